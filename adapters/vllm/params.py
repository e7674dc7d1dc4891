"""What a router and two engines tell each other about a handoff: `kv_transfer_params`, read and answered.

The field's form, as vLLM's own connectors have it: the prefill engine's request has do_remote_decode, and its
answer holds the parameters of the decode engine's request, which has do_remote_prefill. kvkit pushes, so the
prefill engine has to know where to: `handoff`, the decode engine's address. Of several ranks, each sends to
an address of its own.
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
    """This engine's settings have no such side of a handoff, whatever a request says of it."""


@dataclass(frozen=True, slots=True)
class RemoteDecode:
    """A request whose KV goes to the decode engine at `address`, as the transfer `transfer`."""

    transfer: str
    address: str


@dataclass(frozen=True, slots=True)
class RemotePrefill:
    """A request whose KV comes as the transfer `transfer`; `computed`: its prefill engine answered before."""

    transfer: str
    computed: bool


def read_for(
    params: Mapping[str, Any] | None, config: HandoffConfig | None
) -> RemoteDecode | RemotePrefill | None:
    """`read` at an engine with these settings of handoff.

    Raises:
        HandoffUnavailable: the engine has no `[handoff]`, or its role does not take that side.
        ConfigError: as in `read`.
    """
    for kind, role in (("decode", "prefill"), ("prefill", "decode")):
        asked, takes = f"do_remote_{kind}", config is not None and config.role in (role, "both")
        if (params or {}).get(asked) and not takes:
            have = "there is no [handoff]" if config is None else f"handoff.role is {config.role!r}"
            raise HandoffUnavailable(
                f"{WHERE}.{asked}: {have} in this engine's settings; want role = {role!r} or 'both'"
            )
    return read(params, {} if config is None else config.peers)


def read(params: Mapping[str, Any] | None, peers: Mapping[str, str]) -> RemoteDecode | RemotePrefill | None:
    """What a request's parameters ask for; None: nothing.

    Args:
        peers: addresses by name, as configured: `handoff` may be a name, and may be left out where there is
            one peer.

    Raises:
        ConfigError: they contradict themselves or leave something out.
    """
    params = params or {}
    sends, receives = (bool(params.get(f"do_remote_{kind}")) for kind in ("decode", "prefill"))
    if not sends and not receives:
        return None
    if sends and receives:
        raise ConfigError(
            f"{WHERE}: do_remote_decode and do_remote_prefill are both set; want one of the two"
        )
    given = params.get("transfer_id")
    if sends and given is None:
        given = uuid.uuid4().hex
    try:
        transfer = check_id("transfer", given)
    except MessageError as error:
        raise ConfigError(f"{WHERE}.transfer_id: {error}") from error
    if receives:
        return RemotePrefill(transfer, TOKENS in params)
    return RemoteDecode(transfer, _address(params.get("handoff"), peers))


def answer(sending: RemoteDecode, tokens: int) -> dict[str, Any]:
    """The parameters of the decode engine's request. `tokens` is how many of the prompt's are sent."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": sending.transfer,
        TOKENS: tokens,
    }


def _address(given: object, peers: Mapping[str, str]) -> str:
    choices = ", ".join(peers) or "none"
    if given is None and len(peers) == 1:
        (given,) = peers
    if given is None:
        raise ConfigError(f"{WHERE}.handoff: where to send is not said; the peers are {choices}")
    if not isinstance(given, str):
        raise ConfigError(f"{WHERE}.handoff = {given!r}: want an address or a peer's name")
    if given not in peers and "://" not in given:
        said = addresses.quoted(given)
        raise ConfigError(f"{WHERE}.handoff = {said!r}: no such peer; the peers are {choices}")
    return peers.get(given, given)
