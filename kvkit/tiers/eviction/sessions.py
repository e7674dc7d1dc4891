"""The policy `sessions`: evicts what is expected back latest, by return times that it learns on the way.

A conversation, or an agent's run, is a chain of records that grows at its end. So a lookup whose chunks
include the last chunk of an earlier prompt is the next request of the same session: no ids are needed.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvkit.tiers.eviction.policies import Entry, EvictionPolicy, Session

_MOST_SESSIONS = 1 << 16
_SAME_S = 1.0
"""Seconds within which lookups of a session are the same request: tiers are asked more than once."""
_PACES, _SHARED = 13, 6
"""Queue 0 has records of sessions with one request; queue p < `_PACES` those of sessions that return after
about 2**p seconds; `_PACES` more have the same after an answer that calls a tool; the last `_SHARED` have
records that were shared 1, 2 to 3, 4 to 7, ... times."""
_UNSHARED = 2 * _PACES
_QUEUES = _UNSHARED + _SHARED
_KEPT = 0.7
"""Weight of earlier gaps in a session's pace."""
_EDGES: list[float] = [0.0, *np.geomspace(1.0, 1e6, 49).tolist()]
"""Bounds, in seconds, of the bins of ages; in each, the rate of returns is taken to be constant."""
_BINS, _STARTS, _WIDTHS = len(_EDGES) - 1, np.array(_EDGES[:-1]), np.diff(_EDGES)
_FEW = 0.02
"""Returns in a bin of which nothing is known."""
_REFRESHED = 64
"""Lookups, and 1/16 of the sessions, after which the rates are computed again."""
_REMEMBERED = 0.98
"""Weight of what was learnt before a refresh."""


class ReturnTimes:
    """How long sessions of each queue wait before they return: rates by age, from returns and from waiting.

    The rate of a bin is the number of returns at that age, over the seconds that sessions were that old,
    whether they returned or not. A queue with few returns leans on the rates of all queues.
    """

    def __init__(self) -> None:
        self._returns = np.zeros((_QUEUES, _BINS))
        self._seconds = np.zeros((_QUEUES, _BINS))
        self._survival: list[list[float]] = []  # by queue and edge: share that has not returned
        self._waiting: list[list[float]] = []  # its integral up to the edge
        self.refresh(np.zeros(0, int), np.zeros(0))

    def learn(self, queue: int, gap_s: float, *, returned: bool = True) -> None:
        """Count a return after `gap_s`, or that there was none so far. Mutates."""
        self._returns[queue, min(bisect_right(_EDGES, gap_s), _BINS) - 1] += returned
        self._seconds[queue] += np.clip(gap_s - _STARTS, 0.0, _WIDTHS)

    def refresh(self, queues: NDArray[np.int64], ages_s: NDArray[np.float64]) -> None:
        """Compute the rates again, given the queue and age of each session that waits. Mutates."""
        self._returns *= _REMEMBERED
        self._seconds *= _REMEMBERED
        seconds = self._seconds.copy()
        for queue in np.unique(queues):
            seconds[queue] += _seconds_in_bins(ages_s[queues == queue])
        everywhere = (self._returns.sum(0) + _FEW) / (seconds.sum(0) + _WIDTHS)
        rates = (self._returns + everywhere * _WIDTHS) / (seconds + _WIDTHS)
        none = np.zeros((_QUEUES, 1))
        survival = np.exp(-np.concatenate([none, np.cumsum(rates * _WIDTHS, axis=1)], axis=1))
        areas = (survival[:, 1:] + survival[:, :-1]) / 2 * _WIDTHS
        self._survival = survival.tolist()
        self._waiting = np.concatenate([none, np.cumsum(areas, axis=1)], axis=1).tolist()

    def wait_s(self, queue: int, age_s: float, horizon_s: float) -> float:
        """Return the seconds that a session of this age is expected to wait from now on, at most `horizon_s`.

        Where no session was ever so old, it is `horizon_s`.
        """
        survival, waiting = self._survival[queue], self._waiting[queue]
        left = _at(survival, age_s)
        if age_s + horizon_s >= _EDGES[-1] or left < 1e-9:
            return horizon_s
        return (_at(waiting, age_s + horizon_s) - _at(waiting, age_s)) / left


def _seconds_in_bins(ages_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the seconds that sessions of these ages have spent in each bin."""
    ages = np.sort(ages_s)
    first = np.searchsorted(ages, _EDGES)  # per edge: number of younger ones
    sums = np.concatenate([[0.0], np.cumsum(ages)])
    within: NDArray[np.float64] = np.diff(sums[first]) - np.diff(first) * _STARTS
    return within + (len(ages) - first[1:]) * _WIDTHS


def _at(values: list[float], age_s: float) -> float:
    """Interpolate between the edges."""
    i = min(bisect_right(_EDGES, age_s), _BINS) - 1
    return values[i] + (values[i + 1] - values[i]) * (age_s - _EDGES[i]) / (_EDGES[i + 1] - _EDGES[i])


class Sessions(EvictionPolicy):
    """Evicts the record that is expected to be used last, and takes up no record at a worse price.

    Records of sessions that return at about the same pace share a queue, and so do records that about as many
    sessions share; each queue evicts its least recently used record. Waits for a tool's result and for a
    person are apart, where answers are known. Among the queues the longest expected wait decides, as far
    ahead as records are held at all. It is learnt per queue, and grows with age where most return soon or
    never. A record that is due later than every victim is refused. What a session's newest prompt no longer
    has goes first.

    LHD (Beckmann, Chen and Cidon, NSDI 2018) learns such rates per object; Continuum (arXiv 2511.02230) keeps
    the KV of agents for a time that it learns from their tool calls.
    """

    name = "sessions"
    learns = True

    def __init__(self) -> None:
        self._times = ReturnTimes()
        self._sessions: OrderedDict[str, Session] = OrderedDict()  # by the last chunk of its newest prompt
        self._starts: OrderedDict[str, Session] = OrderedDict()  # by the first chunk that a lookup missed
        self._oldest_s = 0.0  # age of the oldest record that could be evicted, a moving average
        self._until_refresh = _REFRESHED

    def rank(self, entry: Entry) -> int:
        return entry.last

    def requested(self, names: Sequence[str], held: Sequence[Entry], now: float, event: int) -> None:
        session, gap_s = self._known(names) or Session(now, 0), 0.0
        if session.tip:
            del self._sessions[session.tip]
            gap_s = now - session.last_s
            if gap_s >= _SAME_S:
                self._times.learn(session.queue, gap_s)
                pace = math.log2(gap_s + 1)
                before = session.paces.get(session.tool_call, pace)
                session.paces[session.tool_call] = _KEPT * before + (1 - _KEPT) * pace
                session.tool_call = True in session.paces  # until it is answered: most answers of agents do
                session.queue = _queue_of(session)
        self._share(held, session, now, gap_s)
        session.last_s, session.event, session.tip = now, event, names[-1]
        _remember(self._sessions, session.tip, session)
        if len(held) < len(names):
            _remember(self._starts, names[len(held)], session)
        self._until_refresh -= 1
        if self._until_refresh <= 0:
            waiting = self._sessions.values()
            ages_s = now - np.array([session.last_s for session in waiting])
            self._times.refresh(np.array([session.queue for session in waiting]), ages_s)
            self._until_refresh = max(_REFRESHED, len(waiting) // 16)

    def answered(self, names: Sequence[str], held: Sequence[Entry], tool_call: bool) -> None:
        session = self._known(names)
        if session is None or session.tool_call == tool_call:
            return
        session.tool_call = tool_call
        session.queue = _queue_of(session)
        for entry in held:
            if entry.session is session and not entry.sharings:
                entry.queue = session.queue

    def enter(self, entry: Entry, parent: Entry | None) -> None:
        session = self._starts.pop(entry.name, None)
        if parent is not None and parent.session is not None:
            session = parent.session
        entry.session = session = session or Session(entry.last_s, 0)
        entry.queue = session.queue
        if entry.name in self._sessions and entry.name != session.tip:  # of a prompt that another tier had
            self._sessions.pop(session.tip, None)
            self._sessions[entry.name], session.tip = session, entry.name

    def choose(self, heads: Sequence[Entry], newcomer: Entry, now: float) -> Entry | None:
        oldest_s = max(now - entry.last_s for entry in heads)
        self._oldest_s += (oldest_s - self._oldest_s) * 0.01
        horizon_s = max(5.0, self._oldest_s)
        wait_s, victim = max(((self._wait_s(entry, now, horizon_s), entry) for entry in heads), key=_order)
        if self._times.wait_s(newcomer.queue, 0.0, horizon_s) > wait_s:
            return None
        if victim.sharings:  # of sessions, `refresh` is told
            self._times.learn(victim.queue, now - victim.last_s, returned=False)
        return victim

    def _known(self, names: Sequence[str]) -> Session | None:
        """Return the session whose newest prompt ends in one of these chunks, the last such."""
        return next((self._sessions[name] for name in reversed(names) if name in self._sessions), None)

    def _share(self, held: Sequence[Entry], session: Session, now: float, gap_s: float) -> None:
        """Give records that a session uses, `gap_s` after its last request, to it; set their queues.

        The last one that was shared before tells how soon such records are used.
        """
        shared = next((entry for entry in reversed(held) if entry.sharings), None)
        if shared is not None and shared.session is not None:
            since_s = gap_s if shared.session is session else now - shared.session.last_s
            if since_s > 0:
                self._times.learn(shared.queue, since_s)
        for entry in held:
            if entry.session is not session:
                entry.sharings += entry.session is not None
                entry.session = session
            sharings = min(entry.sharings.bit_length(), _SHARED)
            entry.queue = _UNSHARED - 1 + sharings if sharings else session.queue

    def _wait_s(self, entry: Entry, now: float, horizon_s: float) -> float:
        if entry.session is None or entry.last < entry.session.event:  # unused since the start, or superseded
            return math.inf
        return self._times.wait_s(entry.queue, max(0.0, now - entry.last_s), horizon_s)


def _queue_of(session: Session) -> int:
    """Return the queue of a session's pace after such an answer as its last one."""
    pace = min(int(session.paces.get(session.tool_call, 0.0)), _PACES - 1)
    return pace + _PACES if session.tool_call else pace


def _order(candidate: tuple[float, Entry]) -> tuple[float, int]:
    """Order of victims: by their wait, then the least recently used one."""
    wait_s, entry = candidate
    return wait_s, -entry.last


def _remember(sessions: OrderedDict[str, Session], name: str, session: Session) -> None:
    """Add a session, and forget the oldest ones beyond the limit."""
    sessions[name] = session
    sessions.move_to_end(name)
    if len(sessions) > _MOST_SESSIONS:
        sessions.popitem(last=False)
