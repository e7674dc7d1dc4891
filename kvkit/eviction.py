"""Which records to let go: pure functions (state, event) -> victims; each mutates only the given state."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class LruState:
    """Records of one place, least recently used first.

    Attributes:
        capacity_bytes: what may be held; None for no limit.
        used_bytes: sum of `entries`.
        entries: bytes by record name.
    """

    capacity_bytes: int | None
    used_bytes: int = 0
    entries: OrderedDict[str, int] = field(default_factory=OrderedDict)


def touch(state: LruState, names: Iterable[str]) -> None:
    """Note that `names` were used, in that order. Unknown names are passed over. Mutates `state`."""
    for name in names:
        if name in state.entries:
            state.entries.move_to_end(name)


def add(
    state: LruState, name: str, size: int, may_evict: Callable[[str], bool] = lambda _: True
) -> list[str] | None:
    """Note that `name` of `size` bytes is held, most recently used; returns the victims to let go first.

    A name that is held already is only touched. Victims are gone from `state` when this returns. None means
    that it does not fit, whatever is let go: then `state` is unchanged. Mutates `state`.
    """
    if name in state.entries:
        state.entries.move_to_end(name)
        return []
    victims: list[str] = []
    if state.capacity_bytes is not None:
        excess = state.used_bytes + size - state.capacity_bytes
        for candidate, held in state.entries.items():
            if excess <= 0:
                break
            if may_evict(candidate):
                victims.append(candidate)
                excess -= held
        if excess > 0:
            return None
    for victim in victims:
        remove(state, victim)
    state.entries[name] = size
    state.used_bytes += size
    return victims


def remove(state: LruState, name: str) -> bool:
    """Note that `name` is gone; whether it was held. Mutates `state`."""
    size = state.entries.pop(name, None)
    if size is None:
        return False
    state.used_bytes -= size
    return True
