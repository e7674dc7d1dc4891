"""Effect of blending on a model's answers: methods of selection against full recompute, by task."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from kvkit.blend import gate
from kvkit.blend.plan import Selection
from kvkit.lab.quality.judge import METHODS, Measures, Method
from kvkit.lab.quality.statistics import bootstrap, paired_p, resampled_means
from kvkit.lab.quality.tasks.registry import SETS, samples
from kvkit.lab.quality.tasks.sample import Encode, Sample
from kvkit.lab.simulate.report import panels
from kvkit.observe.progress import Say, counted

FIGURES = ("kl", "top1", "exact", "f1")
BASELINE = "default .15"
GATE_SAMPLES = 4
GATE_METHODS = ("naive", "default .15")


def run(
    judge: Measuring,
    encode: Encode,
    path: Path,
    *,
    count: int,
    tokens: int,
    methods: Mapping[str, Method] = METHODS,
    sets: Sequence[str] = tuple(SETS),
    seed: int = 0,
) -> Iterator[dict[str, Any]]:
    """Measure `count` samples of every set, and yield {"set", "sample", "measured"} for each.

    Appends every measurement to `path` as a line of JSON. Reuses measurements in `path` of the same model and
    text, and measures only the missing methods.
    """
    drawn = [[(kind, sample) for sample in samples(kind, encode, count, tokens, seed)] for kind in sets]
    turns = enumerate(itertools.zip_longest(*drawn))  # a file may have fewer samples
    work = [(i, *item) for i, one_of_each in turns for item in one_of_each if item is not None]
    finished: dict[str, dict[str, Measures]] = {}
    if path.exists():
        with path.open() as lines:
            for entry in map(json.loads, lines):
                finished.setdefault(entry["of"], {}).update(entry["by_settings"])
    settings = {name: json.dumps(asdict(method)) for name, method in methods.items()}
    with path.open("a") as out:
        for i, kind, sample in work:
            of = _identity(judge, sample)
            known = finished.setdefault(of, {})
            left = {name: method for name, method in methods.items() if settings[name] not in known}
            if left:
                measured = judge.measure(sample, left)
                if "full" in known:  # scale seconds by full recompute, which was measured again beside them
                    slower = measured["full"]["seconds"] / known["full"]["seconds"]
                    for one in measured.values():
                        one["seconds"] /= slower
                by_settings = {settings.get(name, name): figures for name, figures in measured.items()}
                out.write(json.dumps({"of": of, "by_settings": by_settings}) + "\n")
                out.flush()
                known.update(by_settings)
            figures = {"full": known["full"]} | {name: known[settings[name]] for name in methods}
            yield {"set": kind, "sample": i, "measured": figures}


def _identity(judge: Measuring, sample: Sample) -> str:
    """Return a digest of everything that determines a sample's figures, except the method."""
    sample = sample.behind(judge.lead)
    text = sample.prompt.tobytes() + sample.continuation.tobytes() + repr(sample.documents).encode()
    return hashlib.blake2b(judge.weights.encode() + text, digest_size=12).hexdigest()


def summarise(entries: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return mean figures by set and method, with 95 % intervals [low, high] for those of `FIGURES`.

    `kl_p`, `f1_p`: p of a paired test against `BASELINE`. `kl_of_k_deviation`: KL divergence relative to that
    of K deviation at the same ratio, with its interval. `speedup`: median seconds of full recompute relative
    to the method's.
    """
    sets: dict[str, list[dict[str, Measures]]] = {}
    for entry in entries:
        sets.setdefault(entry["set"], []).append(entry["measured"])
    return {kind: {name: _summary(found, name) for name in found[0]} for kind, found in sets.items()}


def overall(entries: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return mean figures over the sets by method; `exact` and `f1` over sets with answers.

    Sets have equal weight. Intervals come from resampling within each set. `f1_ahead`: f1 minus that of
    `BASELINE`, with the interval over the same resamples.
    """
    sets: dict[str, list[dict[str, Measures]]] = {}
    for entry in entries:
        sets.setdefault(entry["set"], []).append(entry["measured"])
    each = summarise(entries)
    means: dict[str, dict[str, Any]] = {}
    f1s: dict[str, NDArray[np.float64]] = {}
    for name in next(iter(each.values())):
        of_sets = [figures[name] for figures in each.values()]
        mean = means[name] = {
            f: float(np.mean([of[f] for of in of_sets])) for f in ("rows", "speedup", "perplexity")
        }
        mean["samples"] = len(entries)
        for figure in FIGURES:
            having = [kind for kind in each if figure in each[kind][name]]
            if having:
                drawn = [
                    resampled_means(np.array([measured[name][figure] for measured in sets[kind]]), seed)
                    for seed, kind in enumerate(having)
                ]
                mean[figure] = float(np.mean([each[kind][name][figure] for kind in having]))
                drawn_means = np.mean(drawn, 0)
                mean[f"{figure}_interval"] = np.percentile(drawn_means, [2.5, 97.5]).tolist()
                if figure == "f1":
                    f1s[name] = drawn_means
    for name in f1s if BASELINE in f1s else ():
        means[name]["f1_ahead"] = means[name]["f1"] - means[BASELINE]["f1"]
        ahead = np.percentile(f1s[name] - f1s[BASELINE], [2.5, 97.5])
        means[name]["f1_ahead_interval"] = ahead.tolist()
    return means


def _summary(found: Sequence[Mapping[str, Measures]], name: str) -> dict[str, Any]:
    def of(method: str, figure: str) -> NDArray[np.float64]:
        return np.array([measured[method][figure] for measured in found])

    summary: dict[str, Any] = {"samples": len(found), "rows": float(of(name, "rows").mean())}
    for figure in FIGURES:
        if all(figure in measured[name] for measured in found):
            values = of(name, figure)
            summary[figure] = float(values.mean())
            summary[f"{figure}_interval"] = list(bootstrap(values))
            if figure in ("kl", "f1") and BASELINE in found[0] and name != BASELINE:
                summary[f"{figure}_p"] = paired_p(values, of(BASELINE, figure))
    summary["perplexity"] = float(np.exp(of(name, "nll").mean()))
    summary["speedup"] = float(np.median(of("full", "seconds")) / np.median(of(name, "seconds")))
    other = name.replace("default", "k deviation").partition(",")[0]
    if name.startswith("default") and other in found[0]:
        a, b = of(name, "kl"), of(other, "kl")
        summary["kl_of_k_deviation"] = float(a.mean() / b.mean())
        summary["kl_of_k_deviation_interval"] = list(bootstrap(a, b))
    return summary


class Measuring(Protocol):
    """Interface of judges, which measure methods on samples; see `kvkit.lab.quality.judge.Judge`.

    Attributes:
        weights: identifier of the model's weights.
        lead: first tokens of every prompt, int32 [n].
    """

    weights: str
    lead: NDArray[np.int32]

    def measure(self, sample: Sample, methods: Mapping[str, Method]) -> dict[str, Measures]: ...


def measure_gate(
    judge: Measuring,
    encode: Encode,
    names: Sequence[str],
    say: Say,
    tokens: int = 768,
    count: int | None = None,
) -> dict[str, Any]:
    """Measure the default selection on a few samples of every set, and keep the verdict of `gate.decide`.

    Args:
        names: names of the weights; the verdict is kept under each.
        say: called every few seconds with the number of measured samples.
        count: samples per set; None: `GATE_SAMPLES`.

    Returns:
        the verdict of `gate.decide`, with kl_interval, of_naive_interval, samples, paths.
    """
    chosen = {name: METHODS[name] for name in GATE_METHODS}
    each = count or GATE_SAMPLES
    drawn = [sample for kind in SETS for sample in samples(kind, encode, each, tokens)]
    work = (judge.measure(sample, chosen) for sample in drawn)
    found = list(counted(work, "samples", len(drawn), say))
    naive, ours = (np.array([measured[name]["kl"] for measured in found]) for name in GATE_METHODS)
    result = gate.decide(float(ours.mean()), float(naive.mean())) | {
        "kl_interval": list(bootstrap(ours)),
        "of_naive_interval": list(bootstrap(ours, naive)),
        "samples": len(ours),
    }
    paths = gate.keep(names, Selection(), result)
    return result | {"paths": [str(path) for path in paths]}


def table(kind: str, summary: Mapping[str, Mapping[str, Any]], wide: bool = False) -> Table:
    """Return a table of one set's methods, fewest rows first; with `wide`, every figure has its interval."""
    count = next(iter(summary.values()))["samples"]
    shown = Table(title=f"{kind}, {count} samples: against full recompute, with 95 % intervals")
    shown.add_column("method")
    headings = ("rows", "KL", "top-1", "perplexity", "exact", "F1", "speedup")
    for heading in (*headings, *(["KL / K deviation's"] if wide else [])):
        shown.add_column(heading, justify="right")

    def figure(figures: Mapping[str, Any], name: str, digits: int) -> str:
        if wide or name not in figures:
            return _with_interval(figures, name, digits)
        return f"{figures[name]:.{digits}f}"

    for name, figures in sorted(summary.items(), key=lambda item: item[1]["rows"]):
        shown.add_row(
            name,
            f"{figures['rows']:.1%}",
            _with_interval(figures, "kl", 4),
            figure(figures, "top1", 3),
            f"{figures['perplexity']:.2f}",
            figure(figures, "exact", 2),
            figure(figures, "f1", 2),
            f"{figures['speedup']:.1f}×",
            *([_with_interval(figures, "kl_of_k_deviation", 2)] if wide else []),
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

    The legend lists the default method, K deviation and custom methods; other methods of kvkit are small dots
    with their names.
    """
    families = {"default": ("#2e4057", "o"), "k deviation": ("#d1495b", "s")}
    own = dict.fromkeys(
        _family(name) for methods in summary.values() for name in methods if name not in (*METHODS, "full")
    )
    others = [family for family in own if family not in families]
    families |= {name: (f"C{1 + n % 9}", _MARKERS[n % len(_MARKERS)]) for n, name in enumerate(others)}
    figure, each = panels(len(summary), 4.2, 3.8)
    for panel, (kind, methods) in zip(each, summary.items(), strict=True):
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
