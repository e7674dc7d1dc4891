"""Regret of guesses for problems that were never tuned, judged by recorded trials: leave one problem out."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from rich.markup import escape
from rich.table import Column, Table

from kvkit.kernels.tuning.cases import Problem
from kvkit.kernels.tuning.configs import KernelConfig, ProblemBucket
from kvkit.kernels.tuning.problems import every_problem, host_problems
from kvkit.kernels.tuning.source import source_digest
from kvkit.kernels.tuning.tables import Build, Tuned, TunedKey, ranked
from kvkit.lab.tuning.recordings import Recording

TunedTable = Mapping[TunedKey, Tuned]
Rule = Callable[[TunedTable, ProblemBucket, Build], Sequence[KernelConfig]]
"""Returns configurations for a bucket from a table, the best guess first, as `tables.ranked` does."""

FLAG = 4.0
"""Distance of two forms for each flag that differs: as much as sizes that differ sixteenfold."""
GAIN = 0.03
"""Share of the default's time by which a result has to be faster, to count for `nearest_gain`."""
SAME = 0.01
"""Regrets that differ by no more count as equal."""


def no_guess(table: TunedTable, bucket: ProblemBucket, build: Build) -> Sequence[KernelConfig]:
    """Return nothing, so that the default is taken."""
    return ()


def equal_form(table: TunedTable, bucket: ProblemBucket, build: Build) -> Sequence[KernelConfig]:
    """Return `tables.ranked` of the results of equal form: only sizes may differ."""
    return ranked({key: one for key, one in table.items() if key.bucket.form == bucket.form}, bucket, build)


def nearest_form(table: TunedTable, bucket: ProblemBucket, build: Build) -> Sequence[KernelConfig]:
    """Return the results of an equal source by the distance of sizes and form.

    Numbers of a form (PAGE, GROUP, sizes of heads) are apart by the absolute logarithm of their quotient to
    the base 2, and flags by FLAG. Other element types are last.
    """

    def rank(key: TunedKey) -> tuple[bool, float, float]:
        ours, theirs = _numbers(bucket), _numbers(key.bucket)
        apart = sum(_distance(ours[name], theirs[name]) for name in ours)
        return _dtype(key.bucket) != _dtype(bucket), apart, table[key].us

    alike = (
        key
        for key in table
        if (key.bucket.op, key.build.source) == (bucket.op, build.source)
        and _numbers(key.bucket).keys() == _numbers(bucket).keys()
    )
    return tuple(table[key].config for key in sorted(alike, key=rank))


def nearest_gain(table: TunedTable, bucket: ProblemBucket, build: Build) -> Sequence[KernelConfig]:
    """Return `nearest_form` of the results that take less than the default by GAIN: others prove little."""
    gained = {key: one for key, one in table.items() if one.us < (1 - GAIN) * (one.default_us or math.inf)}
    return nearest_form(gained, bucket, build)


@cache
def _numbers(bucket: ProblemBucket) -> Mapping[str, str]:
    """Return the settings of a form and the sizes, by name."""
    named = dict(word.partition("=")[::2] for word in bucket.form.split() if "=" in word)
    return named | {str(number): str(size) for number, size in enumerate(bucket.sizes)}


def _dtype(bucket: ProblemBucket) -> str:
    found = re.search(r"\bb?float\d+\w*", bucket.form)
    return found[0] if found else ""


def _distance(one: str, other: str) -> float:
    if one.isdigit() and other.isdigit():
        return abs(math.log2((1 + int(one)) / (1 + int(other))))
    return 0.0 if one == other else FLAG


RULES: Mapping[str, Rule] = {
    "default": no_guess,
    "equal form": equal_form,
    "tables.ranked": ranked,
    "nearest form": nearest_form,
    "nearest gain": nearest_gain,
}
"""Rules by name."""


@dataclass(frozen=True, slots=True)
class Guess:
    """Configuration that a rule gives a problem which it was not told of.

    Args:
        recording: recorded times of the problem.
        config: guess.
        regret: share by which it takes longer than the best recorded one; None: it has no recorded time.
    """

    recording: Recording
    config: KernelConfig
    regret: float | None


def identified(recordings: Sequence[Recording]) -> list[Recording]:
    """Return the recordings with bucket and source: kvkit's own problems are known by name.

    Problems without either are left out.
    """
    found = []
    for one in recordings:
        if one.bucket is None and (problem := _problems().get(one.problem)) is not None:
            one = replace(one, bucket=problem.bucket, source=source_digest(problem.kernel))
        if one.bucket is not None:
            found.append(one)
    return found


def table_of(recordings: Sequence[Recording]) -> dict[TunedKey, Tuned]:
    """Return the table that tuning would have kept of these recordings, of one compiler and driver."""
    return {
        TunedKey(one.bucket, Build(one.source, "")): Tuned(
            one.best, one.seconds(one.best) * 1e6, one.seconds(one.space[0]) * 1e6
        )
        for one in recordings
        if one.bucket is not None
    }


def guesses(rule: Rule, problems: Sequence[Recording], known: Sequence[Recording]) -> Iterator[Guess]:
    """Yield the guess of a rule for each problem from what is known of others.

    Args:
        rule: rule.
        problems: problems to guess for.
        known: recordings that the rule is told of; those of the problem's bucket on its device are left out.
    """
    for one in problems:
        others = [o for o in known if (o.device, o.bucket) != (one.device, one.bucket)]
        assert one.bucket is not None
        space = _space(one)
        found = rule(table_of(others), one.bucket, Build(one.source, ""))
        config = next((config for config in found if config in space), space[0])
        yield Guess(one, config, one.regret(config) if config in one.samples else None)


def _space(recording: Recording) -> Sequence[KernelConfig]:
    """Return the configurations of a problem, also those without a time."""
    problem = _problems().get(recording.problem)
    return (*recording.space, *(problem.space if problem else ()))


@cache
def _problems() -> Mapping[str, Problem]:
    return {problem.name: problem for problem in (*every_problem(), *host_problems())}


def tables(recordings: Sequence[Recording], rules: Mapping[str, Rule] = RULES) -> list[Table]:
    """Return a table for each device: the regret of each rule, told of this device, of others, or of both.

    Means are of the problems whose guess has a recorded time; beside each is the default's for the same.
    """
    found = []
    for device in dict.fromkeys(one.device for one in recordings):
        own = [one for one in recordings if one.device == device]
        rows = list(_rows(own, [one for one in recordings if one.device != device], rules))
        heads = ("regret", "default's", "better", "worse", "no time")
        table = Table(
            "rule",
            "knows",
            *(Column(head, justify="right") for head in heads),
            title=escape(f"{device}: guesses for {len(own)} problems"),
        )
        for name, whose, made in rows:
            table.add_row(name, whose, *_cells(made))
        found.append(table)
    return found


def _cells(made: Sequence[Guess]) -> tuple[str, ...]:
    """Return the mean regret, the default's, problems better and worse than by default, and those without."""
    regrets = [
        (guess.regret, guess.recording.regret(guess.recording.space[0]))
        for guess in made
        if guess.regret is not None
    ]
    means = (statistics.mean(numbers) for numbers in zip(*regrets, strict=True))
    better = sum(ours < default - SAME for ours, default in regrets)
    worse = sum(ours > default + SAME for ours, default in regrets)
    counts = better, worse, len(made) - len(regrets)
    return *([f"{mean:.1%}" for mean in means] or ["", ""]), *map(str, counts)


def _rows(
    own: Sequence[Recording], others: Sequence[Recording], rules: Mapping[str, Rule]
) -> Iterator[tuple[str, str, list[Guess]]]:
    """Yield a rule's name, what it is told of, and its guesses for a device's problems."""
    told = {"this device": own} | ({"others": others, "all": [*own, *others]} if others else {})
    for name, rule in rules.items():
        if rule is no_guess:
            yield name, "nothing", list(guesses(rule, own, ()))
        else:
            yield from ((name, whose, list(guesses(rule, own, known))) for whose, known in told.items())
