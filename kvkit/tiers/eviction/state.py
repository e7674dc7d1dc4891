"""The choice of records to evict: functions (state, event) -> victims that mutate only their state.

Records form chains: a chunk is useless without its parent. So only leaves, records that no held record
follows, are evicted, and a chain shrinks from its end. Among the leaves of the lowest priority, the policy
chooses (`kvkit.tiers.eviction.policies`).

A lookup counts as a use of the records that it finds, and so does the store at the end of the same request.
So policies treat a record as used again only from its second use.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush, heapreplace

from kvkit.tiers.eviction.plugins import policy_named
from kvkit.tiers.eviction.policies import MAIN, SMALL, Entry, prevails

_MOST_REFUSED, _MOST_FRESH = 1024, 1024  # names
_Leaf = tuple[int, int, int, str]
"""(priority, rank, ticket, name) of a record that was a leaf; the lowest is evicted first."""


class EvictionState:
    """The records held by one store, and the policy that evicts them.

    Args:
        capacity_bytes: limit for all records; None for no limit.
        policy: name in `kvkit.tiers.eviction.plugins.POLICIES`, or "package.module:Class".
        quota_bytes: limit for one owner; None for no limit.

    Attributes:
        policy: eviction policy.
        used_bytes: bytes of all `entries`.
        entries: held records by name.

    Raises:
        ValueError: `policy` does not name a policy. The message gives the reason.
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
        self._awaited: dict[str, int] = {}  # number of held followers, by parents that are not held
        self._bytes: Counter[tuple[str, int]] = Counter()  # by owner ("": all) and queue
        self._fresh: dict[str, None] = {}  # leaves in no heap yet: most get a follower before they need one
        self._leaves: defaultdict[tuple[str, int], list[_Leaf]] = defaultdict(list)  # heaps with stale items
        self._pins: dict[str, float] = {}
        self._refused: dict[str, None] = {}  # names that found no room, oldest first
        self._events = 0

    @property
    def limited(self) -> bool:
        """True if there is a capacity or a quota, so that records may be evicted."""
        return self.capacity_bytes is not None or self.quota_bytes is not None


def touch(state: EvictionState, names: Iterable[str], now: float = 0.0) -> None:
    """Mark `names`, a chain, as used at the time `now`, skipping those not held. Mutates `state`."""
    state._events += 1
    entries, event, promotes = state.entries, state._events, state.policy.promotes
    previous: str | None = None
    for name in names:
        entry = entries.get(name)
        if entry is not None:
            entry.last, entry.last_s = event, now
            entry.uses += 1
            if promotes and entry.uses > 1 and entry.queue == SMALL:
                _promote(state, entry)
            if entry.parent is None and previous is not None:
                entry.parent = _follow(state, previous)
        previous = name


def use_run(state: EvictionState, names: Sequence[str], now: float = 0.0) -> int:
    """Return the length of the leading run of `names` (a chain) held; mark it as used. Mutates `state`."""
    entries = state.entries
    run = 0
    for name in names:
        if name not in entries:
            break
        run += 1
    touch(state, names[:run], now)
    return run


def note_request(state: EvictionState, names: Sequence[str], now: float) -> None:
    """Tell a policy that learns that the prompt of a request at the time `now` is `names`, a chain.

    Counts as a use of the leading run held. Mutates `state`; with other policies it does nothing.
    """
    if not state.policy.learns or not names:
        return
    run = use_run(state, names, now)
    held = [state.entries[name] for name in names[:run]]
    queues = [entry.queue for entry in held]
    state.policy.requested(names, held, now, state._events)
    _offer_moved(state, held, queues)


def note_answer(state: EvictionState, names: Sequence[str], tool_call: bool) -> None:
    """Tell a policy that learns that the request with these chunks, a chain, was answered. Mutates `state`.

    Args:
        names: chunks of the prompt and the answer.
        tool_call: True if the answer calls a tool, so that its result is awaited and not a person.
    """
    if not state.policy.learns or not names:
        return
    held = [state.entries[name] for name in names if name in state.entries]
    queues = [entry.queue for entry in held]
    state.policy.answered(names, held, tool_call)
    _offer_moved(state, held, queues)


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
    """Add `names`, a chain of records of `size` bytes after `parent`, until one has no room.

    Mutates `state`. A name that is held already is touched. Victims are removed from `state`; the caller must
    evict them before it writes the records. A record is no victim if it is pinned at the time `now`, is an
    ancestor of a name, or is refused by `may_evict` (None: permits all). For a name without room nothing is
    evicted, and the names that follow it are not added.

    Returns:
        number of leading names that are held now, and the victims.
    """
    entries, pins = state.entries, state._pins

    def barred(name: str) -> bool:
        return pins.get(name, now) > now or (may_evict is not None and not may_evict(name))

    limited, learns, newcomer = state.limited, state.policy.learns, None
    victims: list[str] = []
    added, last = 0, None
    for name in names:
        if name in entries:
            touch(state, (name,), now)
        else:
            if parent is not None:
                parent = _follow(state, parent)  # protects it and its ancestors from eviction
            if learns:
                newcomer = Entry(name, size, None, owner, 0, 0, last_s=now)
                state.policy.enter(newcomer, None if parent is None else entries.get(parent))
            if limited or state._refused:
                evicted: list[Entry] = []
                if parent in state._refused or not _make_room(
                    state, owner, size, barred, evicted, newcomer, now
                ):
                    if parent is not None:
                        _release(state, parent)
                    for entry in reversed(evicted):
                        _hold(state, entry)
                    state._refused[name] = None  # records that follow it are useless until it is held
                    if len(state._refused) > _MOST_REFUSED:
                        del state._refused[next(iter(state._refused))]
                    break
                victims += _let_go(state, evicted)
            last = entries[name] = _new(state, name, size, owner, newcomer, now)
            last.parent, last.followers = parent, state._awaited.pop(name, 0)
            _count(state, last, size)
        parent = name
        added += 1
    if last is not None:  # the others have followers
        _offer(state, last)
    return added, victims


def remove(state: EvictionState, name: str) -> bool:
    """Remove `name`; return whether it was held. Mutates `state`."""
    if name not in state.entries:
        return False
    _forget(state, name)
    state._pins.pop(name, None)
    return True


def pin(state: EvictionState, names: Iterable[str], until: float) -> int:
    """Protect `names` from eviction until the time `until`; return how many are held. Mutates `state`."""
    held = [name for name in names if name in state.entries]
    for name in held:
        state._pins[name] = max(until, state._pins.get(name, until))
    return len(held)


def prioritise(state: EvictionState, names: Iterable[str], priority: int) -> None:
    """Set the priority of those of `names` that are held. Mutates `state`.

    Records of lower priority are evicted first. Of several priorities given to a record, the highest counts.
    """
    for name in names:
        entry = state.entries.get(name)
        if entry is None or not prevails(priority, entry.priority):
            continue
        lowered, entry.priority = priority < entry.priority, priority
        if lowered:  # its item in the heap has the old, higher priority
            _offer(state, entry)


def note(state: EvictionState, name: str, size: int, *, parent: str | None = None, owner: str = "") -> None:
    """Add `name`, even beyond the capacity, or touch it if it is held already. Mutates `state`."""
    if name in state.entries:
        touch(state, (name,))
        return
    entry = _new(state, name, size, owner)
    entry.parent = parent
    _hold(state, entry)


def _let_go(state: EvictionState, evicted: Sequence[Entry]) -> list[str]:
    """Forget what is known of evicted records besides their entries; return their names."""
    for entry in evicted:
        state._pins.pop(entry.name, None)
        if state.policy.queued:
            state.policy.evicted(entry.name, entry, _room(state))
    return [entry.name for entry in evicted]


def _new(
    state: EvictionState, name: str, size: int, owner: str, newcomer: Entry | None = None, now: float = 0.0
) -> Entry:
    """Return an entry for a new record: `newcomer`, of a policy that learns."""
    state._events = event = state._events + 1
    policy = state.policy
    if state._refused:
        state._refused.pop(name, None)
    if newcomer is not None:
        newcomer.ticket = newcomer.last = event
        return newcomer
    queue = policy.queue_of(name, size, _room(state)) if policy.queued else SMALL
    return Entry(name, size, None, owner, event, event, 0, queue, last_s=now)


def _make_room(
    state: EvictionState,
    owner: str,
    size: int,
    barred: Callable[[str], bool],
    evicted: list[Entry],
    newcomer: Entry | None,
    now: float,
) -> bool:
    """Evict leaves into `evicted` until `size` bytes of `owner` fit; return False if they cannot.

    Args:
        newcomer: the new record, for a policy that learns and may refuse it.
    """
    for scope in ("",) if state.quota_bytes is None or not owner else (owner, ""):
        excess = _excess(state, scope, size)
        if excess <= 0:
            continue
        skipped: list[tuple[int, _Leaf]] = []  # leaves that may not be evicted now
        while excess > 0:
            if newcomer is None:
                victim = _next_leaf(state, scope, barred, skipped)
            else:
                victim = _chosen_leaf(state, scope, barred, skipped, newcomer, now)
            if victim is None:
                break
            evicted.append(_forget(state, victim))
            excess -= evicted[-1].size
        for queue, item in skipped:
            heappush(state._leaves[scope, queue], item)
        if excess > 0:
            return False
    return True


def _excess(state: EvictionState, scope: str, size: int) -> int:
    """Return the bytes that `scope` must evict so that `size` more fit; 0 or less if none."""
    if not scope:
        return 0 if state.capacity_bytes is None else state.used_bytes + size - state.capacity_bytes
    if state.quota_bytes is None:
        return 0
    return state._bytes[scope, SMALL] + state._bytes[scope, MAIN] + size - state.quota_bytes


def _next_leaf(
    state: EvictionState, scope: str, barred: Callable[[str], bool], skipped: list[tuple[int, _Leaf]]
) -> str | None:
    """Return the leaf of `scope` to evict next; move those that are `barred` from the heaps to `skipped`."""
    leaves, entries, policy = state._leaves, state.entries, state.policy
    rank_of = policy.rank
    small, main = leaves[scope, SMALL], leaves[scope, MAIN]
    attempts = len(small) + len(main) + 4 * len(entries)  # more deferrals than any policy of kvkit makes
    while True:
        _push_fresh(state)
        queue, heap = SMALL, small
        if main and (not small or (main[0][0], _is_long(state, scope)) < (small[0][0], True)):
            queue, heap = MAIN, main
        if not heap:
            return None
        item = heappop(heap)
        priority, rank, ticket, name = item
        if not _is_current(state, queue, item):
            continue  # stale; a record that became a leaf again was pushed again
        entry = entries[name]
        current = entry.priority, rank_of(entry)
        attempts -= 1
        if (priority, rank) != current and attempts > 0:
            heappush(heap, (*current, ticket, name))
        elif barred(name):
            skipped.append((queue, item))
        elif policy.queued and attempts > 0 and policy.spares(entry):
            _requeue(state, entry)
        else:
            return name


def _chosen_leaf(
    state: EvictionState,
    scope: str,
    barred: Callable[[str], bool],
    skipped: list[tuple[int, _Leaf]],
    newcomer: Entry,
    now: float,
) -> str | None:
    """Return the leaf of `scope` that the policy chooses among the queues' first ones, as `_next_leaf`.

    None if it refuses the new record instead.
    """
    heads: dict[str, list[_Leaf]] = {}
    _push_fresh(state)
    for (of, queue), heap in state._leaves.items():
        while of == scope and (entry := _head(state, heap, queue)) is not None:
            if not barred(entry.name):
                heads[entry.name] = heap
                break
            skipped.append((queue, heappop(heap)))
    if not heads:
        return None
    lowest = min(heap[0][0] for heap in heads.values())
    victims = [state.entries[name] for name, heap in heads.items() if heap[0][0] == lowest]
    victim = state.policy.choose(victims, newcomer, now)
    if victim is None:
        return None
    heappop(heads[victim.name])
    return victim.name


def _is_current(state: EvictionState, queue: int, leaf: _Leaf) -> bool:
    """Return whether the record is still a leaf of `queue`; its rank may be another."""
    entry = state.entries.get(leaf[3])
    return entry is not None and entry.ticket == leaf[2] and entry.queue == queue and not entry.followers


def _head(state: EvictionState, heap: list[_Leaf], queue: int) -> Entry | None:
    """Return the first leaf of a heap, without what is out of date; None if there is none. Mutates it."""
    while heap:
        if not _is_current(state, queue, heap[0]):
            heappop(heap)
            continue
        priority, rank, ticket, name = heap[0]
        entry = state.entries[name]
        if (priority, rank) == (current := (entry.priority, state.policy.rank(entry))):
            return entry
        heapreplace(heap, (*current, ticket, name))
    return None


def _is_long(state: EvictionState, scope: str) -> bool:
    """Return whether the first queue of `scope` is longer than the policy wants it."""
    limit = (state.quota_bytes if scope else state.capacity_bytes) or 0
    return state.policy.is_long(state._bytes[scope, SMALL], limit, _room(state))


def _room(state: EvictionState) -> int:
    """Return the capacity in bytes, or the quota if there is no capacity."""
    return state.capacity_bytes or state.quota_bytes or 0


def _promote(state: EvictionState, entry: Entry) -> None:
    """Move a record to the main queue."""
    _count(state, entry, -entry.size)
    entry.queue = MAIN
    _count(state, entry, entry.size)
    _offer(state, entry)


def _requeue(state: EvictionState, entry: Entry) -> None:
    """Move a record to the end of the main queue, as if it were new."""
    _forget(state, entry.name)
    state._events += 1
    entry.queue, entry.ticket = MAIN, state._events
    _hold(state, entry)


def _hold(state: EvictionState, entry: Entry) -> None:
    """Add an entry."""
    state.entries[entry.name] = entry
    entry.followers = state._awaited.pop(entry.name, 0)
    if entry.parent is not None:
        entry.parent = _follow(state, entry.parent)
    _count(state, entry, entry.size)
    _offer(state, entry)


def _forget(state: EvictionState, name: str) -> Entry:
    """Remove and return an entry."""
    entry = state.entries.pop(name)
    state._fresh.pop(name, None)
    if entry.followers:
        state._awaited[name] = entry.followers
    _count(state, entry, -entry.size)
    if entry.parent is not None:
        _release(state, entry.parent)
    return entry


def _count(state: EvictionState, entry: Entry, size: int) -> None:
    """Count `size` more bytes (fewer if negative) for the scopes and the queue of an entry."""
    state.used_bytes += size
    if state.policy.queued or state.quota_bytes is not None:
        queue = entry.queue if state.policy.queued else SMALL
        for scope in _scopes(state, entry):
            state._bytes[scope, queue] += size


def _offer(state: EvictionState, entry: Entry) -> None:
    """Make a record a candidate of the next search for a victim, if it is a leaf."""
    if state.limited and not entry.followers:
        state._fresh[entry.name] = None
        if len(state._fresh) > _MOST_FRESH:
            _push_fresh(state)


def _offer_moved(state: EvictionState, entries: Sequence[Entry], queues: Sequence[int]) -> None:
    """Make records candidates in their queues, if these are not `queues`, those from before."""
    for entry, queue in zip(entries, queues, strict=True):
        if entry.queue != queue:  # of leaves, which are several if the model has several layer groups
            _offer(state, entry)


def _push_fresh(state: EvictionState) -> None:
    """Move the fresh leaves to their heaps."""
    while state._fresh:
        entry = state.entries[state._fresh.popitem()[0]]
        item = entry.priority, state.policy.rank(entry), entry.ticket, entry.name
        for scope in _scopes(state, entry):
            heap = state._leaves[scope, entry.queue]
            heappush(heap, item)
            if len(heap) > 2 * len(state.entries) + _MOST_FRESH:  # without evictions nothing else shortens it
                heap[:] = {leaf[3]: leaf for leaf in heap if _is_current(state, entry.queue, leaf)}.values()
                heapify(heap)


def _scopes(state: EvictionState, entry: Entry) -> tuple[str, ...]:
    """Return the scopes that an entry counts in: all records (""), and its owner if there is a quota."""
    return ("",) if state.quota_bytes is None or not entry.owner else ("", entry.owner)


def _follow(state: EvictionState, parent: str) -> str:
    """Count one more follower of `parent`; return its name, the same string for all followers."""
    entry = state.entries.get(parent)
    if entry is None:
        state._awaited[parent] = state._awaited.get(parent, 0) + 1
        return parent
    entry.followers += 1
    state._fresh.pop(parent, None)
    return entry.name


def _release(state: EvictionState, parent: str) -> None:
    """Count one follower of `parent` less; it may be a leaf now."""
    entry = state.entries.get(parent)
    if entry is not None:
        entry.followers -= 1
        _offer(state, entry)
    elif state._awaited[parent] > 1:
        state._awaited[parent] -= 1
    else:
        del state._awaited[parent]
