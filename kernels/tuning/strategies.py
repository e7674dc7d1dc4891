"""Strategies of the tuning search, which choose what to measure next: a function or class and a row each."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pkgutil import resolve_name
from typing import Any, Protocol

from kvkit.kernels.tuning.configs import KernelConfig

FIRST_SAMPLES = 3
"""Runs of a configuration by which most strategies judge it."""


class Strategy(Protocol):
    """Choice of the configurations of a problem to measure next, by the times measured so far.

    The search asks, measures `samples` runs, and tells. It also tells the time of the default, which it
    measures first. The same space, seed and times give the same choices.
    """

    samples: int
    """Runs to measure of a configuration each time that it is asked for."""

    def ask(self) -> KernelConfig | None:
        """Return the configuration to measure next, None after the last; mutates the strategy.

        Each configuration is asked for at least once, unless its time was told before: the time limit ends a
        search. It may be asked for again, to measure more runs of it.
        """

    def tell(self, config: KernelConfig, seconds: float | None) -> None:
        """Take the median of all runs of a configuration so far; mutates the strategy.

        Args:
            config: configuration, which may not have been asked for.
            seconds: None if it was not run: it cannot win, or the time is over.
        """


StrategyFactory = Callable[[Sequence[KernelConfig]], Strategy]
"""Makes the strategy of a problem from its configurations, the default first."""


def nearest_first(space: Sequence[KernelConfig]) -> tuple[KernelConfig, ...]:
    """Sort configurations by doublings from the first, so that the nearest are tried if time is short."""

    def doublings(config: KernelConfig) -> float:
        pairs = zip(_sizes(config), _sizes(space[0]), strict=False)  # a configuration may have no tiles
        return sum(abs(math.log2(max(a, 1) / max(b, 1))) for a, b in pairs)

    return tuple(sorted(space, key=doublings))


def _sizes(config: KernelConfig) -> tuple[int, ...]:
    return *(size for _, size in config.tiles), config.warps, config.stages


class Ordered:
    """Ask for each configuration once, in a given order; what is told of times changes nothing."""

    samples = FIRST_SAMPLES

    def __init__(self, order: Iterable[KernelConfig]) -> None:
        self._waiting = deque(order)

    def ask(self) -> KernelConfig | None:
        """Return the next configuration in order."""
        return self._waiting.popleft() if self._waiting else None

    def tell(self, config: KernelConfig, seconds: float | None) -> None:
        """Drop a configuration that was measured before it was asked for."""
        if config in self._waiting:
            self._waiting.remove(config)


def nearest(space: Sequence[KernelConfig], seed: int = 0) -> Ordered:
    """Return the strategy that asks for the nearest to the default first; it needs no seed."""
    return Ordered(nearest_first(space))


def shuffled(space: Sequence[KernelConfig], seed: int = 0) -> Ordered:
    """Return the strategy that asks in random order."""
    return Ordered(random.Random(seed).sample(space, len(space)))


class SuccessiveHalving:
    """Measure all configurations once, the fastest third thrice, the fastest ninth nine times.

    Successive halving (https://arxiv.org/abs/1502.07943, section 3) by thirds, with runs as the budget: 2.3
    runs per configuration in place of FIRST_SAMPLES. The survivors of a rung take turns, so that a noisy
    moment affects all of them.
    """

    samples = 1
    _FACTOR, _RUNGS = 3, 3

    def __init__(self, space: Sequence[KernelConfig], seed: int = 0) -> None:
        self._count = len(space)
        self._rung = 0
        self._waiting = deque(nearest_first(space))
        self._seconds: dict[KernelConfig, float] = {}

    def ask(self) -> KernelConfig | None:
        """Return the next configuration of this rung or, after its last, of the next rung."""
        if not self._waiting and self._rung + 1 < self._RUNGS:
            self._rung += 1
            kept = max(1, self._count // self._FACTOR**self._rung)
            survivors = sorted(self._seconds, key=lambda config: self._seconds[config])[:kept]
            more = self._FACTOR**self._rung - self._FACTOR ** (self._rung - 1)
            self._waiting.extend(survivors * more)
        return self._waiting.popleft() if self._waiting else None

    def tell(self, config: KernelConfig, seconds: float | None) -> None:
        """Take a time; a configuration without one does not survive its rung."""
        if self._rung == 0 and config in self._waiting:
            self._waiting.remove(config)
        if seconds is not None:
            self._seconds[config] = seconds


STRATEGIES: Mapping[str, str] = {
    "nearest": f"{__name__}:nearest",
    "random": f"{__name__}:shuffled",
    "halving": f"{__name__}:SuccessiveHalving",
    "tpe": "kvkit.kernels.tuning.tree_parzen:TreeParzen",
}
"""By name, the function or class that makes a strategy from a space and a seed; imported when asked for."""


def strategy_named(name: str) -> Any:
    """Return a function of a space and a `seed` that makes the strategy of this name.

    Args:
        name: name in `STRATEGIES`, or "package.module:name" of another package's.

    Raises:
        ValueError: there is no such strategy, or a package that it needs is missing.
    """
    if name not in STRATEGIES and ":" not in name:
        raise ValueError(f"{name!r}: want one of {', '.join(STRATEGIES)}, or package.module:name")
    try:
        return resolve_name(STRATEGIES.get(name, name))
    except (ImportError, AttributeError, ValueError) as error:
        hint = "; pip install 'kvkit-llm[tuning]' has it" if name in STRATEGIES else ""
        raise ValueError(f"{name!r}: {error}{hint}") from error
