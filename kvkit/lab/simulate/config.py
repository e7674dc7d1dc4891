"""Settings of a simulation: nodes, tiers, links and speeds, from one TOML file. All have defaults.

    [model]
    kv_bytes_per_token = 131072      # 8B parameters, grouped heads, 16 bit
    prefill_tokens_per_s = 8000

    [nodes]
    both = 4                         # engines; or prefill = 2 and decode = 2
    per_host = 2                     # nodes that share a host's pool
    route = "session"

    [handoff]                        # from a prefill node to a decode node
    bandwidth = "12GB"               # bytes per second
    latency_ms = 1

    [tiers.memory]                   # tiers in lookup order
    scope = "host"                   # a pool at shm://; or node: each engine has its own
    capacity = "32GiB"               # of each instance: here per host
    bandwidth = "20GB"
    in_memory = true                 # in host memory: nothing is written back from this tier

    [tiers.store]
    scope = "shared"
    capacity = "2TiB"
    bandwidth = "2GB"
    latency_ms = 20
    eviction = "lru"
    price_per_gb_month = 0.02

    [policy]                         # optional: all tiers, in the order above
    write_back_to = ["memory"]

    [policy.decode]                  # differences on nodes of one role
    store_to = ["store"]

Sizes are bytes, or have a unit ("4GiB").
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationError, model_validator

from kvkit.format.layout import Precision
from kvkit.settings import ConfigError, explain, read_toml
from kvkit.tiers.eviction.plugins import CHOICES, PolicyName
from kvkit.transfer.policy import Policy, Role, check

log = logging.getLogger(__name__)

Route = Literal["session", "round-robin", "least-busy", "prefix"]
Bandwidth = Annotated[ByteSize, Field(gt=0, description="bytes per second")]
Milliseconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelConfig(_Settings):
    """The model and its engine."""

    kv_bytes_per_token: int = Field(
        default=131_072, gt=0, description="bytes of KV per token, over all layers"
    )
    item_bytes: Literal[2, 4] = Field(default=2, description="bytes of one number of K or V")
    head_size: int = Field(default=128, gt=0, description="numbers of K, or of V, per head and token")
    prefill_tokens_per_s: float = Field(
        default=8_000, gt=0, allow_inf_nan=False, description="prefill speed of one node"
    )
    state_bytes: int = Field(
        default=0, ge=0, description="bytes of a snapshot of all layers with states; 0: no layer has a state"
    )
    snapshot_every: int = Field(
        default=1,
        ge=0,
        description="chunks from one snapshot to the next; another is at a prompt's end; 0: only that one",
    )


class NodesConfig(_Settings):
    """The nodes of each role, and the routing of requests."""

    both: int = Field(default=1, ge=0, le=10_000, description="nodes that prefill and decode")
    prefill: int = Field(default=0, ge=0, le=10_000, description="nodes that prefill, for the decode nodes")
    decode: int = Field(default=0, ge=0, le=10_000, description="nodes that decode, with KV handed to them")
    per_host: int = Field(
        default=1,
        ge=1,
        le=10_000,
        description="consecutive nodes that share the memory of a host; "
        "prefill nodes come before decode nodes",
    )
    route: Route = Field(
        default="session",
        description="session: all requests of a session go to the same node; round-robin; least-busy: the "
        "node that is free first; prefix: the node with the longest prefix match",
    )

    @model_validator(mode="before")
    @classmethod
    def _disaggregated(cls, values: Any) -> Any:
        """Default `both` to 0 if nodes have roles."""
        if isinstance(values, dict) and (values.get("prefill") or values.get("decode")):
            return {"both": 0} | values
        return values

    @model_validator(mode="after")
    def _roles_fit(self) -> NodesConfig:
        if bool(self.prefill) != bool(self.decode):
            raise ValueError(f"prefill = {self.prefill}, decode = {self.decode}: want both or neither")
        if bool(self.both) == bool(self.prefill):
            raise ValueError("want both = N, or prefill = N and decode = M")
        return self


class LinkConfig(_Settings):
    """A link between nodes."""

    bandwidth: Bandwidth = ByteSize(12_000_000_000)
    latency_ms: Milliseconds = Field(
        default=1.0, description="time to hand one request over, besides its bytes"
    )


class SimulatedTier(_Settings):
    """One tier."""

    scope: Literal["node", "host", "shared"] = Field(
        default="node", description="one per node, one for the nodes of a host (shm://), or one for all"
    )
    capacity: ByteSize | None = Field(default=None, gt=0, description="bytes kept; none: no limit")
    precision: Precision | None = Field(default=None, description="quantise KV to 8 bits; none: exact")
    bandwidth: Bandwidth = ByteSize(2_000_000_000)
    latency_ms: Milliseconds = Field(default=0.0, description="latency of a run of chunks, once per run")
    eviction: PolicyName = Field(default="lru", description=f"eviction policy: {CHOICES}")
    in_memory: bool = Field(
        default=False, description="in host memory: nothing is written back from this tier"
    )
    price_per_gb_month: float = Field(
        default=0.0, ge=0, allow_inf_nan=False, description="price of a gigabyte (1e9 bytes) per month"
    )

    @model_validator(mode="before")
    @classmethod
    def _read_old_name(cls, values: Any) -> Any:
        if isinstance(values, dict) and "near" in values:
            log.warning("near is the old name of in_memory, and will not be read by the next version")
            return {"in_memory": values["near"]} | {k: v for k, v in values.items() if k != "near"}
        return values


class RolePolicy(_Settings):
    """The tiers to load from, store to and write back to, by name. See `kvkit.transfer.policy`."""

    retrieve_from: tuple[str, ...] | None = Field(
        default=None, description="tiers to load from, in this order; none: all"
    )
    store_to: tuple[str, ...] | None = Field(
        default=None, description="tiers that get finished chunks; none: all"
    )
    write_back_to: tuple[str, ...] | None = Field(
        default=None, description="tiers that get chunks loaded from another tier; none: the first"
    )
    staging_only: bool | None = Field(
        default=None, description="host memory is only passed through, and keeps nothing"
    )


class SimulatedPolicy(RolePolicy):
    """The policy of every node, and differences by role."""

    prefill: RolePolicy = RolePolicy()
    decode: RolePolicy = RolePolicy()


_MEMORY = SimulatedTier(capacity=ByteSize(32 << 30), bandwidth=ByteSize(20_000_000_000), in_memory=True)
_DISK = SimulatedTier(capacity=ByteSize(512 << 30), bandwidth=ByteSize(3_000_000_000), latency_ms=0.2)


class SimulationConfig(_Settings):
    """All settings of a simulation. See the module's docstring."""

    model: ModelConfig = ModelConfig()
    nodes: NodesConfig = NodesConfig()
    handoff: LinkConfig = LinkConfig()
    tiers: dict[str, SimulatedTier] = Field(default={"memory": _MEMORY, "disk": _DISK}, min_length=1)
    policy: SimulatedPolicy = SimulatedPolicy()

    @model_validator(mode="after")
    def _policies_name_tiers(self) -> SimulationConfig:
        for role in ("both", "prefill", "decode"):
            check(self.policy_of(role), self.tiers)
        quantised = [name for name, tier in self.tiers.items() if tier.precision is not None]
        if self.model.state_bytes and quantised:
            raise ValueError(
                f"tiers.{quantised[0]}.precision: want none for a model with states (state_bytes)"
            )
        return self

    def policy_of(self, role: Role) -> Policy:
        """Return the policy of a node of this role, with defaults filled in."""
        common = self.policy.model_dump(exclude_none=True)
        role_settings = {name: common.pop(name) for name in ("prefill", "decode")}.get(role, {})
        return replace(Policy.default(self.tiers), **common | role_settings)

    def bytes_per_token(self, tier: str) -> int:
        """Return a tier's bytes per token; with a `precision`, a byte per number, and scales per head."""
        model = self.model
        if self.tiers[tier].precision is None:
            return model.kv_bytes_per_token
        return model.kv_bytes_per_token * (model.head_size + 4) // (model.head_size * model.item_bytes)

    def with_tiers(self, changes: Mapping[str, Mapping[str, Any]]) -> SimulationConfig:
        """Return a copy with changed settings of tiers: {tier: {setting: value}}.

        Raises:
            ConfigError: there is no such tier.
        """
        for name in changes:
            if name not in self.tiers:
                raise ConfigError(f"tier {name!r}: no such tier; the tiers are {', '.join(self.tiers)}")
        tiers = {n: t.model_copy(update=dict(changes.get(n, {}))) for n, t in self.tiers.items()}
        return self.model_copy(update={"tiers": tiers})


def load_simulation(path: str | Path) -> SimulationConfig:
    """Read the settings of a simulation from a TOML file.

    Raises:
        ConfigError: the file cannot be read, or a setting is unknown or invalid.
    """
    try:
        return SimulationConfig.model_validate(read_toml(path))
    except ValidationError as error:
        raise ConfigError(explain(error, SimulationConfig, f"{path}: ")) from error
