"""Figures that are made of results: ratios of times with intervals, counts, means over seeds."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.report.computed import frontier, replayed
from benchmarks.report.computed_gpu import fastest
from benchmarks.research.leaderboard import methods_at
from kvkit.lab.quality.statistics import bootstrap

EQUAL_ROWS = 0.1
"""Share of the default's rows by which methods at equal rows may differ."""


def derive(sources: Mapping[str, Any]) -> dict[str, Any]:
    """All of this file, of what `sources.read` found."""
    return {
        "serve": serve(sources["serve"]),
        "pd": [handed(entry, sources["pd"]["results"]) for entry in sources["pd"]["results"]],
        "sending": ratio(sources["sending"]["round_s"]["sent"], sources["sending"]["round_s"]["kept"]),
        "queued": ratio(sources["queued"]["gap_s"]["prefetched"], sources["queued"]["gap_s"]["not"]),
        "served": [
            {
                "documents": entry["documents"],
                "prompt_tokens": entry["prompt_tokens"],
                **{
                    way: ratio(entry["ttft_s"]["plain"], entry["ttft_s"][way]) for way in ("blended", "naive")
                },
                "hit": ratio(entry["ttft_s"]["hit, on"], entry["ttft_s"]["hit, off"]),
                "stages": entry["stage_s"]["blended"],
            }
            for entry in sources["served"]["results"]
        ],
        "hybrid": [
            {way: ratio(entry["ttft_s"]["computed"], times) for way, times in entry["ttft_s"].items()}
            for entry in sources["hybrid"]["results"]
        ],
        "models": models(sources["models"]["architectures"]),
        "blend_models": [
            {"name": name, "special": one["special"], "refused": "refused" in one}
            | {figure: one.get(figure) for figure in ("kl_naive", "kl", "difference")}
            for name, one in sources["blend_models"]["architectures"].items()
        ],
        "frontier": frontier(sources["frontier"]["runs"]),
        "agents": list(replayed(sources["replay_agents"])),
        "gpu": on_gpu(sources["gpu"]["results"]),
        "boards": [board(found) for name, found in sources.items() if name.startswith("board_")],
        "details": details(sources["details"]),
    }


def board(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return a leaderboard, with its methods under names without a ratio.

    `behind`, `level`, `ahead`: methods that compute as many rows as the default, by whether the interval of
    the difference of their divergence from the default's is above 0, includes it, or is below. `knowing`:
    those that know what no engine does, the prompt's other documents.
    """
    overall, equal = found["overall"], methods_at(found["tokens"])
    named = {re.sub(r" \.\d+", "", name, count=1): overall[name] for name in equal if name in overall}
    sides: dict[str, list[str]] = {"behind": [], "level": [], "ahead": [], "knowing": []}
    for name, row in list(named.items())[1:]:
        low, high = row["kl_ahead_interval"]
        if abs(row["rows"] / overall[equal[0]]["rows"] - 1) > EQUAL_ROWS:
            continue
        if re.search("related|anchored", name):
            sides["knowing"].append(name)
        else:
            sides["behind" if low > 0 else "ahead" if high < 0 else "level"].append(name)
    about = {key: found[key] for key in ("model", "tokens", "samples")} | {"tasks": list(found["sets"])}
    return about | {"methods": named} | sides


def details(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is compared with the default apart, and `curve`: the default's figures by rows."""
    overall = {name: row for name, row in found["overall"].items() if name != "full"}
    ratios = [row for name, row in overall.items() if re.fullmatch(r"prophetkv \.\d+, first 8", name)]
    about = {key: found[key] for key in ("model", "tokens")} | {"methods": overall}
    return about | {"curve": sorted(ratios, key=lambda row: float(row["rows"]))}


def on_gpu(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Shares of the roofs by problem, kvkit's time to its peers', and what moves take from products."""
    by_step: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for line in results:
        by_step[line["step"]].append(line)
    took = {line["what"]: line["min_us"] for line in by_step["peers"] if "min_us" in line}
    beside: dict[str, list[float]] = defaultdict(list)
    for line in by_step["moving"]:
        if line["what"] == "beside products":
            beside[line["way"]].append(line["product_time"])
    best = fastest(by_step["defaults"], by_step["tune"])
    return {
        "problems": len(best),
        "of_roof": {name: found.of_roof for name, found in best.items()},
        "attention": [best[f"attention Llama-3.1-8B, {keys} keys"].of_roof for keys in (4096, 8192, 32768)],
        "of_peers": {name: took["kvkit"] / us for name, us in took.items()},
        "beside": beside,
    }


def ratio(times: Sequence[float], others: Sequence[float]) -> dict[str, float]:
    """Mean of `times` over that of `others`, with the 95 % interval of pairs drawn anew."""
    first, second = np.asarray(times, np.float64), np.asarray(others, np.float64)
    low, high = bootstrap(first, second)
    return {"mean": float(first.mean() / second.mean()), "low": low, "high": high, "pairs": len(first)}


def serve(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each system: hits, and its times to the first token, with reuse and without.

    Systems take turns request by request, so that their requests are pairs.
    """
    times = defaultdict[tuple[str, str], list[float]](list)
    for request in document["requests"]:
        if request["again"] or request["workload"] == "random":
            times[request["workload"], request["system"]].append(request["ttft_s"])
    rows = []
    for row in document["results"]:
        if row["workload"] == "document-qa":
            hit, new = (times[workload, row["system"]] for workload in ("document-qa", "random"))
            plain = (times[workload, "plain"] for workload in ("document-qa", "random"))
            rows.append(
                {name: row[name] for name in ("system", "hit_tokens", "prompt_tokens")}
                | {"hit": ratio(hit, next(plain)), "new": ratio(new, next(plain))}
                | {"requests": len(hit), "median_s": statistics.median(hit)}
                | {"of_lmcache": ratio(hit, times["document-qa", "lmcache"])}
            )
    return rows


def handed(entry: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One way of a handoff, beside vLLM's NixlConnector on the same prompt."""
    peer = next(
        other
        for other in others
        if other["prompt_tokens"] == entry["prompt_tokens"] and other["way"] == "vLLM's NixlConnector"
    )
    phases = ("prefill_s", "first_s", "step_s", "alone_s")
    times = {phase: [[turn[phase] for turn in each["each"]] for each in (entry, peer)] for phase in phases}
    whole = [
        [a + b for a, b in zip(*pair, strict=True)]
        for pair in zip(*(times[p] for p in phases[:2]), strict=True)
    ]
    return {
        **{name: entry[name] for name in ("way", "prompt_tokens", "hit_tokens", "same_tokens")},
        **{phase: ratio(*pair) for phase, pair in times.items()},
        "whole": ratio(*whole),
        "median": {phase: statistics.median(pair[0]) for phase, pair in times.items()},
    }


def models(architectures: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each architecture: what became of it with kvkit, and with LMCache where that was run."""
    return [
        {
            "name": name,
            "special": one["special"],
            "tolerance": one.get("tolerance"),
            "fault": min(one["faults"].values()) if one.get("faults") else None,
            "lmcache": outcome(one["lmcache"]) if "lmcache" in one else None,
            **outcome(one),
        }
        for name, one in architectures.items()
    ]


def outcome(one: Mapping[str, Any]) -> dict[str, Any]:
    """On how many ways tokens are plain vLLM's, how many are refused, and what differs at most."""
    ways = one.get("ways", {})
    ran = [way for way in ways.values() if "refused" not in way]
    return {
        "kind": "run" if ran else "refused" if "refused" in one else "absent",
        "ways": len(ran),
        "same": sum(way["same_tokens"] for way in ran),
        "refused": len(ways) - len(ran),
        "difference": max((way["difference"] for way in ran), default=None),
        "names": list(ways),
    }
