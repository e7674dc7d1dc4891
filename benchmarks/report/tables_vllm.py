"""Rows of the tables of what real vLLM engines were measured at: blends, hybrid models, queues, sending."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

_BLENDED = {"blended": "blended, 15 % recomputed", "naive": "blended, nothing recomputed"}


def _results(path: Path) -> list[dict[str, Any]]:
    """What a benchmark found; nothing where it was not run."""
    found: list[dict[str, Any]] = json.loads(path.read_text())["results"] if path.exists() else []
    return found


def blend(path: Path) -> list[list[str]]:
    """Times to the first token of blended prompts, of plain vLLM's and of exact hits."""
    rows = [["prompt", "", "TTFT, minimum", "median", "plain vLLM's takes, of minima", "of medians"]]
    ways = {"plain": "plain vLLM"} | _BLENDED | {"hit, on": "exact hit"}
    for found in _results(path):
        prompt = f"{found['prompt_tokens']:,} tokens, {found['documents']} documents"
        for way, words in ways.items():
            each = {name: (min(s), statistics.median(s)) for name, s in found["ttft_s"].items()}
            ratios = (f"{a / b:.1f}×" for a, b in zip(each["plain"], each[way], strict=True))
            shown = ("", "") if way == "plain" else ratios
            rows.append([prompt, words, *(f"{s:.3f} s" for s in each[way]), *shown])
            prompt = ""
    return rows


def blend_stages(path: Path) -> list[list[str]]:
    """Where a blend's time goes, and how many rows it computes; medians."""
    kinds, stages = ("exact", "blended", "recomputed", "computed"), ("load", "place", "choose", "rows")
    rows = [["prompt", "", *kinds, *stages, "TTFT"]]
    for found in _results(path):
        for way, words in _BLENDED.items():
            tokens = (f"{found['tokens'][way][kind]:,}" for kind in kinds)
            seconds = (found["stage_s"][way].get(stage, 0.0) for stage in stages)
            times = (f"{1e3 * s:.0f} ms" for s in (*seconds, statistics.median(found["ttft_s"][way])))
            rows.append([f"{found['prompt_tokens']:,} tokens", words, *tokens, *times])
    return rows


def blend_exact(path: Path) -> list[list[str]]:
    """What blending costs requests that are not blended."""
    rows = [["TTFT of exact requests, blending on / off", "ratio of minima", "of medians"]]
    for found in _results(path):
        prompts = {"hit": f"{found['prompt_tokens']:,} tokens, hit", "computed": "640 tokens, computed"}
        for way, words in prompts.items():
            rows.append([words, *(f"{found['ratio'][way][k]:.3f}" for k in ("min", "median"))])
    return rows


def hybrid(path: Path) -> list[list[str]]:
    """Times to the first token in a hybrid model."""
    rows = [["", "TTFT, minimum", "median", "computing takes, of minima", "of medians"]]
    ways = {
        "computed": "computed",
        "own": "vLLM's own prefix cache has it",
        "hit": "kvkit has it, prefix caching on",
        "hit, without": "kvkit has it, prefix caching off",
        "new": "kvkit, a new prompt",
    }
    for found in _results(path):
        for way, words in ways.items():
            seconds, ratios = found["ttft_s"][way], found["ratio"].get(way)
            shown = ("", "") if ratios is None else (f"{ratios[k]:.2f}×" for k in ("min", "median"))
            rows.append([words, f"{min(seconds):.3f} s", f"{statistics.median(seconds):.3f} s", *shown])
    return rows


def snapshots(path: Path) -> list[list[str]]:
    """What a conversation stores and hits, by which snapshots are kept."""
    rows = [["`snapshot_every`", "bytes stored for a token", "of prompts hit"]]
    return rows + [
        [str(one["snapshot_every"]), f"{one['bytes_per_token']:,.0f}", f"{one['hit']:.0%}"]
        for found in _results(path)
        for one in found["snapshots"]
    ]


def replay(path: Path) -> list[list[str]]:
    """Hit rates of traces as they are simulated, and as a server had them."""
    rows = [["trace", "requests", "policy", "memory, of all chunks", "simulated", "measured"]]
    for found in json.loads(path.read_text())["rows"]:
        cells = (found["trace"], str(found["requests"]), found["policy"], f"{found['share']:.0%}")
        rows.append([*cells, f"{found['simulated_hits']:.1%}", f"{found['hits']:.1%}"])
    return rows


def queued(document: dict[str, Any]) -> list[list[str]]:
    """What it gives to bring near what a queued request will hit."""
    rows = [["", "minimum", "median"]]
    for kind, shown in (("not", "read from a cold disk"), ("prefetched", "prefetched while it waited")):
        seconds = document["gap_s"][kind]
        rows.append([shown, *(f"{1000 * of(seconds):.0f} ms" for of in (min, statistics.median))])
    rows.append(["ratio", *(f"{document[f'ratio_of_{k}']:.2f}" for k in ("minima", "medians"))])
    return rows


def sending(document: dict[str, Any]) -> list[list[str]]:
    """What sending costs a prefill engine."""
    ratios = (document[f"ratio_of_{k}"] for k in ("minima", "medians"))
    return [
        ["", "ratio of minima", "of medians"],
        ["P's time with sending / without", *(f"{ratio:.3f}" for ratio in ratios)],
    ]
