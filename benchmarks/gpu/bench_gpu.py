"""The kernels on a GPU, against bare copies, matrix products and others' attention. For `make gpu-tests`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import beside
from benchmarks.gpu.peers import MASKED, OURS, BlendShape, contenders
from benchmarks.timing import interleaved, ratio
from kvkit.format.layout import LayerGroup
from kvkit.format.rope import Rope, Rotation
from kvkit.kernels.attention.api import query_scores, rope_scatter
from kvkit.kernels.attention.layer import RowRotations, Scoring
from kvkit.kernels.attention.rows import Rows
from kvkit.kernels.pages.api import Pages, pack, unpack
from kvkit.kernels.pages.checks import ResolvedRotation
from kvkit.staging import Staging

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU; `make gpu-tests` runs it there"
)

LLAMA = LayerGroup(tuple(range(32)), kv_heads=8, k_size=128, v_size=128, dtype="bfloat16", block_tokens=16)
CHUNKS, CHUNK_TOKENS = 8, 256


@pytest.mark.parametrize("way", ["pack", "unpack"])
def test_pinned_pages(benchmark: Any, way: str) -> None:
    """8 chunks of Llama-3.1-8B's layout to or from pinned slots, against one copy of as many bytes.

    Ours is the whole call: checks, the small arrays' way to the device, the kernel, and waiting for it.
    """
    size = LLAMA.chunk_bytes(CHUNK_TOKENS)
    staging = Staging(size, CHUNKS)
    staging.ready.wait()
    records = [array[:size] for array in staging.arrays]
    blocks = np.random.default_rng(0).permutation(CHUNKS * CHUNK_TOKENS // 16).reshape(CHUNKS, -1)
    pages = Pages.of(LLAMA, LLAMA.pages(blocks.size, fill_byte=1, device="cuda"))
    pinned = torch.ones(CHUNKS * size, dtype=torch.uint8).pin_memory()
    device = torch.ones(CHUNKS * size, dtype=torch.uint8, device="cuda")
    move = pack if way == "pack" else unpack

    def ours() -> None:
        move(pages, records, blocks=blocks)

    def link() -> None:
        target, source = (pinned, device) if way == "pack" else (device, pinned)
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    benchmark(ours)
    times = interleaved({"ours": ours, "link": link}, 20 if benchmark.enabled else 1)
    found = ratio(times, "link", "ours")
    benchmark.extra_info.update(bytes=CHUNKS * size, of_link=found)
    print(f"{way}: of the link's speed: min {found['min']:.2f}, median {found['median']:.2f}")
    staging.close()


def test_small_records(benchmark: Any) -> None:
    """Batches of copies, copies one by one and a kernel, to and from pinned memory."""
    device = torch.device("cuda", torch.cuda.current_device())
    with torch.cuda.stream(torch.cuda.Stream(device)):  # the default stream has no batches
        found = list(beside.pieces(device, 60, beside.FEW_MIB, beside.THREE_WAYS))
    benchmark.pedantic(torch.cuda.synchronize, rounds=1)
    benchmark.extra_info["ways"] = found
    for line in found:
        print(beside.in_words(line))


ROPE = Rope(tuple((500000.0 ** -(np.arange(64) / 64)).tolist()))
WAYS: dict[str, dict[str, Any]] = {
    "pack": {"to_records": True},
    "unpack": {},
    "unpack rotated": {"rotated": True},
    "pack fp8": {"to_records": True, "precision": "fp8"},
    "unpack fp8": {"precision": "fp8"},
    "unpack fp8 rotated": {"precision": "fp8", "rotated": True},
    "pack int8": {"to_records": True, "precision": "int8"},
    "unpack int8": {"precision": "int8"},
}


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC"])
@pytest.mark.parametrize("way", WAYS)
def test_device_pages(benchmark: Any, way: str, order: str) -> None:
    """The kernel alone, records on the device, against a copy there that reads and writes as many bytes."""
    from kvkit.kernels.pages import triton as kernels

    how = {"to_records": False, "precision": None, "rotated": False, **WAYS[way]}
    group = replace(LLAMA, order=order, precision=how.pop("precision"))
    size = group.chunk_bytes(CHUNK_TOKENS)
    blocks = np.random.default_rng(0).permutation(CHUNKS * CHUNK_TOKENS // 16).reshape(CHUNKS, -1)
    pages = Pages.of(group, group.pages(blocks.size, fill_byte=1, device="cuda"))
    records = [torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(CHUNKS)]
    if how.pop("rotated"):
        rotation = Rotation(ROPE, np.arange(CHUNKS) * 1000)
        how["rotation"] = ResolvedRotation(ROPE, *rotation.resolve(CHUNKS, CHUNK_TOKENS))
    addresses = [record.data_ptr() for record in records]
    made = kernels.move(pages, addresses, blocks, **how)
    benchmark.pedantic(made.run, rounds=1)
    moved = CHUNKS * (LLAMA.chunk_bytes(CHUNK_TOKENS) + size)
    source, target = (torch.ones(moved // 2, dtype=torch.uint8, device="cuda") for _ in range(2))
    times = {"ours": seconds(made.run), "copy": seconds(lambda: target.copy_(source))}
    found, speed = ratio(times, "copy", "ours"), moved / min(times["ours"]) / 1e9
    benchmark.extra_info.update({"bytes": moved, "GB/s": speed, "of_copy": found})
    print(f"{way} {order}: {speed:.0f} GB/s, of copy_: min {found['min']:.2f}, median {found['median']:.2f}")


ATTENTIONS = {
    "llama-2-7b 8k": BlendShape(8192, 32, 1),
    "llama-3.1-8b 4k": BlendShape(4096, 8, 4),
    "llama-3.1-8b 8k": BlendShape(8192, 8, 4),
    "llama-3.1-8b 32k": BlendShape(32768, 8, 4),
    "llama-3-70b 8k": BlendShape(8192, 8, 8),
    "llama-3-70b 8k tp8": BlendShape(8192, 1, 8),
}


def seconds(function: Callable[[], object], calls: int = 20) -> list[float]:
    """Device time of calls with a cold L2, from CUDA events."""
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    times = []
    for i in range(calls + 3):
        flush.zero_()
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        function()
        ended.record()
        ended.synchronize()
        if i >= 3:
            times.append(began.elapsed_time(ended) / 1e3)
    return times


@pytest.mark.parametrize("name", ATTENTIONS)
def test_blend_attention(benchmark: Any, name: str) -> None:
    """TFLOP/s on visible keys, and as a share of a bf16 matrix product's; peers where they can run."""
    shape = ATTENTIONS[name]
    makers = dict(contenders(shape, torch.device("cuda")))
    ours = makers.pop(OURS)()
    torch.testing.assert_close(ours().float(), makers[MASKED]()().float(), atol=2e-2, rtol=2e-2)
    benchmark.pedantic(ours, rounds=1)
    matrix = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    roof = 2 * 8192**3 / min(seconds(lambda: matrix @ matrix))
    times = seconds(ours)
    speed = shape.flops / min(times)
    benchmark.extra_info.update(
        tflops=speed / 1e12, of_matmul=speed / roof, us=min(times) * 1e6, us_median=1e6 * median(times)
    )
    print(f"{name}: {speed / 1e12:.0f} TFLOP/s, {speed / roof:.2f} of a matrix product's")
    for peer, make in makers.items():
        try:
            its = seconds(make())
        except Exception as error:  # a peer that is missing or cannot do it must not hide the others
            benchmark.extra_info[peer] = f"{type(error).__name__}: {error}"[:200]
            print(f"{peer} did not run: {benchmark.extra_info[peer]}")
            continue
        found = ratio({"ours": times, peer: its}, "ours", peer)
        benchmark.extra_info[peer] = {"ratio_min": found["min"], "ratio_median": found["median"]}
        print(f"{name}: of {peer}: min {found['min']:.2f}, median {found['median']:.2f}")


def test_rope_scatter_and_scores(benchmark: Any) -> None:
    """Bytes that must be read and written, per second, as a share of a device copy's; Llama-3.1-8B at 8k."""
    shape = ATTENTIONS["llama-3.1-8b 8k"]
    count, heads, size = shape.tokens, shape.heads * shape.group, shape.size
    bf16 = {"dtype": torch.bfloat16, "device": "cuda"}
    rope = Rope(tuple((500000.0 ** -(np.arange(size // 2) / (size // 2))).tolist()))
    blocks = np.random.default_rng(1).permutation(count // shape.block_tokens)[None]
    length = np.array([count])
    rows = Rows.of(np.arange(count), np.array([0, count]), length, blocks, shape.block_tokens, "cuda")
    question = Rows.of(
        np.arange(count - 64, count), np.array([0, 64]), length, blocks, shape.block_tokens, "cuda"
    )
    turns = RowRotations(rope, torch.from_numpy(rope.table(rows.positions)).cuda())
    fused = torch.randn(count, heads + 2 * shape.heads, size, **bf16)
    q, k, v = fused.split([heads, shape.heads, shape.heads], 1)
    pages = blocks.size, shape.heads, shape.block_tokens, size
    k_pages, v_pages = (torch.zeros(pages, **bf16) for _ in range(2))
    lse = torch.zeros(64, heads, device="cuda")

    def scatter() -> None:
        rope_scatter(q, k, v, turns, rows.slots, k_pages, v_pages)

    def scores() -> None:
        query_scores(q[-64:], k_pages, v_pages, question, Scoring(size**-0.5), lse)

    benchmark.pedantic(scatter, rounds=1)
    source, target = (torch.ones(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(2))
    roof = 2 * source.nbytes / min(seconds(lambda: target.copy_(source)))
    moved = {
        "scatter": (scatter, 2 * fused.nbytes + turns.cos_sin.nbytes),
        "scores": (scores, k_pages.nbytes + v_pages.nbytes),
    }
    for name, (function, count_bytes) in moved.items():
        speed = count_bytes / min(seconds(function))
        benchmark.extra_info[name] = {"GB/s": speed / 1e9, "of copy": speed / roof}
        print(f"{name}: {speed / 1e9:.0f} GB/s, {speed / roof:.2f} of a device copy's")
