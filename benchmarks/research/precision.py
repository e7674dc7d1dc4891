"""What fewer bits cost and save: quality, bytes, load and store time of a tier, by its form of records.

    python -m benchmarks.research.precision MODEL=FOLDER... --json benchmarks/results/precision-<machine>.json

Quality is that of continuations over a prompt whose KV went through the form, against KV as it is, in
float32. Bytes and times are those of the same KV in bfloat16, in a tier on disk; forms take turns, so that
times count as ratios to `none`. LMCache's fp8 serde runs where it can be imported: it has no scales, and its
bytes go to plain files.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from rich.console import Console

from benchmarks.timing import interleaved
from kvkit import load_config, open_cache
from kvkit.adapters.huggingface.growing import GrowingCache
from kvkit.cache import Cache, SequencePages
from kvkit.format.layout import KVLayout, LayerGroup
from kvkit.kernels.pages import reference
from kvkit.kernels.pages.api import Pages
from kvkit.lab.files import about
from kvkit.lab.quality.judge import MeasuredModel, Measures, figures_of, load_measured
from kvkit.lab.quality.tasks.registry import SETS, samples
from kvkit.lab.quality.tasks.sample import Sample

FORMS: Mapping[str, Mapping[str, str]] = {
    "none": {},
    "fp8": {"precision": "fp8"},
    "int8": {"precision": "int8"},
    "fp8, zstd": {"precision": "fp8", "codec": "zstd"},
    "zstd": {"codec": "zstd"},
    "bitshuffle-zstd": {"codec": "bitshuffle-zstd"},
}
LMCACHE = "LMCache fp8"
CHUNK = 256
Through = Callable[[torch.Tensor, int], torch.Tensor]
"""(K and V side by side [..., C], K's part of C) -> what is left of them."""


def quantised(precision: str, kv: torch.Tensor, k_size: int) -> torch.Tensor:
    rows = reference.quantise(kv, k_size, precision)
    return reference.dequantise(rows, k_size, kv.shape[-1] - k_size, precision).to(kv.dtype)


def serde() -> tuple[Any, Any] | None:
    """LMCache's fp8 serializer and deserializer, on tensors; None where it cannot be imported."""
    try:
        from lmcache.v1.distributed.serde import fp8
    except ImportError:
        return None
    return fp8.Fp8QuantizationSerializer(), fp8.Fp8QuantizationDeserializer()


def through_serde(pair: tuple[Any, Any], kv: torch.Tensor, k_size: int) -> torch.Tensor:
    source = kv.to(torch.bfloat16).contiguous()
    packed, back = torch.empty(source.numel(), dtype=torch.uint8), torch.empty_like(source)
    pair[0].serialize(SimpleNamespace(tensor=source), SimpleNamespace(tensor=packed), None)
    pair[1].deserialize(SimpleNamespace(tensor=packed), SimpleNamespace(tensor=back), None)
    return back.to(kv.dtype)


class FormJudge(MeasuredModel):
    """Measures on samples what is left of a model's answers when its KV went through a form."""

    @torch.inference_mode()
    def measure(self, sample: Sample, forms: Mapping[str, Through]) -> dict[str, Measures]:
        """Figures of each form, and of `none`."""
        sample = sample.behind(self.lead)
        stored, room = len(sample.prompt) - 1, len(sample.prompt) + len(sample.continuation)
        kv, nan = GrowingCache(self.layout, room, self.model.device), float("nan")
        full = self.follow(self.logits(sample.prompt, kv), sample, kv)
        measured = {"none": figures_of(full, full, sample, nan, nan)}
        for name, through in forms.items():
            fewer = GrowingCache(self.layout, room, self.model.device)
            for layer, source in zip(fewer.layers, kv.layers, strict=True):
                k, v = source.room_k[:, :, :stored], source.room_v[:, :, :stored]
                left = through(torch.cat([k, v], -1), k.shape[-1])
                layer.room_k[:, :, :stored] = left[..., : k.shape[-1]]
                layer.room_v[:, :, :stored] = left[..., k.shape[-1] :]
            fewer.mark_filled(stored)
            said = self.follow(self.logits(sample.prompt[stored:], fewer), sample, fewer)
            measured[name] = figures_of(full, said, sample, nan, nan)
        return measured


class RealKV:
    """A model's KV of some tokens in bfloat16, and places to load it to."""

    def __init__(self, judge: FormJudge, tokens: np.ndarray[Any, np.dtype[np.int32]]) -> None:
        count = len(tokens) // CHUNK * CHUNK
        self.tokens = tokens[:count]
        kv = GrowingCache(judge.layout, len(tokens), judge.model.device)
        judge.logits(tokens, kv)
        groups, self.kv = [], []
        for group in judge.layout.groups:
            groups.append(LayerGroup(group.layers, group.kv_heads, group.k_size, group.v_size, "bfloat16"))
            layers = [kv.layers[i] for i in group.layers]
            self.kv.append([torch.cat([x.room_k, x.room_v], 3)[:, :, :count].bfloat16() for x in layers])
        self.layout = KVLayout(tuple(groups))
        self.pages = self._places(self.kv)
        self.loaded = self._places([[torch.zeros_like(x) for x in layers] for layers in self.kv])

    def open(self, folder: Path, form: Mapping[str, str]) -> Cache:
        """A cache with one tier of this form."""
        tiers = {"disk": {"url": str(folder), **form}}
        config = load_config(chunk_tokens=CHUNK, staging="512MiB", tiers=tiers)
        return open_cache(config, self.layout, config.namespace(self.layout, model="m", dtype="bfloat16"))

    def _places(self, kv: list[list[torch.Tensor]]) -> list[SequencePages]:
        slots = np.arange(len(self.tokens), dtype=np.int64)
        return [
            SequencePages(Pages.of(g, list(layers)), slots=slots)
            for g, layers in zip(self.layout.groups, kv, strict=True)
        ]


def times(engine: RealKV, folder: Path, rounds: int) -> dict[str, dict[str, float]]:
    """By form: bytes a token, and store and load time as medians of ratios to `none` of the same round."""
    caches = {name: engine.open(folder / name, form) for name, form in FORMS.items()}
    stores: dict[str, Callable[[], object]] = {}
    loads: dict[str, Callable[[], object]] = {}

    def store(cache: Cache) -> None:
        cache.store(engine.tokens, engine.pages)
        cache.flush()

    for name, cache in caches.items():
        stores[name] = partial(store, cache)
        loads[name] = partial(lambda cache: cache.load(cache.lookup(engine.tokens), engine.loaded), cache)
    pair = serde()
    if pair is not None:
        stores[LMCACHE] = partial(_serialise, pair, engine, folder / "lmcache")
        loads[LMCACHE] = partial(_deserialise, pair, engine, folder / "lmcache")
    found: dict[str, dict[str, float]] = {name: {} for name in stores}
    every: dict[str, dict[str, list[float]]] = {
        "store": {n: [] for n in stores},
        "load": {n: [] for n in stores},
    }
    for turn in range(rounds + 1):
        for cache in caches.values():
            cache.clear("disk")
        for what, functions in (("store", stores), ("load", loads)):
            for name, taken in interleaved(functions, 1, warmup=0).items():
                if turn:  # the first is a warm-up
                    every[what][name] += taken
    for what, taken in every.items():
        for name in found:
            found[name][what] = statistics.median(
                a / b for a, b in zip(taken[name], taken["none"], strict=True)
            )
    for name in found:
        where = folder / ("lmcache" if name == LMCACHE else name)
        size = sum(f.stat().st_size for f in where.rglob("*") if f.is_file() and f.suffix != ".json")
        found[name]["bytes_per_token"] = size / len(engine.tokens)
    for name, cache in caches.items():
        assert cache.counts().loaded_tokens["disk"] == len(engine.tokens) * (rounds + 1), name
        cache.close()
    return found


def _serialise(pair: tuple[Any, Any], engine: RealKV, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for number, kv in enumerate(engine.kv):
        for start in range(0, len(engine.tokens), CHUNK):
            source = torch.stack([layer[:, :, start : start + CHUNK] for layer in kv])
            packed = torch.empty(source.numel(), dtype=torch.uint8)
            pair[0].serialize(SimpleNamespace(tensor=source), SimpleNamespace(tensor=packed), None)
            (folder / f"{number}-{start}").write_bytes(packed.numpy())


def _deserialise(pair: tuple[Any, Any], engine: RealKV, folder: Path) -> None:
    for number, kv in enumerate(engine.kv):
        for start in range(0, len(engine.tokens), CHUNK):
            packed = torch.from_numpy(np.fromfile(folder / f"{number}-{start}", np.uint8))
            back = torch.empty(len(kv), 1, *kv[0].shape[1:2], CHUNK, kv[0].shape[3], dtype=torch.bfloat16)
            pair[1].deserialize(SimpleNamespace(tensor=packed), SimpleNamespace(tensor=back), None)


def measure(folder: str, console: Console, count: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Of one model, by form: kl, top1, exact (where it is not none's), bytes_per_token, store, load."""
    judge, encode = load_measured(folder, console, FormJudge)
    forms: dict[str, Through] = {form: partial(quantised, form) for form in ("fp8", "int8")}
    if (pair := serde()) is not None:
        forms[LMCACHE] = partial(through_serde, pair)
    every = [sample for kind in SETS for sample in samples(kind, encode, count, tokens)]
    said = [judge.measure(sample, forms) for sample in every]
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as scratch, torch.inference_mode():
        engine = RealKV(judge, every[0].behind(judge.lead).prompt)
        found: dict[str, dict[str, Any]] = times(engine, Path(scratch), rounds)
    for name, row in found.items():
        judged = "fp8" if name.startswith("fp8") else name if name in forms else "none"
        for figure in ("kl", "top1", "exact"):
            row[figure] = statistics.mean(one[judged][figure] for one in said if figure in one[judged])
    return {"samples": len(every), "forms": found}


def main() -> None:
    """Measure models, and keep what was found in a file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", metavar="MODEL=FOLDER")
    parser.add_argument("--samples", type=int, default=4, help="of each of the sets of kvkit bench blend")
    parser.add_argument("--tokens", type=int, default=1100, help="of a prompt")
    parser.add_argument("--rounds", type=int, default=9, help="of stores and loads")
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    models = dict(model.split("=", 1) for model in given.models)
    sizes = (given.samples, given.tokens, given.rounds)
    found = {name: measure(folder, Console(), *sizes) for name, folder in models.items()}
    command = f"python -m benchmarks.research.precision {' '.join(f'{name}=FOLDER' for name in models)}"
    given.json.write_text(json.dumps(about(command, seed=0) | {"models": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
