"""What a place for records may do, one record at a time, and whether operations can be put in such an order.

A record is absent, or complete. It is complete while something holds it: a tier, or a transfer that brought
it. Each operation takes effect at one instant between its beginning and its end (linearisability: Herlihy and
Wing, 1990, https://doi.org/10.1145/78969.78972). Records do not depend on each other, so each has a history
of its own (Horn and Kroening, 2015, https://arxiv.org/abs/1504.00204), which is searched for an order that
explains it (Wing and Gong, 1993, https://doi.org/10.1006/jpdc.1993.1015), going on from end to end of
operations (Lowe, 2017, https://doi.org/10.1002/cpe.3928).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

State = frozenset[str]
"""What holds a record."""

NEVER = math.inf
"""The end of what may take effect at any later time."""

OBSERVATIONS = ("seen", "missed")


@dataclass(frozen=True, slots=True)
class Operation:
    """What was done with one record.

    Attributes:
        kind: put: `holder` has it from now on; removed: no holder whose name begins so has it any more; seen:
            one of those had it; missed: none had.
        begin, end: nanoseconds of the monotonic clock, between which it took effect.
        must: whether it did; else it may have.
        who: the process and what it did, for people.
    """

    kind: Literal["put", "removed", "seen", "missed"]
    holder: str
    begin: int
    end: float
    must: bool
    who: str

    def apply(self, state: State) -> State | None:
        """What holds the record after it; None where it cannot have taken effect in this state."""
        if self.kind == "put":
            return state | {self.holder}
        holding = {holder for holder in state if holder.startswith(self.holder)}
        if self.kind == "removed":
            return state - holding
        return state if bool(holding) == (self.kind == "seen") else None


Configuration = tuple[State, frozenset[int]]
"""What holds the record, and which of the operations under way have taken effect."""


def unexplained(operations: Sequence[Operation]) -> Operation | None:
    """The first operation, by its end, up to which no order explains what was observed; None if one does."""
    events: list[tuple[float, int, int]]
    events = [(operation.begin, 0, number) for number, operation in enumerate(operations)]
    events += [(operation.end, 1, number) for number, operation in enumerate(operations)]
    kinds = _alike(operations)
    in_flight: dict[int, Operation] = {}
    found: set[Configuration] = {(frozenset(), frozenset())}
    for _, ends, number in sorted(events):
        if not ends:
            in_flight[number] = operations[number]
            found = {(state, _with_observed(in_flight, state, effective)) for state, effective in found}
            continue
        if operations[number].end == NEVER:  # nothing comes after it
            return None
        explained = _with(number, in_flight, found, kinds)
        found = explained if operations[number].must else found | explained
        if not found:
            return operations[number]
        del in_flight[number]
        found = _least({(state, effective - {number}) for state, effective in found}, operations)
    return None


def views(operations: Sequence[Operation]) -> list[Sequence[Operation]]:
    """Operations that are to be explained together.

    Where several can hold a record, what is seen is explained without what is missed, and what is missed
    by what certainly held it: that asks a little less, of far fewer orders.
    """
    if len({operation.holder for operation in operations if operation.kind == "put"}) < 2:
        return [operations]
    certain = [o for o in operations if o.must or o.kind != "put"]
    return [[o for o in operations if o.kind != "missed"], [o for o in certain if o.kind != "seen"]]


def _with(
    number: int,
    in_flight: Mapping[int, Operation],
    found: Iterable[Configuration],
    kinds: Sequence[object],
) -> set[Configuration]:
    """What can become of these configurations when an operation that now ends has taken effect.

    A put that need not takes effect as late as it can: where it explains what is seen, or when it ends.
    """
    reached, left = set[Configuration](), list(found)
    known = set(left)
    while left:
        state, effective = left.pop()
        if number in effective:
            reached.add((state, effective))
            continue
        for change in _next(in_flight, effective, kinds):
            operation = in_flight[change]
            after = operation.apply(state)
            if after is None or (after == state and not operation.must):
                continue
            changed = effective | {change}
            configuration = after, _with_observed(in_flight, after, changed)
            late = operation.must or operation.kind != "put" or change == number
            if configuration not in known and (late or configuration[1] != changed):
                known.add(configuration)
                left.append(configuration)
    return reached


def _with_observed(
    in_flight: Mapping[int, Operation], state: State, effective: frozenset[int]
) -> frozenset[int]:
    """`effective`, and the observations under way that this state explains: they change nothing."""
    explained = {
        number
        for number, operation in in_flight.items()
        if operation.kind in OBSERVATIONS and operation.apply(state) is not None
    }
    return effective | explained


def _alike(operations: Sequence[Operation]) -> list[object]:
    """For each operation what it has in common with those in whose place it could be, but for its times.

    One that must take effect stands for itself. Of puts that need not, holders do not matter where all that
    observes or removes one of them goes for the other, too.
    """
    others = [o for o in operations if o.kind != "put"]
    kinds: list[object] = []
    for number, operation in enumerate(operations):
        if operation.must:
            kinds.append(number)
        elif operation.kind == "put":
            holder = operation.holder
            kinds.append(frozenset(i for i, other in enumerate(others) if holder.startswith(other.holder)))
        else:
            kinds.append((operation.kind, operation.holder))
    return kinds


def _next(
    in_flight: Mapping[int, Operation], effective: frozenset[int], kinds: Sequence[object]
) -> Iterable[int]:
    """Which changes may be next. Of those that are alike, the one that ends first serves best."""
    chosen: dict[object, int] = {}
    for number, operation in in_flight.items():
        if number in effective or operation.kind in OBSERVATIONS:
            continue
        other = chosen.setdefault(kinds[number], number)
        if (operation.end, number) < (in_flight[other].end, other):
            chosen[kinds[number]] = number
    return chosen.values()


def _least(found: set[Configuration], operations: Sequence[Operation]) -> set[Configuration]:
    """Those of `found` that no other can stand for.

    That one needs no other operations under way, of those that need not take effect, and holds the same; or
    more, where nothing is missed; or less, where nothing is seen.
    """
    kinds = {operation.kind for operation in operations}
    alike: dict[frozenset[int], list[Configuration]] = {}
    for state, effective in found:
        certain = frozenset(number for number in effective if operations[number].must)
        alike.setdefault(certain, []).append((state, effective - certain))

    def stands_for(one: Configuration, other: Configuration) -> bool:
        held = (
            one[0] == other[0]
            or ("missed" not in kinds and one[0] >= other[0])
            or ("seen" not in kinds and one[0] <= other[0])
        )
        return held and one[1] <= other[1]

    least: set[Configuration] = set()
    for certain, every in alike.items():
        kept: list[Configuration] = []
        for each in every:
            if not any(stands_for(one, each) for one in kept):
                kept = [one for one in kept if not stands_for(each, one)] + [each]
        least |= {(state, certain | extra) for state, extra in kept}
    return least
