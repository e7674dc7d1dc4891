"""Read and write `kv_transfer_params`, the field by which a router and two engines arrange a handoff.

The field has the same keys as in vLLM's own connectors. The prefill engine's request has do_remote_decode.
Its answer holds the parameters of the decode engine's request, which has do_remote_prefill. kvkit pushes, so
the prefill engine needs the decode engine's address, `handoff`. Each of several ranks sends to an address of
its own.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvkit.handoff.protocol.messages import MessageError, check_id
from kvkit.handoff.settings import HandoffConfig
from kvkit.handoff.transport import addresses
from kvkit.settings import ConfigError

WHERE = "kv_transfer_params"
TOKENS = "remote_num_tokens"


class HandoffUnavailable(ConfigError):
    """Raised if a request asks for a side of a handoff that this engine's settings do not have."""


@dataclass(frozen=True, slots=True)
class RemoteDecode:
    """A request whose KV is sent to the decode engine at `address`, as the transfer `transfer`."""

    transfer: str
    address: str


@dataclass(frozen=True, slots=True)
class RemotePrefill:
    """A request whose KV arrives as the transfer `transfer`.

    `computed`: True if the prefill engine has already answered, so that all of the KV is computed.
    """

    transfer: str
    computed: bool


def read_for(
    params: Mapping[str, Any] | None, config: HandoffConfig | None
) -> RemoteDecode | RemotePrefill | None:
    """Read a request's parameters, as `read` does, for an engine with these handoff settings.

    Raises:
        HandoffUnavailable: the engine has no `[handoff]`, or its role excludes that side.
        ConfigError: as in `read`.
    """
    for kind, role in (("decode", "prefill"), ("prefill", "decode")):
        parameter, accepted = f"do_remote_{kind}", config is not None and config.role in (role, "both")
        if (params or {}).get(parameter) and not accepted:
            reason = "there is no [handoff]" if config is None else f"handoff.role is {config.role!r}"
            raise HandoffUnavailable(
                f"{WHERE}.{parameter}: {reason} in this engine's settings; want role = {role!r} or 'both'"
            )
    return read(params, {} if config is None else config.peers)


def read(params: Mapping[str, Any] | None, peers: Mapping[str, str]) -> RemoteDecode | RemotePrefill | None:
    """Return the handoff that a request's parameters ask for; None if they ask for none.

    Args:
        peers: configured addresses by name. `handoff` may be one of the names; it may be left out if there
            is one peer.

    Raises:
        ConfigError: the parameters contradict each other or are incomplete.
    """
    params = params or {}
    sends, receives = (bool(params.get(f"do_remote_{kind}")) for kind in ("decode", "prefill"))
    if not sends and not receives:
        return None
    if sends and receives:
        raise ConfigError(
            f"{WHERE}: do_remote_decode and do_remote_prefill are both set; want one of the two"
        )
    transfer_id = params.get("transfer_id")
    if sends and transfer_id is None:
        transfer_id = uuid.uuid4().hex
    try:
        transfer = check_id("transfer", transfer_id)
    except MessageError as error:
        raise ConfigError(f"{WHERE}.transfer_id: {error}") from error
    if receives:
        return RemotePrefill(transfer, TOKENS in params)
    return RemoteDecode(transfer, _address(params.get("handoff"), peers))


def answer(sending: RemoteDecode, tokens: int) -> dict[str, Any]:
    """Return the parameters for the decode engine's request. `tokens`: prompt tokens that are sent."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": sending.transfer,
        TOKENS: tokens,
    }


def _address(value: object, peers: Mapping[str, str]) -> str:
    choices = ", ".join(peers) or "none"
    if value is None and len(peers) == 1:
        (value,) = peers
    if value is None:
        raise ConfigError(
            f"{WHERE}.handoff: want the decode engine's address or a peer's name; the peers are {choices}"
        )
    if not isinstance(value, str):
        raise ConfigError(f"{WHERE}.handoff = {value!r}: want an address or a peer's name")
    if value not in peers and "://" not in value:
        shown = addresses.quoted(value)
        raise ConfigError(f"{WHERE}.handoff = {shown!r}: no such peer; the peers are {choices}")
    return peers.get(value, value)
