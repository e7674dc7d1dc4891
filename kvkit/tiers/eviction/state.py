"""Which records to evict: pure functions (state, event) -> victims; each mutates only the given state.

Records form chains: a chunk is of no use without its parent. So only a record that no held record follows is
evicted, and a chain shrinks from its end, whatever the policy. Among those of the lowest priority the policy
chooses (`kvkit.tiers.eviction.policies`).

A lookup uses what it finds, and so does the store that ends the same request: one use makes nothing old.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush

from kvkit.tiers.eviction.plugins import policy_named
from kvkit.tiers.eviction.policies import MAIN, SMALL, Entry, prevails

_MOST_REFUSED, _MOST_FRESH = 1024, 1024  # names
_Leaf = tuple[int, int, int, str]
"""(priority, rank, ticket, name) of a record that was a leaf: lower goes sooner"""


class EvictionState:
    """Records of one place.

    Args:
        capacity_bytes: what may be held; None for no limit.
        policy: a name in `kvkit.tiers.eviction.policies.POLICIES`, or "package.module:Class".
        quota_bytes: what one owner may hold; None for no limit.

    Attributes:
        policy: that of this place.
        used_bytes: sum over `entries`.
        entries: by record name.

    Raises:
        ValueError: there is no such policy, or it is none. The message names the choices.
    """

    __slots__ = (
        *("capacity_bytes", "policy", "quota_bytes", "used_bytes", "entries"),
        *("_awaited", "_bytes", "_fresh", "_leaves", "_pins", "_refused", "_events"),
    )

    def __init__(
        self, capacity_bytes: int | None, policy: str = "lru", quota_bytes: int | None = None
    ) -> None:
        try:
            self.policy = policy_named(policy)
        except ValueError as error:
            raise ValueError(f"policy={policy!r}: {error}") from error
        self.capacity_bytes = capacity_bytes
        self.quota_bytes = quota_bytes
        self.used_bytes = 0
        self.entries: dict[str, Entry] = {}
        self._awaited: dict[str, int] = {}  # held records by parent, of parents that are not held
        self._bytes: Counter[tuple[str, int]] = Counter()  # by owner ("": all) and queue
        self._fresh: dict[str, None] = {}  # leaves that are in no heap yet: most are followed before that
        self._leaves: defaultdict[tuple[str, int], list[_Leaf]] = defaultdict(list)  # heaps, some out of date
        self._pins: dict[str, float] = {}
        self._refused: dict[str, None] = {}  # names that found no room, oldest first
        self._events = 0

    @property
    def limited(self) -> bool:
        """Whether anything is ever evicted."""
        return self.capacity_bytes is not None or self.quota_bytes is not None


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
                _promote(state, entry)
            if entry.parent is None and before is not None:
                entry.parent = _follow(state, before)
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
    entries, pins = state.entries, state._pins

    def barred(name: str) -> bool:
        return pins.get(name, now) > now or (may_evict is not None and not may_evict(name))

    limited = state.limited
    victims: list[str] = []
    added, last = 0, None
    for name in names:
        if name in entries:
            touch(state, (name,))
        else:
            if parent is not None:
                parent = _follow(state, parent)  # neither it nor what it follows is evicted
            if limited or state._refused:
                gone: list[Entry] = []
                if parent in state._refused or not _make_room(state, owner, size, barred, gone):
                    if parent is not None:
                        _release(state, parent)
                    for entry in reversed(gone):
                        _hold(state, entry)
                    state._refused[name] = None  # what follows it is of no use until it is held
                    if len(state._refused) > _MOST_REFUSED:
                        del state._refused[next(iter(state._refused))]
                    break
                for entry in gone:
                    state._pins.pop(entry.name, None)
                    if state.policy.queued:
                        state.policy.evicted(entry.name, entry, _room(state))
                    victims.append(entry.name)
            last = entries[name] = _new(state, name, size, owner)
            last.parent, last.followers = parent, state._awaited.pop(name, 0)
            _count(state, last, size)
        parent = name
        added += 1
    if last is not None:  # of those before it, each is followed
        _offer(state, last)
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


def prioritise(state: EvictionState, names: Iterable[str], priority: int) -> None:
    """Have those of `names` that are held go after all of a lower priority. Mutates `state`.

    Of several priorities that a record was given, the highest counts.
    """
    for name in names:
        entry = state.entries.get(name)
        if entry is None or not prevails(priority, entry.priority):
            continue
        lowered, entry.priority = priority < entry.priority, priority
        if lowered:  # its place among the leaves is too high
            _offer(state, entry)


def note(state: EvictionState, name: str, size: int, *, parent: str | None = None, owner: str = "") -> None:
    """Note that `name` is held, be it beyond the capacity; one that is held already is touched. Mutates."""
    if name in state.entries:
        touch(state, (name,))
        return
    entry = _new(state, name, size, owner)
    entry.parent = parent
    _hold(state, entry)


def _new(state: EvictionState, name: str, size: int, owner: str) -> Entry:
    """An entry for a record that comes now."""
    state._events = event = state._events + 1
    policy = state.policy
    queue = policy.queue_of(name, size, _room(state)) if policy.queued else SMALL
    if state._refused:
        state._refused.pop(name, None)
    return Entry(name, size, None, owner, event, event, 0, queue)


def _make_room(
    state: EvictionState,
    owner: str,
    size: int,
    barred: Callable[[str], bool],
    gone: list[Entry],
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
            gone.append(_forget(state, victim))
            excess -= gone[-1].size
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
    leaves, entries, policy = state._leaves, state.entries, state.policy
    rank_of = policy.rank
    small, main = leaves[scope, SMALL], leaves[scope, MAIN]
    left = len(small) + len(main) + 4 * len(entries)  # more than any policy of kvkit's own puts off
    while True:
        _push_fresh(state)
        queue, heap = SMALL, small
        if main and (not small or (main[0][0], _is_long(state, scope)) < (small[0][0], True)):
            queue, heap = MAIN, main
        if not heap:
            return None
        item = heappop(heap)
        priority, rank, ticket, name = item
        entry = entries.get(name)
        if entry is None or entry.ticket != ticket or entry.queue != queue or entry.followers:
            continue  # out of date; a record that became a leaf again has been pushed again
        current = entry.priority, rank_of(entry)
        left -= 1
        if (priority, rank) != current and left > 0:
            heappush(heap, (*current, ticket, name))
        elif barred(name):
            passed.append((queue, item))
        elif policy.queued and left > 0 and policy.spares(entry):
            _requeue(state, entry)
        else:
            return name


def _is_long(state: EvictionState, scope: str) -> bool:
    """Whether the first queue of `scope` has more than its share of the room."""
    limit = (state.quota_bytes if scope else state.capacity_bytes) or 0
    return state.policy.is_long(state._bytes[scope, SMALL], limit, _room(state))


def _room(state: EvictionState) -> int:
    """Bytes that may be held, or by one owner where there is no other limit."""
    return state.capacity_bytes or state.quota_bytes or 0


def _promote(state: EvictionState, entry: Entry) -> None:
    """To the queue of what was used again."""
    _count(state, entry, -entry.size)
    entry.queue = MAIN
    _count(state, entry, entry.size)
    _offer(state, entry)


def _requeue(state: EvictionState, entry: Entry) -> None:
    """To the end of the main queue, as if it came now."""
    _forget(state, entry.name)
    state._events += 1
    entry.queue, entry.ticket = MAIN, state._events
    _hold(state, entry)


def _hold(state: EvictionState, entry: Entry) -> None:
    state.entries[entry.name] = entry
    entry.followers = state._awaited.pop(entry.name, 0)
    if entry.parent is not None:
        entry.parent = _follow(state, entry.parent)
    _count(state, entry, entry.size)
    _offer(state, entry)


def _forget(state: EvictionState, name: str) -> Entry:
    entry = state.entries.pop(name)
    state._fresh.pop(name, None)
    if entry.followers:
        state._awaited[name] = entry.followers
    _count(state, entry, -entry.size)
    if entry.parent is not None:
        _release(state, entry.parent)
    return entry


def _count(state: EvictionState, entry: Entry, size: int) -> None:
    state.used_bytes += size
    if state.policy.queued or state.quota_bytes is not None:
        for scope in _scopes(state, entry):
            state._bytes[scope, entry.queue] += size


def _offer(state: EvictionState, entry: Entry) -> None:
    """Have a record be found by the next search for a victim, if it is a leaf."""
    if state.limited and not entry.followers:
        state._fresh[entry.name] = None
        if len(state._fresh) > _MOST_FRESH:
            _push_fresh(state)


def _push_fresh(state: EvictionState) -> None:
    while state._fresh:
        entry = state.entries[state._fresh.popitem()[0]]
        item = entry.priority, state.policy.rank(entry), entry.ticket, entry.name
        for scope in _scopes(state, entry):
            heappush(state._leaves[scope, entry.queue], item)


def _scopes(state: EvictionState, entry: Entry) -> tuple[str, ...]:
    return ("",) if state.quota_bytes is None or not entry.owner else ("", entry.owner)


def _follow(state: EvictionState, parent: str) -> str:
    """One record more follows `parent`; its name, once for all that follow it."""
    entry = state.entries.get(parent)
    if entry is None:
        state._awaited[parent] = state._awaited.get(parent, 0) + 1
        return parent
    entry.followers += 1
    state._fresh.pop(parent, None)
    return entry.name


def _release(state: EvictionState, parent: str) -> None:
    """One record less follows `parent`, which may be a leaf now."""
    entry = state.entries.get(parent)
    if entry is not None:
        entry.followers -= 1
        _offer(state, entry)
    elif state._awaited[parent] > 1:
        state._awaited[parent] -= 1
    else:
        del state._awaited[parent]
