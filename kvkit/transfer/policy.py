"""Policies: the tiers to retrieve from, store to and write back to; a request's own policy."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from kvkit.tiers.eviction.policies import HIGHEST, NORMAL

Role = Literal["prefill", "decode", "both"]


class PolicyError(ValueError):
    """A policy names an unknown tier or has an invalid number.

    The message names the setting, the value and the choices.
    """


@dataclass(frozen=True, slots=True)
class Policy:
    """The tiers to retrieve from, store to and write back to, by name.

    Args:
        retrieve_from: tiers in lookup order; each continues where the previous tier's run ended.
        store_to: tiers that get all finished chunks.
        write_back_to: tiers that get verified chunks loaded from another tier.
        staging_only: host memory passes records through only: no tier in it is read, stored to or written
            back to, and nothing is written back at all.
    """

    retrieve_from: tuple[str, ...]
    store_to: tuple[str, ...]
    write_back_to: tuple[str, ...] = ()
    staging_only: bool = False

    @staticmethod
    def default(tiers: Iterable[str]) -> Policy:
        """Return a policy to retrieve from and store to all tiers, in order, and write back to the first."""
        names = tuple(tiers)
        return Policy(retrieve_from=names, store_to=names, write_back_to=names[:1])


@dataclass(frozen=True, slots=True)
class Retention:
    """How tiers evict the records of a request's leading tokens.

    Args:
        tokens: number of leading tokens; None: all.
        keep_s: seconds for which tiers do not evict the records.
        priority: eviction priority, above `NORMAL`; `NORMAL`: none.
    """

    tokens: int | None = None
    keep_s: float = 0.0
    priority: int = NORMAL


@dataclass(frozen=True, slots=True)
class RequestPolicy:
    """Options of one request for the cache. They accompany the request's chunks everywhere.

    Args:
        load_from: tiers to load from, in lookup order; None: the policy's.
        store_to: tiers that get its chunks, by store or write-back; None: the policy's; empty: none.
        max_load_tokens: maximum tokens to load, in whole chunks; None: no limit.
        keep_s: seconds for which tiers do not evict the stored records.
        priority: eviction priority, 0 to 100; records of lower priority are evicted first.
        prefixes: more retention, for leading tokens; the longest time and the highest priority count.

    Raises:
        PolicyError: a number is out of range.
    """

    load_from: tuple[str, ...] | None = None
    store_to: tuple[str, ...] | None = None
    max_load_tokens: int | None = None
    keep_s: float = 0.0
    priority: int = NORMAL
    prefixes: tuple[Retention, ...] = ()

    def __post_init__(self) -> None:
        if (self.max_load_tokens or 0) < 0:
            raise PolicyError(f"max_load_tokens={self.max_load_tokens}: want at least 0, or None")
        if not 0 <= self.keep_s < float("inf"):
            raise PolicyError(f"keep_s={self.keep_s}: want seconds, at least 0")
        if not 0 <= self.priority <= HIGHEST:
            raise PolicyError(f"priority={self.priority}: want 0 to {HIGHEST}")

    @property
    def retains(self) -> bool:
        """True if the request sets how tiers evict what it stores."""
        return self.keep_s > 0 or self.priority != NORMAL or bool(self.prefixes)

    def at(self, token: int) -> RequestPolicy:
        """Return the policy of the records that begin at a token, without `prefixes`."""
        if not self.prefixes:
            return self
        here = [r for r in self.prefixes if r.tokens is None or token < r.tokens]
        priority = max((r.priority for r in here), default=NORMAL)
        return replace(
            self,
            keep_s=max((self.keep_s, *(r.keep_s for r in here))),
            priority=max(self.priority, priority) if priority > NORMAL else self.priority,
            prefixes=(),
        )


DEFAULT_REQUEST_POLICY = RequestPolicy()


def for_role(role: Role, tiers: Sequence[str], handoff: str, peers: Sequence[str]) -> Policy:
    """Return the default policy of a node that takes part in handoff.

    Prefill stores its chunks, and retrieves generated tokens from peers. Decode retrieves first what was sent
    to it, and stores prompts and answers. Nothing is stored at a peer: sending is no store.

    Args:
        tiers: this node's and shared tiers, in lookup order.
        handoff: the tier of received records.
        peers: tiers in other nodes' memory, asked last.
    """
    return Policy(
        retrieve_from=(*([] if role == "prefill" else [handoff]), *tiers, *peers),
        store_to=tuple(tiers),
        write_back_to=tuple(tiers[:1]),
    )


def in_effect(policy: Policy, in_memory: Collection[str], read_only: Collection[str] = ()) -> Policy:
    """Return `policy` without puts into read-only tiers; if `staging_only`, without memory and write-backs.

    Args:
        in_memory: tiers that keep records in host memory.
        read_only: tiers that take no puts.
    """
    in_memory, write_back_to = (in_memory, ()) if policy.staging_only else ((), policy.write_back_to)
    return replace(
        policy,
        retrieve_from=tuple(t for t in policy.retrieve_from if t not in in_memory),
        store_to=tuple(t for t in policy.store_to if t not in (*in_memory, *read_only)),
        write_back_to=tuple(t for t in write_back_to if t not in read_only),
    )


def for_request(policy: Policy, request: RequestPolicy) -> Policy:
    """Return `policy` with the request's tiers in place of its own."""
    load_from, store_to = request.load_from, request.store_to
    if load_from is not None:
        policy = replace(policy, retrieve_from=load_from)
    if store_to is not None:
        write_back_to = tuple(tier for tier in policy.write_back_to if tier in store_to)
        policy = replace(policy, store_to=store_to, write_back_to=write_back_to)
    return policy


def check(policy: Policy, tiers: Collection[str]) -> Policy:
    """Return `policy` if each setting names only tiers in `tiers`, each once.

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
    """Raise `PolicyError` if a name is not in `tiers`."""
    for name in names:
        if name not in tiers:
            raise PolicyError(f"{setting}={name!r}: no such tier; the tiers are {', '.join(tiers) or 'none'}")
