"""Sealing and verifying a record against memcpy and other checksums, the cost per record, and the codecs."""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Callable
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt
import pytest
import torch
from xxhash import xxh3_64_intdigest

from benchmarks.timing import interleaved, ratio
from kvkit.format import codecs
from kvkit.format import record as records
from kvkit.format.layout import KVLayout, LayerGroup, Namespace
from kvkit.format.record import RecordFormat

TOKENS = np.arange(256, dtype=np.int32)
KEY = bytes(16)
COPIES = 24  # of an 11.8 MB record, each used in turn: 283 MB, so that no cache has the next one


def format_of(layers: int, heads: int, size: int, dtype: str) -> RecordFormat:
    layout = KVLayout((LayerGroup(tuple(range(layers)), heads, size, size, dtype),))
    return RecordFormat.of(layout, 0, Namespace("bench", layout.fingerprint(), dtype))


SMOLLM2 = format_of(30, 3, 64, "float32")
TWO_LAYERS = format_of(2, 3, 64, "float32")  # 0.8 MB: stays in cache, with its copies
TINY = format_of(2, 1, 8, "uint8")


def sealed(form: RecordFormat) -> npt.NDArray[np.uint8]:
    """A record of noise; every page of it has been written, so that no call meets a page fault."""
    record = np.zeros(form.record_bytes, np.uint8)
    view = records.payload(form, record)
    view[:] = np.random.default_rng(0).integers(0, 256, view.size, dtype=np.uint8)
    records.seal(form, record, form.digest, KEY, TOKENS)
    return record


def report(
    benchmark: Any, functions: dict[str, Callable[[], object]], size: int, rounds: int, rates: bool = True
) -> None:
    """Time of each function, over memcpy's of `size` bytes, from calls that take turns.

    With `rates` also GB/s, where all of them go over the same bytes.
    """
    times = interleaved(functions, rounds if benchmark.enabled else 1, warmup=3 if benchmark.enabled else 0)
    for name in functions:
        found = ratio(times, name, "memcpy")
        benchmark.extra_info[name] = {
            "us": min(times[name]) * 1e6,
            "ratio_min": found["min"],
            "ratio_median": found["median"],
        }
        if rates:
            benchmark.extra_info[name]["gb_per_s"] = size / min(times[name]) / 1e9
    benchmark.extra_info.update(against=f"memcpy of {size} bytes", bytes=size)


@pytest.mark.parametrize("where", ["cache", "memory"])
def test_speed(benchmark: Any, where: str) -> None:
    form = SMOLLM2 if where == "memory" else TWO_LAYERS
    copies = COPIES if where == "memory" and benchmark.enabled else 1
    turns = itertools.cycle(range(copies))  # one for all functions: none meets what another has just read
    held = [sealed(form) for _ in range(copies)]
    targets = [np.ones_like(records.payload(form, record)) for record in held]
    frozen = [records.payload(form, record).tobytes() for record in held]  # google_crc32c takes bytes alone

    def over(function: Callable[[int], object]) -> Callable[[], object]:
        return lambda: function(next(turns))

    def payload(i: int) -> npt.NDArray[np.uint8]:
        return records.payload(form, held[i])

    functions: dict[str, Callable[[int], object]] = {
        "memcpy": lambda i: np.copyto(targets[i], payload(i)),
        "seal": lambda i: records.seal(form, held[i], form.digest, KEY, TOKENS),
        "verify": lambda i: records.verify(form, held[i], form.digest, KEY, TOKENS),
        "xxh3_64, whole": lambda i: xxh3_64_intdigest(payload(i)),
        "xxh3_64, per layer": lambda i: records.layer_checksums(form, held[i]),
        "crc32c": lambda i: google_crc32c.value(frozen[i]),
        "zlib.crc32": lambda i: zlib.crc32(payload(i)),
    }
    try:
        from blake3 import blake3
    except ImportError:
        pass
    else:
        functions["blake3"] = lambda i: blake3(payload(i)).digest()
    assert records.verify(form, held[0], form.digest, KEY, TOKENS) is None
    benchmark(over(functions["verify"]))
    size = form.layers_end - form.header_bytes
    report(benchmark, {name: over(function) for name, function in functions.items()}, size, rounds=48)


def test_cost_per_record(benchmark: Any) -> None:
    """What seal and verify take where there is next to nothing to hash."""
    form, record = TINY, sealed(TINY)
    target = np.ones_like(record)
    assert records.verify(form, record, form.digest, KEY, TOKENS) is None
    functions: dict[str, Callable[[], object]] = {
        "memcpy": lambda: np.copyto(target, record),
        "seal": lambda: records.seal(form, record, form.digest, KEY, TOKENS),
        "verify": lambda: records.verify(form, record, form.digest, KEY, TOKENS),
        "verify_header": lambda: records.verify_header(form, record, form.digest, KEY, TOKENS),
        "read_header": lambda: records.read_header(record),
    }
    benchmark(functions["verify"])
    report(benchmark, functions, form.record_bytes, rounds=3000, rates=False)


@functools.cache
def real_kv() -> torch.Tensor:
    """SmolLM2's KV of the first tokens of the language reference, float32 [L, H, T, C]."""
    import transformers

    from kvkit.adapters.huggingface import smollm2
    from kvkit.adapters.huggingface.cached import CachedModel
    from kvkit.adapters.huggingface.probe import probe_layout
    from kvkit.lab.demo.conversation import document

    folder = smollm2.fetch()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer(document(tokenizer))["input_ids"]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    kv = CachedModel(loaded, probe_layout(loaded), None).prefill(tokens[: TOKENS.size]).kv
    layers = [torch.cat([x.room_k, x.room_v], 3)[0, :, : TOKENS.size] for x in kv.layers]
    return torch.stack(layers)


def synthetic_kv() -> torch.Tensor:
    """A random walk over tokens, float32 [L, H, T, C]: quick, where the codec's figures do not count."""
    steps = np.random.default_rng(0).standard_normal((4, 3, TOKENS.size, 128)) * 0.1
    return torch.from_numpy(steps.cumsum(2)).float()


@pytest.mark.parametrize("codec", ["zstd", "bitshuffle-zstd"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_codec(benchmark: Any, codec: str, dtype: str) -> None:
    kv = real_kv() if benchmark.enabled else synthetic_kv()
    layers, heads, tokens, channels = kv.shape
    assert tokens == TOKENS.size
    form = format_of(layers, heads, channels // 2, dtype)
    record = sealed(form)
    records.payload(form, record)[:] = (
        kv.to(getattr(torch, dtype)).contiguous().view(torch.uint8).numpy().ravel()
    )
    records.seal(form, record, form.digest, KEY, TOKENS)
    packed, back = np.ones(2 * record.size, np.uint8), np.ones_like(record)
    size = codecs.compress(record, codec, packed)
    assert codecs.decompress(packed[:size], back) == form.record_bytes
    assert np.array_equal(back, record)
    header = records.read_header(
        packed[:size]
    )  # whole records are rounded up to 4096 bytes: compare payloads
    compressed_to = (header.layers_end - header.header_bytes) / (form.layers_end - form.header_bytes)
    benchmark.extra_info.update(compressed_to=compressed_to)
    functions: dict[str, Callable[[], object]] = {
        "memcpy": lambda: np.copyto(back, record),
        "compress": lambda: codecs.compress(record, codec, packed),
        "decompress": lambda: codecs.decompress(packed[:size], back),
    }
    benchmark(functions["decompress"])
    report(benchmark, functions, record.size, rounds=15)
