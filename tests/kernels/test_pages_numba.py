"""The CPU's pack and unpack write the right bytes, and no others, in every layout."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvkit.format.layout import ITEM_BYTES, ORDERS, SMALLEST_AMAX, LayerGroup
from kvkit.format.rope import Rope, Rotation
from kvkit.kernels.pages import numba, reference
from kvkit.kernels.pages.api import Pages, pack, unpack
from kvkit.transfer.sequence import SequencePages

POISON = 0xA5
Tensors = list[torch.Tensor | tuple[torch.Tensor, torch.Tensor]]
Ids = NDArray[np.int64]
FLOATS = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Job:
    """A group, where its pages are, which of them make the chunks, and where the records are."""

    group: LayerGroup
    # joined, apart (own memory), split (views of joined), mixed (every second is split); opaque: bytes, typed
    form: str
    blocks: int
    tokens: int  # N of the tensors
    pad: int  # elements left free after every axis
    ids: Ids
    granular: str  # blocks or slots
    gap: int  # bytes before, between and after records

    @property
    def slots(self) -> Ids:
        """[chunks, T] of token slots; opaque: of pages."""
        if self.granular == "slots" or self.group.opaque:
            return self.ids
        every = self.ids[:, :, None] * self.tokens + np.arange(self.tokens)
        return np.where(self.ids[:, :, None] < 0, -1, every).reshape(len(self.ids), -1)

    def pools(self, seed: int) -> list[torch.Tensor]:
        """Random bytes, all that the pages live in."""
        parts = [(self.group.k_size, 0), (self.group.v_size, 0)] if self.form == "apart" else [(0, 0)]
        random = np.random.default_rng(seed)
        sizes = [self._strides(channels)[1] * self.group.item_bytes for channels, _ in parts]
        return [torch.from_numpy(random.integers(0, 256, size, np.uint8)) for size in sizes]

    def tensors(self, pools: list[torch.Tensor]) -> Tensors:
        """The pages as an engine would give them, views of `pools`."""
        group = self.group
        if self.form == "apart":
            k = self._views(pools[0], group.k_size)
            v = self._views(pools[1], group.v_size)
            return list(zip(k, v, strict=True))
        joined = self._views(pools[0], 0)
        split_layers = {"split": 1, "mixed": 2}.get(self.form)
        return [
            (t[..., : group.k_size], t[..., group.k_size :]) if split_layers and i % split_layers == 0 else t
            for i, t in enumerate(joined)
        ]

    def records(self) -> tuple[NDArray[np.uint8], list[NDArray[np.uint8]]]:
        """Poisoned memory, and the records in it, in any order and of any alignment."""
        group, tokens = self.group.stored, self.slots.shape[1]
        row_bytes = group.page_bytes or group.kv_heads * group.channels * group.item_bytes
        size = len(group.layers) * tokens * row_bytes
        step = size + self.gap
        arena = np.full(step * len(self.ids) + self.gap, POISON, np.uint8)
        starts = [self.gap + i * step for i in range(len(self.ids))]
        return arena, [arena[s : s + size] for s in reversed(starts)]

    def _strides(self, channels: int) -> tuple[dict[str, int], int]:
        """Strides in elements by axis, and how many elements they span."""
        group = self.group
        sizes = {
            "L": len(group.layers),
            "B": self.blocks,
            "H": group.kv_heads,
            "N": self.tokens,
            "C": channels or group.channels,
        }
        if self.form == "bytes":
            sizes |= {"H": 1, "N": 1, "C": group.page_bytes or 0}
        strides, step = {}, 1
        for axis in reversed(group.order):
            strides[axis] = step
            # an opaque block has no holes, only what follows it may be free
            inner = group.opaque and axis in "HNC"
            step = step * sizes[axis] + (0 if inner else self.pad)
        return strides, step

    def _views(self, pool: torch.Tensor, channels: int) -> list[torch.Tensor]:
        group = self.group
        strides, _ = self._strides(channels)
        shape = (self.blocks, group.kv_heads, self.tokens, channels or group.channels)
        dtype = group.dtype
        if self.form == "bytes":
            shape, dtype = (self.blocks, 1, 1, group.page_bytes or 0), "uint8"
        return [
            pool.view(getattr(torch, dtype)).as_strided(
                shape, [strides[a] for a in "BHNC"], layer * strides["L"]
            )
            for layer in range(len(group.layers))
        ]


def expect(job: Job, tensors: Tensors, records: list[NDArray[np.uint8]], to_records: bool) -> None:
    """The slow, plain meaning: one head of one token at a time."""
    layers, heads = len(job.group.layers), 1 if job.group.opaque else job.group.kv_heads
    tokens = 1 if job.group.opaque else job.tokens
    for record, slots in zip(records, job.slots, strict=True):
        rows = record.reshape(layers, heads, len(slots), -1)
        for layer, tensor in enumerate(tensors):
            for t, slot in enumerate(slots.tolist()):
                if slot < 0:
                    continue
                block, n = divmod(slot, tokens)
                for head in range(heads):
                    first = 0
                    for part in tensor if isinstance(tensor, tuple) else (tensor,):
                        if job.group.opaque:
                            # in the order of memory, whatever the order of the axes
                            heads_first = part.stride(1) >= part.stride(2)
                            page = part[block] if heads_first else part[block].transpose(0, 1)
                            page = page.view(torch.uint8).view(-1)
                        else:
                            page = part[block, head, n].view(torch.uint8)
                        row = rows[layer, head, t, first : first + len(page)]
                        if to_records:
                            row[:] = page.numpy()
                        else:
                            page.copy_(torch.from_numpy(row))
                        first += len(page)


def by_host(
    pages: Pages, records: list[NDArray[np.uint8]], job: Job, to_records: bool, threads: int = 2
) -> None:
    ids: dict[str, Any] = {job.granular: job.ids}
    (pack if to_records else unpack)(pages, records, threads=threads, **ids)


def by_reference(pages: Pages, records: list[NDArray[np.uint8]], job: Job, to_records: bool) -> None:
    (reference.pack if to_records else reference.unpack)(job.group, pages.parts, records, job.slots)


@contextmanager
def sizes(piece: int, inline: int, stream: int) -> Iterator[None]:
    """Have small jobs take the ways of large ones: in pieces, by threads, around the caches."""
    with mock.patch.multiple(numba, PIECE_BYTES=piece, INLINE_BYTES=inline, STREAM_BYTES=stream):
        yield


def check(job: Job, move: Callable[[Pages, list[NDArray[np.uint8]], Job, bool], None]) -> None:
    """Pack and unpack `job`: exactly the named bytes change, on both sides, and the round trip is exact."""
    pools = job.pools(1)
    arena, records = job.records()
    wanted, wanted_records = job.records()
    expect(job, job.tensors(pools), wanted_records, True)
    before = [pool.clone() for pool in pools]
    move(Pages.of(job.group, job.tensors(pools)), records, job, True)
    np.testing.assert_array_equal(arena, wanted)
    assert all(map(torch.equal, pools, before))

    others = job.pools(2)
    wanted_pools = [pool.clone() for pool in others]
    for record in records:
        record.setflags(write=False)
    expect(job, job.tensors(wanted_pools), wanted_records, False)
    move(Pages.of(job.group, job.tensors(others)), records, job, False)
    assert all(map(torch.equal, others, wanted_pools))
    np.testing.assert_array_equal(arena, wanted)

    again, packed = job.records()
    move(Pages.of(job.group, job.tensors(others)), packed, job, True)
    np.testing.assert_array_equal(again, arena)


@st.composite
def jobs(
    draw: st.DrawFn,
    forms: tuple[str, ...] = ("joined", "apart", "split", "mixed", "bytes", "typed"),
    dtypes: tuple[str, ...] = tuple(sorted(ITEM_BYTES)),
) -> Job:
    form = draw(st.sampled_from(forms))
    opaque = form in ("bytes", "typed")
    granular = "blocks" if opaque else draw(st.sampled_from(["blocks", "slots"]))
    widths = st.sampled_from([1, 2, 3, 7, 16, 32, 64, 132])
    dtype = draw(st.sampled_from(dtypes))
    group = LayerGroup(
        layers=tuple(range(draw(st.integers(1, 3)))),
        kv_heads=draw(st.integers(1, 4)),
        k_size=draw(widths),
        v_size=draw(widths if form in ("apart", "split", "mixed") else st.just(0) | widths),
        dtype=dtype,
        block_tokens=draw(st.integers(1, 5)),
        order=draw(st.sampled_from([o for o in ORDERS if not opaque or o[-3:-1] in ("HN", "NH")])),
    )
    if opaque:
        group = replace(group, page_bytes=group.block_bytes)
    tokens = group.block_tokens if granular == "blocks" else draw(st.integers(1, 9))
    chunks, per_chunk = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    per_block = tokens if granular == "slots" else 1
    blocks = -(-chunks * per_chunk // per_block) + draw(st.integers(0, 2))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    total = blocks * per_block
    ids = np.arange(total) if draw(st.booleans()) else random.permutation(total)
    ids = ids[: chunks * per_chunk].reshape(chunks, per_chunk).astype(np.int64)
    if draw(st.booleans()):
        ids[random.random(ids.shape) < 0.3] = draw(st.sampled_from([-1, -(2**62)]))
    pad = draw(st.sampled_from([0, 0, 1, 3, 64]))
    return Job(group, form, blocks, tokens, pad, ids, granular, draw(st.sampled_from([0, 1, 13, 64, 100])))


SMALL = LayerGroup(layers=(0, 1), kv_heads=2, k_size=16, v_size=16, dtype="float32", block_tokens=4)


@settings(max_examples=300, deadline=None)
@given(job=jobs(), size=st.sampled_from([(64, 0, 0), (1 << 19, 0, 1 << 40), (1 << 19, 1 << 40, 0)]))
@example(job=Job(SMALL, "joined", 4, 4, 0, np.array([[1, 0], [3, 2]]), "blocks", 64), size=(64, 0, 0)).via(
    "streams into whole lines"
)
def test_host(job: Job, size: tuple[int, int, int]) -> None:
    with sizes(*size):
        check(job, by_host)


@settings(max_examples=100, deadline=None)
@given(job=jobs())
def test_reference(job: Job) -> None:
    check(job, by_reference)


@settings(max_examples=50, deadline=None)
@given(job=jobs().filter(lambda job: job.granular == "blocks"))
def test_copied(job: Job) -> None:
    pools, (wanted, expected), (arena, records) = job.pools(1), job.records(), job.records()
    expect(job, job.tensors(pools), expected, True)
    copy = SequencePages(Pages.of(job.group, job.tensors(pools)), job.ids.reshape(-1)).copied()
    for pool in pools:
        pool.fill_(POISON)
    assert copy.blocks is not None
    by_host(copy.pages, records, replace(job, ids=copy.blocks.reshape(job.ids.shape)), True)
    np.testing.assert_array_equal(arena, wanted)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_layouts(order: str, dtype: str) -> None:
    """Every order and dtype, as `LayerGroup.pages` makes them."""
    group = replace(SMALL, order=order, dtype=dtype)
    ids = np.array([[5, 0, 2], [1, 4, 3]])
    pages = group.pages(7, POISON)
    for layer, tensor in enumerate(pages):
        raw = np.random.default_rng(layer).integers(0, 256, (7, 2, 4, 32 * group.item_bytes), np.uint8)
        tensor.copy_(torch.from_numpy(raw).view(tensor.dtype))
    records = [np.zeros(group.chunk_bytes(12), np.uint8) for _ in ids]
    with sizes(256, 0, 0):
        pack(Pages.of(group, pages), records, blocks=ids)
        for record, row in zip(records, ids, strict=True):
            wanted = torch.stack([t.view(torch.uint8)[row].permute(1, 0, 2, 3) for t in pages])
            np.testing.assert_array_equal(record, wanted.reshape(-1).numpy())
        fresh = group.pages(7, POISON)
        unpack(Pages.of(group, fresh), records, blocks=ids)
    for tensor, other in zip(pages, fresh, strict=True):
        assert torch.equal(tensor.view(torch.uint8)[:6], other.view(torch.uint8)[:6])
        assert (other.view(torch.uint8)[6] == POISON).all()


def test_repeated_reads() -> None:
    """Chunks may share blocks when they are packed."""
    job = Job(SMALL, "joined", 3, 4, 0, np.array([[2, 2], [0, 2], [2, -1]]), "blocks", 3)
    pools = job.pools(0)
    wanted, wanted_records = job.records()
    expect(job, job.tensors(pools), wanted_records, True)
    for move in (by_host, by_reference):
        arena, records = job.records()
        move(Pages.of(job.group, job.tensors(pools)), records, job, True)
        np.testing.assert_array_equal(arena, wanted)


def test_every_row_of_a_large_job() -> None:
    """Nothing is patched: two threads, pieces, streaming."""
    group = LayerGroup(layers=tuple(range(9)), kv_heads=3, k_size=64, v_size=64, dtype="float32")
    tokens = numba.STREAM_BYTES // group.chunk_bytes(16) * 16 + 32
    blocks = np.random.default_rng(0).permutation(tokens // 16).reshape(1, -1)
    pages = group.pages(tokens // 16)
    random = np.random.default_rng(1)
    for tensor in pages:
        tensor.copy_(torch.from_numpy(random.standard_normal(tensor.shape, np.float32)))
    record = np.zeros(group.chunk_bytes(tokens), np.uint8)
    pack(Pages.of(group, pages), [record], blocks=blocks, threads=2)
    got = torch.from_numpy(record).view(torch.float32).view(9, 3, tokens, 128)
    for layer, tensor in enumerate(pages):
        assert torch.equal(got[layer], tensor[blocks[0]].transpose(0, 1).reshape(3, tokens, 128))


def test_slot_0_after_a_skipped_one() -> None:
    """-1 and 0 are consecutive numbers, not consecutive slots."""
    job = Job(SMALL, "joined", 2, 4, 0, np.array([[-1, 0, 1, -2, -1, 4, 3, 2]]), "slots", 0)
    for move in (by_host, by_reference):
        check(job, move)


def test_no_chunks() -> None:
    pages = Pages.of(SMALL, SMALL.pages(2))
    pack(pages, [], blocks=np.empty((0, 2), np.int64))
    unpack(pages, [], slots=np.empty((0, 0), np.int64))


def concurrent_job(seed: int) -> Job:
    ids = np.random.default_rng(seed).permutation(40)[:24].reshape(4, 6)
    return Job(replace(SMALL, order="LBNHC"), "joined", 40, 4, 1, ids, "blocks", 13)


def test_concurrent_calls() -> None:
    """Python threads share the kernel's pool, and each gets its own bytes."""
    with sizes(256, 0, 1 << 40), ThreadPoolExecutor(4) as callers:
        for done in [callers.submit(check, concurrent_job(i % 5), by_host) for i in range(40)]:
            done.result()


@pytest.mark.parametrize("begun", [True, False])
def test_waits_for_what_has_begun(begun: bool) -> None:
    """And not for a thread that never came to it: the caller has done its share by then."""
    future = mock.Mock()
    future.cancel.return_value = not begun
    pool = mock.Mock()
    pool.submit.return_value = future
    with sizes(256, 0, 0), mock.patch.object(numba, "_pool", return_value=pool):
        check(concurrent_job(0), by_host)
    assert future.result.call_count == (3 if begun else 0)


def test_many_threads() -> None:
    """More threads than pieces."""
    with sizes(1 << 30, 0, 1 << 40):
        check(concurrent_job(0), partial(by_host, threads=5))


def _in_child() -> None:
    torch.set_num_threads(1)  # torch's own threads do not survive a fork, and it waits for them forever
    with sizes(256, 0, 0):
        check(concurrent_job(7), by_host)
    assert any(thread.name.startswith("kvkit-pages") for thread in threading.enumerate())


def test_fork() -> None:
    """A child has none of its parent's threads and makes its own."""
    with sizes(256, 0, 0):
        check(concurrent_job(7), by_host)
    child = multiprocessing.get_context("fork").Process(target=_in_child)
    child.start()
    child.join(60)
    exitcode = child.exitcode
    child.kill()
    assert exitcode == 0


Move = Callable[[Pages, list[NDArray[np.uint8]], Job, bool, Rotation | None, str | None], None]


@dataclass(frozen=True)
class Conversion:
    """What happens to the numbers of a job on their way."""

    job: Job
    rotation: Rotation | None


@st.composite
def conversions(draw: st.DrawFn) -> Conversion:
    """Any layout, rotated by tokens or chunks, quantised, or both."""
    job = draw(jobs(("joined", "apart", "split", "mixed"), FLOATS))
    to: Any = draw(st.sampled_from([None, "fp8", "int8"]))
    pairs = draw(st.integers(0 if to else 1, job.group.k_size // 2)) if job.group.k_size > 1 else 0
    job = replace(job, group=replace(job.group, precision=to if pairs else to or "fp8"))
    if not pairs:
        return Conversion(job, None)
    random = np.random.default_rng(draw(st.integers(0, 99)))
    first = draw(st.sampled_from([0, job.group.k_size - 2 * pairs, (job.group.k_size - 2 * pairs) // 2]))
    rope = Rope(tuple(random.uniform(0, 1, pairs)), draw(st.booleans()), first)
    shape = job.slots.shape if draw(st.booleans()) else job.slots.shape[:1]
    return Conversion(job, Rotation(rope, random.integers(-5000, 5000, shape)))


def numbers(job: Job, seed: int) -> list[torch.Tensor]:
    """As `Job.pools`: numbers of very different sizes, zeros among them, none of them infinite or NaN."""
    random = np.random.default_rng(seed)
    dtype = getattr(torch, job.group.dtype)
    pools = []
    for pool in job.pools(seed):
        count = len(pool) // job.group.item_bytes
        values = (
            random.standard_normal(count) * 10.0 ** random.integers(-9, 4, -(-count // 50)).repeat(50)[:count]
        )
        values[random.random(count) < 0.05] = 0
        pools.append(torch.from_numpy(values).to(dtype).view(torch.uint8))
    return pools


def convert_by_host(
    pages: Pages,
    records: list[NDArray[np.uint8]],
    job: Job,
    to_records: bool,
    rotation: Rotation | None,
) -> None:
    ids: dict[str, Any] = {job.granular: job.ids}
    if to_records:
        pack(pages, records, threads=2, **ids)
    else:
        unpack(pages, records, rotate=rotation, threads=2, **ids)


def check_conversion(conversion: Conversion, move: Move) -> None:
    """As `check`, against the reference, bit for bit: all backends round in the same places."""
    job, rotation = conversion.job, conversion.rotation
    pools = numbers(job, 1)
    before = [pool.clone() for pool in pools]
    pages = Pages.of(job.group, job.tensors(pools))
    arena, records = job.records()
    wanted, wanted_records = job.records()
    reference.pack(job.group, pages.parts, wanted_records, job.slots)
    move(pages, records, job, True, None)
    np.testing.assert_array_equal(arena, wanted)
    assert all(map(torch.equal, pools, before))

    for record in wanted_records:
        record.setflags(write=False)
    others = job.pools(2)
    wanted_pools = [pool.clone() for pool in others]
    into = Pages.of(job.group, job.tensors(wanted_pools))
    reference.unpack(job.group, into.parts, wanted_records, job.slots, rotation)
    move(Pages.of(job.group, job.tensors(others)), wanted_records, job, False, rotation)
    assert all(map(torch.equal, others, wanted_pools))


@settings(max_examples=80, deadline=None)
@given(
    conversion=conversions(), size=st.sampled_from([(64, 0, 0), (1 << 19, 0, 1 << 40), (1 << 19, 1 << 40, 0)])
)
def test_host_conversions(conversion: Conversion, size: tuple[int, int, int]) -> None:
    with sizes(*size):
        check_conversion(conversion, convert_by_host)


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_16_bits_and_code(dtype: str) -> None:
    """All bit patterns of the halves, and codes that no kernel writes: those between numbers, too."""
    group = LayerGroup((0,), 1, 128, 0, dtype, block_tokens=512)
    every = torch.arange(1 << 16).to(torch.int32)
    bits = every << 16 | 0x7FFF if dtype == "float32" else every.to(torch.int16)
    pages = Pages.of(group, [bits.view(getattr(torch, dtype)).view(1, 1, 512, 128)])
    rotation = Rotation(Rope((0.25,) * 64), np.array([3]))
    slots = np.arange(512)[None]
    plain = np.zeros(group.chunk_bytes(512), np.uint8)
    pack(pages, [plain], slots=slots)
    quantised = np.random.default_rng(0).integers(0, 256, (512, 132), np.uint8)
    quantised[:2, :128] = np.arange(256).reshape(2, 128)
    quantised[:, 128:] = np.random.default_rng(1).uniform(0, 2, (512, 1)).astype(np.float32).view(np.uint8)
    for record, form in ((plain, None), (quantised.reshape(-1), "fp8"), (quantised.reshape(-1), "int8")):
        group = replace(group, precision=form)
        found, wanted = group.pages(1), group.pages(1)
        unpack(Pages.of(group, found), [record], slots=slots, rotate=rotation)
        reference.unpack(group, Pages.of(group, wanted).parts, [record], slots, rotation)
        torch.testing.assert_close(found[0], wanted[0], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("form", ["fp8", "int8"])
@pytest.mark.parametrize("spoilt", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_spoils_its_own_row(form: Any, spoilt: float) -> None:
    group = LayerGroup((0,), 2, 8, 8, "float32", block_tokens=4, precision=form)
    tensors = group.pages(2)
    tensors[0].fill_(1.5)
    tensors[0][1, 0, 2, 5] = spoilt  # K of head 0
    record = np.zeros(group.chunk_bytes(4), np.uint8)
    pack(Pages.of(group, tensors), [record], blocks=np.array([[1]]))
    out = group.pages(1)
    unpack(Pages.of(group, out), [record], blocks=np.array([[0]]))
    assert not out[0][0, 0, 2, :8].isfinite().any()
    out[0][0, 0, 2, :8] = 1.5
    torch.testing.assert_close(out[0], torch.full_like(out[0], 1.5), rtol=1e-6, atol=0)


@settings(max_examples=100, deadline=None)
@given(
    dtype=st.sampled_from(FLOATS),
    form=st.sampled_from(["fp8", "int8"]),
    k_size=st.integers(1, 70),
    v_size=st.integers(0, 70),
    exponent=st.integers(-40, 38),
    zeros=st.floats(0, 1),
    seed=st.integers(0, 2**32),
)
def test_quantisation_error(
    dtype: str, form: Any, k_size: int, v_size: int, exponent: int, zeros: float, seed: int
) -> None:
    """The bounds that `reference.quantise` promises, for tiny and huge rows, too."""
    group = LayerGroup((0,), 2, k_size, v_size, dtype, block_tokens=3, precision=form)
    random = np.random.default_rng(seed)
    values = random.uniform(-1, 1, (2, 2, 3, group.channels)) * 10.0 ** random.uniform(-6, 0, group.channels)
    values[random.random(values.shape) < zeros] = 0
    tensors = [torch.from_numpy(values * 10.0**exponent).to(getattr(torch, dtype))]
    tensors[0][~tensors[0].isfinite()] = 0
    record = np.zeros(group.chunk_bytes(6), np.uint8)
    pack(Pages.of(group, tensors), [record], blocks=np.array([[1, 0]]))
    out = [torch.full_like(tensors[0], torch.nan)]
    unpack(Pages.of(group, out), [record], blocks=np.array([[1, 0]]))
    for part in (slice(0, k_size), slice(k_size, None)):
        x, error = tensors[0][..., part].double(), (out[0] - tensors[0])[..., part].double().abs()
        if not x.numel():
            continue
        amax = x.abs().amax(-1, keepdim=True)
        bound = amax / 254 if form == "int8" else torch.maximum(x.abs() / 16, amax / 448 / 1024)
        rounding = torch.finfo(getattr(torch, dtype))
        bound = bound * (1 + 1e-5) + x.abs() * 2 * rounding.eps + rounding.smallest_normal * rounding.eps
        bound = torch.where(amax < SMALLEST_AMAX, amax, bound)
        assert (error <= bound).all(), (error - bound).max()


ROPES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}


@pytest.mark.parametrize("kind", ROPES)
def test_rotation_is_the_models_own(kind: str) -> None:
    """Keys of positions 3 on, moved to 200 on, are what the model computes there."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        rope_parameters={"rope_theta": 10000.0, **ROPES[kind]},
    )
    model = LlamaRotaryEmbedding(config)
    rope = Rope(tuple(model.inv_freq.double().tolist()), scale=float(model.attention_scaling))
    group = LayerGroup((0,), 2, 32, 32, "float32", block_tokens=8)
    k = torch.randn(1, 2, 8, 32, generator=torch.Generator().manual_seed(0))

    def at(position: int) -> torch.Tensor:
        cos, sin = model(k, torch.arange(position, position + 8)[None])
        return apply_rotary_pos_emb(k, k, cos, sin)[1]

    tensors = [torch.cat([at(3), torch.ones_like(k)], -1)]
    record = np.zeros(group.chunk_bytes(8), np.uint8)
    pack(Pages.of(group, tensors), [record], blocks=np.array([[0]]))
    for rotation in (Rotation(rope, np.array([197])), Rotation(rope, np.full((1, 8), 197))):
        unpack(Pages.of(group, tensors), [record], blocks=np.array([[0]]), rotate=rotation)
        torch.testing.assert_close(tensors[0][..., :32], at(200), rtol=0, atol=2e-4)
        assert (tensors[0][..., 32:] == 1).all()


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_back_is_the_identity(interleaved: bool) -> None:
    """And norms are kept. To rounding: 2 float32 products a channel, twice."""
    group = LayerGroup((0, 1), 3, 24, 8, "float32", block_tokens=4)
    rope = Rope(tuple(np.linspace(1, 0.01, 8)), interleaved, first=5)
    tensors, there, back = group.pages(3), group.pages(3), group.pages(3)
    for layer, tensor in enumerate(tensors):
        tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(layer)))
    ids = np.array([[2, 0, 1]])
    delta = np.arange(12)[None] * 1000
    record = np.zeros(group.chunk_bytes(12), np.uint8)
    pack(Pages.of(group, tensors), [record], blocks=ids)
    unpack(Pages.of(group, there), [record], blocks=ids, rotate=Rotation(rope, delta))
    pack(Pages.of(group, there), [record], blocks=ids)
    unpack(Pages.of(group, back), [record], blocks=ids, rotate=Rotation(rope, -delta))
    for before, turned, after in zip(tensors, there, back, strict=True):
        torch.testing.assert_close(after, before, rtol=0, atol=2e-6)
        torch.testing.assert_close(turned.norm(dim=-1), before.norm(dim=-1), rtol=1e-6, atol=0)
        assert torch.equal(turned[..., :5], before[..., :5])
        assert torch.equal(turned[..., 21:], before[..., 21:])
        assert not torch.equal(turned[..., 5:21], before[..., 5:21])
