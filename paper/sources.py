"""Which figures the text needs of which results file, and that they are there."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvkit.format.layout import ORDERS

BLEND = ("1k", "4k")
"""Lengths of the prompts of `kvkit bench blend`, in tokens."""

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
LLAMA = tuple(f"pages::pages[llama-{order}]" for order in ORDERS)
LMCACHE = "pages::lmcache"
_CONVERSIONS = (
    "unpack rotated",
    *(f"{way} {form}" for form in ("fp8", "int8") for way in ("pack", "unpack")),
    *(f"unpack {form} rotated" for form in ("fp8", "int8")),
)

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
    **dict.fromkeys(LLAMA, _OF_COPY),
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
    **{
        f"engine::{test}": ("ratio_min", "ratio_median", "bound_min")
        for test in (
            "prefetch_from_disk_and_s3",
            "prefetch_from_disk_and_s3_behind_a_link",
            *(f"overlap_of_waiting_tiers[{way}]" for way in ("prefetch", "load-64-slots", "load-16-slots")),
        )
    },
    **dict.fromkeys(("engine::write_back[memory]", "engine::write_back[disk]"), _RATIO),
    "engine::resident_memory": ("stored_mb", "staging_mb", "growth_mb"),
    **{
        f"handoff::{test}": ("bytes", f"{way}/min", f"{way}/median", "against")
        for test, way in (("one_host", "unix"), ("loopback[tcp]", "tcp"), ("loopback[nixl]", "nixl"))
    },
    "handoff::private_memory": ("private/min", "private/median"),
    **{
        f"shm::hits[{engines}]": (
            "bytes",
            *(f"{place}/{field}" for place in ("memory", *places) for field in ("us", "min", "median")),
        )
        for engines, places in (
            ("1", ("shm", "folder", "redis", "lmcache")),
            ("8", ("shm", "folder", "redis")),
        )
    },
}
"""What the text reads of each benchmark; / leads into an object."""


@dataclass(frozen=True, slots=True)
class Source:
    """A results file beside that of the benchmarks.

    Args:
        file: its name; {machine} is that of the benchmarks' file.
        command: what makes it.
        fields: what the text reads of it; / leads into an object, * into each entry of a list or object.
    """

    file: str
    command: str
    fields: tuple[str, ...]


SOURCES: Mapping[str, Source] = {
    "demo": Source(
        "demo-{machine}.json",
        "kvkit demo",
        (
            "model",
            *(
                f"turns/*/{field}"
                for field in (
                    "prompt_tokens",
                    "hit_tokens",
                    "computed_tokens",
                    "ttft_s",
                    "ttft_cold_s",
                    "identical",
                )
            ),
        ),
    ),
    "compiled": Source(
        "compile.json",
        "python -m kvkit.lab.compiling.gate",
        (
            "triton",
            *(
                f"kernels/*/{field}"
                for field in (
                    *("problem", "kernel", "target", "registers", "spill_bytes", "shared_bytes"),
                    *("loads", "loads_16", "stores", "stores_16"),
                )
            ),
        ),
    ),
    "gpu": Source(
        "gpu-nvidia-h100-80gb-hbm3.json",
        "python -m benchmarks.gpu.keep results.jsonl",
        ("machine/gpu", "versions/torch", "versions/triton", "results/*/step"),
    ),
    **{
        f"blend_{size}": Source(
            f"blend-{size}-{{machine}}.json",
            f"kvkit bench blend --tokens {1024 * int(size[:-1])}",
            (
                *("model", "samples", "tokens"),
                *(f"sets/*/*/{field}" for field in ("rows", "kl", "kl_interval", "speedup")),
                "sets/retrieval/*/exact",
            ),
        )
        for size in BLEND
    },
    "leaderboard": Source(
        "leaderboard-smollm2-{machine}.json",
        "python -m benchmarks.research.leaderboard smollm2",
        (
            *("model", "samples", "tokens", "sets/*/*/f1"),
            *(f"overall/*/{field}" for field in ("rows", "kl", "f1", "f1_ahead")),
            *(f"overall/*/{field}_interval" for field in ("kl", "f1", "f1_ahead")),
        ),
    ),
    "lost_context": Source(
        "lost-context-{machine}.json",
        "python -m benchmarks.research.lost_context",
        tuple(f"runs/*/{field}" for field in ("tokens", "exact", "alone", "slope")),
    ),
    "blend_rows": Source(
        "blend-rows-4k-{machine}.json",
        "kvkit bench blend --tokens 4096 --samples 4",
        ("samples", "tokens", *(f"overall/*/{field}" for field in ("rows", "exact", "kl")), "sets/*/*/exact"),
    ),
    "blend_models": Source(
        "blend-models.json",
        "python tests/vllm_adapter/test_vllm_blend_models.py",
        ("architectures/*/special",),
    ),
    "served": Source(
        "vllm-blend-{machine}.json",
        "python -m benchmarks.serving.vllm_blend",
        (
            *("results/*/documents", "results/*/prompt_tokens"),
            *(f"results/*/ttft_s/{way}" for way in ("plain", "blended", "naive", "hit, on", "hit, off")),
            *(f"results/*/stage_s/blended/{stage}" for stage in ("load", "choose", "rows")),
        ),
    ),
    "serve": Source(
        "serve-{machine}.json",
        "kvkit bench serve",
        (
            *("model", "load/rounds", "load/requests", "chunk_tokens"),
            *(
                f"results/*/{field}"
                for field in ("system", "workload", "hit_tokens", "prompt_tokens", "wall_s")
            ),
            *(f"requests/*/{field}" for field in ("system", "workload", "again", "ttft_s")),
        ),
    ),
    "pd": Source(
        "pd-{machine}.json",
        "python -m benchmarks.serving.pd_peers",
        (
            *("rounds", "token_bytes"),
            *(f"results/*/{field}" for field in ("way", "prompt_tokens", "hit_tokens", "same_tokens")),
            *(f"results/*/each/*/{field}" for field in ("prefill_s", "first_s", "step_s", "alone_s")),
        ),
    ),
    "sending": Source(
        "sending-{machine}.json", "python -m benchmarks.serving.sending", ("round_s/sent", "round_s/kept")
    ),
    **{
        f"flow_{flow}": Source(
            f"flow-{flow}-{{machine}}.json",
            f"kvkit demo --pd --flow {flow}",
            tuple(f"turns/*/{field}" for field in ("prompt_tokens", "ttft_s", "plain_ttft_s", "identical")),
        )
        for flow in ("handoff", "pool", "pull", "both")
    },
    "soak": Source(
        "soak-{machine}.json",
        "python -m benchmarks.soak",
        (
            *(f"parts/*/{field}" for field in ("seconds", "wrong", "flat/*/rests", "flat/*/not_flat")),
            *(
                f"parts/vllm/{field}"
                for field in (
                    *("requests", "requests_aborted", "answers_tokens", "wrong_tokens", "preemptions"),
                    *("wrong_tokens_at_ratio_1", "faults_injected/*", "prompt_tokens", "hit_tokens"),
                    *("blended/requests", "all_slots_free", "all_blocks_free"),
                )
            ),
            *(
                f"parts/handoff/{field}"
                for field in ("done/requests", "outcomes/cancelled", "killed/senders")
            ),
            *(f"parts/router/done/{field}" for field in ("requests", "right", "errors", "compared")),
            *(f"parts/router/faults/{field}" for field in ("answers", "engines killed", "engines stopped")),
            "parts/shm/done/chunks loaded and compared",
            "parts/shm/faults/processes killed",
        ),
    ),
    "precision": Source(
        "precision-{machine}.json",
        "python -m benchmarks.research.precision",
        (
            "models/*/samples",
            *(f"models/*/forms/*/{field}" for field in ("kl", "top1", "bytes_per_token", "store", "load")),
        ),
    ),
    "hybrid": Source(
        "vllm-hybrid-{machine}.json",
        "python -m benchmarks.serving.vllm_hybrid",
        (
            "results/*/prompt_tokens",
            *(f"results/*/ttft_s/{way}" for way in ("computed", "own", "hit", "hit, without", "new")),
            *(f"results/*/snapshots/*/{field}" for field in ("snapshot_every", "bytes_per_token", "hit")),
        ),
    ),
    "models": Source(
        "models.json",
        "python tests/vllm_adapter/test_vllm_zoo.py",
        ("architectures/*/special",),
    ),
    "queued": Source(
        "queued-{machine}.json",
        "python -m benchmarks.serving.queued",
        ("hit_tokens", "gap_s/prefetched", "gap_s/not"),
    ),
    "many": Source(
        "many-requests-{machine}.json",
        "python -m benchmarks.serving.many_requests",
        ("results/*/requests", "results/*/slowest_step_s", "results/*/seconds_per_request/*"),
    ),
    "scale": Source(
        "scale-{machine}.json",
        "python -m benchmarks.research.scale",
        tuple(f"results/*/{field}" for field in ("part", "records", "bytes_per_record", "lookups_per_s")),
    ),
    "timeline": Source(
        "timeline-{machine}.json",
        "python -m benchmarks.serving.timeline",
        (
            *("settings/chunks", "settings/length", "settings/slots"),
            *(f"events/*/{field}" for field in ("kind", "thread", "begin_s", "end_s")),
        ),
    ),
    "snapshots": Source(
        "snapshots.json",
        "python -m benchmarks.research.snapshots",
        tuple(f"runs/*/{field}" for field in ("trace", "snapshot_every", "written_bytes", "hit_rate")),
    ),
    "frontier": Source(
        "frontier.json",
        "python -m benchmarks.research.frontier",
        ("requests", *(f"runs/*/{field}" for field in ("trace", "share", "asked", "bound", "hits/lru"))),
    ),
    "fleet": Source(
        "fleet.json",
        "python -m benchmarks.research.fleet",
        tuple(f"runs/*/{field}" for field in ("engines", "layout", "hit_rate")),
    ),
    "replay": Source(
        "replay.json",
        "python -m benchmarks.serving.replay",
        tuple(
            f"rows/*/{field}" for field in ("trace", "requests", "policy", "share", "hits", "simulated_hits")
        ),
    ),
    "routing": Source(
        "routing.json",
        "python -m benchmarks.research.routing",
        tuple(f"runs/*/{field}" for field in ("trace", "route", "hit_rate")),
    ),
    "simulated": Source(
        "simulate.json",
        "python -m benchmarks.micro.bench_simulate",
        tuple(f"runs/*/{field}" for field in ("trace", "share", "policy", "hit_rate")),
    ),
}
"""Other files that the text needs, all of them."""


class PaperError(RuntimeError):
    """The paper cannot be built. The message names what is missing and the command that makes it."""


def read(folder: Path, machine: str) -> dict[str, Any]:
    """All of `SOURCES`, by name.

    Raises:
        PaperError: a file is not there, or lacks figures.
    """
    found = {}
    for name, source in SOURCES.items():
        path = folder / source.file.format(machine=machine)
        if not path.exists():
            raise PaperError(f"{path} is missing: run `{source.command} --json {path}`")
        found[name] = json.loads(path.read_text())
        absent = [gap for field in source.fields for gap in gaps(found[name], field)]
        if absent:
            raise PaperError(f"{path} lacks {', '.join(absent)}: run `{source.command} --json {path}`")
    return found


def missing(results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """A line for every benchmark that is not there, or not with all its figures: its name and command."""
    for name, fields in NEEDED.items():
        command = f"run `python -m benchmarks.report.run benchmarks/micro/bench_{name.split('::')[0]}.py`"
        if name not in results:
            yield f"  {name}: {command}"
            continue
        absent = [gap for field in fields for gap in gaps(results[name], field)]
        if absent:
            yield f"  {', '.join(absent)} of {name}: {command}"


def gaps(entry: Any, field: str) -> list[str]:
    """Where `entry` lacks `field`: "GB/s" as it is, "pack/min" as a way into it, "*/min" in every entry."""
    if field.startswith("*"):
        inner = dict(enumerate(entry)) if isinstance(entry, list) else entry
        if not isinstance(inner, Mapping) or not inner:
            return [field]
        rest = field[2:]
        return [f"{key}/{gap}" for key, value in inner.items() for gap in (gaps(value, rest) if rest else [])]
    if not isinstance(entry, Mapping):
        return [field]
    if entry.get(field) is not None:
        return []
    ways = [name for name in entry if field.startswith(f"{name}/")]
    if not ways:
        return [field]
    return [f"{ways[0]}/{gap}" for gap in gaps(entry[ways[0]], field[len(ways[0]) + 1 :])]
