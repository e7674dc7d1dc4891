"""Rows of the tables of what `make gpu` measured on a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

KERNELS = (
    *("pack Llama, 8 chunks", "unpack Llama, 8 chunks", "pack Llama, 1 chunks", "pack 132-byte rows"),
    *("rotate Llama, 8 chunks", "rotate interleaved", "rotate DeepSeek's latents"),
    *("pack fp8", "unpack fp8", "rotate fp8", "unpack int8"),
    *("scatter Llama-3.1-8B", "scatter Llama-3.1-8B, deviation", "deviation Llama-3.1-8B"),
    *(f"attention Llama-3.1-8B, {keys} keys" for keys in (4096, 8192, 32768)),
    *("attention Llama-3.1-8B, one block", "attention Llama-3.1-8B, window", "attention Llama-3-70B"),
    *("attention Llama-2-7B", "attention Qwen2-7B", "attention Phi-3-mini", "attention heads of 72"),
    *("attention Falcon-7B", "attention Gemma-2-9B", "attention heads of 512", "attention DeepSeek-V3"),
    *("attention DeepSeek-V3, not absorbed", "attention Llama-3.1-8B, float32"),
    *("scores Llama-3.1-8B", "scores DeepSeek-V3"),
)
"""Problems that are shown, of those that were measured."""


class Fastest(NamedTuple):
    """A configuration, its µs, and its share of a copy's rate, or of a product's where it multiplies."""

    config: str
    us: float
    of_roof: float


def tables(path: Path, prefix: str) -> dict[str, Callable[[], list[list[str]]]]:
    """The tables of a result of `benchmarks.gpu.keep`, by name, which begins with `prefix`."""
    made = {"kernels": kernels, "peers": peers, "runs": runs, "ways": ways, "beside": beside}
    return {f"{prefix}_{name}": partial(rows, path) for name, rows in made.items()}


def lines(path: Path, step: str) -> list[dict[str, Any]]:
    """What a step found; nothing where it was not run."""
    results = json.loads(path.read_text())["results"] if path.exists() else []
    return [line for line in results if line["step"] == step]


def fastest(defaults: Sequence[Mapping[str, Any]], tuned: Sequence[Mapping[str, Any]]) -> dict[str, Fastest]:
    """Of each problem, from the lines of two steps: what tuning gained counts for the default's time."""
    best = {line["what"]: line for line in tuned}
    found = {}
    for line in defaults:
        other = best.get(line["what"], line | {"default_us": line["us"]})
        gain = other["default_us"] / other["us"]
        roof = line.get("of_product", line["of_copy"])
        found[line["what"]] = Fastest(other["config"], line["us"] / gain, roof * gain)
    return found


def kernels(path: Path) -> list[list[str]]:
    """The fastest configuration that was measured of each problem, and what its time is to the roof's."""
    defaults = {line["what"]: line for line in lines(path, "defaults")}
    found = fastest([*defaults.values()], lines(path, "tune"))
    head = ["problem", "fastest measured", "µs", "of a copy", "of a product", "default, µs", "predicted"]
    rows = [head]
    for name in (name for name in KERNELS if name in found):
        default, best = defaults[name], found[name]
        shares = ("", f"{best.of_roof:.2f}") if "of_product" in default else (f"{best.of_roof:.2f}", "")
        predicted = default["predicted_us"]
        times = f"{default['us']:,.1f}", f"{predicted:,.1f}" if predicted else ""
        rows.append([name, best.config.replace("TILE_", ""), f"{best.us:,.1f}", *shares, *times])
    return rows


def peers(path: Path) -> list[list[str]]:
    """Attention of others beside kvkit's."""
    found = [line for line in lines(path, "peers") if "us" in line]
    rows = [["", "µs, minimum", "median", "kvkit takes of its minimum", "of its median"]]
    ours = next((line for line in found if line["what"] == "kvkit"), {})
    for line in found:
        ratios = (f"{ours[kind] / line[kind]:.2f}" for kind in ("min_us", "us"))
        rows.append([line["what"], *(f"{line[kind]:,.0f}" for kind in ("min_us", "us")), *ratios])
    return rows


def runs(path: Path) -> list[list[str]]:
    """The rows of a blend together, and run by run."""
    found = {line["what"]: line for line in lines(path, "blend_rows")}
    rows = [
        ["rows of a blend", "together, µs, minimum", "median", "run by run takes, of minima", "of medians"]
    ]
    for what, line in found.items():
        one, each = found.get(f"{what}: kvkit"), found.get(f"{what}: kvkit, run by run")
        if "untuned" in line and one and each:
            ratios = (f"{each[kind] / one[kind]:.1f}×" for kind in ("min_us", "us"))
            rows.append([what, *(f"{one[kind]:,.0f}" for kind in ("min_us", "us")), *ratios])
    return rows


def ways(path: Path) -> list[list[str]]:
    """Rates of the copy engine and of a kernel of 16 programs, by size of records."""
    found = [line for line in lines(path, "moving") if line["what"] == "by size"]
    engine = {(x["move"], x["records"], x["record_bytes"]): x for x in found if x["way"] == "copy engine"}
    rows = [["", "records", "copy engine, GB/s", "16 programs", "their time to the engine's"]]
    for line in found:
        if line["way"] == "16 programs":
            key = line["move"], line["records"], line["record_bytes"]
            rates = (f"{x['GB/s']:.1f}" for x in (engine[key], line))
            size = f"{line['records']} of {line['record_bytes'] >> 10:,} KiB"
            rows.append([line["move"], size, *rates, f"{line['of_engine_time']:.2f}"])
    return rows


def beside(path: Path) -> list[list[str]]:
    """What moves and matrix products that run side by side take from one another."""
    rows = [["", "way", "GB/s", "rate to that alone", "time of the products to that alone"]]
    for line in lines(path, "moving"):
        if line["what"] == "beside products":
            shown = f"{line['GB/s']:.1f}", f"{line['move_rate']:.2f}", f"{line['product_time']:.2f}"
            rows.append([line["move"], line["way"], *shown])
    return rows
