"""What goes where: the tiers to retrieve from, to store to and to write back to; what one request wants."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from kvkit.tiers.eviction.policies import HIGHEST, NORMAL

Role = Literal["prefill", "decode", "both"]


class PolicyError(ValueError):
    """A policy names a tier that does not exist, or an impossible number. The message names the setting, the
    value and the choices."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Where records are sought, stored and copied, by tier name.

    Args:
        retrieve_from: sought in this order; a later tier goes on where an earlier one's run ended.
        store_to: finished chunks are put into all of these.
        write_back_to: chunks that were loaded, and verified, from another tier are put into these.
        staging_only: this host's memory is only passed through: no tier in it is sought, stored to or written
            back to, and nothing is written back at all.
    """

    retrieve_from: tuple[str, ...]
    store_to: tuple[str, ...]
    write_back_to: tuple[str, ...] = ()
    staging_only: bool = False

    @staticmethod
    def default(tiers: Iterable[str]) -> Policy:
        """Retrieve from and store to all tiers, in the order given; write back to the first."""
        names = tuple(tiers)
        return Policy(retrieve_from=names, store_to=names, write_back_to=names[:1])


@dataclass(frozen=True, slots=True)
class RequestPolicy:
    """What one request wants of the cache. It goes with the request's chunks wherever they go.

    Args:
        load_from: tiers to seek, in this order; None: the policy's.
        store_to: tiers that get its chunks, by store or write-back; None: the policy's, empty: none.
        max_load_tokens: so many are loaded at most, in whole chunks; None: no limit.
        keep_s: for so many seconds tiers evict nothing of what is stored; then it goes like any other.
        priority: 0 to 100. Tiers that evict let what has a lower one go first.

    Raises:
        PolicyError: a number is out of its range.
    """

    load_from: tuple[str, ...] | None = None
    store_to: tuple[str, ...] | None = None
    max_load_tokens: int | None = None
    keep_s: float = 0.0
    priority: int = NORMAL

    def __post_init__(self) -> None:
        if (self.max_load_tokens or 0) < 0:
            raise PolicyError(f"max_load_tokens={self.max_load_tokens}: want at least 0, or None")
        if not 0 <= self.keep_s < float("inf"):
            raise PolicyError(f"keep_s={self.keep_s}: want seconds, at least 0")
        if not 0 <= self.priority <= HIGHEST:
            raise PolicyError(f"priority={self.priority}: want 0 to {HIGHEST}")

    @property
    def retains(self) -> bool:
        """Whether tiers are to be told how to evict what it stores."""
        return self.keep_s > 0 or self.priority != NORMAL


DEFAULT_REQUEST_POLICY = RequestPolicy()


def for_role(role: Role, tiers: Sequence[str], handoff: str, peers: Sequence[str]) -> Policy:
    """The default policy of a node that takes part in handoff.

    Prefill sends to the peers that wait and keeps what it computes; it looks at them for what they generated.
    Decode looks first at what was sent to it, and stores prompt and answer. Nothing is stored at a peer.

    Args:
        tiers: of this node and shared ones, in the order in which they are sought.
        handoff: the tier that is the two sides of handoff.
        peers: tiers that are other nodes' memory, sought last.
    """
    return Policy(
        retrieve_from=(*([] if role == "prefill" else [handoff]), *tiers, *peers),
        store_to=(*([] if role == "decode" else [handoff]), *tiers),
        write_back_to=tuple(tiers[:1]),
    )


def in_effect(policy: Policy, near: Collection[str]) -> Policy:
    """What `staging_only` leaves of `policy`, where `near` tiers keep records in this host's memory."""
    if not policy.staging_only:
        return policy
    return Policy(
        retrieve_from=tuple(t for t in policy.retrieve_from if t not in near),
        store_to=tuple(t for t in policy.store_to if t not in near),
        staging_only=True,
    )


def for_request(policy: Policy, request: RequestPolicy) -> Policy:
    """`policy` with the tiers that a request names."""
    load_from, store_to = request.load_from, request.store_to
    if load_from is not None:
        policy = replace(policy, retrieve_from=load_from)
    if store_to is not None:
        back = tuple(tier for tier in policy.write_back_to if tier in store_to)
        policy = replace(policy, store_to=store_to, write_back_to=back)
    return policy


def check(policy: Policy, tiers: Collection[str]) -> Policy:
    """`policy`, if every tier that it names is one of `tiers`, once per setting.

    Raises:
        PolicyError: otherwise.
    """
    for setting in ("retrieve_from", "store_to", "write_back_to"):
        names = getattr(policy, setting)
        check_named(setting, names, tiers)
        if len(set(names)) != len(names):
            raise PolicyError(f"{setting}={names!r}: a tier is named twice")
    return policy


def check_named(setting: str, names: Iterable[str], tiers: Collection[str]) -> None:
    """Raise `PolicyError` where one of `names` is none of `tiers`."""
    for name in names:
        if name not in tiers:
            raise PolicyError(f"{setting}={name!r}: no such tier; the tiers are {', '.join(tiers) or 'none'}")
