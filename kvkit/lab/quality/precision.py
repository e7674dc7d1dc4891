"""Effect of quantised records on a model's answers: 8-bit KV of a prompt against KV in full precision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import numpy as np
import torch
from rich.console import Console

from kvkit.adapters.huggingface.growing import GrowingCache
from kvkit.format.layout import LayoutError, Precision
from kvkit.kernels.pages import reference
from kvkit.lab.files import BenchError
from kvkit.lab.quality.judge import MeasuredModel, Measures, figures_of, load_measured
from kvkit.lab.quality.statistics import bootstrap
from kvkit.lab.quality.tasks.registry import SETS, samples
from kvkit.lab.quality.tasks.sample import Encode, Sample
from kvkit.observe.progress import Report, counted
from kvkit.transfer import precision as gate

GATE_SAMPLES, ROUNDS = 4, 4
"""Samples per set in each round, and the maximum number of rounds until the verdict is sure."""


def restore(kv: GrowingCache, source: GrowingCache, tokens: int, precision: Precision) -> None:
    """Fill `kv` with the first tokens of `source`, quantised and dequantised. Mutates `kv`."""
    for layer, source_layer in zip(kv.layers, source.layers, strict=True):
        k, v = source_layer.room_k[:, :, :tokens], source_layer.room_v[:, :, :tokens]
        sizes = k.shape[-1], v.shape[-1]
        rows = reference.quantise(torch.cat([k, v], -1), sizes[0], precision)
        restored = reference.dequantise(rows, *sizes, precision).to(k.dtype)
        layer.room_k[:, :, :tokens], layer.room_v[:, :, :tokens] = (
            restored[..., : sizes[0]],
            restored[..., sizes[0] :],
        )
    kv.mark_filled(tokens)


class PrecisionJudge(MeasuredModel):
    """Judge of quantisation on samples: quantises the KV of all prompt tokens but the last."""

    @torch.inference_mode()
    def measure(
        self, sample: Sample, precisions: Sequence[Precision] = get_args(Precision)
    ) -> dict[str, Measures]:
        """Return figures of each precision and of `full`, as `Judge.measure`; rows and seconds are NaN."""
        sample = sample.behind(self.lead)
        stored_tokens, room = len(sample.prompt) - 1, len(sample.prompt) + len(sample.continuation)
        kv, nan = GrowingCache(self.layout, room, self.model.device), float("nan")
        full = self.follow(self.logits(sample.prompt, kv), sample, kv)
        measured = {"full": figures_of(full, full, sample, nan, nan)}
        for precision in precisions:
            quantised_kv = GrowingCache(self.layout, room, self.model.device)
            restore(quantised_kv, kv, stored_tokens, precision)
            log_probabilities = self.follow(
                self.logits(sample.prompt[stored_tokens:], quantised_kv), sample, quantised_kv
            )
            measured[precision] = figures_of(full, log_probabilities, sample, nan, nan)
        return measured


def load(model: str | None, console: Console) -> tuple[PrecisionJudge, Encode]:
    """Load a model (None: SmolLM2-135M) to be measured, and its tokenizer as a function.

    Raises:
        BenchError: a package is missing, the model cannot be loaded, or its KV cannot be cached.
    """
    try:
        return load_measured(model, console, PrecisionJudge)
    except LayoutError as error:
        raise BenchError(f"model {model!r}: {error}") from error


def measure_gate(
    judge: PrecisionJudge,
    encode: Encode,
    names: Sequence[str],
    precision: Precision,
    report: Report,
    tokens: int = 768,
) -> dict[str, Any]:
    """Measure a precision on `GATE_SAMPLES` samples of every set, and keep the verdict of `gate.decide`.

    Measures more samples, up to `ROUNDS` times as many, while another draw could change the verdict.

    Args:
        names: names of the weights; the verdict is kept under each.
        report: called every few seconds with the number of measured samples of a round.

    Returns:
        the verdict of `gate.decide`, with kl_interval, top1_interval, samples, sure, paths; exact, the share
        of codes repeated correctly, and full_exact, the same with KV in full precision.
    """
    samples_by_set = [samples(kind, encode, ROUNDS * GATE_SAMPLES, tokens) for kind in SETS]
    measurements: list[dict[str, Measures]] = []

    def values_of(variant: str, figure: str) -> np.ndarray[Any, np.dtype[np.float64]]:
        return np.array(
            [measured[variant][figure] for measured in measurements if figure in measured[variant]]
        )

    for number in range(ROUNDS):
        round_samples = [sample for one_set in samples_by_set for sample in one_set[number::ROUNDS]]
        work = (judge.measure(sample, [precision]) for sample in round_samples)
        measurements += counted(
            work, f"samples, round {number + 1} of at most {ROUNDS}", len(round_samples), report
        )
        kl, top1 = values_of(precision, "kl"), values_of(precision, "top1")
        intervals = bootstrap(kl), bootstrap(top1)
        if sure := gate.is_sure(*intervals):
            break
    result = gate.decide(float(kl.mean()), float(top1.mean())) | {
        "kl_interval": list(intervals[0]),
        "top1_interval": list(intervals[1]),
        "exact": float(values_of(precision, "exact").mean()),
        "full_exact": float(values_of("full", "exact").mean()),
        "samples": len(measurements),
        "sure": sure,
    }
    paths = gate.keep(names, precision, result)
    return result | {"paths": [str(path) for path in paths]}
