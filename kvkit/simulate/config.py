"""What is simulated: nodes, tiers, links and speeds, read from one TOML file. Every setting has a default.

    [model]
    kv_bytes_per_token = 131072      # 8B parameters, grouped heads, 16 bit
    prefill_tokens_per_s = 8000

    [nodes]
    both = 4                         # engines; or prefill = 2 and decode = 2
    per_host = 2                     # of which so many share a host's pool
    route = "session"

    [handoff]                        # from a prefill node to a decode node
    bandwidth = "12GB"               # bytes per second
    latency_ms = 1

    [tiers.memory]                   # in the order in which they are sought
    scope = "host"                   # a pool at shm://; or node: each engine has its own
    capacity = "32GiB"               # per host, or node, where that is the scope
    bandwidth = "20GB"
    near = true                      # in the host's memory: nothing is written back from here

    [tiers.store]
    scope = "shared"
    capacity = "2TiB"
    bandwidth = "2GB"
    latency_ms = 20
    eviction = "lru"
    price_per_gb_month = 0.02

    [policy]                         # optional: all tiers, in the order above
    write_back_to = ["memory"]

    [policy.decode]                  # what differs on nodes of one role
    store_to = ["store"]

Sizes are bytes, or have a unit ("4GiB").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationError, model_validator

from kvkit.format.layout import Precision
from kvkit.moving.policy import Policy, Role, check
from kvkit.settings import ConfigError, explain, read_toml
from kvkit.tiers.eviction.plugins import CHOICES, PolicyName

Route = Literal["session", "round-robin", "least-busy", "prefix"]
Bandwidth = Annotated[ByteSize, Field(gt=0, description="bytes per second")]
Milliseconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelConfig(_Settings):
    """The model and its engine."""

    kv_bytes_per_token: int = Field(default=131_072, gt=0, description="KV of one token, all layers")
    item_bytes: Literal[2, 4] = Field(default=2, description="of a number of it")
    head_size: int = Field(default=128, gt=0, description="numbers of K, or of V, that a head has of a token")
    prefill_tokens_per_s: float = Field(default=8_000, gt=0, allow_inf_nan=False, description="of one node")
    state_bytes: int = Field(
        default=0, ge=0, description="a snapshot of all layers that keep a state; 0: there are none"
    )
    snapshot_every: int = Field(
        default=1,
        ge=0,
        description="chunks from one snapshot to the next, besides that at a prompt's end; 0: that one alone",
    )


class NodesConfig(_Settings):
    """How many nodes of each role, and how requests come to them."""

    both: int = Field(default=1, ge=0, le=10_000, description="nodes that prefill and decode")
    prefill: int = Field(default=0, ge=0, le=10_000, description="nodes that prefill, for `decode` nodes")
    decode: int = Field(default=0, ge=0, le=10_000, description="nodes that decode what was handed to them")
    per_host: int = Field(
        default=1,
        ge=1,
        le=10_000,
        description="nodes that share the memory of a host, those that follow"
        " each other; prefill nodes come before decode nodes",
    )
    route: Route = Field(
        default="session",
        description="session: all of one to the same node; round-robin; least-busy: the node that is free "
        "first; prefix: the node that holds the longest run",
    )

    @model_validator(mode="before")
    @classmethod
    def _disaggregated(cls, values: Any) -> Any:
        """Where nodes have roles, none does both unless that is said."""
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
    latency_ms: Milliseconds = Field(default=1.0, description="of handing one request over")


class SimulatedTier(_Settings):
    """One tier."""

    scope: Literal["node", "host", "shared"] = Field(
        default="node", description="one per node, one for the nodes of a host (shm://), or one for all"
    )
    capacity: ByteSize | None = Field(default=None, gt=0, description="bytes kept, none: no limit")
    precision: Precision | None = Field(default=None, description="KV in 8 bits; none: as it is computed")
    bandwidth: Bandwidth = ByteSize(2_000_000_000)
    latency_ms: Milliseconds = Field(default=0.0, description="of a run of chunks, once")
    eviction: PolicyName = Field(default="lru", description=f"who leaves when it is full: {CHOICES}")
    near: bool = Field(default=False, description="in the host's memory: nothing is written back from here")
    price_per_gb_month: float = Field(
        default=0.0, ge=0, allow_inf_nan=False, description="of a gigabyte (1e9 bytes)"
    )


class RolePolicy(_Settings):
    """What goes where, by tier name. See `kvkit.moving.policy`."""

    retrieve_from: tuple[str, ...] | None = Field(default=None, description="tiers, in this order; none: all")
    store_to: tuple[str, ...] | None = Field(default=None, description="what gets finished chunks; none: all")
    write_back_to: tuple[str, ...] | None = Field(
        default=None, description="what gets chunks that came from another tier; none: the first"
    )
    staging_only: bool | None = Field(default=None, description="memory is only passed through")


class SimulatedPolicy(RolePolicy):
    """What goes where on every node, and what differs by role."""

    prefill: RolePolicy = RolePolicy()
    decode: RolePolicy = RolePolicy()


_MEMORY = SimulatedTier(capacity=ByteSize(32 << 30), bandwidth=ByteSize(20_000_000_000), near=True)
_DISK = SimulatedTier(capacity=ByteSize(512 << 30), bandwidth=ByteSize(3_000_000_000), latency_ms=0.2)


class SimulationConfig(_Settings):
    """Every setting of a simulation. See the module's text."""

    model: ModelConfig = ModelConfig()
    nodes: NodesConfig = NodesConfig()
    handoff: LinkConfig = LinkConfig()
    tiers: dict[str, SimulatedTier] = Field(default={"memory": _MEMORY, "disk": _DISK}, min_length=1)
    policy: SimulatedPolicy = SimulatedPolicy()

    @model_validator(mode="after")
    def _policies_name_tiers(self) -> SimulationConfig:
        for role in ("both", "prefill", "decode"):
            check(self.policy_of(role), self.tiers)
        narrow = [name for name, tier in self.tiers.items() if tier.precision is not None]
        if self.model.state_bytes and narrow:
            raise ValueError(f"tiers.{narrow[0]}.precision: want none for a model with states (state_bytes)")
        return self

    def policy_of(self, role: Role) -> Policy:
        """The policy of a node of this role, with what was left out filled in."""
        every = self.policy.model_dump(exclude_none=True)
        own = {name: every.pop(name) for name in ("prefill", "decode")}.get(role, {})
        return replace(Policy.default(self.tiers), **every | own)

    def bytes_per_token(self, tier: str) -> int:
        """What a tier keeps of one token: with a `precision`, a byte a number, and scales for each head."""
        model = self.model
        if self.tiers[tier].precision is None:
            return model.kv_bytes_per_token
        return model.kv_bytes_per_token * (model.head_size + 4) // (model.head_size * model.item_bytes)

    def with_tiers(self, changes: Mapping[str, Mapping[str, Any]]) -> SimulationConfig:
        """A copy whose tiers have these settings changed: {tier: {setting: value}}.

        Raises:
            ConfigError: there is no such tier.
        """
        for name in changes:
            if name not in self.tiers:
                raise ConfigError(f"tier {name!r}: no such tier; the tiers are {', '.join(self.tiers)}")
        tiers = {n: t.model_copy(update=dict(changes.get(n, {}))) for n, t in self.tiers.items()}
        return self.model_copy(update={"tiers": tiers})


def load_simulation(path: str | Path) -> SimulationConfig:
    """Read a TOML file.

    Raises:
        ConfigError: it cannot be read, or a setting is unknown or impossible.
    """
    try:
        return SimulationConfig.model_validate(read_toml(path))
    except ValidationError as error:
        raise ConfigError(explain(error, SimulationConfig, f"{path}: ")) from error
