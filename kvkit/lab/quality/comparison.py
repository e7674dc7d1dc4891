"""Effect of blending on a model's answers: methods of selection against full recompute, by task."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TextIO

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from kvkit.blend import gate
from kvkit.blend.plan import Selection
from kvkit.lab.files import BenchError
from kvkit.lab.quality.judge import Measures
from kvkit.lab.quality.methods import METHODS, Method, method_named
from kvkit.lab.quality.statistics import bootstrap, paired_p, resampled_means, wilson
from kvkit.lab.quality.tasks.registry import SETS, samples
from kvkit.lab.quality.tasks.sample import Encode, Sample
from kvkit.lab.simulate.report import panels
from kvkit.observe.progress import Report, counted

FIGURES = ("kl", "top1", "exact", "f1")
MOST_DRAWN = 6
"""Samples drawn of a set, for each that is wanted, to find those that full recompute answers."""
GATE_SAMPLES = 4
_GATE_METHODS: Mapping[gate.Context, tuple[str, str]] = {
    "prefix": ("naive", "default .15"),
    "alone": ("naive, alone", "default .15, alone"),
}
"""Methods without rows and with the default's, by context of the documents."""
_STANDARD = Selection(layers=8, value_norm=True, fade=64, drift=0.0, coverage=1.0)
"""Settings that lines of measurements leave out. They stay when defaults change: lines are kept."""


def run(
    judge: Measuring,
    encode: Encode,
    path: Path,
    *,
    count: int,
    tokens: int,
    methods: Mapping[str, Method] = METHODS,
    sets: Sequence[str] = tuple(SETS),
    answered: bool = False,
) -> Iterator[dict[str, Any]]:
    """Measure `count` samples of every set, and yield {"set", "sample", "measured"} for each.

    Appends every measurement to `path` as a line of JSON. Reuses measurements in `path` of the same model and
    text, and measures only the missing methods.

    Args:
        answered: yield only samples that full recompute answers; of `MOST_DRAWN` times as many samples, sets
            may have fewer.

    Raises:
        BenchError: `answered`, and a set has no answers.
    """
    drawn = count * MOST_DRAWN if answered else count
    samples_by_set = [[(kind, sample) for sample in samples(kind, encode, drawn, tokens)] for kind in sets]
    if answered and (unanswerable := [of[0][0] for of in samples_by_set if not of[0][1].answer]):
        raise BenchError(f"answered: {', '.join(unanswerable)}: samples have no answers")
    batches = enumerate(itertools.zip_longest(*samples_by_set))  # a file may have fewer samples
    work = [(i, *item) for i, batch in batches for item in batch if item is not None]
    finished = _read(path)
    yielded = dict.fromkeys(sets, 0)
    with path.open("a") as out:
        for i, kind, sample in work:
            if yielded[kind] == count:
                continue
            known = finished.setdefault(_identity(judge, sample), {})
            _complete(known, judge, sample, methods, answered, out)
            if answered and not known["full"].get("exact"):
                continue
            yielded[kind] += 1
            figures = {"full": known["full"]} | {name: known[_settings(methods[name])] for name in methods}
            yield {"set": kind, "sample": i, "measured": figures}


def _read(path: Path) -> dict[str, dict[str, Measures]]:
    """Return the measurements in `path`, by identity of the sample and settings of the method."""
    finished: dict[str, dict[str, Measures]] = {}
    if path.exists():
        with path.open() as lines:
            for entry in map(json.loads, lines):
                finished.setdefault(entry["of"], {}).update(entry["by_settings"])
    return finished


def _complete(
    known: dict[str, Measures],
    judge: Measuring,
    sample: Sample,
    methods: Mapping[str, Method],
    answered: bool,
    out: TextIO,
) -> None:
    """Measure the methods that `known` lacks; add them to it, and to `out`."""
    if answered and not known.get("full", {"exact": 1.0}).get("exact"):
        return
    missing = {name: method for name, method in methods.items() if _settings(method) not in known}
    if not missing and "full" in known:
        return
    measured = judge.measure(sample, missing, answered)
    if "full" in known:  # scale seconds by full recompute, which was measured again beside them
        slowdown = measured["full"]["seconds"] / known["full"]["seconds"]
        for measures in measured.values():
            measures["seconds"] /= slowdown
    by_settings = {
        _settings(missing[name]) if name in missing else name: {
            figure: float(f"{value:.5g}") for figure, value in measures.items()
        }
        for name, measures in measured.items()
    }
    out.write(json.dumps({"of": _identity(judge, sample), "by_settings": by_settings}) + "\n")
    out.flush()
    known.update(by_settings)


def _settings(method: Method) -> str:
    """Return what determines a method's figures: its name, ratio, first tokens, and what else is set."""
    standard = Method(_STANDARD)
    others = {
        field: value
        for chosen, usual in ((method.selection, standard.selection), (method, standard))
        for field, value in asdict(chosen).items()
        if field not in ("selection", "method", "ratio", "first_n") and value != getattr(usual, field)
    }
    selection = method.selection
    return json.dumps([selection.method, selection.ratio, selection.first_n, others])


def _identity(judge: Measuring, sample: Sample) -> str:
    """Return a digest of everything that determines a sample's figures, except the method."""
    sample = sample.behind(judge.prefix)
    text = sample.prompt.tobytes() + sample.continuation.tobytes() + repr(sample.documents).encode()
    return hashlib.blake2b(judge.weights.encode() + text, digest_size=12).hexdigest()


def summarise(entries: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return mean figures by set and method, with 95 % intervals [low, high] for those of `FIGURES`.

    `kl_p`, `f1_p`: p of a paired test against the baseline, as in `overall`. `speedup`: median seconds of
    full recompute relative to the method's.
    """
    return {
        kind: {name: _summary(measurements, name) for name in measurements[0]}
        for kind, measurements in _by_set(entries).items()
    }


def overall(entries: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return mean figures over the sets by method; `exact` and `f1` over sets with answers.

    Sets have equal weight. Intervals come from resampling within each set. `kl_ahead`, `exact_ahead`,
    `f1_ahead`: the figure minus that of the baseline, the first method, with the interval over the same
    resamples. `kept`: share of the prompts that full recompute answers that the method answers,
    too, with Wilson's interval, and their number `answered`.
    """
    sets, summaries = _by_set(entries), summarise(entries)
    names = list(next(iter(summaries.values())))
    baseline = _baseline(names)
    means: dict[str, dict[str, Any]] = {}
    for name in names:
        figures_by_set = [figures[name] for figures in summaries.values()]
        means[name] = {
            f: float(np.mean([figures[f] for figures in figures_by_set]))
            for f in ("rows", "speedup", "perplexity")
        }
        means[name] |= {"samples": len(entries)} | _kept(entries, name)
    for figure in FIGURES:
        kinds = [kind for kind in summaries if figure in summaries[kind][baseline]]
        if not kinds:
            continue
        resamples = {
            name: np.mean([_resampled(sets[kind], name, figure, seed) for seed, kind in enumerate(kinds)], 0)
            for name in names
        }
        for name, mean in means.items():
            mean[figure] = float(np.mean([summaries[kind][name][figure] for kind in kinds]))
            mean[f"{figure}_interval"] = _interval(resamples[name])
        for mean, resampled in zip(means.values(), resamples.values(), strict=True):
            mean[f"{figure}_ahead"] = mean[figure] - means[baseline][figure]
            mean[f"{figure}_ahead_interval"] = _interval(resampled - resamples[baseline])
    return means


def _baseline(names: Sequence[str]) -> str:
    """Return the method that others are compared with, the first one after `full`."""
    return names[min(1, len(names) - 1)]


def _resampled(
    measurements: Sequence[Mapping[str, Measures]], name: str, figure: str, seed: int
) -> NDArray[np.float64]:
    return resampled_means(np.array([measured[name][figure] for measured in measurements]), seed)


def _interval(resampled: NDArray[np.float64]) -> list[float]:
    interval: list[float] = np.percentile(resampled, [2.5, 97.5]).tolist()
    return interval


def _kept(entries: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    """Return the share of full recompute's exact answers that a method gives, too; {} without answers."""
    measurements = [entry["measured"] for entry in entries]
    answered = [measured for measured in measurements if measured["full"].get("exact") == 1]
    if not answered:
        return {}
    kept = sum(int(measured[name]["exact"]) for measured in answered)
    interval = list(wilson(kept, len(answered)))
    return {"answered": len(answered), "kept": kept / len(answered), "kept_interval": interval}


def _by_set(entries: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Measures]]]:
    sets: dict[str, list[dict[str, Measures]]] = {}
    for entry in entries:
        sets.setdefault(entry["set"], []).append(entry["measured"])
    return sets


def _summary(measurements: Sequence[Mapping[str, Measures]], name: str) -> dict[str, Any]:
    def values_of(method: str, figure: str) -> NDArray[np.float64]:
        return np.array([measured[method][figure] for measured in measurements])

    baseline = _baseline(list(measurements[0]))
    summary: dict[str, Any] = {"samples": len(measurements), "rows": float(values_of(name, "rows").mean())}
    for figure in FIGURES:
        if all(figure in measured[name] for measured in measurements):
            values = values_of(name, figure)
            summary[figure] = float(values.mean())
            summary[f"{figure}_interval"] = list(bootstrap(values))
            if figure in ("kl", "f1") and name != baseline:
                summary[f"{figure}_p"] = paired_p(values, values_of(baseline, figure))
    summary["perplexity"] = float(np.exp(values_of(name, "nll").mean()))
    summary["speedup"] = float(
        np.median(values_of("full", "seconds")) / np.median(values_of(name, "seconds"))
    )
    return summary


class Measuring(Protocol):
    """Interface of judges, which measure methods on samples, such as `kvkit.lab.quality.judge.Judge`.

    Attributes:
        weights: identifier of the model's weights.
        prefix: first tokens of every prompt, int32 [n].
    """

    weights: str

    @property
    def prefix(self) -> NDArray[np.int32]: ...

    def measure(
        self, sample: Sample, methods: Mapping[str, Method], answered: bool = False
    ) -> dict[str, Measures]: ...


def measure_gate(
    judge: Measuring,
    encode: Encode,
    names: Sequence[str],
    report: Report,
    tokens: int = 768,
    count: int | None = None,
) -> dict[str, Any]:
    """Measure the default selection on a few samples of every set, and keep a verdict of `gate.decide`.

    Measures both contexts of documents, and decides on the one with the smaller divergence.

    Args:
        names: names of the weights; the verdict is kept under each.
        report: called every few seconds with the number of measured samples.
        count: samples per set; None: `GATE_SAMPLES`.

    Returns:
        the verdict of `gate.decide`, with context, other_kl (of the other context), kl_interval,
        of_naive_interval, samples, paths.
    """
    methods = gate_methods()
    samples_per_set = count or GATE_SAMPLES
    gate_samples = [sample for kind in SETS for sample in samples(kind, encode, samples_per_set, tokens)]
    work = (judge.measure(sample, methods) for sample in gate_samples)
    measurements = list(counted(work, "samples", len(gate_samples), report))
    kl = {name: np.array([measured[name]["kl"] for measured in measurements]) for name in methods}
    contexts = sorted(_GATE_METHODS, key=lambda context: float(kl[_GATE_METHODS[context][1]].mean()))
    naive, blended = (kl[name] for name in _GATE_METHODS[contexts[0]])
    result = gate.decide(float(blended.mean()), float(naive.mean())) | {
        "context": contexts[0],
        "other_kl": float(kl[_GATE_METHODS[contexts[1]][1]].mean()),
        "kl_interval": list(bootstrap(blended)),
        "of_naive_interval": list(bootstrap(blended, naive)),
        "samples": len(blended),
    }
    paths = gate.keep(names, Selection(), contexts[0], result)
    return result | {"paths": [str(path) for path in paths]}


def gate_methods() -> dict[str, Method]:
    """Return the methods that `measure_gate` needs."""
    return {name: method_named(name) for names in _GATE_METHODS.values() for name in names}


def table(kind: str, summary: Mapping[str, Mapping[str, Any]], wide: bool = False) -> Table:
    """Return a table of one set's methods, fewest rows first; with `wide`, every figure has its interval."""
    count = next(iter(summary.values()))["samples"]
    shown = Table(title=f"{kind}, {count} samples: against full recompute, with 95 % intervals")
    shown.add_column("method")
    for heading in ("rows", "KL", "top-1", "perplexity", "exact", "F1", "speedup"):
        shown.add_column(heading, justify="right")

    def formatted(figures: Mapping[str, Any], name: str, digits: int) -> str:
        if wide or name not in figures:
            return _with_interval(figures, name, digits)
        return f"{figures[name]:.{digits}f}"

    for name, figures in sorted(summary.items(), key=lambda item: item[1]["rows"]):
        shown.add_row(
            name,
            f"{figures['rows']:.1%}",
            _with_interval(figures, "kl", 4),
            formatted(figures, "top1", 3),
            f"{figures['perplexity']:.2f}",
            formatted(figures, "exact", 2),
            formatted(figures, "f1", 2),
            f"{figures['speedup']:.1f}×",
        )
    return shown


def _with_interval(figures: Mapping[str, Any], name: str, digits: int) -> str:
    if name not in figures:
        return ""
    low, high = figures[f"{name}_interval"]
    return f"{figures[name]:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


_MARKERS = "D^vPX*"


def _family(name: str) -> str:
    """Return a method's name without its ratio; a name with options is returned whole."""
    return name if "," in name else name.rpartition(" ")[0]


def draw(summary: Mapping[str, Mapping[str, Mapping[str, Any]]], path: Path) -> None:
    """Draw quality against computed rows, a panel per set.

    The legend lists the default method, `k_deviation` and methods that are not in `METHODS`; those that are,
    are small dots with their names.
    """
    families = {"default": ("#2e4057", "o"), "k_deviation": ("#d1495b", "s")}
    custom = dict.fromkeys(
        _family(name) for methods in summary.values() for name in methods if name not in (*METHODS, "full")
    )
    added = [family for family in custom if family not in families]
    families |= {name: (f"C{1 + n % 9}", _MARKERS[n % len(_MARKERS)]) for n, name in enumerate(added)}
    figure, axes = panels(len(summary), 4.2, 3.8)
    for panel, (kind, methods) in zip(axes, summary.items(), strict=True):
        for family, (color, marker) in families.items():
            names = [name for name in methods if _family(name) == family]
            points = sorted((methods[n]["rows"], methods[n]["kl"], *methods[n]["kl_interval"]) for n in names)
            if points:
                rows, kl, low, high = zip(*points, strict=True)
                panel.plot(rows, kl, color=color, marker=marker, label=family)
                panel.vlines(rows, low, high, color=color, alpha=0.5)
        for name, figures in methods.items():
            if name != "full" and _family(name) not in families:
                panel.plot(figures["rows"], figures["kl"], ".", color="#777777")
                panel.annotate(name, (figures["rows"], figures["kl"]), fontsize=5.5, color="#555555")
        panel.set(title=kind, xlabel="rows computed, of all", yscale="log")
        panel.set_ylabel("KL from full recompute, nats a token")
        panel.legend(fontsize=7)
    figure.savefig(path, dpi=110)
