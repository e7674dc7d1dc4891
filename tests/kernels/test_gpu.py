"""Pages on a GPU move as on a CPU, bit by bit; `make gpu-tests` runs this where there is a GPU."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cached_models import config, prompt, random_model
from test_attention import DTYPES, TOLERANCES, Problem, oracle
from test_pages_triton import numbers_for_fp8

from kvkit.adapters.huggingface.cached import CachedModel
from kvkit.adapters.huggingface.probe import probe_layout
from kvkit.environment import cuda_driver
from kvkit.format.layout import ORDERS, LayerGroup
from kvkit.format.rope import Rope, Rotation
from kvkit.kernels.attention import api as attention
from kvkit.kernels.attention.layer import RowRotations
from kvkit.kernels.checks import LaunchError
from kvkit.kernels.pages import device as device_moves
from kvkit.kernels.pages import streams
from kvkit.kernels.pages.api import Pages, pack, unpack
from kvkit.kernels.pages.copies import BatchedCopy, Copies, can_batch
from kvkit.kernels.pages.device import PROGRAM_CHOICES, programs_config
from kvkit.kernels.pages.problems import TRANSFERS, transfer_problem
from kvkit.staging import Staging

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU; `make gpu-tests` runs it there"
)

GROUPS = {
    **{order: LayerGroup((0, 1, 2), 3, 8, 4, "bfloat16", block_tokens=4, order=order) for order in ORDERS},
    "mla": LayerGroup((0, 1), 1, 576, 0, "bfloat16", block_tokens=16),
    "uint8": LayerGroup((0, 1), 2, 132, 0, "uint8", block_tokens=4),
    "opaque": LayerGroup((0, 1), 1, 1, 0, "uint8", block_tokens=4, page_bytes=132),
}


@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS.keys())
def test_gpu_pages_move_like_cpu_pages(group: LayerGroup) -> None:
    blocks, tokens = 9, 2 * group.block_tokens
    table = np.array([[5, 1], [8, 3]], np.int64)
    host = group.pages(blocks)
    for layer, pages in enumerate(host):
        raw = pages.contiguous().view(torch.uint8)
        noise = torch.randint(
            0, 256, raw.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(layer)
        )
        pages.copy_(noise.view(pages.dtype))
    device = group.pages(blocks, device="cuda")
    for source, target in zip(host, device, strict=True):
        target.view(torch.uint8).copy_(source.view(torch.uint8))
    records = [np.full(group.chunk_bytes(tokens), 0xA5, np.uint8) for _ in range(4)]
    pack(Pages.of(group, host), records[:2], blocks=table)
    pack(Pages.of(group, device), records[2:], blocks=table)
    assert all(np.array_equal(a, b) for a, b in zip(records[:2], records[2:], strict=True))
    for pages in (*host, *device):
        pages.view(torch.uint8).fill_(0xA5)
    unpack(Pages.of(group, host), records[:2], blocks=table)
    unpack(Pages.of(group, device), records[2:], blocks=table)
    for source, target in zip(host, device, strict=True):
        assert torch.equal(source.view(torch.uint8), target.view(torch.uint8).cpu())


def test_gpu_has_the_codes_of_fp8_that_the_cpu_has() -> None:
    """Numbers of every kind in rows whose largest is 448, then every code with a scale of 1."""
    numbers = numbers_for_fp8()
    numbers = numbers[numbers.abs() <= 448]
    numbers = torch.nn.functional.pad(numbers, (0, -len(numbers) % 15)).view(-1, 15)
    rows = torch.cat([torch.full_like(numbers[:, :1], 448.0), numbers], 1)
    group = LayerGroup((0,), 1, 16, 0, "float32", block_tokens=len(rows), precision="fp8")
    size = group.chunk_bytes(len(rows))
    found = []
    for device in ("cpu", "cuda"):
        pages = rows.view(1, 1, -1, 16).to(device)
        record = np.full(size, 0xA5, np.uint8)
        pack(Pages.of(group, [pages]), [record], blocks=np.array([[0]]))
        codes = torch.cat([torch.arange(256).view(16, 16), torch.tensor([[0, 0, 128, 63]] * 16)], 1)
        other = replace(group, block_tokens=16)
        (decoded,) = other.pages(1, device=device)
        unpack(Pages.of(other, [decoded]), [codes.byte().view(-1).numpy()], blocks=np.array([[0]]))
        found.append((record.tolist(), decoded.nan_to_num(999.0).view(torch.int32).tolist()))
    assert found[0] == found[1]


def device_records(count: int, size: int, memory: str) -> list[Any]:
    """Poisoned records in memory of any kind, 16 bytes from a multiple of 64."""
    step = -(-size // 64) * 64 + 64
    arena = torch.full((count * step,), 0xA5, dtype=torch.uint8, device="cuda" if memory == "cuda" else "cpu")
    if memory == "pinned":
        arena = arena.pin_memory()
    tensors = [arena[i * step + 16 :][:size] for i in range(count)]
    return tensors if memory == "cuda" else [tensor.numpy() for tensor in tensors]


@pytest.mark.parametrize("memory", ["pageable", "pinned", "cuda"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("precision", [None, "fp8", "int8"])
def test_gpu_converts_like_the_cpu(precision: Any, dtype: str, interleaved: bool, memory: str) -> None:
    """Codes are equal, rotated numbers but for the rounding of a product that a GPU fuses with the sum."""
    group = LayerGroup((0, 1, 2), 3, 64, 32, dtype, block_tokens=4, precision=precision)
    rope = Rope(tuple(np.linspace(1, 0.01, 16)), interleaved, first=32)
    table = np.array([[5, 1, -1], [8, 3, 0]])
    slots = np.where(table[:, :, None] < 0, -1, table[:, :, None] * 4 + np.arange(4)).reshape(2, -1)
    rotation = Rotation(rope, np.random.default_rng(0).integers(-999, 999, (2, 12)))
    host = group.pages(9)
    for layer, tensor in enumerate(host):
        tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(layer)))
    device = [tensor.cuda() for tensor in host]
    size = group.chunk_bytes(12)
    records, wanted = device_records(2, size, memory), [np.full(size, 0xA5, np.uint8) for _ in range(2)]
    pack(Pages.of(group, device), records, slots=slots)
    pack(Pages.of(group, host), wanted, slots=slots)
    for found, want in zip(records, wanted, strict=True):
        np.testing.assert_array_equal(found.cpu().numpy() if memory == "cuda" else found, want)
    for pages in (*host, *device):
        pages.view(torch.uint8).fill_(0xA5)
    unpack(Pages.of(group, device), records, blocks=table, rotate=rotation)
    unpack(Pages.of(group, host), wanted, blocks=table, rotate=rotation)
    rounding = torch.finfo(host[0].dtype).eps
    for source, target in zip(host, device, strict=True):
        torch.testing.assert_close(target.cpu(), source, rtol=2 * rounding, atol=1e-6)
        for untouched in (2, 4, 6, 7):
            assert (target[untouched].view(torch.uint8) == 0xA5).all()


def test_gpu_records_may_be_reused_at_once() -> None:
    """On the device they are read in the order of the stream, in pinned memory before unpack returns."""
    group = LayerGroup(tuple(range(8)), 8, 64, 64, "bfloat16", block_tokens=16)
    blocks = np.arange(64).reshape(1, -1)
    for memory in ("pinned", "cuda"):
        pages = group.pages(64, device="cuda")
        records = device_records(1, group.chunk_bytes(1024), memory)
        unpack(Pages.of(group, pages), records, blocks=blocks)
        records[0][:] = 0
        assert all((tensor.view(torch.uint8) == 0xA5).all() for tensor in pages)


def test_staging_is_pinned() -> None:
    staging = Staging(1 << 20, 4)
    assert staging.ready.wait(60)
    assert torch.from_numpy(staging.arrays[3]).is_pinned()
    torch.cuda.synchronize()
    addresses = [streams.device_address(array.ctypes.data) for array in staging.arrays]
    assert None not in addresses
    assert streams.device_address(np.zeros(8, np.uint8).ctypes.data) is None
    staging.close()


LAYER = LayerGroup((0, 1), 8, 128, 128, "bfloat16", block_tokens=16)


def moved_and_back(records: list[Any], blocks: Any, **how: Any) -> bool:
    """Whether records that are unpacked are the same once they are packed into poison; mutates them."""
    pages = Pages.of(LAYER, LAYER.pages(blocks.size, device="cuda"))
    before = [record.copy() for record in records]
    unpack(pages, records, blocks=blocks, **how)
    for record in records:
        record[:] = 0xA5
    pack(pages, records, blocks=blocks, **how)
    return all(map(np.array_equal, records, before))


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of copies in each batch that the driver was given."""
    found, queue = list[int](), BatchedCopy.queue

    def noted(call: BatchedCopy, pairs: Any, stream: int) -> bool:
        found.append(len(pairs))
        return queue(call, pairs, stream)

    monkeypatch.setattr(BatchedCopy, "queue", noted)
    return found


@pytest.mark.parametrize("stream", ["own", "default"])
@pytest.mark.parametrize("to_records", [True, False])
@pytest.mark.parametrize("way", PROGRAM_CHOICES)
def test_every_way_moves_the_same_bytes(way: int, to_records: bool, stream: str, batches: list[int]) -> None:
    """The copy engine by batches on a stream of its own, one by one on the default one."""
    on = torch.cuda.Stream() if stream == "own" else torch.cuda.default_stream()
    for spec in (spec for spec in TRANSFERS if spec.to_records == to_records):
        case = transfer_problem(replace(spec, chunks=min(spec.chunks, 4))).make(torch.device("cuda", 0), True)
        case.poison()
        torch.cuda.synchronize()
        with torch.cuda.stream(on):
            case.run(programs_config(way))
        torch.cuda.synchronize()
        assert case.fault() == "", spec
    assert bool(batches) == (can_batch() and stream == "own" and not way)


@pytest.mark.parametrize("memory", ["pinned", "pageable"])
@pytest.mark.parametrize("to_gpu", [True, False])
def test_batches_copy_exactly_their_bytes(to_gpu: bool, memory: str, batches: list[int]) -> None:
    """In the order of the stream; pageable memory is copied one by one."""
    sizes = [1, 3333, 16, 70000, 5]
    near = torch.full((5, 70002), 0xA5, dtype=torch.uint8, device="cuda")
    far = torch.full((5, 70002), 0xA5, dtype=torch.uint8, pin_memory=memory == "pinned")
    source, target = (far, near) if to_gpu else (near, far)
    noise = torch.randint(0, 256, source.shape, dtype=torch.uint8).pin_memory()
    source.copy_(noise)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        if not to_gpu:  # what the batch reads is written late
            source.fill_(0)
            torch.cuda._sleep(1 << 26)
            source.copy_(noise, non_blocking=True)
        Copies([(target[i, 1 : n + 1], source[i, 1 : n + 1]) for i, n in enumerate(sizes)]).run()
    torch.cuda.synchronize()
    for i, n in enumerate(sizes):
        assert torch.equal(target[i, 1 : n + 1].cpu(), noise[i, 1 : n + 1])
        assert target[i, 0] == 0xA5
        assert (target[i, n + 1 :] == 0xA5).all()
    assert batches == ([5] if can_batch() and memory == "pinned" else [])


@pytest.mark.skipif(torch.version.hip is not None, reason="of NVIDIA's driver")
def test_batches_come_with_cuda_12_8() -> None:
    driver, version = cuda_driver(), ctypes.c_int()
    assert driver is not None
    assert driver.cuDriverGetVersion(ctypes.byref(version)) == 0
    assert can_batch() == (version.value >= 12080)


@pytest.mark.parametrize("buffer_bytes", [1, 3 << 20, 1 << 30])
def test_unpinned_records_pass_a_buffer_in_turns(buffer_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_moves.move, "__defaults__", (None, buffer_bytes))
    records = [np.random.default_rng(i).integers(0, 256, LAYER.chunk_bytes(256), np.uint8) for i in range(5)]
    assert moved_and_back(records, np.random.default_rng(9).permutation(80).reshape(5, 16))


@pytest.mark.parametrize("memory", ["pageable", "pinned"])
def test_a_move_does_not_wait_for_what_the_engine_queues_after_it_was_asked_for(memory: str) -> None:
    blocks, records = np.arange(16).reshape(1, -1), device_records(1, LAYER.chunk_bytes(256), memory)
    assert moved_and_back(records, blocks)  # compiled
    pages = Pages.of(LAYER, LAYER.pages(16, device="cuda"))
    asked = streams.marks([torch.device("cuda", 0)])
    torch.cuda._sleep(1 << 32)  # cycles: more than a second
    busy = torch.cuda.current_stream().record_event()
    unpack(pages, records, blocks=blocks, after=asked)
    assert not busy.query(), "the move waited for the engine"
    busy.synchronize()


def test_moves_wait_for_the_engine_unless_told() -> None:
    """Pages that a busy stream will fill are packed as it leaves them, whatever thread packs."""
    blocks, records = np.arange(16).reshape(1, -1), device_records(1, LAYER.chunk_bytes(256), "pinned")
    tensors = LAYER.pages(16, device="cuda")
    pages, engine = Pages.of(LAYER, tensors), torch.cuda.Stream()
    pack(pages, records, blocks=blocks)
    engine.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(engine):
        torch.cuda._sleep(1 << 30)
        for tensor in tensors:
            tensor.view(torch.uint8).fill_(7)
        asked = streams.marks([torch.device("cuda", 0)])
    thread = threading.Thread(target=lambda: pack(pages, records, blocks=blocks, after=asked))
    thread.start()
    thread.join(60)
    assert (records[0] == 7).all()


def test_pages_cannot_be_captured_and_another_thread_may_move_meanwhile() -> None:
    """A thread that allocates while this one captures in the strictest mode spoils nothing."""
    blocks, found = np.arange(32).reshape(2, 16), list[bool]()
    records = [np.random.default_rng(i).integers(0, 256, LAYER.chunk_bytes(256), np.uint8) for i in (0, 1)]
    pages = Pages.of(LAYER, LAYER.pages(32, device="cuda"))
    x, graph = torch.zeros(8, device="cuda"), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    thread = threading.Thread(
        target=lambda: found.append(unpack(pages, records, blocks=blocks, after=()) is None)
    )
    with torch.cuda.graph(graph, capture_error_mode="global"):
        x += 1
        with pytest.raises(LaunchError, match="capturing a CUDA graph"):
            unpack(pages, records, blocks=blocks)
        thread.start()
        thread.join(60)
        x += 1
    assert found == [True]
    graph.replay()
    assert (x == 2).all()


@pytest.mark.parametrize("kind", ["gqa", "mha", "sliding window", "hybrid"])
def test_a_model_on_the_gpu_says_the_same_from_disk(kind: str, tmp_path: Path) -> None:
    model = random_model(kind).cuda()
    plain = CachedModel(model, probe_layout(model), None)
    tokens = prompt(75)
    expected = plain.generate(tokens, 12)
    for hits in (0, 64):
        with CachedModel.open(model, config(tmp_path)) as cached:
            answer = cached.generate(tokens, 12)
        assert sum(answer.hit_tokens.values()) == hits
        assert answer.tokens == expected.tokens


def blend_problem(dtype: torch.dtype, window: int | None, softcap: float | None, heads: int) -> Problem:
    """Two requests whose tiles are many enough, or, with one KV head, so few that they are split."""
    random = np.random.default_rng(0)
    rows = [(tuple(np.sort(random.choice(n, n // 6, replace=False)).tolist()), n) for n in (1777, 300)]
    return Problem(
        rows=tuple(rows), heads=heads, group=4, size=128, v_size=128, tokens=16,
        dtype=dtype, window=window, softcap=softcap,
    )  # fmt: skip


@pytest.mark.parametrize("heads", [1, 8])
@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("window", [None, 500])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gpu_attention(dtype: torch.dtype, window: int | None, softcap: float | None, heads: int) -> None:
    """`blend_attention` and `query_scores`, against float64."""
    problem = blend_problem(dtype, window, softcap, heads)
    q, k, v = problem.tensors()
    on_gpu = [x.cuda() for x in (q, k, v)]
    o, lse = attention.blend_attention(*on_gpu, problem.plan("cuda"), problem.scoring)
    wanted, wanted_lse = oracle(problem, q, k, v, problem.plan())
    close = {"atol": TOLERANCES[dtype], "rtol": TOLERANCES[dtype]}
    torch.testing.assert_close(o.cpu().double(), wanted, **close)
    torch.testing.assert_close(lse.cpu(), wanted_lse, atol=1e-3, rtol=1e-3)
    room = torch.full((len(o) + 2, *o.shape[1:]), torch.nan, dtype=dtype, device="cuda")
    again, _ = attention.blend_attention(*on_gpu, problem.plan("cuda"), problem.scoring, room[1:-1])
    assert torch.equal(o, again)
    assert torch.equal(o, room[1:-1])
    assert room[:: len(o) + 1].isnan().all()

    one = replace(problem, rows=problem.rows[:1])
    q, k, v = one.tensors()
    scores = [
        attention.query_scores(q.to(device), k.to(device), v.to(device), one.plan(device), one.scoring)
        for device in ("cpu", "cuda", "cuda")
    ]
    torch.testing.assert_close(scores[1].cpu(), scores[0], atol=1e-3, rtol=1e-2)
    assert torch.equal(scores[1], scores[2])


def test_attention_may_be_captured_after_a_call_with_its_rows() -> None:
    problem = blend_problem(torch.bfloat16, None, None, 8)
    q, k, v = (x.cuda() for x in problem.tensors())
    rows, graph = problem.plan("cuda"), torch.cuda.CUDAGraph()
    wanted, _ = attention.blend_attention(q, k, v, rows, problem.scoring)
    with torch.cuda.graph(graph):
        captured, _ = attention.blend_attention(q, k, v, rows, problem.scoring)
    graph.replay()
    assert torch.equal(captured, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gpu_scatter(dtype: torch.dtype) -> None:
    """`rope_scatter` and `token_deviation` write and say what they do on a CPU."""
    rope = Rope(tuple((10000.0 ** -(np.arange(64) / 64)).tolist()))
    cos_sin = torch.from_numpy(rope.table(np.arange(100) * 37))
    fused = torch.randn(100, 32 + 8 + 8, 128).to(dtype)
    slots = torch.from_numpy(np.random.default_rng(0).permutation(160)[:100])
    slots[::7] = -1
    found = []
    for device in ("cpu", "cuda"):
        q, k, v = fused.to(device).split([32, 8, 8], 1)
        k_pages, v_pages = torch.zeros(2, 10, 8, 16, 128, dtype=dtype, device=device)
        moved = torch.empty(100, device=device)
        turns = RowRotations(rope, cos_sin.to(device))
        turned = attention.rope_scatter(q, k, v, turns, slots.to(device), k_pages, v_pages, moved)
        distance = attention.token_deviation(k, v)
        found.append([x.cpu() for x in (turned, k_pages, v_pages, moved, distance)])
    for ours, wanted in zip(found[1], found[0], strict=True):
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(ours, wanted, atol=1e-5, rtol=2 * eps)
