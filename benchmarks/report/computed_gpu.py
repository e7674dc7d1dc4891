"""Compute what the tables of a GPU show and no line of `make gpu` holds: the fastest, and ratios of lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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


def _lines(document: Mapping[str, Any], step: str) -> list[dict[str, Any]]:
    """Return what a step found."""
    return [line for line in document["results"] if line["step"] == step]


def fastest(defaults: Sequence[Mapping[str, Any]], tuned: Sequence[Mapping[str, Any]]) -> dict[str, Fastest]:
    """Take each problem's best time from two steps: tuning's gain counts on the default's time."""
    best = {line["what"]: line for line in tuned}
    found = {}
    for line in defaults:
        other = best.get(line["what"], line | {"default_us": line["us"]})
        gain = other["default_us"] / other["us"]
        roof = line.get("of_product", line["of_copy"])
        found[line["what"]] = Fastest(other["config"], line["us"] / gain, roof * gain)
    return found


def kernels(document: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The fastest configuration that was measured of each problem, and what its time is to the roof's."""
    defaults = {line["what"]: line for line in _lines(document, "defaults")}
    found = fastest([*defaults.values()], _lines(document, "tune"))
    for name in (name for name in KERNELS if name in found):
        best = found[name]
        roof = "product" if "of_product" in defaults[name] else "copy"
        config = best.config.replace("TILE_", "")
        yield defaults[name] | {"fastest": config, "fastest_us": best.us, roof: best.of_roof}


def peers(document: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Attention of others beside kvkit's."""
    found = {line["what"]: line for line in _lines(document, "peers") if "us" in line}
    return (line | {"ours": found["kvkit"]} for line in found.values())


def runs(document: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows of a blend together, and run by run."""
    found = {line["what"]: line for line in _lines(document, "blend_rows")}
    for what, line in found.items():
        one, each = found.get(f"{what}: kvkit"), found.get(f"{what}: kvkit, run by run")
        if "untuned" in line and one and each:
            yield {"what": what, "one": one, "each": each}


def ways(document: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Rates of the copy engine and of a kernel of 16 programs, by size of records."""
    found = [line for line in _lines(document, "moving") if line["what"] == "by size"]
    engine = {(x["move"], x["records"], x["record_bytes"]): x for x in found if x["way"] == "copy engine"}
    for line in found:
        if line["way"] == "16 programs":
            yield line | {"engine": engine[line["move"], line["records"], line["record_bytes"]]}
