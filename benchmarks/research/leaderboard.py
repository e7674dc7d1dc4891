"""The leaderboard of blending methods: what measures it, model by model, and its tables and picture.

python -m benchmarks.research.leaderboard [smollm2, qwen-0.5b, smollm2-latent, a hub id or a folder, ...]
python -m benchmarks.report.tables && python -m benchmarks.report.pictures

Measures every task by every method of every model, on a GPU where there is one, into
results/leaderboard-MODEL-MACHINE.json, over prompts that full recompute answers; with --details what helps
to understand them, into blend-details-MODEL-MACHINE.json. What was measured before is not measured again, so
that samples and methods can be added; it lies beside, in a .jsonl file.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.folders import RESULTS
from benchmarks.research import latent_model
from kvkit.environment import slug, slug_of
from kvkit.lab.quality.tasks.sample import DOCUMENT_TOKENS
from kvkit.lab.simulate.report import panels

MODELS = ("smollm2", "qwen-0.5b")
RATIO = 0.15
TASKS = ("retrieval", "needle keys", "qa")
OTHER_CONTEXTS = ("alone", "related", "anchored")
"""Contexts of documents besides the system prompt alone."""


def methods_at(tokens: int) -> tuple[str, ...]:
    """Return the methods for prompts of about `tokens` tokens; others are compared with the first one.

    Behind the system prompt the first document is exact, and a ratio counts reused tokens: it is larger by so
    much that all methods compute as many rows as `RATIO` of documents that were computed alone.
    """
    documents = max(2, tokens // DOCUMENT_TOKENS)
    alone, share = _ratio(RATIO), _ratio(RATIO * documents / (documents - 1))
    return (
        *(f"prophetkv {share}, first 8, drift .5", f"prophetkv {share}, first 8"),
        f"question_attention {share}, first 8",
        *(f"prophetkv {alone}, first 8, {context}" for context in OTHER_CONTEXTS),
        f"question_attention {alone}, first 8, alone",
        *("naive", *(f"naive, {context}" for context in OTHER_CONTEXTS), "ape"),
        f"fewer documents {_ratio(max(RATIO, 1 / documents))}",
        *(f"{name} {share}" for name in ("prophetkv", "infoflow", "qcfuse", "sparsex", "cacheblend")),
        *(f"{name} {share}" for name in ("k_deviation", "first_n", "random")),
        *(f"{name} {share}, first 8" for name in ("infoflow", "qcfuse")),
    )


def details_at(tokens: int) -> tuple[str, ...]:
    """Return what is compared with the first method apart: other ratios, masks, choices that know all."""
    with_drift, without = methods_at(tokens)[:2]
    share = without.split()[1].rstrip(",")
    return (
        *(without, with_drift, "naive"),
        *(f"prophetkv {ratio}, first 8" for ratio in (".05", ".30", ".45", ".60")),
        "prophetkv .60, first 8, covering .65",
        *(f"{name} {share}, first 8" for name in ("oracle", "oracle_change")),
        f"cacheclip {share}",
        *(
            f"k_deviation {_ratio(RATIO)}, alone{mask}"
            for mask in ("", ", bottom-right mask", ", block mask")
        ),
    )


def _ratio(share: float) -> str:
    return f"{share:.2f}".removeprefix("0")


def commands(arguments: Sequence[str]) -> Iterator[list[str]]:
    """The arguments of `kvkit` that measure each model that is asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.research.leaderboard")
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--samples", type=int, default=50, help="of each task, which full recompute answers")
    parser.add_argument("--tokens", type=int, default=1024, help="of a prompt, about")
    parser.add_argument("--tasks", default="; ".join(TASKS), help="as of kvkit bench blend")
    parser.add_argument("--methods", default="", help="as of kvkit bench blend; default: all of the board's")
    parser.add_argument("--details", action="store_true", help="other ratios, masks and oracles instead")
    parser.add_argument("--auxiliary", default="gemma", help="by which cacheclip chooses")
    asked = parser.parse_args(arguments)
    size = "" if asked.tokens == parser.get_default("tokens") else f"-{asked.tokens}"
    kind, chosen = ("blend-details", details_at) if asked.details else ("leaderboard", methods_at)
    for model in asked.models:
        file = RESULTS / f"{kind}-{slug_of(Path(model).name)}{size}-{slug()}.json"
        methods = asked.methods or "; ".join(chosen(asked.tokens))
        yield [
            *("bench", "blend", "--methods", methods, "--tasks", asked.tasks, "--answered"),
            *("--samples", str(asked.samples), "--tokens", str(asked.tokens)),
            *("--auxiliary", asked.auxiliary, "--json", str(file)),
            *(() if model == "smollm2" else ("--model", _found(model))),
        ]


def _found(model: str) -> str:
    """Return a model as `kvkit bench blend` takes it; make SmolLM2 with latent attention first."""
    return str(latent_model.fetch()) if model == latent_model.NAME else model


def main() -> None:
    """Measure what the command line says, each model in a process of its own.

    The exit status is that of the first that fails.
    """
    for command in commands(sys.argv[1:]):
        start = [sys.executable, "-c", "from kvkit.cli import main; main()"]
        if status := subprocess.run([*start, *command], check=False).returncode:
            sys.exit(status)


def methods(entries: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Methods of each model and length, the smallest divergence first; tasks count alike.

    `kept` is the share of full recompute's exact answers.
    """
    heads = ("rows", "KL", "more than the first", "kept", "more", "speedup", "prompts", "commit")
    rows = [["model, tokens", "method", *heads]]
    for entry in entries:
        means = {name: shown for name, shown in entry["overall"].items() if name != "full"}
        first = next(iter(means))
        for name in sorted(means, key=lambda name: means[name]["kl"]):
            shown, figures = (
                means[name],
                (("kl", ".3f"), ("kl_ahead", "+.3f"), ("kept", ".2f"), ("exact_ahead", "+.2f")),
            )
            cells = [
                "" if name == first and "ahead" in figure else _shown(shown, figure, form)
                for figure, form in figures
            ]
            about = (f"{shown['speedup']:.1f}×", str(shown["samples"]), entry["commit"])
            rows.append([_named(entry), name, f"{shown['rows']:.1%}", *cells, *about])
    return rows


def tasks(entries: Sequence[dict[str, Any]]) -> list[list[str]]:
    """The divergence of each method, and the answers that it keeps, task by task, for each model."""
    kinds = dict.fromkeys(kind for entry in entries for kind in entry["sets"])
    rows = [["model, tokens", "method", *kinds]]
    for entry in entries:
        for name in entry["overall"]:
            of = [entry["sets"].get(kind, {}).get(name) for kind in kinds]
            cells = ("" if one is None else f"{one['kl']:.3f}, {one['exact']:.2f}" for one in of)
            rows.append([_named(entry), name, *cells])
    return rows


def overpaid(document: dict[str, Any]) -> list[list[str]]:
    """By how much the question overpays tokens that lost context; of a result of `lost_context`."""
    runs = document["runs"]
    rows = [["tokens of a prompt", *(f"{run['tokens']:,}" for run in runs)]]
    rows.append(["paid to reused tokens, all computed", *(f"{run['exact']:.0%}" for run in runs)])
    rows.append(["to their keys as they were found", *(f"{run['alone']:.0%}" for run in runs)])
    every = [{(one["from"], one["to"]): one["log_ratio"] for one in run["by_loss"]} for run in runs]
    for low, high in dict.fromkeys(edges for of in every for edges in of):
        ratios = [of.get((low, high)) for of in every]
        shown = ["" if ratio is None else f"{math.exp(ratio):.1f}×" for ratio in ratios]
        rows.append([f"those that saw 1 of {math.exp(low):.1f} to {math.exp(high):.1f}", *shown])
    rows.append(["power of what is missing", *(f"{run['slope']:.2f}" for run in runs)])
    of_tasks = (
        [f"of `{task}` alone", *(f"{run['slopes'][task]:.2f}" for run in runs)] for task in runs[0]["slopes"]
    )
    return [*rows, *of_tasks]


def draw(entry: dict[str, Any], path: Path) -> None:
    """Draw each method's divergence and the answers that it keeps, with intervals, the nearest first."""
    overall = {name: shown for name, shown in entry["overall"].items() if name != "full"}
    names = sorted(overall, key=lambda name: float(overall[name]["kl"]))
    figure, (by_kl, by_kept) = panels(2, 5.0, 0.9 + 0.17 * len(names))
    for panel, value in ((by_kl, "kl"), (by_kept, "kept")):
        for place, name in enumerate(names):
            shown, color = overall[name], "#d1495b" if name == next(iter(overall)) else "#2e4057"
            panel.plot(shown[f"{value}_interval"], [place, place], color=color, linewidth=1)
            panel.plot(shown[value], place, "o", markersize=4, color=color)
        panel.set_yticks(range(len(names)), names if panel is by_kl else [""] * len(names), fontsize=7)
        panel.invert_yaxis()
        panel.set(title=_named(entry))
    by_kl.set(xlabel="KL from full recompute, nats a token", xscale="log")
    by_kept.set_xlabel("kept, of full recompute's answers")
    figure.savefig(path, dpi=110)


def _named(entry: dict[str, Any]) -> str:
    """The model, and how long prompts are."""
    return f"{entry['model']}, {entry['tokens']:,}"


def _shown(figures: dict[str, Any], name: str, form: str) -> str:
    """A figure with its interval; one with a sign has those of its bounds apart; "" if there is none."""
    if name not in figures:
        return ""
    low, high = (format(bound, form) for bound in figures[f"{name}_interval"])
    bounds = f"{low} to {high}" if "+" in form else f"{low}–{high}"
    return f"{figures[name]:{form}} ({bounds})".replace("-", "−")


if __name__ == "__main__":
    main()
