"""Write the tables of README.md and docs/ from results/, so that no quoted figure is typed by hand.

python -m benchmarks.report.tables
"""

from __future__ import annotations

import json
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.folders import RESULTS, ROOT
from benchmarks.report import tables_gpu, tables_pools, tables_proofs, tables_vllm
from benchmarks.research import leaderboard
from benchmarks.soak import __main__ as soak
from kvkit.lab.demo.pd import FLOWS, by_tier

PAGES = tuple(
    str(path.relative_to(ROOT))
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if "<!-- table:" in path.read_text()
)
MACHINE = "amd-epyc-2-cores"
"""Whose results are quoted."""
GPU = "nvidia-h100-80gb-hbm3"
SECOND_GPU = "nvidia-h200"
"""And which GPUs'."""


def render(page: str, results: Path = RESULTS) -> str:
    """`page` with each table between its markers made anew.

    In `engine`, `kernels`, `blend_1k` and `blend_4k`, what was not measured is left out, all of it with a
    sentence.

    Raises:
        KeyError: a marker names no table, or a benchmark of another table has no result; `make bench` makes
            them.
    """
    measured = json.loads((results / f"{MACHINE}.json").read_text())
    figures = {entry["name"]: entry for entry in measured["results"]}
    demo = json.loads((results / f"demo-{MACHINE}.json").read_text())
    tables: dict[str, Callable[[], list[list[str]]]] = {
        "demo": lambda: _demo(demo["turns"]),
        "speed": lambda: _speed(demo["turns"], figures),
        "ratios": lambda: _ratios(figures),
        "checksums": lambda: _checksums(figures),
        "codecs": lambda: _codecs(figures),
        "eviction": lambda: _eviction(json.loads((results / "simulate.json").read_text())),
        "frontier": lambda: _frontier(json.loads((results / "frontier.json").read_text())["runs"]),
        "routing": lambda: _routing(json.loads((results / "routing.json").read_text())),
        "engine": lambda: _engine(figures),
        "kernels": lambda: _kernels(figures),
        "compiled_peers": lambda: _compiled_peers(json.loads((results / "compiled-peers.json").read_text())),
        "blend_1k": lambda: _blend(results / f"blend-1k-{MACHINE}.json"),
        "blend_4k": lambda: _blend(results / f"blend-4k-{MACHINE}.json"),
        "leaderboard": lambda: leaderboard.methods(results),
        "leaderboard_tasks": lambda: leaderboard.tasks(results),
        "blend_rows": lambda: leaderboard.curve(results / f"blend-rows-4k-{MACHINE}.json"),
        "lost_context": lambda: leaderboard.overpaid(results / f"lost-context-{MACHINE}.json"),
        "blend_models": lambda: _blend_models(json.loads((results / "blend-models.json").read_text())),
        "models": lambda: _models(json.loads((results / "models.json").read_text())),
        "decoders": lambda: _decoders(json.loads((results / "decoders.json").read_text())["decoders"]),
        "models_lmcache": lambda: _ways(_of_lmcache(json.loads((results / "models.json").read_text()))),
        "vllm_versions": lambda: _versions(json.loads((results / "vllm-versions.json").read_text())["runs"]),
        "serve": lambda: _serve(json.loads((results / f"serve-{MACHINE}.json").read_text())),
        "queued": lambda: tables_vllm.queued(json.loads((results / f"queued-{MACHINE}.json").read_text())),
        "sending": lambda: tables_vllm.sending(json.loads((results / f"sending-{MACHINE}.json").read_text())),
        "precision": lambda: _precision(json.loads((results / f"precision-{MACHINE}.json").read_text())),
        "handoff": lambda: _handoff(figures),
        "private": lambda: _private(figures),
        "flows": lambda: _flows(results),
        "vllm_blend": lambda: tables_vllm.blend(results / f"vllm-blend-{MACHINE}.json"),
        "vllm_blend_stages": lambda: tables_vllm.blend_stages(results / f"vllm-blend-{MACHINE}.json"),
        "vllm_blend_exact": lambda: tables_vllm.blend_exact(results / f"vllm-blend-{MACHINE}.json"),
        "replay": lambda: tables_vllm.replay(results / "replay.json"),
        "hybrid": lambda: tables_vllm.hybrid(results / f"vllm-hybrid-{MACHINE}.json"),
        "snapshots": lambda: tables_vllm.snapshots(results / f"vllm-hybrid-{MACHINE}.json"),
        "simulated_snapshots": lambda: _simulated(json.loads((results / "snapshots.json").read_text())),
        "scale": lambda: _scale(json.loads((results / f"scale-{MACHINE}.json").read_text())["results"]),
        "many_requests": lambda: _many(json.loads((results / f"many-requests-{MACHINE}.json").read_text())),
        "fleet": lambda: _fleet(json.loads((results / "fleet.json").read_text())["runs"]),
        **tables_pools.tables(figures),
        "pd": lambda: _pd(json.loads((results / f"pd-{MACHINE}.json").read_text())),
        **tables_proofs.proofs(results),
        **tables_gpu.tables(results / f"gpu-{GPU}.json", "gpu"),
        **tables_gpu.tables(results / f"gpu-{SECOND_GPU}.json", "h200"),
        **soak.tables(results / f"soak-{MACHINE}.json"),
    }

    def fill(match: re.Match[str]) -> str:
        return f"{match[1]}\n{_markdown(tables[match[2]]())}\n{match[3]}"

    return re.sub(r"(<!-- table: (\w+) -->)\n.*?(<!-- end -->)", fill, page, flags=re.DOTALL)


def _demo(turns: Sequence[dict[str, Any]]) -> list[list[str]]:
    rows = [
        ["turn", "prompt tokens", "hits from disk", "without kvkit", "with kvkit", "speedup", "same text"]
    ]
    for number, turn in enumerate(turns, 1):
        cold, warm = turn["ttft_cold_s"], turn["ttft_s"]
        hits = sum(turn["hit_tokens"].values())
        same = "yes" if turn["identical"] else "no"
        prompt = str(turn["prompt_tokens"])
        rows.append(
            [str(number), prompt, str(hits), f"{cold:.2f} s", f"{warm:.2f} s", f"{cold / warm:.1f}×", same]
        )
    return rows


def _serve(document: dict[str, Any]) -> list[list[str]]:
    """Hits of long-document QA, and what each system costs where nothing is reused."""
    found = [row for row in document["results"] if row["workload"] == "document-qa"]
    cold = found[0]["ttft_s"]["p50"]  # plain vLLM computes what others have
    rows = [["", "tokens hit", "TTFT, hit", "of plain vLLM's", "TTFT without reuse, of plain vLLM's"]]
    for row in found:
        control = document["overhead"].get(row["system"])
        shown = [f"{row['hit_tokens']:,} of {row['prompt_tokens']:,}", f"{row['ttft_s']['p50']:.3f} s"]
        shown.append(f"{row['ttft_s']['p50'] / cold:.3f}")
        shown.append("" if control is None else f"{control['median']:.3f}")
        rows.append([row["system"], *shown])
    return rows


def _handoff(figures: dict[str, Any]) -> list[list[str]]:
    """Each transport against its roof."""
    rows = [["address", "against", "that took", "this", "ratio of minima", "of medians"]]
    for name, way in (("one_host", "unix"), ("loopback[tcp]", "tcp"), ("loopback[nixl]", "nixl")):
        entry = figures[f"handoff::{name}"]
        found, roof = entry[way], entry["against"]
        times = (f"{it['us'] / 1e3:.1f} ms" for it in (entry[roof], found))
        rows.append([f"`{way}://`", roof, *times, f"{found['min']:.2f}", f"{found['median']:.2f}"])
    return rows


def _private(figures: dict[str, Any]) -> list[list[str]]:
    """What it takes that nobody changes what was verified."""
    moved = figures["handoff::private_memory"]
    ways = [(f"{moved['bytes'] >> 20} MiB through the socket", "by shared memory", moved["private"], -1)]
    for layers in (11, 30):
        entry = figures[f"handoff::copy_before_verifying[{layers}]"]
        what = f"copying {entry['bytes'] / 1e6:.0f} MB, then verifying the copy"
        ways.append((what, "verifying in place", entry["copy and verify"], 1))
    return [
        ["", "against", "times as long, of minima", "of medians"],
        *(
            [what, against, *(f"{found[k] ** e:.1f}" for k in ("min", "median"))]
            for what, against, found, e in ways
        ),
    ]


def _flows(results: Path) -> list[list[str]]:
    """A conversation over a prefill and a decode engine, and over plain vLLM, by flow and turn."""
    rows = [["flow", "turn", "prompt tokens", "P loaded", "D loaded", "TTFT", "plain vLLM's", "same text"]]
    for flow in FLOWS:
        document = json.loads((results / f"flow-{flow}-{MACHINE}.json").read_text())
        for number, turn in enumerate(document["turns"], 1):
            loaded = (by_tier(turn[key]) for key in ("prefill_hits", "decode_received"))
            times = (f"{turn[key]:.2f} s" for key in ("ttft_s", "plain_ttft_s"))
            same = "yes" if turn["identical"] else "no"
            first = f"`{flow}`" if number == 1 else ""
            rows.append([first, str(number), f"{turn['prompt_tokens']:,}", *loaded, *times, same])
    return rows


def _pd(document: dict[str, Any]) -> list[list[str]]:
    """From a prompt to the decode engine's first token; of each time the minimum and the median."""
    rows = [["prompt", "", "handed", "P's token", "then D's first", "D's next, each", "D's first without P"]]

    def milliseconds(found: dict[str, float]) -> str:
        return " / ".join(f"{found[kind] * 1e3:.0f}" for kind in ("min", "median")) + " ms"

    for found in document["results"]:
        times = (milliseconds(found[key]) for key in ("prefill_s", "first_s", "step_s", "alone_s"))
        rows.append([f"{found['prompt_tokens']:,}", found["way"], f"{found['hit_tokens']:,}", *times])
    return rows


def _ratios(figures: dict[str, Any]) -> list[list[str]]:
    rows = [["what", "against", "ratio of minima", "of medians"]]

    def add(what: str, against: str, found: dict[str, float], inverse: bool = False) -> None:
        low, middle = (found.get(f"ratio_{k}", found.get(k, 0.0)) for k in ("min", "median"))
        rows.append([what, against, *(f"{1 / x if inverse else x:.2f}" for x in (low, middle))])

    for way in ("pack", "unpack"):
        found = figures["pages::pages[vllm-cpu-LBHNC]"][way]["of copy_"]
        add(f"{way} 47 MB, vLLM's CPU layout", "torch `copy_`, two threads", found, inverse=True)
    if "pages::lmcache" in figures:
        for way, peer in (("pack", "LMCache gather"), ("unpack", "LMCache scatter")):
            found = figures["pages::lmcache"][f"{way} to {peer}"]
            add(f"{way} 47 MB, the same", f"LMCache 0.5.6 {peer.split()[1]} on CPU", found, inverse=True)
    record = figures["record::speed[memory]"]
    for what in ("seal", "verify"):
        add(f"{what} an 11.8 MB record", "memcpy", record[what])
    for state in ("warm", "cold"):
        add(
            f"read 32 × 6 MiB, {state}",
            "bare `preadv`, as many threads",
            figures[f"tiers::read[6MiB-{state}]"],
        )
        found = figures[f"tiers::read_against_fsspec[6MiB-{state}]"]
        add(f"read 32 × 6 MiB, {state}", "fsspec's `cat` of the list", found)
    for other, words in (("direct", "past the page cache"), ("cached", "through it")):
        bare = f"bare `pwritev` {words}, rename, as many threads"
        add("write 32 × 6 MiB, sustained", bare, figures[f"tiers::write[6MiB-{other}]"])
    for chunk in (256, 16):
        found = figures[f"chunks::keys[{chunk}]"]
        times = (f"{found[f'{kind}_s'] * 1e6:.0f} µs" for kind in ("min", "median"))
        rows.append([f"keys of 131,072 tokens, chunks of {chunk}", "", *times])
    overhead = figures["cache::overhead_of_a_memory_hit"]["us_per_chunk"]
    rows.append(
        [
            "a memory hit, beside its bytes",
            "",
            f"{overhead['min']:.0f} µs",
            f"{overhead['median']:.0f} µs a chunk",
        ]
    )
    return rows


def _speed(turns: Sequence[dict[str, Any]], figures: dict[str, Any]) -> list[list[str]]:
    """A turn of the demo, and those of `_ratios` that say most: one for each roofline and each peer."""
    head, *found = _ratios(figures)
    second = turns[1]
    ratio = f"{second['ttft_s'] / second['ttft_cold_s']:.2f}"
    rows = [head, ["first token of `make demo`'s second turn, from disk", "without kvkit", ratio, ratio]]
    shown = (
        ("pack 47 MB, vLLM's CPU layout", "torch"),
        ("pack 47 MB, the same", "LMCache"),
        ("unpack 47 MB, the same", "LMCache"),
        ("verify an 11.8 MB record", "memcpy"),
        ("read 32 × 6 MiB, cold", "bare"),
        ("read 32 × 6 MiB, warm", "fsspec"),
        ("write 32 × 6 MiB, sustained", "bare `pwritev` past"),
    )
    return rows + [row for row in found if any(row[0] == w and row[1].startswith(a) for w, a in shown)]


def _checksums(figures: dict[str, Any]) -> list[list[str]]:
    rows = [["checksum", "out of cache", "time / memcpy", "in cache", "time / memcpy"]]
    memory, cache = figures["record::speed[memory]"], figures["record::speed[cache]"]
    names = (
        "memcpy",
        "xxh3_64, whole",
        "xxh3_64, per layer",
        "crc32c",
        "zlib.crc32",
        "blake3",
        "seal",
        "verify",
    )
    for name in names:
        cells = [name]
        for found in (memory[name], cache[name]):
            cells += [f"{found['gb_per_s']:.0f} GB/s", f"{found['ratio_min']:.2f}"]
        rows.append(cells)
    return rows


def _codecs(figures: dict[str, Any]) -> list[list[str]]:
    rows = [["stored as", "codec", "payload left", "compress", "decompress", "time / memcpy"]]
    for dtype in ("float32", "bfloat16"):
        for codec in ("zstd", "bitshuffle-zstd"):
            found = figures[f"record::codec[{dtype}-{codec}]"]
            speed = [f"{found[way]['gb_per_s']:.2f} GB/s" for way in ("compress", "decompress")]
            against = " / ".join(f"{found[way]['ratio_min']:.0f}" for way in ("compress", "decompress"))
            rows.append([dtype, codec, f"{found['compressed_to']:.0%}", *speed, against])
    return rows


def _eviction(found: dict[str, Any]) -> list[list[str]]:
    """Hit rates, the mean over seeds; the best of a row in bold."""
    policies = found["policies"]
    rows = [["trace", "capacity", *policies]]
    for trace in dict.fromkeys(run["trace"] for run in found["runs"]):
        for share in found["shares"]:
            means = []
            for policy in policies:
                rates = [
                    run["hit_rate"]
                    for run in found["runs"]
                    if (run["trace"], run["share"], run["policy"]) == (trace, share, policy)
                ]
                means.append(f"{sum(rates) / len(rates):.1%}")
            best = max(means, key=lambda cell: float(cell[:-1]))
            cells = [f"**{cell}**" if cell == best else cell for cell in means]
            rows.append([trace, f"{share:.0%}", *cells])
    return rows


def _frontier(runs: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Hit rates of LRU and of the optimum, and what share of their gap each way closes: means over seeds."""
    ways = [way for way in runs[0]["hits"] if way != "lru"]
    rows = [["trace", "capacity", "lru", "could be had", *ways]]
    groups = defaultdict[tuple[str, float], list[dict[str, Any]]](list)
    for run in runs:
        groups[run["trace"], run["share"]].append(run)
    closed = defaultdict[str, list[float]](list)
    for (trace, share), found in groups.items():
        had = statistics.fmean(run["hits"]["lru"] / run["asked"] for run in found)
        bound = statistics.fmean(run["bound"] / run["asked"] for run in found)
        cells = [f"{had:.1%}", f"{bound:.1%}"]
        for way in ways:
            gaps = [
                (run["hits"][way] - run["hits"]["lru"]) / (run["bound"] - run["hits"]["lru"]) for run in found
            ]
            closed[way].append(statistics.fmean(gaps))
            cells.append(f"{closed[way][-1]:.0%}")
        rows.append([trace, f"{share:.0%}", *cells])
    rows.append(["mean", "", "", "", *(f"{statistics.fmean(closed[way]):.0%}" for way in ways)])
    return rows


def _routing(found: dict[str, Any]) -> list[list[str]]:
    """Hit rate, time to the first token (median / 99th percentile) by trace and way: means over seeds."""
    cells = defaultdict[tuple[str, str], list[tuple[float, ...]]](list)
    for run in found["runs"]:
        way = run["route"] + ("" if run["delay_s"] is None else f", {run['delay_s']:g} s late")
        figures = (run[name] for name in ("hit_rate", "ttft_p50_s", "ttft_p99_s"))
        cells[run["trace"], way].append(tuple(figures))
    rows = [["", *dict.fromkeys(way for _, way in cells)]]
    for trace in dict.fromkeys(trace for trace, _ in cells):
        means = [map(statistics.mean, zip(*cells[trace, way], strict=True)) for way in rows[0][1:]]
        rows.append([trace, *(f"{hit:.1%}, {p50:.2f} / {p99:.1f} s" for hit, p50, p99 in means)])
    return rows


def _engine(figures: dict[str, Any]) -> list[list[str]]:
    """Ratios of times, and beside a prefetch's what it would be if the slower tier took all of the time."""
    rows = [["what", "against", "ratio of minima", "of medians", "at best"]]
    both = "64 × 8 MiB, half from a cold disk, half from S3"
    linked = "64 × 8 MiB, 54 from a cold disk, 10 from S3 over a link of 2 Gbit/s"
    moves = {
        "prefetch_from_disk_and_s3": f"prefetch {both}",
        "prefetch_from_disk_and_s3_behind_a_link": f"prefetch {linked}",
        "overlap_of_waiting_tiers[prefetch]": "the same, half and half, waiting alone",
        "overlap_of_waiting_tiers[load-64-slots]": "load them through 64 slots, waiting alone",
        "overlap_of_waiting_tiers[load-16-slots]": "load them through 16 slots, waiting alone",
    }
    for name, what in moves.items():
        found = figures.get(f"engine::{name}")
        if found is not None:
            ratios = (found[key] for key in ("ratio_min", "ratio_median", "bound_median"))
            rows.append([what, "one part, then the other", *(f"{ratio:.2f}" for ratio in ratios)])
    for target in ("memory", "disk"):
        found = figures.get(f"engine::write_back[{target}]")
        if found is not None:
            what = f"load 32 × 8 MiB from S3, writing back to {target}"
            ratios = (found[key] for key in ("ratio_min", "ratio_median"))
            rows.append([what, "without writing back", *(f"{ratio:.2f}" for ratio in ratios), "1.00"])
    return rows


def _kernels(figures: dict[str, Any]) -> list[list[str]]:
    rows = [["what", "against", "ratio of minima", "of medians"]]

    def add(what: str, against: str, name: str, *way: str) -> None:
        """A row of the ratio of times that `way` leads to, if it is there; "of copy_" is one of speeds."""
        found = figures.get(name)
        for step in way:
            found = None if found is None else found.get(step)
        if found is not None:
            ratios = [found.get(f"ratio_{kind}", found.get(kind)) for kind in ("min", "median")]
            shown = [1 / ratio if way[-1:] == ("of copy_",) else ratio for ratio in ratios]
            rows.append([what, against, *(f"{ratio:.2f}" for ratio in shown)])

    copy = "torch `copy_` of the pages' bytes, two threads"
    for order in ("LBHNC", "LBNHC", "BLHNC", "BLNHC"):
        for way in ("pack", "unpack"):
            add(f"{way}, Llama, {order}", copy, f"pages::pages[llama-{order}]", way, "of copy_")
    for name, words in (("llama-bfloat16", "Llama"), ("smollm2-float32", "SmolLM2"), ("mla-bfloat16", "MLA")):
        for way in ("unpack rotated", "pack fp8", "unpack fp8", "unpack fp8 rotated", "pack int8"):
            dtype = name.rpartition("-")[2]
            add(f"{way}, {words}, {dtype}", copy, f"pages::conversions[{name}]", way, "of copy_")
    for what in ("Llama, 64 tokens", "Llama, 256 tokens", "opaque SmolLM2, 512 tokens"):
        for way in ("pack", "unpack"):
            add(f"{way} {what}, tuned", "its default", f"tuned::tuned[{way} {what}]", "tuned to default")
    shapes = {"smollm2": "SmolLM2, 4096 keys", "llama-8b": "Llama-3.1-8B, 2048 keys"}
    for name, words in shapes.items():
        what = f"attention of 15 % of the rows, {words}"
        add(what, "torch's of the same rows with a mask", f"blend::attention[{name}]", "masked")
        add(what, "torch's of all rows, causal", f"blend::attention[{name}]", "full")
    around = "blend::around_the_attention"
    add("rotate and scatter the rows, SmolLM2", "their attention", around, "scatter")
    add("scores of the question, SmolLM2", "the rows' attention", around, "scores")
    for tokens in ("1k", "4k"):
        name = f"prefill::blended_prefill[{tokens}]"
        full = "the model's own, of the whole prompt"
        add(f"blended prefill, SmolLM2, {tokens} tokens", full, name)
        add("the same, recomputing nothing", full, name, "recomputing nothing")
    for way in ("pack", "unpack"):
        add(f"{way} under XLA, SmolLM2, float32", "numpy's copy", f"jax::pages[{way}]", "XLA")
    add("attention under XLA, SmolLM2, 4096 keys", "the same on torch tensors", "jax::attention", "XLA")
    return rows


def _compiled_peers(document: dict[str, Any]) -> list[list[str]]:
    names = (
        "tile",
        "warps",
        "stages",
        "registers",
        "instructions",
        "per_mma",
        "waits",
        "in_flight",
        "blocks_per_sm",
    )
    head = "tile", "warps", "stages", "registers", "instructions", "of these per product", "waits"
    rows = [["kernel", *head, "copies in flight", "blocks per SM"]]
    return rows + [[e["kernel"], *(str(e[name]) for name in names)] for e in document["kernels"]]


def _blend(path: Path) -> list[list[str]]:
    if not path.exists():
        return [["method"]]
    sets: dict[str, Any] = json.loads(path.read_text())["sets"]
    kinds = list(sets)
    rows = [["method", "rows", *(f"KL, {kind}" for kind in kinds), "exact answers", "speedup"]]
    first = sets[kinds[0]]
    for name in sorted(first, key=lambda name: (first[name]["rows"], name)):
        cells = [name, f"{first[name]['rows']:.1%}"]
        for kind in kinds:
            low, high = sets[kind][name]["kl_interval"]
            cells.append(f"{sets[kind][name]['kl']:.3f} ({low:.3f}–{high:.3f})")
        exact = [sets[kind][name]["exact"] for kind in kinds if "exact" in sets[kind][name]]
        cells += ["".join(f"{value:.2f}" for value in exact), f"{first[name]['speedup']:.1f}×"]
        rows.append(cells)
    return rows


def _blend_models(document: dict[str, Any]) -> list[list[str]]:
    """What blending in vLLM makes of each architecture's answers."""
    rows = [["architecture", "of interest", "KL, naive", "KL, 15 %", "every row: largest difference"]]
    for name, found in document["architectures"].items():
        shown = ["refused", "", ""]
        if "refused" not in found:
            shown = [f"{found['kl_naive']:.2g}", f"{found['kl']:.2g}", f"{found['difference']:.1g}"]
        rows.append([name, found["special"], *shown])
    return rows


def _models(document: dict[str, Any]) -> list[list[str]]:
    """What each architecture of the zoo does with kvkit on every way that KV comes."""
    found = document["architectures"]
    rows = _ways(found)
    rows[0][1:1], rows[0][len(rows[0]) :] = ["of interest"], ["tolerated", "wrong KV, smallest"]
    for row, one in zip(rows[1:], found.values(), strict=True):
        row.insert(1, one["special"])
        row += (
            [f"{one['tolerance']:g}", f"{min(one['faults'].values()):.1g}"] if "faults" in one else ["", ""]
        )
    return rows


def _decoders(found: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Kinds of decoders of transformers by what becomes of them, with the reason."""
    kinds = defaultdict[str, list[str]](list)
    for kind, one in found.items():
        if "absent" in one:
            kinds["not tried: no small model can be made"].append(kind)
        elif "refused" in one:
            why = one["refused"].removeprefix(f"{one['class']}: ")
            kinds[f"refused: {re.split(':|;| of layers| of all', why)[0]}"].append(kind)
        else:
            kinds["cached: same tokens, logits within 1e-4"].append(kind)
    names = {what: ", ".join(f"`{kind}`" for kind in which) for what, which in sorted(kinds.items())}
    return [["", "", "kinds"], *([what, str(len(kinds[what])), which] for what, which in names.items())]


def _ways(found: dict[str, dict[str, Any]]) -> list[list[str]]:
    """What became of each architecture on every way, and how far log-probabilities were off at most."""
    ways = next(list(one["ways"]) for one in found.values() if "ways" in one)
    rows = [["architecture", *ways, "largest difference"]]
    for name, one in found.items():
        if "ways" in one:
            gone = [one["ways"][way] for way in ways]
            worst = f"{max(way.get('difference', 0.0) for way in gone):.1g}"
            rows.append([name, *(_outcome(way) for way in gone), worst])
        else:
            kind = "refused" if "refused" in one else "not run here"
            why = (one.get("refused") or one["absent"]).partition("; ")[0]
            rows.append([name, *[kind] * len(ways), f"because: {why}"])
    return rows


def _versions(runs: Sequence[dict[str, Any]]) -> list[list[str]]:
    """The versions of vLLM that the tests ran with, and how steps were scheduled."""
    rows = [["vLLM", "build", "model runner", "steps", "torch", "tests passed", "failed", "day"]]
    for run in runs:
        told = [run["vllm"], run["build"], run["runner"], run["scheduling"], run["torch"].partition("+")[0]]
        rows.append([*told, str(run["passed"]), str(run["failed"] + run["error"]), run["day"]])
    return rows


def _of_lmcache(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What became of each architecture with LMCache's connector."""
    return {name: one["lmcache"] for name, one in document["architectures"].items()}


def _outcome(way: dict[str, Any]) -> str:
    if "refused" in way:
        return f"refused because: {way['refused'].partition('; ')[0]}"
    return "works" if way["works"] else "differs" if way["loaded_tokens"] else "no hits"


def _precision(document: dict[str, Any]) -> list[list[str]]:
    """Quality, bytes and times of each form of records."""
    rows = [["model", "form", "KL", "top 1", "codes", "bytes a token", "store", "load"]]
    for model, found in document["models"].items():
        for form, row in found["forms"].items():
            kl = f"{row['kl']:.4f}" if row["kl"] else "0"
            shares = [f"{row[figure]:.1%}" for figure in ("top1", "exact")]
            times = [f"{row[what]:.2f} ×" for what in ("store", "load")]
            rows.append([model, form, kl, *shares, f"{row['bytes_per_token']:,.0f}", *times])
    return rows


def _simulated(found: dict[str, Any]) -> list[list[str]]:
    """What snapshots take and bring in simulations, by which are stored."""
    limit = f"{found['capacity_bytes'] >> 30} GiB"
    rows = [["trace", "`snapshot_every`", "written", "hits", f"hits of {limit}"]]
    for run in found["runs"]:
        hits = (f"{run[key]:.1%}" for key in ("hit_rate", "limited_hit_rate"))
        rows.append(
            [run["trace"], str(run["snapshot_every"]), f"{run['written_bytes'] / 1e9:,.0f} GB", *hits]
        )
    return rows


def _scale(found: Sequence[dict[str, Any]]) -> list[list[str]]:
    """What a record takes of an index, by how many there are."""
    rows = [
        ["index of", "records", "bytes a record", "opened in", "records looked up a second", "put a second"]
    ]
    words = {"folder": "a folder", "full_folder": "a folder that is full", "memory": "memory that is full"}
    words |= {"shm": "a pool that is full", "router": "blocks of engines, in the router"}
    for part in words:
        for one in sorted((one for one in found if one["part"] == part), key=lambda one: one["records"]):
            puts = f"{one['puts_per_s']:,.0f}" if "puts_per_s" in one else ""
            size = f"{one['records']:,}", f"{one['bytes_per_record']:.0f}", f"{one['open_s']:.1f} s"
            rows.append([words[part], *size, f"{one['lookups_per_s']:,.0f}", puts])
    return rows


def _many(document: dict[str, Any]) -> list[list[str]]:
    """What requests take of the scheduler's side of the connector, by how many there are."""
    parts = "lookups", "plans", "events"
    rows = [["requests at once", *parts, "a request and step", "longest step", "of it Python's collector"]]
    for run in document["results"]:
        each = run["seconds_per_request"]
        total = sum(each.values()) * run["requests"]
        rows.append(
            [
                f"{run['requests']:,}",
                *(f"{1e3 * each[part]:.2f} ms" for part in parts),
                f"{1e6 * total / run['request_steps']:.1f} µs",
                *(f"{1e3 * run[name]:.0f} ms" for name in ("slowest_step_s", "collecting_s")),
            ]
        )
    return rows


def _fleet(runs: Sequence[dict[str, Any]]) -> list[list[str]]:
    """What fleets of engines hit, and what crosses their links; bytes a second are for an engine."""
    rows = [
        ["engines", "tiers", "hit", "computed by an engine", "TTFT mean", "p99", "read from disk or store"]
    ]
    rows[0] += ["written there", "held there"]
    for run in runs:
        last = list(run["hits"])[-1]
        far = [""] * 3
        if last in ("disk", "store"):
            each = (
                run[way][last] / run["engines"] / 1e6 for way in ("read_bytes_per_s", "written_bytes_per_s")
            )
            far = [*(f"{size:.0f} MB/s" for size in each), f"{run['peak_bytes'][last] / 1e12:.2f} TB"]
        times = (f"{run['ttft_s'][key]:.2f} s" for key in ("mean", "p99"))
        rows.append(
            [str(run["engines"]), run["layout"], f"{run['hit_rate']:.1%}", f"{run['busy']:.0%}", *times]
        )
        rows[-1] += far
    return rows


def _markdown(rows: list[list[str]]) -> str:
    if len(rows) == 1:
        return "*Not measured yet.*"
    head, *body = ("| " + " | ".join(row) + " |" for row in rows)
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body])


def main() -> None:
    """Bring every page up to date."""
    for name in PAGES:
        path = ROOT / name
        path.write_text(render(path.read_text()))


if __name__ == "__main__":
    main()
