"""Settings of handoff, their checks at start-up, and the tiers that are opened from them."""

from __future__ import annotations

import logging
import platform
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from pydantic import BaseModel, ByteSize, ConfigDict, Field, SecretStr, model_validator

from kvkit.format.keys import namespace_digest
from kvkit.format.layout import KVLayout, Namespace
from kvkit.handoff.endpoint import Endpoint
from kvkit.handoff.peer import PeerTier
from kvkit.handoff.protocol.messages import HANDOFF, MAX_LABEL, MAX_PEER_NAME, MAX_RANKS, check_id
from kvkit.handoff.protocol.states import Limits
from kvkit.handoff.ranks import divided
from kvkit.handoff.receiver import Receiver
from kvkit.handoff.sender import Sender
from kvkit.handoff.tier import HandoffTier
from kvkit.handoff.transport import addresses, tls
from kvkit.handoff.transport.handshake import Identity
from kvkit.staging import PAGE_BYTES, Staging
from kvkit.tiers.base import Tier
from kvkit.transfer.policy import Policy, Role, for_role
from kvkit.transfer.sequence import largest_record_bytes

log = logging.getLogger(__name__)

MIN_SECRET_CHARS = 16


class HandoffConfig(BaseModel):
    """Direct KV transfer between engines. {rank} in an address stands for the number of each rank."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    role: Role = Field("both", description="prefill sends, decode receives; it sets the default policy")
    listen: tuple[str, ...] = Field(
        (),
        description="addresses to listen at, such as unix:///run/kvkit/decode.sock; "
        "tcp://127.0.0.1:9478 and nixl://... need a secret",
    )
    peers: dict[str, str] = Field(
        default_factory=dict, description="addresses of other nodes by tier name; each is read as a tier"
    )
    buffer: ByteSize | None = Field(
        None, description="bytes for records from peers, rounded down to whole chunks", gt=0
    )
    shared_memory: bool = Field(
        True,
        description="whether senders write directly into the buffer, over unix:// and nixl://; "
        "false: no other process can access its memory, and records arrive through the socket",
    )
    max_prefill_tokens: int | None = Field(
        None, description="tokens of the longest request that must fit in the buffer", ge=1
    )
    max_ranks: int = Field(
        64,
        description="most ranks of an engine that this one sends to; one that reports more is refused",
        ge=1,
        le=MAX_RANKS,
    )
    allocation_timeout_s: float = Field(
        30.0, description="longest wait for room in a buffer, in seconds", gt=0, le=3600
    )
    transfer_timeout_s: float = Field(
        30.0, description="longest pause within a transfer, in seconds", gt=0, le=3600
    )
    idle_timeout_s: float = Field(
        120.0, description="how long a complete transfer is kept until it is used, in seconds", gt=0, le=3600
    )
    shutdown_timeout_s: float = Field(
        10.0, description="how long shutdown waits for open transfers, in seconds", gt=0, le=3600
    )
    secret: SecretStr | None = Field(
        None,
        description="shared secret of this node and its peers; required for every address but unix:// ones",
        min_length=MIN_SECRET_CHARS,
    )
    secret_file: Path | None = Field(None, description="file that holds the secret")
    tls_certificate: Path | None = Field(None, description="certificate of this node, for TCP")
    tls_key: Path | None = Field(None, description="private key of that certificate")
    tls_ca: Path | None = Field(None, description="CA certificate that signed the certificates of peers")

    @model_validator(mode="after")
    def _settings_go_together(self) -> HandoffConfig:
        if self.secret is not None and self.secret_file is not None:
            raise ValueError("secret and secret_file are both given; want one of the two")
        if self.receives and not self.listen:
            raise ValueError(f"listen: none given, role = {self.role!r} needs at least one address")
        if self.receives and self.buffer is None:
            raise ValueError(f"buffer: none given, role = {self.role!r} needs one")
        for name in self.peers:
            check_id("peer", name, MAX_PEER_NAME)
        has_secret = self.secret is not None or self.secret_file is not None
        setting_addresses = [("listen", address) for address in self.listen]
        setting_addresses += [(f"peers.{name}", address) for name, address in self.peers.items()]
        for setting, address in setting_addresses:
            try:
                addresses.check_secret(addresses.of_rank(address, 0), has_secret)
            except ValueError as error:
                raise ValueError(f"{setting}: {error}") from None
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key go together; one of the two is given")
        return self

    @property
    def receives(self) -> bool:
        return self.role != "prefill"

    @property
    def sends(self) -> bool:
        return self.role != "decode"

    @property
    def tiers(self) -> tuple[str, ...]:
        """Names of the tiers opened from these settings."""
        return (HANDOFF, *self.peers)

    def default_policy(self, tiers: Iterable[str]) -> Policy:
        """Return the default policy of the role; `tiers` are the other tiers."""
        return for_role(self.role, tuple(tiers), HANDOFF, tuple(self.peers))

    def check_tiers(self, tiers: Iterable[str]) -> None:
        """Refuse names of other tiers that are too long for the protocol.

        Raises:
            ValueError: a name is too long.
        """
        for name in tiers:
            if self.listen and len(name) > MAX_LABEL:
                raise ValueError(
                    f"handoff: tier {name!r}: its name is sent to peers; want at most {MAX_LABEL} characters"
                )

    def check_policy(self, policy: Policy, tiers: Sequence[str]) -> None:
        """Refuse a policy that uses a tier for what it cannot do. `tiers` are the other tiers.

        Raises:
            ValueError: it does. The message names the setting, the tier and the choices.
        """
        reasons = {
            "retrieve_from": "role = 'prefill' receives nothing",
            "store_to": "role = 'decode' sends nothing",
            "write_back_to": "handoff takes no write-backs",
        }
        supported = {"retrieve_from": self.receives, "store_to": self.sends, "write_back_to": False}
        for setting, reason in reasons.items():
            own_tiers = [HANDOFF] if supported[setting] else []
            choices = (
                [*own_tiers, *tiers, *self.peers] if setting == "retrieve_from" else [*tiers, *own_tiers]
            )
            for name in getattr(policy, setting):
                if name in self.tiers and name not in choices:
                    reason = reason if name == HANDOFF else "it is another node's memory"
                    raise ValueError(f"{setting}={name!r}: {reason}; the choices are {', '.join(choices)}")


def buffer_size(config: HandoffConfig, layout: KVLayout, namespace: Namespace) -> tuple[int, int]:
    """Return the slots in `config.buffer` for this layout, as whole chunks, and the bytes of a slot.

    Raises:
        ValueError: the buffer holds no chunk, or fewer slots than `max_prefill_tokens` tokens take.
    """
    assert config.buffer is not None
    groups = len(layout.groups)
    slot_bytes = -(-largest_record_bytes(layout, namespace) // PAGE_BYTES) * PAGE_BYTES
    slots = config.buffer // (slot_bytes * groups) * groups
    buffer_setting = f"buffer={config.buffer.human_readable()}"
    if not slots:
        raise ValueError(f"{buffer_setting}: a chunk takes {groups} slots of {slot_bytes} bytes")
    if config.max_prefill_tokens is not None:
        required_slots = slots_of(config.max_prefill_tokens, layout, namespace)
        if required_slots > slots:
            required_size = ByteSize(required_slots * slot_bytes).human_readable()
            raise ValueError(
                f"max_prefill_tokens={config.max_prefill_tokens} take {required_slots} slots of {slot_bytes} "
                f"bytes, {buffer_setting} has {slots}: want a buffer of {required_size} or more, "
                "or fewer tokens"
            )
    return slots, slot_bytes


def slots_of(tokens: int, layout: KVLayout, namespace: Namespace) -> int:
    """Return the slots that a request of up to `tokens` tokens may take: whole chunks, then single blocks.

    A last token that is alone in its block is not sent: the receiver computes it in any case. States take one
    snapshot.
    """
    block_tokens = min(group.block_tokens for group in layout.groups)
    chunks, rest = divmod(tokens, namespace.chunk_tokens)
    blocks = -(-max(rest - 1, 0) // block_tokens)
    if chunks:  # a shorter request, one token short of its last whole chunk, may take more
        blocks = max(blocks, namespace.chunk_tokens // block_tokens - 1)
    return (chunks + blocks) * layout.token_groups + len(layout.groups) - layout.token_groups


def open_handoff(
    config: HandoffConfig,
    in_memory: Sequence[Tier],
    layout: KVLayout,
    namespace: Namespace,
    secret: bytes,
    timeout_s: float,
) -> list[Tier]:
    """Open the tier "handoff" and one tier for each peer. Peers can connect from now on.

    Args:
        in_memory: other tiers in this host's memory; peers may query and pull from them.
        secret: shared secret of this node and its peers, empty for none.
        timeout_s: limit for a connection and for a single frame, in seconds.

    Raises:
        ValueError: a size, a certificate or an address is invalid.
        OSError: the buffer's memory is not available, or an address is in use.
    """
    client_tls, server_tls = None, None
    if config.tls_ca is not None:
        client_tls = tls.client_context(config.tls_ca, config.tls_certificate, config.tls_key)
    if config.listen and config.tls_certificate is not None and config.tls_key is not None:
        server_tls = tls.server_context(config.tls_certificate, config.tls_key, config.tls_ca)
    identity = identify(layout, namespace, secret)
    receiver, sender, endpoint = None, None, None
    with ExitStack() as opened:
        if config.receives:
            receiver = _open_receiver(config, layout, namespace)
            opened.callback(receiver.close, config.shutdown_timeout_s)
        if config.sends:
            sender = Sender(
                identity,
                timeout_s=timeout_s,
                transfer_s=config.transfer_timeout_s,
                tls=client_tls,
                max_ranks=config.max_ranks,
            )
            opened.callback(sender.close, config.shutdown_timeout_s)
        peers: list[Tier] = []
        for name, address in config.peers.items():
            peer_address = addresses.of_rank(address, namespace.rank)
            peers.append(PeerTier(name, peer_address, identity, timeout_s=timeout_s, tls=client_tls))
            opened.callback(peers[-1].close)
        if config.listen:
            endpoint = Endpoint(
                receiver,
                in_memory,
                identity,
                [addresses.of_rank(address, namespace.rank) for address in config.listen],
                timeout_s=timeout_s,
                pin_s=config.allocation_timeout_s,
                tls=server_tls,
            )
        opened.pop_all()
    return [HandoffTier(receiver, sender, endpoint, shutdown_s=config.shutdown_timeout_s), *peers]


def _open_receiver(config: HandoffConfig, layout: KVLayout, namespace: Namespace) -> Receiver:
    """Return a receiver with a buffer of its own. Raises the errors of `open_handoff`."""
    limits = Limits(config.allocation_timeout_s, config.transfer_timeout_s, config.idle_timeout_s)
    slots, slot_bytes = buffer_size(config, layout, namespace)
    log.info(
        "handoff: a buffer of %d slots of %d bytes, %d chunks: %d bytes of handoff.buffer=%d",
        slots,
        slot_bytes,
        slots // len(layout.groups),
        slots * slot_bytes,
        config.buffer,
    )
    return Receiver(Staging(slot_bytes, slots, shared=config.shared_memory), limits)


def identify(layout: KVLayout, namespace: Namespace, secret: bytes) -> Identity:
    """Return this node's identity; it leaves out LoRA and salt, which differ between requests only."""
    base = namespace_digest(replace(namespace, lora="", salt=""))
    return Identity(
        node=f"{platform.node()}/{namespace.rank}",
        namespace=base[:16].hex(),
        layout=layout.fingerprint(),
        slot_bytes=largest_record_bytes(layout, namespace),
        secret=secret,
        ranks=namespace.world,
        record_ranks=max(group.head_shards for group in layout.groups) if divided(namespace, layout) else 0,
        draft=namespace.draft[:MAX_LABEL],
    )
