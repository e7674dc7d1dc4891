"""Strategies ask for every configuration of a space, by seed and by what they were told."""

from __future__ import annotations

import itertools
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_fixtures import scale_problem, tiled
from typer.testing import CliRunner

from kvkit import cli
from kvkit.kernels.tuning import devices
from kvkit.kernels.tuning import search as tuning
from kvkit.kernels.tuning.compiling import CompileError
from kvkit.kernels.tuning.configs import KernelConfig
from kvkit.kernels.tuning.search import NO_ROOFLINE, UNTRIED, CompileInfo, Roofline, Tools, search
from kvkit.kernels.tuning.strategies import (
    FIRST_SAMPLES,
    STRATEGIES,
    Strategy,
    SuccessiveHalving,
    nearest_first,
    strategy_named,
)

NAMES = tuple(STRATEGIES)
LARGE = tuple(
    KernelConfig((("ROWS", rows), ("KEYS", keys)), warps, stages)
    for rows, keys, warps, stages in itertools.product(
        (64, 16, 32, 128, 256), (64, 16, 32, 128, 256), (4, 2, 8), (3, 2, 4)
    )
)
"""225 configurations, the default first."""


def far_valley(config: KernelConfig) -> float:
    """Seconds that fall towards ROWS=256 KEYS=16 warps=2, far from the default."""
    sizes = dict(config.tiles)
    return 1e-3 * (
        1 + 256 / sizes["ROWS"] + sizes["KEYS"] / 16 + config.warps / 4 + abs(config.stages - 4) / 8
    )


def made(name: str, space: Sequence[KernelConfig], seed: int = 0) -> Strategy:
    strategy: Strategy = strategy_named(name)(space, seed=seed)
    return strategy


def asked(
    strategy: Strategy, space: Sequence[KernelConfig], seconds: Callable[[KernelConfig], float | None]
) -> Iterator[KernelConfig]:
    """Yield the default, then what the strategy asks for, which is told the seconds of each."""
    config: KernelConfig | None = space[0]
    while config is not None:
        yield config
        strategy.tell(config, seconds(config))
        config = strategy.ask()


spaces = st.lists(
    st.builds(
        lambda rows, keys, warps, stages: KernelConfig((("ROWS", rows), ("KEYS", keys)), warps, stages),
        st.sampled_from((0, 1, 16, 96)),
        st.sampled_from((16, 32, 256)),
        st.sampled_from((4, 8)),
        st.integers(1, 3),
    ),
    min_size=1,
    max_size=20,
    unique=True,
)


@pytest.mark.parametrize("name", NAMES)
@given(space=spaces, seed=st.integers(0, 9), missing=st.integers(1, 5))
def test_all_are_asked_for_and_an_end_comes(
    name: str, space: list[KernelConfig], seed: int, missing: int
) -> None:
    """Also where some, the default among them, do not run."""

    def seconds(config: KernelConfig) -> float | None:
        return None if space.index(config) % missing == 0 else 1.0 + space.index(config)

    orders = [
        list(itertools.islice(asked(made(name, space, seed), space, seconds), 10 * len(space)))
        for _ in range(2)
    ]
    assert orders[0] == orders[1], "of one seed"
    assert set(orders[0]) == set(space)
    assert len(orders[0]) < 10 * len(space)
    runs = Counter(orders[0])
    assert all(runs[config] == 1 for config in space if seconds(config) is None)
    if name != "halving":
        assert len(orders[0]) == len(space)


@pytest.mark.parametrize("name", ["random", "tpe"])
def test_another_seed_is_another_order(name: str) -> None:
    orders = {tuple(asked(made(name, LARGE[:40], seed), LARGE, far_valley)) for seed in range(3)}
    assert len(orders) == 3


def test_the_nearest_come_first() -> None:
    assert tuple(asked(made("nearest", LARGE), LARGE, far_valley)) == nearest_first(LARGE)


def test_halving_runs_the_fastest_more_often() -> None:
    """Once all, thrice a third, nine times a ninth; survivors take turns."""
    space = LARGE[:27]
    order = list(asked(SuccessiveHalving(space), space, far_valley))
    rank = sorted(space, key=far_valley)
    runs = Counter(order)
    assert [runs[config] for config in rank] == [9] * 3 + [3] * 6 + [1] * 18
    assert order[27:36] == order[36:45]
    assert set(order[27:36]) == set(rank[:9])


def trials_to(name: str, seed: int, within: float) -> int:
    """Return the number of configurations until one is within a factor of the fastest."""
    fastest = min(map(far_valley, LARGE))
    order = asked(made(name, LARGE, seed), LARGE, far_valley)
    return next(i for i, config in enumerate(order, 1) if far_valley(config) <= within * fastest)


def test_the_estimator_finds_a_far_valley_sooner() -> None:
    """In the mean of five seeds in half of the trials that chance takes, and that the nearest take."""
    by_chance = statistics.mean(trials_to("random", seed, 1.05) for seed in range(5))
    estimated = statistics.mean(trials_to("tpe", seed, 1.05) for seed in range(5))
    assert estimated < by_chance / 2
    assert estimated < trials_to("nearest", 0, 1.05) / 2


DEFAULT, SMALL, FLAWED, WRONG, TWIN, FAST = (tiled(n) for n in (1024, 256, 512, 2048, 128, 4096))


def found_by(
    name: str, seconds: Mapping[KernelConfig, float], late: Callable[[], bool] = lambda: False
) -> tuple[Any, dict[KernelConfig, str], Counter[KernelConfig]]:
    """Search six configurations, of which one is rejected and two are one binary."""
    wrong = tiled(WRONG.tiles[0][1], wrong=1)
    problem = scale_problem(space=(DEFAULT, SMALL, FLAWED, wrong, TWIN, TWIN._replace(stages=3), FAST))
    infos = {
        FLAWED: CompileInfo("does not fit"),
        TWIN: CompileInfo("", "a"),
        TWIN._replace(stages=3): CompileInfo("", "a"),
    }
    runs = Counter[KernelConfig]()

    def measure(config: KernelConfig) -> float:
        runs[config] += 1
        return seconds.get(config._replace(tiles=config.tiles[:1]), 3.0)

    case = problem.make(torch.device("cpu"), True)
    found, trials = search(
        problem, case, measure, infos, NO_ROOFLINE, late, strategy=lambda space: made(name, space)
    )
    return found, {trial.config: trial.outcome for trial in trials}, runs


@pytest.mark.parametrize("name", NAMES)
def test_the_rules_of_the_search_hold_for_every_strategy(name: str) -> None:
    """The wrong and the rejected are not taken, and of two equal binaries one is run."""
    by_block = {WRONG: 1.9, FAST: 2.0, FLAWED: 0.5}
    found, outcome, runs = found_by(name, {c._replace(tiles=c.tiles[:1]): s for c, s in by_block.items()})
    assert found.config == FAST
    assert found.untried == 0
    assert outcome[FAST] == "best"
    assert outcome[tiled(2048, wrong=1)].startswith("wrong")
    assert runs[FLAWED] == 0
    assert {TWIN, TWIN._replace(stages=3)} - runs.keys() == {
        config for config, why in outcome.items() if why.startswith("the same binary")
    }
    assert runs[DEFAULT] >= tuning.FINAL_SAMPLES


@pytest.mark.parametrize("name", NAMES)
def test_a_late_search_runs_the_default_alone(name: str) -> None:
    found, outcome, runs = found_by(name, {}, late=lambda: True)
    assert found.config == DEFAULT
    assert set(runs) == {DEFAULT}
    assert outcome[SMALL] == outcome[FAST] == UNTRIED
    assert found.untried == 4, "all but the default, the rejected and one of two equal binaries"


class Unwilling:
    """A plug-in that ends before it has asked for all."""

    samples = 1

    def __init__(self, space: Sequence[KernelConfig], seed: int) -> None:
        self.left = [space[1]] * seed

    def ask(self) -> KernelConfig | None:
        return self.left.pop() if self.left else None

    def tell(self, config: KernelConfig, seconds: float | None) -> None:
        pass


def test_a_plug_in_can_end_early_and_ask_again() -> None:
    made_by = strategy_named(f"{__name__}:Unwilling")
    problem = scale_problem(space=(DEFAULT, SMALL, FAST))
    runs = Counter[KernelConfig]()

    def measure(config: KernelConfig) -> float:
        runs[config] += 1
        return 1.0 if runs.total() < 4 else 9.0

    seen: list[int] = []
    tuned, trials = search(
        problem,
        problem.make(torch.device("cpu"), True),
        measure,
        {},
        NO_ROOFLINE,
        on_trial=lambda _, trial: seen.append(len(trial.samples)),
        strategy=lambda space: made_by(space, seed=2),
    )
    assert seen == [1, 1, 2]
    assert tuned is not None
    assert tuned.untried == 1
    assert trials[2].outcome == UNTRIED


TOOLS = Tools("H200", torch.device("cpu"), lambda *_: {}, lambda case: lambda config: 1.0, NO_ROOFLINE, float)


class Listener:
    """A strategy that asks for all in order, one run each, and remembers what it is told."""

    samples = 1

    def __init__(self, space: Sequence[KernelConfig]) -> None:
        self.left, self.told = list(space[1:]), list[tuple[KernelConfig, float | None]]()

    def ask(self) -> KernelConfig | None:
        return self.left.pop(0) if self.left else None

    def tell(self, config: KernelConfig, seconds: float | None) -> None:
        self.told.append((config, seconds))


def test_the_search_tells_all_that_it_knows() -> None:
    """A twin has the time of its binary; what is rejected, fails or cannot win has none."""
    twin, failing = TWIN._replace(stages=3), tiled(8192)
    problem = scale_problem(space=(DEFAULT, FLAWED, TWIN, twin, failing, FAST))
    infos = {FLAWED: CompileInfo("does not fit")} | dict.fromkeys((TWIN, twin), CompileInfo("", "a"))
    seconds = {DEFAULT: 1000.0, TWIN: 200.0}

    def measure(config: KernelConfig) -> float:
        if config == failing:
            raise CompileError("out of resource")
        return seconds[config]

    made: list[Listener] = []

    def strategy(space: Sequence[KernelConfig]) -> Listener:
        made.append(Listener(space))
        return made[0]

    low = Roofline(1e30, 10.0)  # the flops are the BLOCK: at least 328 s for that of FAST
    _, trials = search(
        problem, problem.make(torch.device("cpu"), True), measure, infos, low, strategy=strategy
    )
    assert made[0].told == [
        *((DEFAULT, 1000.0), (FLAWED, None), (TWIN, 200.0)),
        *((twin, 200.0), (failing, None), (FAST, None)),
    ]
    assert "at the roofline" in trials[-1].outcome


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, ["tune", *arguments], env={"COLUMNS": "80", "NO_COLOR": "1"})


def test_an_unknown_name_has_the_choices() -> None:
    for name, words in (
        ("fastest", "--strategy 'fastest': want one of nearest, random, halving, tpe, or package.module"),
        ("nowhere:X", "--strategy 'nowhere:X': No module named 'nowhere'"),
        (f"{__name__}:X", "has no attribute 'X'"),
    ):
        told = run("--device", "host", "--strategy", name)
        assert told.exit_code == 1
        assert words in told.stderr
        assert "pip install" not in told.stderr


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    monkeypatch.delitem(sys.modules, "kvkit.kernels.tuning.tree_parzen", raising=False)
    with pytest.raises(ValueError, match=r"optuna.*; pip install 'kvkit-llm\[tuning\]'"):
        strategy_named("tpe")


def test_the_command_takes_strategy_and_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[str, Any] = {}

    def tune(*_: object, **options: Any) -> Iterator[None]:
        kept.update(options)
        return iter(())

    monkeypatch.setattr(tuning, "tune", tune)
    monkeypatch.setattr(devices, "tools_here", lambda *_: nullcontext(TOOLS))
    for arguments, name, seed in (
        ((), "nearest", 0),
        (("--strategy", "random", "--seed", "7"), "random", 7),
    ):
        assert run("--device", "host", *arguments).exit_code == 0
        first = list(asked(kept["strategy"](LARGE), LARGE, far_valley))
        assert first == list(asked(made(name, LARGE, seed), LARGE, far_valley))
        assert kept["strategy"](LARGE).samples == FIRST_SAMPLES
