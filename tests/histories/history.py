"""From what processes noted to what is wrong with it: pure functions over a history.

A history is the notes of every process, and what is known of the run. A note is a dict. What a process does
has a number, `op`, and notes of its beginning (`begin`, `do`, `chunks`, `tiers`) and its end (`end`, and what
came of it); of a store also when a tier had a chunk (`stored`) and when no more will come (`settled`), of a
send when its last piece began (`last`). Times are nanoseconds of the monotonic clock, which all processes of
a host share. A chunk is called `epoch:path`: what was stored before a reset is another epoch's.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from histories.model import NEVER, Operation, unexplained, views

STORE, MEMORY, HANDOFF, PEER = "store", "memory", "handoff", "D"
"""Tiers: the one that all processes share, those that a process has to itself, and another's memory."""

Note = Mapping[str, Any]
Record = tuple[str, str]
"""A place, which is the shared store or a process, and a chunk."""

LOOKING = ("store", "lookup", "load")
"""By what a process learns what a store holds."""

TOLD = 12
"""Operations that a finding tells of."""


@dataclass(frozen=True, slots=True)
class History:
    """What happened in a run.

    Attributes:
        notes: by process, in the order in which it wrote them.
        opened, ended: when a process began and when it was found dead.
        statuses: how it ended; negative: by that signal.
        late: whether what a process began may take effect after its death, as on a server behind a network.
        stale: whether a lookup may know records of the store that other processes have removed meanwhile.
        trouble: what the run itself noted, such as a process that did not end.
    """

    notes: Mapping[str, Sequence[Note]]
    opened: Mapping[str, int]
    ended: Mapping[str, int]
    statuses: Mapping[str, int]
    late: bool = False
    stale: bool = False
    trouble: Sequence[str] = ()


@dataclass(slots=True)
class _Done:
    """One operation of a process, put together from its notes."""

    process: str
    begin: Note
    end: Note | None = None
    stored: dict[tuple[str, int], int] = field(default_factory=dict)
    settled: int | None = None
    last: int | None = None

    @property
    def who(self) -> str:
        return f"{self.process} #{self.begin['op']} {self.begin['do']}"

    def over(self) -> float:
        """When it is over for its process."""
        if self.begin["do"] == "store":
            return NEVER if self.settled is None else self.settled
        return NEVER if self.end is None else float(self.end["end"])

    def until(self, history: History) -> float:
        """When what it began has taken effect, if ever."""
        if self.end is not None and self.end.get("ok", True):
            return float(self.end["end"])
        if history.late:
            return NEVER
        return float(history.ended[self.process] if self.end is None else self.end["end"])


def read(folder: Path) -> History:
    """The history that a run left in a folder."""
    run = json.loads((folder / "run.json").read_text())
    notes = {}
    for process in run["opened"]:
        lines = (folder / f"{process}.jsonl").read_text().splitlines(keepends=True)
        notes[process] = [json.loads(line) for line in lines if line.endswith("\n")]  # it died amid the last
    return History(notes, **run)


def findings(history: History) -> list[str]:
    """What is wrong with a history, as people read it; nothing where the model explains it."""
    found = list(history.trouble)
    for process, status in history.statuses.items():
        if status not in (0, -9):
            found.append(f"{process} ended with status {status}")
    for process, notes in history.notes.items():
        for note in notes:
            found += [f"{process} #{note.get('op')}: {what}" for what in _wrong(note)]
    for (place, chunk), operations in sorted(operations_of(history).items()):
        for view in views(operations):
            stuck = unexplained(view)
            if stuck is not None:
                found.append(_told(place, chunk, operations, stuck))
    return found


def counted(history: History) -> dict[str, int]:
    """How much of what is in a history: operations by kind, chunks seen and missed."""
    counts: dict[str, int] = defaultdict(int)
    for done in _operations(history):
        counts[f"{done.begin['do']}{'' if done.end is not None else ' cut short'}"] += 1
    for operations in operations_of(history).values():
        for operation in operations:
            counts[f"chunks {operation.kind}"] += 1
    return dict(sorted(counts.items()))


def operations_of(history: History) -> dict[Record, list[Operation]]:
    """What was done with each record."""
    found: dict[Record, list[Operation]] = defaultdict(list)
    cleared: list[tuple[str, Operation]] = []
    known = _Transfers.of(history)
    forgotten = _forgotten(history)
    for done in _operations(history):
        match done.begin["do"]:
            case "store":
                for record, operation in _stored(history, done):
                    found[record].append(operation)
            case "lookup" | "load":
                for record, operation in _observed(history, done, forgotten[done.process]):
                    found[record].append(operation)
            case "remove" | "release":
                for record, operation in _removed(history, done):
                    found[record].append(operation)
            case "clear":
                cleared += _cleared(history, done)
            case "send":
                for record, operation in _sent(done, known):
                    found[record].append(operation)
    for (place, _), operations in found.items():
        operations += [operation for where, operation in cleared if where == place]
    return found


def _operations(history: History) -> Iterator[_Done]:
    """Every operation; those of a process in their order."""
    for process, notes in history.notes.items():
        done: dict[int, _Done] = {}
        for note in notes:
            if "begin" in note:
                done[note["op"]] = _Done(process, note)
            elif "end" in note:
                done[note["op"]].end = note
            elif "stored" in note:
                done[note["op"]].stored[note["tier"], note["chunk"]] = note["stored"]
            elif "settled" in note:
                done[note["op"]].settled = note["settled"]
            elif "last" in note:
                done[note["op"]].last = note["last"]
        yield from done.values()


def _stored(history: History, done: _Done) -> Iterator[tuple[Record, Operation]]:
    begin = done.begin
    ends: float = history.ended[done.process] if done.settled is None else done.settled
    for tier in begin["tiers"]:
        late = history.late and tier == STORE
        for number, chunk in enumerate(begin["chunks"]):
            at = done.stored.get((tier, number))
            until = NEVER if at is None and late else ends if at is None else at
            put = Operation("put", tier, begin["begin"], until, at is not None, done.who)
            yield (_place(tier, done.process), chunk), put


@dataclass(frozen=True, slots=True)
class _Forgotten:
    """A removal from the store, of `chunks` (None: of all), by a process that knew what it held.

    Attributes:
        touched: what the process itself looked for, or stored, meanwhile, and so may know all the same.
    """

    begin: int
    end: int
    chunks: frozenset[str] | None
    touched: frozenset[str]

    def before(self, at: int, chunk: str) -> int:
        """From when on, if this ended before `at`, the process has what it knows of a chunk; 0: not said."""
        if self.end >= at or (self.chunks is not None and chunk not in self.chunks):
            return 0
        return self.begin if chunk in self.touched else self.end + 1


def _forgotten(history: History) -> dict[str, list[_Forgotten]]:
    """What each process removed from the store itself."""
    every: dict[str, list[_Done]] = {process: [] for process in history.notes}
    for done in _operations(history):
        every[done.process].append(done)
    found: dict[str, list[_Forgotten]] = {process: [] for process in history.notes}
    for process, operations in every.items():
        looked = [
            (o.begin["begin"], o.over(), o.begin["chunks"]) for o in operations if o.begin["do"] in LOOKING
        ]
        for removal in operations:
            begin, end = removal.begin, removal.end
            if (
                begin["do"] in ("remove", "clear")
                and STORE in begin["tiers"]
                and end is not None
                and end["ok"]
            ):
                meanwhile = (c for first, last, c in looked if first < end["end"] and last > begin["begin"])
                touched = frozenset(chunk for chunks in meanwhile for chunk in chunks)
                chunks = frozenset(begin["chunks"]) or None
                found[process].append(_Forgotten(begin["begin"], end["end"], chunks, touched))
    return found


def _observed(
    history: History, done: _Done, forgotten: Sequence[_Forgotten]
) -> Iterator[tuple[Record, Operation]]:
    """What a lookup or a load says of records."""
    begin, end, process = done.begin, done.end, done.process
    for tier in begin.get("back", ()):  # a load may write back
        until = NEVER if history.late and tier == STORE else done.until(history)
        for chunk in begin["chunks"]:
            back = Operation("put", tier, begin["begin"], until, False, done.who)
            yield (_place(tier, process), chunk), back
    if end is None:
        return
    chunks, found = begin["chunks"], 0
    for tier, count in end["found"]:
        holder = {PEER: "", HANDOFF: f"{HANDOFF}/"}.get(tier, tier)
        for chunk in chunks[found : found + count]:
            at = begin["begin"]
            if tier == STORE and history.stale and begin["do"] == "lookup":
                true = (removal.before(at, chunk) for removal in forgotten)
                at = max([history.opened[process], *true])
            place = end["peer"] if tier == PEER else _place(tier, process)
            if tier and (tier != PEER or begin["peer"] == end["peer"]):  # or it is not known who had it
                yield (place, chunk), Operation("seen", holder, at, end["end"], True, done.who)
        found += count
    if end["sure"] and found < len(chunks):
        for tier, holder in (STORE, STORE), (HANDOFF, f"{HANDOFF}/"):
            if tier in begin["tiers"]:
                missed = Operation("missed", holder, begin["begin"], end["end"], True, done.who)
                yield (_place(tier, process), chunks[found]), missed


def _removed(history: History, done: _Done) -> Iterator[tuple[Record, Operation]]:
    must = done.end is not None and done.end["ok"]
    for tier in done.begin["tiers"]:
        holder = f"{HANDOFF}/{done.begin['transfer']}" if tier == HANDOFF else tier
        for chunk in done.begin["chunks"]:
            until = done.until(history)
            yield (
                (_place(tier, done.process), chunk),
                Operation("removed", holder, done.begin["begin"], until, must, done.who),
            )


def _cleared(history: History, done: _Done) -> Iterator[tuple[str, Operation]]:
    must = done.end is not None and done.end["ok"]
    for tier in done.begin["tiers"]:
        begin, until = done.begin["begin"], done.until(history)
        yield _place(tier, done.process), Operation("removed", tier, begin, until, must, done.who)


@dataclass(frozen=True, slots=True)
class _Transfers:
    """What receivers know of transfers, by receiver and transfer.

    Attributes:
        complete: when it had been found complete first.
        released: when its receiver had last released it.
        listed: since when a receiver had listed all of its transfers last.
    """

    complete: Mapping[tuple[str, str], int]
    released: Mapping[tuple[str, str], int]
    listed: Mapping[str, int]

    @staticmethod
    def of(history: History) -> _Transfers:
        complete, released, listed = (
            dict[tuple[str, str], int](),
            dict[tuple[str, str], int](),
            dict[str, int](),
        )
        for process, notes in history.notes.items():
            for note in notes:
                if "listed" in note:
                    listed[process] = max(listed.get(process, 0), note["since"])
                    for transfer in note["ready"]:
                        complete.setdefault((process, transfer), note["listed"])
        for done in _operations(history):
            if done.begin["do"] == "release":
                end = history.ended[done.process] if done.end is None else done.end["end"]
                released[done.process, done.begin["transfer"]] = end
        return _Transfers(complete, released, listed)


def _sent(done: _Done, known: _Transfers) -> Iterator[tuple[Record, Operation]]:
    """A transfer is there when it is complete: not before its last piece began to be sent.

    Where its receiver had some of it from others, it holds these from its beginning on: then there is no last
    piece. That it did not arrive its sender cannot know, but its receiver would have listed it.
    """
    begin, end = done.begin, done.end or {"ok": False, "peer": done.begin["peer"]}
    transfer, at = begin["transfer"], begin["begin"] if done.last is None else done.last
    for receiver in {begin["peer"], end["peer"]}:
        complete = known.complete.get((receiver, transfer), NEVER)
        if end["ok"] and begin["peer"] == end["peer"]:
            complete = min(complete, end["end"])
        first, until = at, complete
        if complete == NEVER and (receiver, transfer) in known.released:
            until = known.released[receiver, transfer]
        elif complete == NEVER and done.last is not None:
            first = max(at, known.listed.get(receiver, 0))
        must = complete < NEVER and done.last is not None
        for chunk in begin["chunks"]:
            put = Operation("put", f"{HANDOFF}/{transfer}", first, max(first, until), must, done.who)
            yield (receiver, chunk), put


def _place(tier: str, process: str) -> str:
    return STORE if tier == STORE else process


def _wrong(note: Note) -> Iterator[str]:
    """What a note says by itself."""
    if note.get("wrong"):
        yield f"loaded other bytes than belong to {', '.join(note['wrong'])}"
    if note.get("damaged"):
        yield f"a record was there that is not whole: {note['damaged']}"
    if "failed" in note:
        yield note["failed"]


def _told(place: str, chunk: str, operations: Sequence[Operation], stuck: Operation) -> str:
    """A finding, and what happened around it."""
    holders = [o.holder for o in operations if o.kind == "put" and o.begin <= stuck.end]
    put = any(holder.startswith(stuck.holder) for holder in holders)
    if stuck.kind == "missed":
        why = "misses what was put and not removed"
    elif stuck.kind == "seen":
        why = "sees what was removed and not put again" if put else "sees what nobody had put"
    else:
        why = f"is {stuck.kind}, which goes with nothing that was observed"
    before = sorted((o for o in operations if o.begin <= stuck.end), key=lambda o: (o.end, o.begin))
    first = min(o.begin for o in before)
    lines = [f"{chunk} in {place}: {stuck.who} {why}"]
    for o in before[-TOLD:] if stuck in before[-TOLD:] else [*before[-TOLD + 1 :], stuck]:
        end = f"{(o.end - first) / 1e6:10.3f}" if o.end < NEVER else "     never"
        sure = "" if o.must else "perhaps "
        lines.append(f"    {(o.begin - first) / 1e6:10.3f} to {end} ms  {sure}{o.kind} {o.holder}  {o.who}")
    return "\n".join(lines)
