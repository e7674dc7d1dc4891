"""Judge of blending methods: compares a model's answers over blended KV with those of full recompute.

The judge computes a sample's prompt in full, and each of its documents in the methods' contexts; methods of
the same context then blend the same documents. It compares the distributions of the continuation's tokens.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

from kvkit.adapters.huggingface import smollm2
from kvkit.adapters.huggingface.auxiliary import AuxiliaryModel
from kvkit.adapters.huggingface.blended import HuggingFaceDecoder
from kvkit.adapters.huggingface.fingerprint import model_fingerprint
from kvkit.adapters.huggingface.growing import GrowingCache
from kvkit.adapters.huggingface.latent import decoder_of
from kvkit.adapters.huggingface.probe import probe_layout
from kvkit.blend.plan import BlendError, BlendPlan, Span, plan_blend
from kvkit.blend.run import Blended, LastKeys, Positions, Reader, blend
from kvkit.lab.files import BenchError, load_model, load_tokenizer, model_folder
from kvkit.lab.quality.contexts import Context, context_texts
from kvkit.lab.quality.methods import METHODS, Method
from kvkit.lab.quality.peers import adaptive_parallel_encoding, fewer_documents
from kvkit.lab.quality.statistics import f1
from kvkit.lab.quality.tasks.sample import SYSTEM_PROMPT, Encode, Sample

M = TypeVar("M", bound="MeasuredModel")
Measures = dict[str, float]

BLOCK_ROWS = 32


class NotBlendable(BenchError):
    """kvkit cannot compute the model's layers, which differ from Llama's."""


class MeasuredModel:
    """Hugging Face causal language model, in eval mode, that measures continuations of prompts.

    Attributes:
        lead: first tokens of every text by its tokenizer, int32 [n]; often `<bos>`, or empty.
        system: system prompt of every prompt, which follows `lead`, int32 [n].

    Raises:
        LayoutError: the model's KV cannot be cached, see `probe_layout`.
    """

    def __init__(self, model: Any) -> None:
        self.lead: NDArray[np.int32] = np.zeros(0, np.int32)
        self.system: NDArray[np.int32] = np.zeros(0, np.int32)
        self.model, self.config = model, model.config
        self.layout = probe_layout(model)
        self.weights = model_fingerprint(model)

    @property
    def prefix(self) -> NDArray[np.int32]:
        """First tokens of every prompt: `lead` and `system`."""
        return np.concatenate([self.lead, self.system])

    def logits(self, ids: NDArray[np.int32], kv: GrowingCache, keep: int = 1) -> torch.Tensor:
        """Return logits [keep, V] of the last tokens of `ids` (0: of all); appends their KV to `kv`."""
        inputs = torch.from_numpy(ids.astype(np.int64))[None].to(self.model.device)
        out = self.model(input_ids=inputs, past_key_values=kv, use_cache=True, logits_to_keep=keep)
        logits: torch.Tensor = out.logits[0]
        return logits

    def generate_answer(self, last: torch.Tensor, sample: Sample, kv: GrowingCache) -> list[int]:
        """Return greedy tokens, as many as the answer has, from the logits `last` [1, V]. Mutates `kv`."""
        tokens = [int(last.argmax())]
        while len(tokens) < sample.answer:
            tokens.append(int(self.logits(np.array(tokens[-1:], np.int32), kv).argmax()))
        return tokens

    def follow(self, last: torch.Tensor, sample: Sample, kv: GrowingCache) -> torch.Tensor:
        """Return log probabilities [C, V] of the continuation's tokens, each given the earlier ones.

        Mutates `kv`.
        """
        rest = self.logits(sample.continuation[:-1], kv, 0)
        return torch.cat([last, rest]).float().log_softmax(-1)


class Judge(MeasuredModel):
    """Judge of methods on samples; every prompt begins with `lead` and `system`.

    Args:
        auxiliary: auxiliary model of methods that need one.

    Raises:
        BlendError: the model cannot be blended.
    """

    def __init__(self, model: Any, auxiliary: Reader | None = None) -> None:
        self.decoder = decoder_of(model)
        self.auxiliary = auxiliary
        super().__init__(model)

    @torch.inference_mode()
    def measure(
        self, sample: Sample, methods: Mapping[str, Method] = METHODS, answered: bool = False
    ) -> dict[str, Measures]:
        """Return figures of every method, and of `full` recompute.

        Args:
            answered: measure no method if full recompute does not give the sample's answer.

        Returns:
            by method: kl, mean KL divergence from full recompute's distributions, in nats per token; top1,
            share of tokens with the same most likely token; nll, mean negative log likelihood of the
            continuation; if the sample has an answer, exact, 1 if the most likely tokens are the answer, and
            f1, of as many tokens generated greedily; rows, computed share of tokens * layers; seconds of the
            prefill after the reused KV is in place: CPU time of all threads, or wall time on a GPU.
        """
        sample = sample.behind(self.prefix)
        total = len(sample.prompt)
        room = total + len(sample.continuation)
        kv = GrowingCache(self.layout, room, self.decoder.device)
        start_s = _clock_s(self.decoder.device)
        last = self.logits(sample.prompt, kv)
        seconds = _clock_s(self.decoder.device) - start_s
        full = self.follow(last, sample, kv)
        measured = {"full": figures_of(full, full, sample, 1.0, seconds) | self._f1(last, full, sample, kv)}
        if answered and not measured["full"].get("exact"):
            return measured
        contexts = {m.context for m in methods.values() if m.imitates != "fewer documents"}
        documents = {context: self.document_kv(sample, room, context) for context in contexts}
        for name, method in methods.items():
            if method.imitates == "fewer documents":
                fewer = fewer_documents(sample, method.selection.ratio)
                measured[name] = self._computed_in_full(fewer, full, total)
                continue
            document_kv, plan = documents[method.context]
            for layer, source in zip(kv.layers, document_kv.layers, strict=True):
                layer.room_k.copy_(source.room_k)
                layer.room_v.copy_(source.room_v)
            if method.imitates == "ape":
                measured[name] = self._rescaled(sample, plan, kv, full)
            else:
                measured[name] = self._blended(method, sample, plan, kv, full)
        return measured

    def _computed_in_full(self, sample: Sample, full: torch.Tensor, total: int) -> Measures:
        """Return figures of a prompt other than that of `full`, of `total` tokens; reuses its prefix only."""
        kv = GrowingCache(self.layout, len(sample.prompt) + len(sample.continuation), self.decoder.device)
        if len(self.prefix):
            self.logits(self.prefix, kv)
        start_s, rest = _clock_s(self.decoder.device), sample.prompt[len(self.prefix) :]
        last = self.logits(rest, kv)
        seconds = _clock_s(self.decoder.device) - start_s
        return self._compared(last, sample, kv, full, len(rest) / total, seconds)

    def _rescaled(self, sample: Sample, plan: BlendPlan, kv: GrowingCache, full: torch.Tensor) -> Measures:
        """Return figures of attention that is rescaled, as `_blended`; computes the question alone."""
        end = plan.tokens - len(plan.computed)
        with adaptive_parallel_encoding(self.model, len(self.prefix), end):
            kv.mark_filled(end)
            start_s = _clock_s(self.decoder.device)
            last = self.logits(sample.prompt[end:], kv)
            seconds = _clock_s(self.decoder.device) - start_s
            return self._compared(last, sample, kv, full, len(plan.computed) / plan.tokens, seconds)

    def _blended(
        self, method: Method, sample: Sample, plan: BlendPlan, kv: GrowingCache, full: torch.Tensor
    ) -> Measures:
        """Return figures of a method, given the KV of prefix and documents in `kv`, which it mutates."""
        start_s = _clock_s(self.decoder.device)
        blended = self._blend(method, sample, plan, kv)
        seconds = _clock_s(self.decoder.device) - start_s
        kv.mark_filled(plan.tokens)
        rows = blended.row_layers / (plan.tokens * self.decoder.layers)
        return self._compared(blended.logits[None], sample, kv, full, rows, seconds)

    def _compared(
        self,
        last: torch.Tensor,
        sample: Sample,
        kv: GrowingCache,
        full: torch.Tensor,
        rows: float,
        seconds: float,
    ) -> Measures:
        """Return figures of the continuation after the logits `last`, [1, V]. Mutates `kv`."""
        logits = self.follow(last, sample, kv)
        return figures_of(full, logits, sample, rows, seconds) | self._f1(last, logits, sample, kv)

    def _f1(self, last: torch.Tensor, logits: torch.Tensor, sample: Sample, kv: GrowingCache) -> Measures:
        """Return the F1 of the answer's tokens; truncates `kv` to the prompt if it generates."""
        if not sample.answer:
            return {}
        answer = sample.continuation[: sample.answer].tolist()
        if logits[: sample.answer].argmax(-1).tolist() == answer:
            return {"f1": 1.0}
        kv.mark_filled(len(sample.prompt))
        return {"f1": f1(self.generate_answer(last, sample, kv), answer)}

    def document_kv(
        self, sample: Sample, room: int, context: Context = "prefix"
    ) -> tuple[GrowingCache, BlendPlan]:
        """Return the KV of the prefix and the documents of a prompt, and the plan.

        Each document is computed in its `context`, then rotated to its place.
        """
        found, prefix = GrowingCache(self.layout, room, self.decoder.device), len(self.prefix)
        if prefix:
            self.logits(self.prefix, found)
        for layer in found.layers:
            layer.room_k[:, :, prefix:] = layer.room_v[:, :, prefix:] = 0.0
        texts = context_texts(sample, self.lead, self.system, context)
        shares = Counter(i for text in texts for i in text.starts)
        spans: dict[int, Span] = {}
        for text in texts:
            computed = GrowingCache(self.layout, len(text.tokens), self.decoder.device)
            self.logits(text.tokens, computed)
            for i, first in text.starts.items():
                start, stop = sample.documents[i]
                self._add_moved(computed, found, first, (start, stop), 1 / shares[i])
                exact = np.array_equal(text.tokens[:first], sample.prompt[:start])
                spans[i] = Span(start, stop, first, exact)
        in_order = [spans[i] for i in sorted(spans)]
        return found, plan_blend(len(sample.prompt), prefix, in_order)

    def _add_moved(
        self, source: GrowingCache, target: GrowingCache, first: int, place: tuple[int, int], share: float
    ) -> None:
        """Add a share of the KV from position `first` on in `source`, moved to its place in `target`."""
        start, stop = place
        here, there = slice(first, first + stop - start), slice(start, stop)
        shifts = np.full(stop - start, start - first)
        for old, new in zip(source.layers, target.layers, strict=True):
            k, v = self.decoder.moved(old.keys[:, :, here], old.values[:, :, here], shifts)
            new.room_k[:, :, there] += share * k
            new.room_v[:, :, there] += share * v

    def _blend(self, method: Method, sample: Sample, plan: BlendPlan, kv: GrowingCache) -> Blended:
        pages, decoder = self.decoder.pages(kv), self.decoder
        last_keys: LastKeys | None = None
        if method.imitates == "block mask":
            kind: type[_BlockMask] = type("BlockMask", (_BlockMask, type(self.decoder)), {})
            decoder = imitation = kind(self.decoder, plan)
            last_keys = imitation.last_keys
        elif method.imitates:
            last_keys = _bottom_right(plan.tokens)
        blended = blend(
            decoder,
            pages,
            sample.prompt,
            plan,
            method.selection,
            last_keys=last_keys,
            auxiliary=self.auxiliary,
        )
        self.decoder.write_back(pages, kv)
        return blended


def _clock_s(device: torch.device) -> float:
    """Return CPU seconds, or on a GPU wall seconds after its work is complete."""
    if device.type != "cuda":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def figures_of(
    full: torch.Tensor, measured: torch.Tensor, sample: Sample, rows: float, seconds: float
) -> Measures:
    """Return figures of log probabilities [C, V], compared with those of full recompute."""
    targets = torch.from_numpy(sample.continuation.astype(np.int64)).to(measured.device)
    likeliest = measured.argmax(-1)
    correct = (likeliest == targets)[: sample.answer]
    return {
        "kl": float((full.exp() * (full - measured)).sum(-1).mean()),
        "top1": float((likeliest == full.argmax(-1)).float().mean()),
        "nll": float(-measured.gather(-1, targets[:, None]).mean()),
        **({"exact": float(correct.all())} if sample.answer else {}),
        "rows": rows,
        "seconds": seconds,
    }


def _bottom_right(tokens: int) -> LastKeys:
    return lambda positions: np.arange(tokens - len(positions), tokens, dtype=np.int32)


class _BlockMask(HuggingFaceDecoder):
    """Decoder with the attention mask of LMCache's sparse kernel for selected rows; see `Method.imitates`."""

    def __init__(self, decoder: HuggingFaceDecoder, plan: BlendPlan) -> None:
        vars(self).update(vars(decoder))  # the same model: avoids probing it again
        self.plan = plan
        self.zeros: NDArray[np.intp] = np.zeros(0, np.intp)

    def last_keys(self, positions: Positions) -> Positions:
        """Return the last key position that each row attends to."""
        selected = np.flatnonzero(~np.isin(positions, self.plan.computed))
        if len(positions) == int((~self.plan.exact).sum()):  # layer 0 is dense
            selected = selected[:0]
        seen = positions.copy()
        complete_rows = len(selected) // BLOCK_ROWS * BLOCK_ROWS
        for block in range(0, complete_rows, BLOCK_ROWS):
            rows = selected[block : block + BLOCK_ROWS]
            seen[rows] = positions[rows[-1]] // BLOCK_ROWS * BLOCK_ROWS - 1
        self.zeros = selected[complete_rows:]
        return seen

    def post(self, layer: int, h: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
        if layer < self.layers - 1:  # the last layer has only the question's last row
            o[torch.from_numpy(self.zeros)] = 0
        return super().post(layer, h, o)


def load_judge(model: str | None, console: Console) -> tuple[Judge, Encode, str]:
    """Load a judge of a model (None: SmolLM2-135M), its tokenizer as a function, and its name.

    Raises:
        BenchError: a package is missing, or the model cannot be loaded.
        NotBlendable: the model cannot be blended layer by layer.
    """
    try:
        judge, encode = load_measured(model, console, Judge)
    except BlendError as error:
        raise NotBlendable(str(error)) from error
    return judge, encode, model or smollm2.NAME


def load_auxiliary(name: str, model: str | None, console: Console) -> AuxiliaryModel:
    """Load an auxiliary model (`name`: hub id, folder or "gemma") for the measured `model`.

    Raises:
        BenchError: a package is missing, or a model cannot be loaded.
    """
    tokenizer, loaded = load_model(model_folder(name, console))
    return AuxiliaryModel(_on_device(loaded), (load_tokenizer(model_folder(model, console)), tokenizer))


def load_measured(model: str | None, console: Console, make: Callable[[Any], M]) -> tuple[M, Encode]:
    """Load a model (None: SmolLM2-135M), wrap it with `make`, and return it and its tokenizer as a function.

    Raises:
        BenchError: a package is missing, or the model cannot be loaded.
    """
    folder = model_folder(model, console)
    console.print("loading the model")
    tokenizer, loaded = load_model(folder)
    measured = make(_on_device(loaded))
    measured.lead = np.array(tokenizer("")["input_ids"], np.int32)

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    measured.system = np.array(encode(SYSTEM_PROMPT), np.int32)

    return measured, encode


def _on_device(model: Any) -> Any:
    """Move the model to the GPU, if there is one, and return it."""
    return model.to("cuda") if torch.cuda.is_available() else model
