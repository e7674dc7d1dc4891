"""Which records to evict: pure functions (state, event) -> victims; each mutates only the given state.

Records form chains: a chunk is of no use without its parent. So only a record that no held record follows is
evicted, and a chain shrinks from its end, whatever the policy. Among those the policy chooses
(`kvkit.tiers.eviction.policies`).

A lookup uses what it finds, and so does the store that ends the same request: one use makes nothing old.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush

from kvkit.tiers.eviction.policies import MAIN, POLICIES, SMALL, Entry

_MOST_REFUSED = 1024  # names
_Leaf = tuple[int, int, str]
"""(rank, ticket, name) of a record that was a leaf: lower goes sooner"""


class EvictionState:
    """Records of one place.

    Args:
        capacity_bytes: what may be held; None for no limit.
        policy: a name in `POLICIES`.
        quota_bytes: what one owner may hold; None for no limit.

    Attributes:
        policy: that of this place.
        used_bytes: sum over `entries`.
        entries: by record name.

    Raises:
        ValueError: there is no such policy. The message names the choices.
    """

    __slots__ = (
        *("capacity_bytes", "policy", "quota_bytes", "used_bytes", "entries"),
        *("_followers", "_bytes", "_leaves", "_pins", "_refused", "_events"),
    )

    def __init__(
        self, capacity_bytes: int | None, policy: str = "lru", quota_bytes: int | None = None
    ) -> None:
        if policy not in POLICIES:
            raise ValueError(f"policy={policy!r}, want one of {', '.join(POLICIES)}")
        self.capacity_bytes = capacity_bytes
        self.policy = POLICIES[policy]()
        self.quota_bytes = quota_bytes
        self.used_bytes = 0
        self.entries: dict[str, Entry] = {}
        self._followers: dict[str, int] = {}  # held records by parent, held or not
        self._bytes: Counter[tuple[str, int]] = Counter()  # by owner ("": all) and queue
        self._leaves: defaultdict[tuple[str, int], list[_Leaf]] = defaultdict(list)  # heaps, some out of date
        self._pins: dict[str, float] = {}
        self._refused: dict[str, None] = {}  # names that found no room, oldest first
        self._events = 0


def touch(state: EvictionState, names: Iterable[str]) -> None:
    """Note that `names` were used: records of a chain, each following the one before it. Mutates `state`.

    Names that are not held are passed over.
    """
    state._events += 1
    entries, now, promotes = state.entries, state._events, state.policy.promotes
    before: str | None = None
    for name in names:
        entry = entries.get(name)
        if entry is not None:
            entry.last = now
            entry.uses += 1
            if promotes and entry.uses > 1 and entry.queue == SMALL:
                _promote(state, name, entry)
            if entry.parent is None and before is not None:
                entry.parent = before
                state._followers[before] = state._followers.get(before, 0) + 1
        before = name


def use_run(state: EvictionState, names: Sequence[str]) -> int:
    """How many of `names`, a chain, are held from the first on; these were used. Mutates `state`."""
    entries = state.entries
    run = 0
    for name in names:
        if name not in entries:
            break
        run += 1
    touch(state, names[:run])
    return run


def add_run(
    state: EvictionState,
    names: Sequence[str],
    size: int,
    *,
    parent: str | None = None,
    owner: str = "",
    now: float = 0.0,
    may_evict: Callable[[str], bool] | None = None,
) -> tuple[int, list[str]]:
    """Note that `names` are held, a chain of records of `size` bytes after `parent`, until one has no room.

    Returns how many are held now, and the victims to evict first. A name that is held already is touched.
    Victims are gone from `state` when this returns; none is pinned at the time `now`, precedes a name, or is
    one that `may_evict` (None: all may go) denies. What follows a name that had no room has none; for a name
    without room nothing is evicted. Mutates `state`.
    """
    entries, followers, pins = state.entries, state._followers, state._pins

    def barred(name: str) -> bool:
        return pins.get(name, now) > now or (may_evict is not None and not may_evict(name))

    limited = state.capacity_bytes is not None or state.quota_bytes is not None
    victims: list[str] = []
    added, leaf = 0, None
    for name in names:
        if name in entries:
            touch(state, (name,))
        else:
            if parent is not None:
                followers[parent] = followers.get(parent, 0) + 1  # neither it nor what it follows is evicted
            if limited or state._refused:
                gone: list[tuple[str, Entry]] = []
                if parent in state._refused or not _make_room(state, owner, size, barred, gone):
                    if parent is not None:
                        _release(state, parent)
                    for victim, entry in reversed(gone):
                        _hold(state, victim, entry)
                    state._refused[name] = None  # what follows it is of no use until it is held
                    if len(state._refused) > _MOST_REFUSED:
                        del state._refused[next(iter(state._refused))]
                    break
                for victim, entry in gone:
                    state._pins.pop(victim, None)
                    if state.policy.queued:
                        state.policy.evicted(victim, entry, _room(state))
                    victims.append(victim)
            entry = _new(state, name, size, owner)
            entries[name] = entry
            entry.parent = parent
            _count(state, entry, size)
            leaf = name
        parent = name
        added += 1
    if leaf is not None and leaf not in followers:  # of those before it, each is followed
        _offer(state, leaf, entries[leaf])
    return added, victims


def remove(state: EvictionState, name: str) -> bool:
    """Note that `name` is gone; whether it was held. Mutates `state`."""
    if name not in state.entries:
        return False
    _forget(state, name)
    state._pins.pop(name, None)
    return True


def pin(state: EvictionState, names: Iterable[str], until: float) -> int:
    """Evict none of `names` before the time `until`; returns how many are held. Mutates `state`."""
    held = [name for name in names if name in state.entries]
    for name in held:
        state._pins[name] = max(until, state._pins.get(name, until))
    return len(held)


def note(state: EvictionState, name: str, size: int, *, parent: str | None = None, owner: str = "") -> None:
    """Note that `name` is held, be it beyond the capacity; one that is held already is touched. Mutates."""
    if name in state.entries:
        touch(state, (name,))
        return
    entry = _new(state, name, size, owner)
    entry.parent = parent
    _hold(state, name, entry)


def _new(state: EvictionState, name: str, size: int, owner: str) -> Entry:
    """An entry for a record that comes now."""
    state._events = event = state._events + 1
    policy = state.policy
    queue = policy.queue_of(name, size, _room(state)) if policy.queued else SMALL
    if state._refused:
        state._refused.pop(name, None)
    return Entry(size, None, owner, event, event, 0, queue)


def _make_room(
    state: EvictionState,
    owner: str,
    size: int,
    barred: Callable[[str], bool],
    gone: list[tuple[str, Entry]],
) -> bool:
    """Evict leaves until `size` bytes of `owner` fit, noting them in `gone`; False: they cannot."""
    for scope in ("",) if state.quota_bytes is None or not owner else (owner, ""):
        excess = _excess(state, scope, size)
        if excess <= 0:
            continue
        passed: list[tuple[int, _Leaf]] = []  # leaves that may not be evicted now
        while excess > 0:
            victim = _next_leaf(state, scope, barred, passed)
            if victim is None:
                break
            entry = _forget(state, victim)
            gone.append((victim, entry))
            excess -= entry.size
        for queue, item in passed:
            heappush(state._leaves[scope, queue], item)
        if excess > 0:
            return False
    return True


def _excess(state: EvictionState, scope: str, size: int) -> int:
    """Bytes that `scope` must evict so that `size` more fit."""
    if not scope:
        return 0 if state.capacity_bytes is None else state.used_bytes + size - state.capacity_bytes
    if state.quota_bytes is None:
        return 0
    return state._bytes[scope, SMALL] + state._bytes[scope, MAIN] + size - state.quota_bytes


def _next_leaf(
    state: EvictionState, scope: str, barred: Callable[[str], bool], passed: list[tuple[int, _Leaf]]
) -> str | None:
    """The leaf of `scope` to evict next; those that are `barred` are moved from the heaps to `passed`."""
    leaves, entries, followers, policy = state._leaves, state.entries, state._followers, state.policy
    rank_of = policy.rank
    small, main = leaves[scope, SMALL], leaves[scope, MAIN]
    while True:
        queue, heap = SMALL, small
        if main and not (small and _is_long(state, scope)):
            queue, heap = MAIN, main
        if not heap:
            return None
        item = heappop(heap)
        rank, ticket, name = item
        entry = entries.get(name)
        if entry is None or entry.ticket != ticket or entry.queue != queue or name in followers:
            continue  # out of date; a record that became a leaf again has been pushed again
        current = rank_of(entry)
        if rank != current:
            heappush(heap, (current, ticket, name))
        elif barred(name):
            passed.append((queue, item))
        elif policy.queued and policy.spares(entry):
            _requeue(state, name, entry)
        else:
            return name


def _is_long(state: EvictionState, scope: str) -> bool:
    """Whether the first queue of `scope` has more than its share of the room."""
    limit = (state.quota_bytes if scope else state.capacity_bytes) or 0
    return state.policy.is_long(state._bytes[scope, SMALL], limit, _room(state))


def _room(state: EvictionState) -> int:
    """Bytes that may be held, or by one owner where there is no other limit."""
    return state.capacity_bytes or state.quota_bytes or 0


def _promote(state: EvictionState, name: str, entry: Entry) -> None:
    """To the queue of what was used again."""
    _count(state, entry, -entry.size)
    entry.queue = MAIN
    _count(state, entry, entry.size)
    if name not in state._followers:
        _offer(state, name, entry)


def _requeue(state: EvictionState, name: str, entry: Entry) -> None:
    """To the end of the main queue, as if it came now."""
    _forget(state, name)
    state._events += 1
    entry.queue, entry.ticket = MAIN, state._events
    _hold(state, name, entry)


def _hold(state: EvictionState, name: str, entry: Entry) -> None:
    state.entries[name] = entry
    if entry.parent is not None:
        state._followers[entry.parent] = state._followers.get(entry.parent, 0) + 1
    _count(state, entry, entry.size)
    if name not in state._followers:
        _offer(state, name, entry)


def _forget(state: EvictionState, name: str) -> Entry:
    entry = state.entries.pop(name)
    _count(state, entry, -entry.size)
    if entry.parent is not None:
        _release(state, entry.parent)
    return entry


def _count(state: EvictionState, entry: Entry, size: int) -> None:
    state.used_bytes += size
    if state.policy.queued or state.quota_bytes is not None:
        for scope in _scopes(state, entry):
            state._bytes[scope, entry.queue] += size


def _offer(state: EvictionState, name: str, entry: Entry) -> None:
    item = state.policy.rank(entry), entry.ticket, name
    for scope in _scopes(state, entry):
        heappush(state._leaves[scope, entry.queue], item)


def _scopes(state: EvictionState, entry: Entry) -> tuple[str, ...]:
    return ("",) if state.quota_bytes is None or not entry.owner else ("", entry.owner)


def _release(state: EvictionState, parent: str) -> None:
    """One record less follows `parent`, which may be a leaf now."""
    left = state._followers[parent] - 1
    if left:
        state._followers[parent] = left
        return
    del state._followers[parent]
    entry = state.entries.get(parent)
    if entry is not None:
        _offer(state, parent, entry)
