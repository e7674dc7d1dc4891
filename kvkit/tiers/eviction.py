"""Which records to let go: pure functions (state, event) -> victims; each mutates only the given state.

Records form chains: a chunk is of no use without its parent. So only a record that no held record follows is
let go, and a chain shrinks from its end, whatever the policy. Among those the policy chooses:

    lru      the least recently used
    fifo     the one held longest
    lfu      the least often used, of these the least recently used
    s3fifo   two queues (https://doi.org/10.1145/3600006.3613147): newcomers pass through a small one, a tenth
             of the capacity, and leave unless they were used again meanwhile; names that left so are
             remembered, and enter the main queue at once when they return
    arc      two queues (Megiddo and Modha, FAST 2003), of records that were used again and of those that were
             not, the least recently used of either first; names that left are remembered, and when one
             returns, its queue had been too short: it gets more of the room

A lookup uses what it finds, and so does the store that ends the same request: one use makes nothing old.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Literal, get_args

Policy = Literal["lru", "fifo", "lfu", "s3fifo", "arc"]
POLICIES: tuple[Policy, ...] = get_args(Policy)

_SMALL, _MAIN = 0, 1  # queues; without s3fifo and arc all is in the first
_QUEUED = ("s3fifo", "arc")
_MOST_USES = 3  # what s3fifo counts up to
_MOST_REFUSED = 1024  # names
_USE = 1 << 48  # a use weighs more than any number of events
_Item = tuple[int, int, str]
"""(rank, ticket, name) of a record that was a leaf: lower goes sooner"""


@dataclass(slots=True)
class Entry:
    """A held record.

    Attributes:
        size: its bytes.
        parent: the record that it follows; None if it begins a chain, or nobody has said.
        owner: whose quota it counts against.
        ticket: the event that brought it.
        last: the event that used it last.
        uses: how often it was used since it came, or since its queue let it pass.
        queue: 1 in the main queue of s3fifo, or in that of arc for what was used again; else 0.
    """

    size: int
    parent: str | None
    owner: str
    ticket: int
    last: int
    uses: int = 0
    queue: int = _SMALL


@dataclass(slots=True)
class _Ghosts:
    """Names that left a queue, the oldest first, with their bytes."""

    sizes: OrderedDict[str, int] = field(default_factory=OrderedDict)
    bytes: int = 0


@dataclass(slots=True)
class State:
    """Records of one place.

    Attributes:
        capacity_bytes: what may be held; None for no limit.
        policy: one of `POLICIES`.
        quota_bytes: what one owner may hold; None for no limit.
        used_bytes: sum over `entries`.
        entries: by record name.
    """

    capacity_bytes: int | None
    policy: str = "lru"
    quota_bytes: int | None = None
    used_bytes: int = 0
    entries: dict[str, Entry] = field(default_factory=dict)
    _followers: dict[str, int] = field(default_factory=dict)  # held records by parent, held or not
    _bytes: dict[tuple[str, int], int] = field(default_factory=dict)  # by owner ("": all) and queue
    _leaves: dict[tuple[str, int], list[_Item]] = field(
        default_factory=dict
    )  # heaps; items may be out of date
    _pins: dict[str, float] = field(default_factory=dict)
    _refused: dict[str, None] = field(default_factory=dict)  # names that found no room, oldest first
    _ghosts: tuple[_Ghosts, _Ghosts] = field(default_factory=lambda: (_Ghosts(), _Ghosts()))  # by queue
    _small_bytes: int = 0  # arc: the room of the first queue
    _events: int = 0


def touch(state: State, names: Iterable[str]) -> None:
    """Note that `names` were used: records of a chain, each following the one before it. Mutates `state`.

    Names that are not held are passed over.
    """
    state._events += 1
    entries, now, arc = state.entries, state._events, state.policy == "arc"
    before: str | None = None
    for name in names:
        entry = entries.get(name)
        if entry is not None:
            entry.last = now
            entry.uses += 1
            if arc and entry.uses > 1 and entry.queue == _SMALL:
                _promote(state, name, entry)
            if entry.parent is None and before is not None:
                entry.parent = before
                state._followers[before] = state._followers.get(before, 0) + 1
        before = name


def use_run(state: State, names: Sequence[str]) -> int:
    """How many of `names`, a chain, are held from the first on; these were used. Mutates `state`."""
    entries = state.entries
    run = 0
    for name in names:
        if name not in entries:
            break
        run += 1
    touch(state, names[:run])
    return run


def add(
    state: State,
    name: str,
    size: int,
    *,
    parent: str | None = None,
    owner: str = "",
    now: float = 0.0,
    may_evict: Callable[[str], bool] | None = None,
) -> list[str] | None:
    """Note that `name` of `size` bytes, which follows `parent`, is held; returns the victims to let go first.

    A name that is held already is only touched. Victims are gone from `state` when this returns; none of them
    is pinned at the time `now`, precedes `name`, or is one that `may_evict` (None: all may go) denies. None
    means that there is no room, or none for what `name` follows (`refuse`): then nothing is let go. Mutates
    `state`.
    """
    added, victims = add_run(state, (name,), size, parent=parent, owner=owner, now=now, may_evict=may_evict)
    return victims if added else None


def add_run(
    state: State,
    names: Sequence[str],
    size: int,
    *,
    parent: str | None = None,
    owner: str = "",
    now: float = 0.0,
    may_evict: Callable[[str], bool] | None = None,
) -> tuple[int, list[str]]:
    """`add` for each of `names`, a chain of records of `size` bytes, until one finds no room.

    Returns how many are held now, and the victims to let go first. Mutates `state`.
    """
    entries, followers = state.entries, state._followers
    limited = state.capacity_bytes is not None or state.quota_bytes is not None
    victims: list[str] = []
    added, leaf = 0, None
    for name in names:
        if name in entries:
            touch(state, (name,))
        else:
            if parent is not None:
                followers[parent] = followers.get(parent, 0) + 1  # neither it nor what it follows is let go
            if limited or state._refused:
                gone: list[tuple[str, Entry]] = []
                if parent in state._refused or not _make_room(state, owner, size, now, may_evict, gone):
                    if parent is not None:
                        _release(state, parent)
                    for victim, entry in reversed(gone):
                        _hold(state, victim, entry)
                    refuse(state, name)
                    break
                for victim, entry in gone:
                    state._pins.pop(victim, None)
                    if state.policy in _QUEUED:
                        _remember(state, victim, entry)
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


def refuse(state: State, name: str) -> None:
    """Note that `name` found no room: what follows it is of no use until it is held. Mutates `state`."""
    state._refused[name] = None
    if len(state._refused) > _MOST_REFUSED:
        del state._refused[next(iter(state._refused))]


def remove(state: State, name: str) -> bool:
    """Note that `name` is gone; whether it was held. Mutates `state`."""
    if name not in state.entries:
        return False
    _forget(state, name)
    state._pins.pop(name, None)
    return True


def pin(state: State, names: Iterable[str], until: float) -> int:
    """Let go of none of `names` before the time `until`; returns how many are held. Mutates `state`."""
    held = [name for name in names if name in state.entries]
    for name in held:
        state._pins[name] = max(until, state._pins.get(name, until))
    return len(held)


def note(state: State, name: str, size: int, *, parent: str | None = None, owner: str = "") -> None:
    """Note that `name` is held, be it beyond the capacity; one that is held already is touched. Mutates."""
    if name in state.entries:
        touch(state, (name,))
        return
    entry = _new(state, name, size, owner)
    entry.parent = parent
    _hold(state, name, entry)


def clear(state: State) -> None:
    """Note that nothing is held any more. Mutates `state`."""
    for name in list(state.entries):
        remove(state, name)


def _new(state: State, name: str, size: int, owner: str) -> Entry:
    """An entry for a record that comes now."""
    state._events = event = state._events + 1
    queue = _MAIN if state.policy in _QUEUED and _was_remembered(state, name, size) else _SMALL
    if state._refused:
        state._refused.pop(name, None)
    return Entry(size, None, owner, event, event, 0, queue)


def _make_room(
    state: State,
    owner: str,
    size: int,
    now: float,
    may_evict: Callable[[str], bool] | None,
    gone: list[tuple[str, Entry]],
) -> bool:
    """Let leaves go until `size` bytes of `owner` fit, noting them in `gone`; False: they cannot."""
    for scope in ("",) if state.quota_bytes is None or not owner else (owner, ""):
        excess = _excess(state, scope, size)
        if excess <= 0:
            continue
        passed: list[tuple[int, _Item]] = []  # leaves that may not be let go now
        while excess > 0:
            victim = _next_leaf(state, scope, now, may_evict, passed)
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


def _excess(state: State, scope: str, size: int) -> int:
    """Bytes that `scope` must let go so that `size` more fit."""
    if not scope:
        return 0 if state.capacity_bytes is None else state.used_bytes + size - state.capacity_bytes
    if state.quota_bytes is None:
        return 0
    held = state._bytes.get((scope, _SMALL), 0) + state._bytes.get((scope, _MAIN), 0)
    return held + size - state.quota_bytes


def _rank(policy: str, entry: Entry) -> int:
    """Lower is let go sooner."""
    if policy in ("lru", "arc"):
        return entry.last
    if policy == "lfu":
        return entry.uses * _USE + entry.last
    return entry.ticket


def _next_leaf(
    state: State,
    scope: str,
    now: float,
    may_evict: Callable[[str], bool] | None,
    passed: list[tuple[int, _Item]],
) -> str | None:
    """The leaf of `scope` to let go next; those that may not go are moved from the heaps to `passed`."""
    leaves, entries, followers, policy = state._leaves, state.entries, state._followers, state.policy
    small, main = leaves.get((scope, _SMALL)), leaves.get((scope, _MAIN))
    while True:
        queue, heap = _SMALL, small
        if main and not (small and _is_long(state, scope)):
            queue, heap = _MAIN, main
        if not heap:
            return None
        item = heappop(heap)
        rank, ticket, name = item
        entry = entries.get(name)
        if entry is None or entry.ticket != ticket or entry.queue != queue or name in followers:
            continue  # out of date; a record that became a leaf again has been pushed again
        current = _rank(policy, entry)
        if rank != current:
            heappush(heap, (current, ticket, name))
        elif (may_evict is not None and not may_evict(name)) or (
            state._pins and state._pins.get(name, now) > now
        ):
            passed.append((queue, item))
        elif policy == "s3fifo" and entry.uses > (1 if queue == _SMALL else 0):
            _requeue(state, name, entry)
            small, main = leaves.get((scope, _SMALL)), leaves.get((scope, _MAIN))
        else:
            return name


def _is_long(state: State, scope: str) -> bool:
    """Whether the first queue of `scope` has more than its share of the room."""
    held = state._bytes.get((scope, _SMALL), 0)
    limit = (state.quota_bytes if scope else state.capacity_bytes) or 0
    if state.policy == "arc":
        return held * _room(state) > state._small_bytes * limit
    return held * 10 >= limit


def _room(state: State) -> int:
    """Bytes that may be held, or by one owner where there is no other limit."""
    return state.capacity_bytes or state.quota_bytes or 0


def _promote(state: State, name: str, entry: Entry) -> None:
    """arc: to the queue of what was used again."""
    _count(state, entry, -entry.size)
    entry.queue = _MAIN
    _count(state, entry, entry.size)
    if name not in state._followers:
        _offer(state, name, entry)


def _requeue(state: State, name: str, entry: Entry) -> None:
    """s3fifo: what was used goes to the end of the main queue, and is worth less each time it comes round."""
    uses = min(entry.uses, _MOST_USES)
    _forget(state, name)
    state._events += 1
    entry.uses = uses - 1 if entry.queue == _MAIN else 0
    entry.queue, entry.ticket = _MAIN, state._events
    _hold(state, name, entry)


def _remember(state: State, name: str, entry: Entry) -> None:
    """Note a name that left its queue (s3fifo: the small one); as many bytes of them as may be held."""
    if state.policy == "s3fifo" and entry.queue == _MAIN:
        return
    ghosts = state._ghosts[entry.queue]
    ghosts.sizes[name] = entry.size
    ghosts.bytes += entry.size
    while ghosts.bytes > _room(state):
        ghosts.bytes -= ghosts.sizes.popitem(last=False)[1]


def _was_remembered(state: State, name: str, size: int) -> bool:
    """Whether a name left before; no longer. arc: gives the queue that it left more of the room."""
    for queue, ghosts in enumerate(state._ghosts):
        left = ghosts.sizes.pop(name, None)
        if left is None:
            continue
        other = state._ghosts[1 - queue].bytes
        step = max(size, size * other // max(1, ghosts.bytes))
        ghosts.bytes -= left
        if queue == _SMALL:
            state._small_bytes = min(_room(state), state._small_bytes + step)
        else:
            state._small_bytes = max(0, state._small_bytes - step)
        return True
    return False


def _hold(state: State, name: str, entry: Entry) -> None:
    state.entries[name] = entry
    if entry.parent is not None:
        state._followers[entry.parent] = state._followers.get(entry.parent, 0) + 1
    _count(state, entry, entry.size)
    if name not in state._followers:
        _offer(state, name, entry)


def _forget(state: State, name: str) -> Entry:
    entry = state.entries.pop(name)
    _count(state, entry, -entry.size)
    if entry.parent is not None:
        _release(state, entry.parent)
    return entry


def _count(state: State, entry: Entry, size: int) -> None:
    state.used_bytes += size
    if state.policy in _QUEUED or state.quota_bytes is not None:
        for scope in _scopes(state, entry):
            share = scope, entry.queue
            state._bytes[share] = state._bytes.get(share, 0) + size


def _offer(state: State, name: str, entry: Entry) -> None:
    item = _rank(state.policy, entry), entry.ticket, name
    for scope in _scopes(state, entry):
        heap = state._leaves.get((scope, entry.queue))
        if heap is None:
            heap = state._leaves[scope, entry.queue] = []
        heappush(heap, item)


def _scopes(state: State, entry: Entry) -> tuple[str, ...]:
    return ("",) if state.quota_bytes is None or not entry.owner else ("", entry.owner)


def _release(state: State, parent: str) -> None:
    """One record less follows `parent`, which may be a leaf now."""
    left = state._followers[parent] - 1
    if left:
        state._followers[parent] = left
        return
    del state._followers[parent]
    entry = state.entries.get(parent)
    if entry is not None:
        _offer(state, parent, entry)
