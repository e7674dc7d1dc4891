"""kvkit.kernels' pack and unpack on a CPU, and LMCache's, as a share of torch's copy_ of the pages' bytes.

LMCache is called where the environment variable KVKIT_PEERS names a folder that has it in `lmcache/`:
pip install --no-deps --target $KVKIT_PEERS/lmcache lmcache==0.5.6 \\
    cachetools aiohttp multidict yarl propcache aiohappyeyeballs aiosignal frozenlist
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.timing import interleaved, ratio
from kvkit.format.layout import ORDERS, LayerGroup, Precision
from kvkit.format.rope import Rope, Rotation
from kvkit.kernels.pages import reference
from kvkit.kernels.pages.api import Pages, pack, unpack
from kvkit.staging import Staging

THREADS = 2
CHUNK_TOKENS = 256
JOB_BYTES = 47_000_000
OTHER_BYTES = 128 << 20  # more than the caches hold
SMOLLM2 = LayerGroup(
    layers=tuple(range(30)), kv_heads=3, k_size=64, v_size=64, dtype="float32", block_tokens=128
)
LLAMA = LayerGroup(
    layers=tuple(range(32)), kv_heads=8, k_size=128, v_size=128, dtype="bfloat16", block_tokens=16
)
MLA = LayerGroup(layers=tuple(range(60)), kv_heads=1, k_size=576, v_size=0, dtype="bfloat16", block_tokens=64)
CASES = {
    "vllm-cpu-opaque": replace(SMOLLM2, page_bytes=SMOLLM2.block_bytes),
    "vllm-cpu-LBHNC": SMOLLM2,
    **{f"llama-{order}": replace(LLAMA, order=order) for order in ORDERS},
    "mla": MLA,
    "indexer-132": replace(MLA, k_size=132, dtype="uint8"),
}
CONVERTED = {
    "smollm2-float32": (SMOLLM2, Rope(tuple(1e5 ** -(np.arange(32) / 32)))),
    "llama-bfloat16": (LLAMA, Rope(tuple(5e5 ** -(np.arange(64) / 64)))),
    "llama-float16": (replace(LLAMA, dtype="float16"), Rope(tuple(5e5 ** -(np.arange(64) / 64)))),
    "mla-bfloat16": (MLA, Rope(tuple(1e4 ** -(np.arange(32) / 32)), interleaved=True, first=512)),
}
FORMS: tuple[Precision, ...] = ("fp8", "int8")


class Job:
    """Chunks in random blocks of a pool twice as large, and records in slots as a cache has them.

    Every page has been touched.
    """

    def __init__(self, group: LayerGroup, chunks: int) -> None:
        per_chunk = CHUNK_TOKENS // group.block_tokens
        self.bytes = chunks * group.chunk_bytes(CHUNK_TOKENS)
        self.tensors = group.pages(2 * chunks * per_chunk)
        for layer, tensor in enumerate(self.tensors):
            raw = tensor.view(torch.uint8)
            raw.copy_(torch.arange(raw.shape[0]).mul(7).add(layer).to(torch.uint8)[:, None, None, None])
        self.pages = Pages.of(group, self.tensors)
        random = np.random.default_rng(0)
        self.blocks = random.permutation(2 * chunks * per_chunk)[: chunks * per_chunk].reshape(chunks, -1)
        size = self.bytes // chunks
        staging = Staging(size, chunks)
        self.leases = staging.acquire(chunks, 1.0)
        self.records = [lease.array[:size] for lease in self.leases]
        for record in self.records:
            record[:] = 0
        self.source = torch.ones(self.bytes, dtype=torch.uint8)
        self.target = torch.zeros(self.bytes, dtype=torch.uint8)

    def copy(self) -> None:
        self.target.copy_(self.source)

    def pack(self) -> None:
        pack(self.pages, self.records, blocks=self.blocks, threads=THREADS)

    def unpack(self) -> None:
        unpack(self.pages, self.records, blocks=self.blocks, threads=THREADS)

    def check(self) -> None:
        """Records hold what their blocks hold; a round trip changes nothing."""
        before = [tensor.view(torch.uint8).clone() for tensor in self.tensors]  # as bytes: NaN is not NaN
        self.pack()
        for record, row in zip(self.records, self.blocks, strict=True):
            layers = torch.from_numpy(record).view(len(before), -1)
            for layer, tensor in zip(layers, before, strict=True):
                assert torch.equal(layer, tensor[row].transpose(0, 1).reshape(-1))
        for pages in self.tensors:
            pages[self.blocks.ravel()] = 0
        self.unpack()
        for tensor, old in zip(self.tensors, before, strict=True):
            assert torch.equal(tensor.view(torch.uint8), old)


@pytest.fixture(autouse=True)
def _torch_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)


def compare(benchmark: Any, job: Job, others: dict[str, Callable[[], object]]) -> None:
    """Time pack, unpack and `others`, and keep how each compares with copy_: above 1 is faster."""
    compared = {"copy_": job.copy, "pack": job.pack, "unpack": job.unpack, **others}
    other_memory = np.zeros(OTHER_BYTES // 8 if benchmark.enabled else 1)

    def rest() -> None:
        """Cold caches, as between requests; and torch's threads, which spin for a while, are asleep."""
        np.add(other_memory, 1, out=other_memory)
        time.sleep(0.01 if benchmark.enabled else 0)

    functions: dict[str, Callable[[], object]] = {}
    for name, function in compared.items():
        functions |= {f"rest before {name}": rest, name: function}
    times = interleaved(functions, 60 if benchmark.enabled else 1, warmup=3 if benchmark.enabled else 1)
    benchmark.extra_info["bytes"] = job.bytes
    for name in compared:
        share = ratio(times, "copy_", name)
        speed = job.bytes / min(times[name]) / 1e9
        benchmark.extra_info[name] = {"GB/s": round(speed, 2), "of copy_": share}
        print(f"{name:20} {speed:6.2f} GB/s, of copy_: min {share['min']:.2f}, median {share['median']:.2f}")


class Conversion:
    """A job's pages, holding numbers, with a rotation and records of either form."""

    def __init__(self, job: Job, rope: Rope) -> None:
        self.job = job
        for layer, tensor in enumerate(job.tensors):
            seed = torch.Generator().manual_seed(layer)
            tensor.copy_(torch.randn(tensor.shape[-1], generator=seed).expand(tensor.shape))
        job.pack()
        chunks = len(job.records)
        self.rotation = Rotation(rope, np.arange(chunks) * 1000 + 1)
        self.pages: dict[Precision | None, Pages] = {
            f: replace(job.pages, group=replace(job.pages.group, precision=f)) for f in FORMS
        }
        self.records: dict[Precision | None, list[Any]] = {
            form: [np.zeros(pages.group.chunk_bytes(CHUNK_TOKENS), np.uint8) for _ in range(chunks)]
            for form, pages in self.pages.items()
        }
        self.pages[None], self.records[None] = job.pages, job.records

    def pack(self, form: Precision) -> None:
        pack(self.pages[form], self.records[form], blocks=self.job.blocks, threads=THREADS)

    def unpack(self, form: Precision | None, rotated: bool) -> None:
        rotate = self.rotation if rotated else None
        unpack(self.pages[form], self.records[form], blocks=self.job.blocks, rotate=rotate, threads=THREADS)

    def ways(self) -> dict[str, Callable[[], object]]:
        """What is timed, by name; what unpacks after what packs."""
        ways: dict[str, Callable[[], object]] = {"unpack rotated": partial(self.unpack, None, True)}
        for form in FORMS:
            ways |= {
                f"pack {form}": partial(self.pack, form),
                f"unpack {form}": partial(self.unpack, form, False),
                f"unpack {form} rotated": partial(self.unpack, form, True),
            }
        return ways

    def check(self) -> None:
        """The first chunk is what the reference makes of it."""
        job, group = self.job, self.job.pages.group
        slots = (job.blocks[:1, :, None] * group.block_tokens + np.arange(group.block_tokens)).reshape(1, -1)
        rotation = replace(self.rotation, delta=self.rotation.delta[:1])
        form: Precision | None
        for form in (None, *FORMS):
            records, group = self.records[form], self.pages[form].group
            if form is not None:
                self.pack(form)
                wanted = np.zeros_like(records[0])
                reference.pack(group, job.pages.parts, [wanted], slots)
                np.testing.assert_array_equal(records[0], wanted)
            self.unpack(form, True)
            found = [tensor[job.blocks[0]].clone() for tensor in job.tensors]
            reference.unpack(group, job.pages.parts, records[:1], slots, rotation)
            assert all(
                torch.equal(tensor[job.blocks[0]], f) for tensor, f in zip(job.tensors, found, strict=True)
            )
            self.unpack(None, False)


@pytest.mark.parametrize("name", CONVERTED)
def test_conversions(benchmark: Any, name: str) -> None:
    """K rotated, K and V quantised, and both, on the way."""
    group, rope = CONVERTED[name]
    if not benchmark.enabled:
        group = replace(group, layers=(0, 1))
    conversion = Conversion(
        Job(group, -(-JOB_BYTES // group.chunk_bytes(CHUNK_TOKENS)) if benchmark.enabled else 1), rope
    )
    conversion.check()
    benchmark(partial(conversion.unpack, None, True))
    compare(benchmark, conversion.job, conversion.ways())


@pytest.mark.parametrize("name", CASES)
def test_pages(benchmark: Any, name: str) -> None:
    group = CASES[name]
    job = Job(group, -(-JOB_BYTES // group.chunk_bytes(CHUNK_TOKENS)) if benchmark.enabled else 1)
    job.check()
    benchmark(job.pack)
    compare(benchmark, job, {})


def test_lmcache(benchmark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """LMCache's own gather and scatter for CPU tensors, on the pages of vLLM's CPU engine."""
    peers = os.environ.get("KVKIT_PEERS")
    if not peers:
        pytest.skip("KVKIT_PEERS is not set: no LMCache to compare with")
    monkeypatch.setenv("DO_NOT_TRACK", "1")
    monkeypatch.setenv("LMCACHE_TRACK_USAGE", "false")
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(peers) / "lmcache")])
    lmcache = pytest.importorskip(
        "lmcache.v1.multiprocess.transfer_context.base", reason="KVKIT_PEERS has no LMCache that imports"
    )
    job = Job(SMOLLM2, 4 if benchmark.enabled else 1)
    job.check()
    caches = {f"model.layers.{i}.attn": tensor for i, tensor in enumerate(job.tensors)}
    ids, per_chunk = job.blocks.ravel().tolist(), job.blocks.shape[1]
    hints = {"kv_layout": "HND"}
    chunks = lmcache.gather_paged_kv_to_cpu(caches, ids, per_chunk, hints)

    def gather_fresh() -> None:
        lmcache.gather_paged_kv_to_cpu(caches, ids, per_chunk, hints)

    def gather() -> None:
        lmcache.gather_paged_kv_to_cpu(caches, ids, per_chunk, hints, out=chunks)

    def scatter() -> None:
        lmcache.scatter_cpu_to_paged_kv(caches, ids, chunks, per_chunk, layout_hints=hints)

    heads = SMOLLM2.kv_heads
    for chunk, record in zip(chunks, job.records, strict=True):
        ours = torch.from_numpy(record).view(chunk.dtype).view(len(chunk), heads, CHUNK_TOKENS, -1)
        assert torch.equal(chunk.view(len(chunk), CHUNK_TOKENS, heads, -1).transpose(1, 2), ours)
    benchmark(job.pack)
    peer_jobs = {
        "LMCache gather": gather,
        "LMCache gather, no buffers given": gather_fresh,
        "LMCache scatter": scatter,
    }
    compare(benchmark, job, peer_jobs)
    for peer in peer_jobs:
        way = "unpack" if "scatter" in peer else "pack"
        mine, its = benchmark.extra_info[way]["of copy_"], benchmark.extra_info[peer]["of copy_"]
        faster = {key: mine[key] / its[key] for key in mine}
        benchmark.extra_info[f"{way} to {peer}"] = faster
        print(f"{way} is {faster['min']:.1f} (min), {faster['median']:.1f} (median) times {peer}")
