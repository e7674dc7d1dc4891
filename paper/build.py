"""Make the report: figures and data out of benchmark results, then paper/build/kvkit.pdf. For `make paper`.

python paper/build.py [results folder] [output folder]

The text is in kvkit.typ and holds no measured number: it reads data.json, which this writes next to the PDF.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import typst

from kvkit.bench import demo
from kvkit.blend import plan
from kvkit.format import names, record
from kvkit.format.layout import ORDERS
from kvkit.kernels.pages.reference import LARGEST
from kvkit.moving import reads
from kvkit.tiers import health

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "benchmarks" / "results"
OUT = HERE / "build"
TEXT = HERE / "kvkit.typ"
DEMO = "demo-"
"""The demo's figures of the machine of <slug>.json are in demo-<slug>.json."""
BLEND = ("1k", "4k")
"""What `kvkit bench blend` found with prompts of so many tokens is in blend-<tokens>-<slug>.json."""
COMPILED = "compile.json"

Results = Mapping[str, Mapping[str, Any]]

_RATIO = ("ratio_min", "ratio_median")
_OPERATIONS = ("memcpy", "seal", "verify", "xxh3_64, per layer", "crc32c", "zlib.crc32")
_OF_MEMCPY = (
    "bytes",
    *(f"{operation}/{field}" for operation in _OPERATIONS for field in (*_RATIO, "gb_per_s")),
)
_OF_COPY = tuple(
    f"{way}/{field}" for way in ("pack", "unpack") for field in ("GB/s", "of copy_/min", "of copy_/median")
)
_CODEC = ("compressed_to", "compress/gb_per_s", "decompress/gb_per_s", "decompress/ratio_min")
_LLAMA = tuple(f"pages::pages[llama-{order}]" for order in ORDERS)
LMCACHE = "pages::lmcache"
_CONVERSIONS = (
    "unpack rotated",
    *(f"{way} {form}" for form in ("fp8", "int8") for way in ("pack", "unpack")),
    *(f"unpack {form} rotated" for form in ("fp8", "int8")),
)
_KERNEL = ("registers", "spill_bytes", "shared_bytes", "loads", "loads_16", "stores", "stores_16")
_BLENDED = ("samples", "rows", "kl", "kl_interval", "speedup")
_LEGEND: Mapping[str, Any] = {
    "frameon": False,
    "loc": "lower center",
    "bbox_to_anchor": (0.5, 1.0),
    "ncols": 3,
    "columnspacing": 1.2,
    "handlelength": 1.6,
    "handletextpad": 0.5,
}

NEEDED: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("chunks::keys[16]", "chunks::keys[256]"), ("min_s", "median_s")),
    **{f"chunks::other_algorithms[{name}]": _RATIO for name in ("blake3", "sha256")},
    **{f"record::speed[{where}]": _OF_MEMCPY for where in ("cache", "memory")},
    "record::cost_per_record": ("seal/us", "verify/us"),
    **{
        f"record::codec[{dtype}-{codec}]": _CODEC
        for dtype in ("float32", "bfloat16")
        for codec in ("zstd", "bitshuffle-zstd")
    },
    **{f"pages::pages[{name}]": _OF_COPY for name in ("vllm-cpu-opaque", "vllm-cpu-LBHNC")},
    **dict.fromkeys(_LLAMA, _OF_COPY),
    **{f"pages::pages[{name}]": _OF_COPY for name in ("mla", "indexer-132")},
    **{
        f"tiers::{test}[{size}-{cache}]": (*_RATIO, "threads", "file_system")
        for test in ("read", "read_against_fsspec")
        for size in ("2MiB", "6MiB")
        for cache in ("warm", "cold")
    },
    **{
        f"tiers::write[{size}-{other}]": _RATIO for size in ("2MiB", "6MiB") for other in ("direct", "cached")
    },
    "tiers::memory_borrow": ("min_s", "records"),
    "cache::overhead_of_a_memory_hit": ("us_per_chunk/min", "us_per_chunk/median"),
    "cache::load_from_disk": _RATIO,
}
"""What the text reads of each benchmark; / leads into an object."""
OPTIONAL: Mapping[str, Sequence[str]] = {
    LMCACHE: tuple(
        f"{pair}/{field}"
        for pair in ("pack to LMCache gather", "unpack to LMCache scatter")
        for field in ("min", "median")
    ),
    **{
        f"pages::conversions[{name}]": tuple(
            f"{way}/of copy_/{field}" for way in _CONVERSIONS for field in ("min", "median")
        )
        for name in ("llama-bfloat16", "smollm2-float32", "mla-bfloat16")
    },
    **{
        f"blend::attention[{name}]": (
            "rows",
            "visible_share",
            *(f"{other}/{field}" for other in ("masked", "full") for field in _RATIO),
        )
        for name in ("smollm2", "llama-8b")
    },
    "blend::around_the_attention": tuple(
        f"{part}/{field}" for part in ("scatter", "scores") for field in _RATIO
    ),
    **{
        f"prefill::blended_prefill[{size}]": (*_RATIO, "tokens", "rows", "recomputing nothing/min")
        for size in BLEND
    },
}
"""Benchmarks that need not have run, some of software that need not be installed: the text says where they
are missing."""
DEMO_FIELDS = ("model", "turns")
TURN_FIELDS = ("prompt_tokens", "hit_tokens", "computed_tokens", "ttft_s", "ttft_cold_s", "identical")


class PaperError(RuntimeError):
    """The paper cannot be built. The message names what is missing and the command that makes it."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A ratio in the figure: time of kvkit over time of what it is compared with.

    Args:
        label: what kvkit does.
        other: what it is compared with.
        roof: whether that is the bare operation, which nothing can beat for long; else it is a peer.
        ratio: of minima and of medians.
    """

    label: str
    other: str
    roof: bool
    ratio: tuple[float, float]


def build(results: Path = RESULTS, out: Path = OUT) -> Path:
    """Write figures, data.json and kvkit.pdf into `out`, which is made; returns the PDF's path.

    Raises:
        PaperError: results are missing.
        typst.TypstError: the text does not compile.
    """
    data = collect(results)
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    (out / "data.json").write_text(json.dumps(data, indent=1) + "\n")
    draw(data, out / "reuse.svg")
    if data["blend"]["1k"] is not None:
        draw_blend(data["blend"]["1k"]["sets"], out / "blend.svg")
    pdf = out / "kvkit.pdf"
    # the root is that of the file system: text and data may lie anywhere
    _, warnings = typst.compile_with_warnings(
        str(TEXT),
        str(pdf),
        root="/",
        sys_inputs={"out": str(out)},
        font_paths=typst.Fonts(include_system_fonts=False),
    )
    for warning in warnings:
        print(warning.diagnostic or warning.message, file=sys.stderr)
    return pdf


def collect(folder: Path) -> dict[str, Any]:
    """All that the text says in numbers: results and demo of one machine, and constants of the code.

    That machine is the one of which the fewest results are missing. What the compile gate recorded and what
    blending was measured to do are None where their files are not there.

    Raises:
        PaperError: other results are missing all the same, or a file lacks figures.
    """
    if not folder.is_dir():
        raise PaperError(f"{folder} is no folder: `make bench` makes it")
    found = [
        (p, json.loads(p.read_text())) for p in sorted(folder.glob("*.json")) if not p.name.startswith(DEMO)
    ]
    # other tables lie there, too: only those of benchmarks have names
    documents = [(p, d) for p, d in found if all("name" in entry for entry in d.get("results", [{}]))]
    if not documents:
        raise PaperError(f"{folder} holds no results: run `make bench`")
    gaps, path, document = min(
        ((list(missing(_by_name(document))), path, document) for path, document in documents),
        key=lambda found: len(found[0]),
    )
    if gaps:
        raise PaperError(f"{path} lacks\n" + "\n".join(gaps))
    return {
        "machine": document["machine"],
        "versions": document["versions"],
        "results": _by_name(document),
        "has_lmcache": LMCACHE in _by_name(document),
        "demo": _demo(folder / f"{DEMO}{path.name}"),
        "compiled": _compiled(folder / COMPILED),
        "blend": {size: _blended(folder / f"blend-{size}-{path.name}", size) for size in BLEND},
        "constants": {
            "align": record.ALIGN,
            "high_bits": names.HIGH_BITS,
            "low_bits": names.LOW_BITS,
            "in_flight": reads.MAX_IN_FLIGHT,
            "failures": health.FAILURES_TO_PAUSE,
            "first_pause_s": health.PAUSES_S[0],
            "longest_pause_s": health.PAUSES_S[-1],
            "demo_chunk_tokens": demo.CHUNK_TOKENS,
            "demo_answer_tokens": demo.ANSWER_TOKENS,
            "demo_document_tokens": demo.DOCUMENT_TOKENS,
            "largest": LARGEST,
            "ratio": plan.Selection().ratio,
            "first_n": plan.Selection().first_n,
            "looked": plan.Selection().layers,
            "fade": plan.Selection().fade,
        },
    }


def missing(results: Results) -> Iterator[str]:
    """A line for every benchmark that is not there, or not with all its figures: its name and command."""
    for name, fields in {**NEEDED, **{n: f for n, f in OPTIONAL.items() if n in results}}.items():
        command = f"run `python -m benchmarks.run benchmarks/bench_{name.split('::')[0]}.py`"
        if name not in results:
            yield f"  {name}: {command}"
            continue
        absent = [field for field in fields if not _has(results[name], field)]
        if absent:
            yield f"  {', '.join(absent)} of {name}: {command}"


def bars(results: Results) -> list[Bar]:
    """What the figure shows, from the top: records, pages, tiers, the cache as a whole."""
    slowest = {way: max(_of_copy(results, name, way) for name in _LLAMA) for way in ("pack", "unpack")}
    shown = [
        *(
            Bar(f"{way} a record", "memcpy", True, _ratio(results["record::speed[memory]"][way]))
            for way in ("seal", "verify")
        ),
        *(
            Bar(
                f"{way}, vLLM's CPU pages",
                "copy_",
                True,
                _of_copy(results, "pages::pages[vllm-cpu-LBHNC]", way),
            )
            for way in ("pack", "unpack")
        ),
        *(Bar(f"{way}, Llama, slowest order", "copy_", True, slowest[way]) for way in ("pack", "unpack")),
        *(
            Bar(f"read {cache}", "preadv", True, _ratio(results[f"tiers::read[6MiB-{cache}]"]))
            for cache in ("warm", "cold")
        ),
        Bar("write", "pwritev, O_DIRECT", True, _ratio(results["tiers::write[6MiB-direct]"])),
        Bar("write", "pwritev, page cache", False, _ratio(results["tiers::write[6MiB-cached]"])),
        *(
            Bar(
                f"read {cache}", "fsspec", False, _ratio(results[f"tiers::read_against_fsspec[6MiB-{cache}]"])
            )
            for cache in ("warm", "cold")
        ),
        Bar("load from files into pages", "preadv", True, _ratio(results["cache::load_from_disk"])),
    ]
    if LMCACHE in results:
        for place, way, theirs in ((8, "pack", "LMCache gather"), (9, "unpack", "LMCache scatter")):
            faster = results[LMCACHE][f"{way} to {theirs}"]
            ratio = 1 / faster["min"], 1 / faster["median"]
            shown.insert(place, Bar(f"{way}, vLLM's CPU pages", theirs, False, ratio))
    return shown


def draw(data: Mapping[str, Any], path: Path) -> None:
    """Left: time to first token with and without kvkit. Right: `bars`. Told apart without colours."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    dark, light = "#24435f", "#d9d4c8"
    settings = {
        "font.family": "STIXGeneral",
        "font.size": 8,
        "axes.linewidth": 0.6,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "hatch.linewidth": 0.5,
        "svg.hashsalt": "kvkit",
    }
    with plt.rc_context(settings):
        figure, (left, right) = plt.subplots(
            1, 2, figsize=(6.9, 3.5), width_ratios=(1, 1.45), constrained_layout=True
        )
        turns = data["demo"]["turns"]
        numbers = list(range(1, len(turns) + 1))
        with_s, without_s = ([turn[field] for turn in turns] for field in ("ttft_s", "ttft_cold_s"))
        left.bar(
            [n - 0.2 for n in numbers],
            without_s,
            0.38,
            color=light,
            edgecolor="black",
            linewidth=0.5,
            hatch="////",
            label="without kvkit",
        )
        left.bar(
            [n + 0.2 for n in numbers],
            with_s,
            0.38,
            color=dark,
            edgecolor="black",
            linewidth=0.5,
            label="with kvkit, from files",
        )
        for number, warm, cold in zip(numbers, with_s, without_s, strict=True):
            left.annotate(
                f"{cold / warm:.1f}×",
                (number, max(warm, cold)),
                (0, 3),
                textcoords="offset points",
                ha="center",
            )
        left.set(xlabel="turn of the conversation", xticks=numbers, ylabel="time to first token, seconds")
        left.legend(**_LEGEND)

        shown = bars(data["results"])
        for place, bar in enumerate(shown):
            least, median = bar.ratio
            right.barh(
                place,
                least - 1,
                0.66,
                left=1,
                color=dark if bar.roof else light,
                edgecolor="black",
                linewidth=0.5,
                hatch=None if bar.roof else "////",
                label="roof" if bar.roof else "peer",
            )
            right.plot(median, place, "o", ms=3, mfc="white", mec="black", mew=0.6, label="ratio of medians")
            slow = max(least, median) > 1 and least >= 1
            edge = max(least, median, 1.0) if slow else min(least, median, 1.0)
            right.annotate(
                f"{least:.2f}",
                (edge, place),
                (4 if slow else -4, 0),
                textcoords="offset points",
                va="center",
                ha="left" if slow else "right",
                fontsize=7,
            )
        right.axvline(1, color="black", linewidth=0.8)
        right.set_xscale("log")
        every = [ratio for bar in shown for ratio in bar.ratio]
        right.set_xlim(min(0.5, *every) / 1.9, max(2.0, *every) * 1.9)
        right.xaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
        right.xaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        right.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
        labels = [f"{bar.label} vs. {bar.other}" for bar in shown]
        right.set_yticks(range(len(shown)), labels, fontsize=7)
        right.tick_params(axis="y", length=0)
        right.invert_yaxis()
        right.set_xlabel("time of kvkit / time of the other")
        handles = dict(zip(*reversed(right.get_legend_handles_labels()), strict=True))
        order = "roof", "peer", "ratio of medians"
        right.legend([handles[name] for name in order], order, **_LEGEND)
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)


def draw_blend(sets: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Distance from full recompute's answers against computed rows, a panel per set."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    families = {"default": ("o", "-", "#24435f"), "k deviation": ("s", "--", "#8a6d3b")}
    settings = {
        "font.family": "STIXGeneral",
        "font.size": 8,
        "axes.linewidth": 0.6,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "svg.hashsalt": "kvkit",
    }
    with plt.rc_context(settings):
        figure, panels = plt.subplots(
            1, len(sets), figsize=(6.9, 2.3), constrained_layout=True, squeeze=False, sharex=True
        )
        for panel, (kind, methods) in zip(panels[0], sets.items(), strict=True):
            for family, (marker, line, colour) in families.items():
                names = [name for name in methods if name.startswith(f"{family} .") and "," not in name]
                found = sorted((methods[name] for name in names), key=lambda figures: figures["rows"])
                panel.errorbar(
                    [100 * figures["rows"] for figures in found],
                    [figures["kl"] for figures in found],
                    np.abs([[figures["kl"] - end for end in figures["kl_interval"]] for figures in found]).T
                    if found
                    else None,
                    marker=marker,
                    ms=3.5,
                    linestyle=line,
                    linewidth=0.9,
                    elinewidth=0.6,
                    color=colour,
                    label=family,
                )
            marked = {"naive": "x", "first n .15": "^", "random .15": "v"}
            for name, marker in marked.items():
                if name in methods:
                    figures = methods[name]
                    panel.plot(
                        100 * figures["rows"],
                        figures["kl"],
                        marker,
                        ms=4,
                        color="black",
                        mfc="white",
                        label=name,
                    )
            panel.set(title=kind, xlabel="rows computed, % of all", yscale="log")
            panel.yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
            panel.yaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:g}"))
            panel.yaxis.set_minor_locator(matplotlib.ticker.NullLocator())
        panels[0][0].set_ylabel("KL divergence, nats per token")
        handles, labels = panels[0][0].get_legend_handles_labels()
        if labels:
            figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)


def _compiled(path: Path) -> dict[str, Any] | None:
    """What the compile gate recorded, checked; None where the file is not there."""
    if not path.exists():
        return None
    found: dict[str, Any] = json.loads(path.read_text())
    kernels = found.get("kernels", [])
    absent = sorted({field for kernel in kernels for field in _KERNEL if not _has(kernel, field)})
    if absent or not kernels:
        command = f"run `python -m kvkit.kernels.tuning.gate --json {path}`"
        raise PaperError(f"{path} lacks {', '.join(absent) or 'kernels'}: {command}")
    return found


def _blended(path: Path, size: str) -> dict[str, Any] | None:
    """What `kvkit bench blend` found, checked; None where the file is not there."""
    if not path.exists():
        return None
    found: dict[str, Any] = json.loads(path.read_text())
    sets = found.get("sets", {})
    absent = [
        f"{field} of {method} in {kind}"
        for kind, methods in sets.items()
        for method, figures in methods.items()
        for field in _BLENDED
        if field not in figures
    ]
    if absent or not sets:
        command = f"run `kvkit bench blend --tokens {1024 * int(size[:-1])} --json {path}`"
        raise PaperError(f"{path} lacks {', '.join(absent) or 'sets'}: {command}")
    return found


def _by_name(document: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in document["results"]}


def _demo(path: Path) -> dict[str, Any]:
    """The demo's figures, checked."""
    command = f"run `kvkit demo --json {path}`"
    if not path.exists():
        raise PaperError(f"{path} is missing: {command}")
    found: dict[str, Any] = json.loads(path.read_text())
    absent = [field for field in DEMO_FIELDS if not found.get(field)]
    absent += [
        f"turn {number}'s {field}"
        for number, turn in enumerate(found.get("turns", []), 1)
        for field in TURN_FIELDS
        if turn.get(field) is None
    ]
    if absent:
        raise PaperError(f"{path} lacks {', '.join(absent)}: {command}")
    return found


def _has(entry: Any, field: str) -> bool:
    """Whether `entry` has `field`: "GB/s" as it is, "pack/of copy_/min" as a way into it."""
    if not isinstance(entry, Mapping):
        return False
    if isinstance(entry.get(field), (int, float, str)):
        return True
    return any(
        field.startswith(f"{name}/") and _has(inner, field[len(name) + 1 :]) for name, inner in entry.items()
    )


def _ratio(entry: Mapping[str, float]) -> tuple[float, float]:
    return entry["ratio_min"], entry["ratio_median"]


def _of_copy(results: Results, name: str, way: str) -> tuple[float, float]:
    """Time of pack or unpack over that of copy_. The benchmark gives the speed: the inverse."""
    share = results[name][way]["of copy_"]
    return 1 / share["min"], 1 / share["median"]


def main() -> None:
    """Build from the command line's folders."""
    folders = [Path(argument) for argument in sys.argv[1:3]]
    try:
        pdf = build(*folders)
    except PaperError as error:
        sys.exit(str(error))
    except typst.TypstError as error:
        sys.exit(error.diagnostic or error.message)
    print(pdf)


if __name__ == "__main__":
    main()
