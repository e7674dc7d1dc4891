"""The pictures of the report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import rc_context, ticker
from matplotlib.figure import Figure

from paper.sources import LLAMA, LMCACHE

Results = Mapping[str, Mapping[str, Any]]

_LEGEND: Mapping[str, Any] = {
    "frameon": False,
    "loc": "lower center",
    "bbox_to_anchor": (0.5, 1.0),
    "ncols": 3,
    "columnspacing": 1.2,
    "handlelength": 1.6,
    "handletextpad": 0.5,
}


SIDES = ("behind", "level", "ahead", "knowing")
"""Lists of a leaderboard: methods at equal rows, by where they stand beside the default."""


@contextmanager
def drawing(path: Path, columns: int, height: float, **layout: Any) -> Iterator[tuple[Any, Any]]:
    """A figure as wide as the page, in inches, and its panels in a row; saved at the end."""
    style = {
        "font.family": "STIXGeneral",
        "font.size": 8,
        "axes.linewidth": 0.6,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "hatch.linewidth": 0.5,
        "svg.hashsalt": "kvkit",
    }
    with rc_context(style):
        figure = Figure(figsize=(6.9, height), layout="constrained")
        yield figure, figure.subplots(1, columns, squeeze=False, **layout)[0]
        figure.savefig(path, metadata={"Date": None})


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


def bars(results: Results) -> list[Bar]:
    """What the figure shows, from the top: records, pages, tiers, the cache as a whole."""
    slowest = {way: max(_of_copy(results, name, way) for name in LLAMA) for way in ("pack", "unpack")}
    gather, scatter = (
        results[LMCACHE][f"{way} to {theirs}"]
        for way, theirs in (("pack", "LMCache gather"), ("unpack", "LMCache scatter"))
    )
    return [
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
        Bar("pack, vLLM's CPU pages", "LMCache gather", False, (1 / gather["min"], 1 / gather["median"])),
        Bar(
            "unpack, vLLM's CPU pages", "LMCache scatter", False, (1 / scatter["min"], 1 / scatter["median"])
        ),
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


def draw(data: Mapping[str, Any], path: Path) -> None:
    """Left: time to first token with and without kvkit. Right: `bars`. Told apart without colours."""
    dark, light = "#24435f", "#d9d4c8"
    with drawing(path, columns=2, height=3.5, width_ratios=(1, 1.45)) as (_, (left, right)):
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
        right.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        right.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        right.xaxis.set_minor_locator(ticker.NullLocator())
        labels = [f"{bar.label} vs. {bar.other}" for bar in shown]
        right.set_yticks(range(len(shown)), labels, fontsize=7)
        right.tick_params(axis="y", length=0)
        right.invert_yaxis()
        right.set_xlabel("time of kvkit / time of the other")
        handles = dict(zip(*reversed(right.get_legend_handles_labels()), strict=True))
        order = "roof", "peer", "ratio of medians"
        right.legend([handles[name] for name in order], order, **_LEGEND)


def draw_blend(boards: Sequence[Mapping[str, Any]], path: Path) -> None:
    """By how much divergences from full recompute exceed the default's, a panel per leaderboard."""
    names = list(dict.fromkeys(name for board in boards for side in SIDES for name in board[side]))
    names.sort(key=lambda name: max(_exceeds(board, name)[0] for board in boards if name in board["methods"]))
    height = 0.6 + 0.16 * len(names)
    with drawing(path, columns=len(boards), height=height, sharey=True) as (_, panels):
        for panel, board in zip(panels, boards, strict=True):
            for place, name in enumerate(names):
                if name not in board["methods"]:
                    continue
                value, low, high = _exceeds(board, name)
                panel.plot([low, high], [place, place], color="#24435f", linewidth=1)
                panel.plot(value, place, "o", ms=3.5, color="#24435f")
            panel.axvline(0, color="black", linewidth=0.6)
            panel.set(title=f"{board['model']}, {board['tokens']:,} tokens")
            panel.set_xlabel("KL divergence above the default's, nats per token")
        panels[0].set_yticks(range(len(names)), names, fontsize=7)
        panels[0].invert_yaxis()


def _exceeds(board: Mapping[str, Any], name: str) -> tuple[float, float, float]:
    """The difference from the default's divergence, and its interval."""
    row = board["methods"][name]
    return row["kl_ahead"], row["kl_ahead_interval"][0], row["kl_ahead_interval"][1]


def _ratio(entry: Mapping[str, float]) -> tuple[float, float]:
    return entry["ratio_min"], entry["ratio_median"]


def _of_copy(results: Results, name: str, way: str) -> tuple[float, float]:
    """Time of pack or unpack over that of copy_. The benchmark gives the speed: the inverse."""
    share = results[name][way]["of copy_"]
    return 1 / share["min"], 1 / share["median"]


def draw_frontier(cells: list[dict[str, Any]], path: Path) -> None:
    """Hits of every way of evicting against what could be had, a panel for each of four traces."""
    ways = {
        "could be had": ("None", ":", "black"),
        "told": ("D", "--", "#777777"),
        "sessions": ("v", "-", "#7a3f8f"),
        "arc": ("o", "-", "#24435f"),
        "tinylfu": ("^", "-", "#8a6d3b"),
        "s3fifo": ("s", "-", "#6b8f71"),
        "lru": ("x", "-", "#a23b3b"),
    }
    traces = defaultdict[str, list[dict[str, Any]]](list)
    for cell in cells:
        if cell["trace"] in ("Claude Code", "Mooncake, conversation", "mixed", "rag"):
            traces[cell["trace"]].append(cell)
    with drawing(path, columns=len(traces), height=1.9) as (figure, panels):
        for panel, (trace, found) in zip(panels, traces.items(), strict=True):
            for way, (marker, line, colour) in ways.items():
                hits = [
                    100 * (cell["bound"] if way == "could be had" else cell["hits"][way]) for cell in found
                ]
                shares = [100 * cell["share"] for cell in found]
                panel.plot(
                    shares, hits, marker=marker, ls=line, ms=3, lw=0.9, color=colour, mfc="white", label=way
                )
            panel.set(title=trace, xlabel="capacity, % of distinct chunks", xscale="log")
            panel.set_xticks(shares, [f"{share:g}" for share in shares])
            panel.xaxis.set_minor_locator(ticker.NullLocator())
            panel.margins(x=0.12)
        panels[0].set_ylabel("chunks that are hits, %")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)


def draw_timeline(events: list[dict[str, Any]], path: Path) -> None:
    """What the threads of one load did and when, a row for each."""
    kinds = {
        "read disk": "#24435f",
        "read s3": "#8fb0cc",
        "verify": "#d9a441",
        "unpack": "#a23b3b",
        "write back to disk": "#b9b3a4",
    }

    def row(thread: str) -> tuple[bool, str, int]:
        tier, _, number = thread.rpartition("-")
        return thread.startswith("kvkit-"), tier, int(number) if number.isdigit() else 0

    threads = sorted({event["thread"] for event in events}, key=row)
    with drawing(path, columns=1, height=2.9) as (figure, (panel,)):
        for kind, colour in kinds.items():
            for place, thread in enumerate(threads):
                spans = [
                    (1e3 * event["begin_s"], 1e3 * (event["end_s"] - event["begin_s"]))
                    for event in events
                    if (event["kind"], event["thread"]) == (kind, thread)
                ]
                panel.broken_barh(spans, (place - 0.42, 0.84), color=colour, edgecolor="white", linewidth=0.3)
            panel.plot([], [], color=colour, linewidth=5, label=kind)
        names = [thread.removeprefix("kvkit-") if row(thread)[0] else "load" for thread in threads]
        panel.set_yticks(range(len(threads)), names, fontsize=5.5)
        panel.tick_params(axis="y", length=0)
        panel.invert_yaxis()
        panel.set(xlabel="milliseconds since the load began", xlim=(0, None))
        handles, labels = panel.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
