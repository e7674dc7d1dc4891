"""Checks of `kvkit doctor` whether a model may be blended, and whether its KV may be quantised."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

from rich.console import Console

from kvkit.environment import prepare_verdicts
from kvkit.format.layout import Precision
from kvkit.lab.files import BenchError, measuring, model_folder
from kvkit.observe.progress import timed
from kvkit.observe.terminal import print_text

_BEHIND = {"prefix": "behind their prompt's prefix", "alone": "alone"}


def check_blending(model: str, console: Console) -> None:
    """Measure a model's answers with blending; keep and print the verdict.

    Raises:
        BenchError: the model must not be blended or cannot be measured.
        ModelError: the model cannot be fetched.
    """
    from kvkit.lab.quality.comparison import gate_methods, measure_gate
    from kvkit.lab.quality.in_vllm import opened

    _prepare_folder("blend")
    folder = model_folder(model, console)
    with measuring(model), opened(folder, console, gate_methods()) as (judge, encode, _):
        served = served_names(folder, judge.config)
        names = list(dict.fromkeys([judge.weights, *served]))
        verdict = measure_gate(judge, encode, names, timed(console))
    low, high = verdict["kl_interval"]
    (other,) = _BEHIND.keys() - {verdict["context"]}
    for line in (
        f"{model}: blending 15 % changes the distribution of the next token by {verdict['kl']:.4f} nats "
        f"({low:.4f}–{high:.4f}), limit {verdict['kl_limit']}; that is {verdict['of_naive']:.2f} of "
        f"the change by reuse without recomputation ({verdict['naive_kl']:.4f}), "
        f"limit {verdict['of_naive_limit']}",
        f"documents are computed {_BEHIND[verdict['context']]}; {_BEHIND[other]}, the change is "
        f"{verdict['other_kl']:.4f}",
        *_kept_lines(verdict, served),
    ):
        print_text(line, console)
    if not verdict["passed"]:
        raise BenchError("this model must not be blended")
    console.print("this model may be blended")


def check_precision(name: str, model: str, console: Console) -> None:
    """Measure a model's answers with quantised KV; keep and print the verdict.

    Raises:
        BenchError: the KV must not be quantised or cannot be measured, or the precision is unknown.
        ModelError: the model cannot be fetched.
    """
    from kvkit.lab.quality import precision as gate

    choices: dict[str, Precision] = {known: known for known in get_args(Precision)}
    if (precision := choices.get(name)) is None:
        raise BenchError(f"precision = {name!r}: want one of {', '.join(choices)}")
    _prepare_folder(f"precision/{precision}")
    folder = model_folder(model, console)
    judge, encode = gate.load(folder, console)
    served = served_names(folder, judge.model.config)
    with measuring(model):
        verdict = gate.measure_gate(judge, encode, [judge.weights, *served], precision, timed(console))
    for line in (
        f"{model}, {verdict['samples']} samples, 95 % intervals: KV in {precision} changes the distribution "
        f"of the next token by {verdict['kl']:.5f} nats "
        f"({verdict['kl_interval'][0]:.5f}–{verdict['kl_interval'][1]:.5f}), limit {verdict['kl_limit']}; "
        f"the most likely token is the same in {verdict['top1']:.1%} ({verdict['top1_interval'][0]:.1%}–"
        f"{verdict['top1_interval'][1]:.1%}), limit {verdict['top1_limit']:.0%}; "
        f"{verdict['exact']:.0%} of the codes are repeated correctly, {verdict['full_exact']:.0%} in full "
        "precision",
        *(
            []
            if verdict["sure"]
            else ["a limit lies within its interval: other texts may change the verdict"]
        ),
        *_kept_lines(verdict, served),
    ):
        print_text(line, console)
    if not verdict["passed"]:
        raise BenchError(f"this model's KV must not be held in {precision}")
    console.print(f"this model's KV may be held in {precision}")


def _prepare_folder(kind: str) -> None:
    """Create the folder for verdicts of this kind, before measuring.

    Raises:
        BenchError: the folder cannot be written.
    """
    try:
        prepare_verdicts(kind)
    except OSError as error:
        raise BenchError(
            f"a verdict could not be kept: {error}; set XDG_CACHE_HOME to a writable folder"
        ) from error


def _kept_lines(verdict: dict[str, Any], served: list[str]) -> list[str]:
    """Return lines with the paths of a verdict, and a hint if vLLM engines cannot find it."""
    hint = "not kept for engines of vLLM, which need blake3 to find it: pip install 'kvkit-llm[blake3]'"
    return [f"kept in {', '.join(verdict['paths'])}", *([] if served else [hint])]


def served_names(model: str, config: Any) -> list[str]:
    """Return the name under which vLLM engines look up a verdict on `model`, a hub id or a folder.

    Args:
        config: configuration of the model, as loaded by transformers.

    Returns:
        one name, or none if it cannot be determined here.
    """
    try:
        from kvkit.adapters.vllm.gate import folder_name
    except ImportError:  # of blake3
        return []
    if Path(model).is_dir():
        return [folder_name(Path(model))]
    commit = getattr(config, "_commit_hash", None)
    return [commit] if commit else []
