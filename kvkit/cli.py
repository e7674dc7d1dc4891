"""The command line: `kvkit demo`, `kvkit doctor`, `kvkit inspect`, `kvkit simulate`, `kvkit top`."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from kvkit.environment import gpu_name, version_of

app = typer.Typer(
    help="Compute an LLM's KV cache once, use it everywhere.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

FEATURES = (
    ("torch", "tensors", "kvkit"),
    ("numba", "kernels on CPU", "kvkit"),
    ("xxhash", "keys and checksums", "kvkit"),
    ("fsspec", "stores by URL", "kvkit"),
    ("triton", "kernels on GPU", "torch for CUDA"),
    ("transformers", "the Hugging Face adapter", "kvkit[transformers]"),
    ("matplotlib", "the demo's picture", "kvkit[demo]"),
    ("gguf", "the demo's model", "kvkit[demo]"),
    ("zarr", "reading a store with Zarr", "kvkit[zarr]"),
    ("numcodecs", "compressed records", "kvkit[codecs]"),
    ("blake3", "blake3 keys", "kvkit[blake3]"),
    ("uvicorn", "the HTTP endpoint", "kvkit[server]"),
    ("obstore", "tiers on S3, GCS and Azure", "kvkit[s3]"),
    ("redis", "tiers on Redis and Valkey", "kvkit[redis]"),
)
"""(package, what it is for, what installs it)"""


@app.command()
def demo(
    model: Annotated[
        str | None, typer.Option(help="hub id or folder; default: SmolLM2-135M from PyPI")
    ] = None,
    json_path: Annotated[Path, typer.Option("--json", help="where to write the figures")] = Path("demo.json"),
    png_path: Annotated[Path, typer.Option("--png", help="where to write the picture")] = Path("demo.png"),
) -> None:
    """A 4-turn conversation over a long document, cold and then, in a new process, from disk."""
    from kvkit.adapters.smollm2 import ModelError
    from kvkit.demo import DemoError, run

    try:
        run(model, json_path, png_path, Console())
    except (DemoError, ModelError) as error:
        _fail(str(error))


@app.command()
def doctor(
    config: Annotated[Path | None, typer.Argument(help="a configuration file to check")] = None,
) -> None:
    """Say what is installed, what is missing for which feature, and check a configuration file."""
    console = Console()
    console.print(
        f"kvkit {version_of('kvkit')}, Python {platform.python_version()}, {platform.machine()}, "
        f"{os.cpu_count()} CPUs, {gpu_name() or 'no GPU'}"
    )
    shown = Table("package", "version", "for")
    for package, purpose, source in FEATURES:
        version = version_of(package)
        missing = (
            f"[yellow]missing[/yellow]: pip install '{escape(source)}'"
            if source.startswith("kvkit")
            else f"missing: comes with {source}"
        )
        shown.add_row(package, version or missing, purpose)
    console.print(shown)
    if config is not None:
        _check_config(config, console)


@app.command()
def inspect(url: Annotated[str, typer.Argument(help="a store: a folder or any fsspec URL")]) -> None:
    """List a store: namespaces, chunks, tokens, bytes, damaged records. Reads all of it; changes nothing."""
    from kvkit.listing import list_store

    console = Console()
    done = []
    try:
        with console.status("reading") as status:
            for listing, complete in list_store(url):
                status.update(f"{escape(listing.array)}: {listing.chunks} records")
                if complete:
                    done.append(listing)
    except (OSError, ValueError, ImportError) as error:
        _fail(str(error))
    if not done:
        console.print(f"{url}: no records", markup=False, highlight=False, soft_wrap=True)
        return
    shown = Table(Column("namespace", overflow="fold"), "group", "model", "chunks", "tokens", "MB", "damaged")
    for listing in done:
        digest, _, group = listing.array.rpartition("/")
        model = (
            " ".join(str(listing.namespace.get(k, "")) for k in ("model", "dtype")).strip() or "no zarr.json"
        )
        shown.add_row(
            *(escape(digest), escape(group), escape(model), str(listing.chunks)),
            *(str(listing.tokens), f"{listing.bytes / 1e6:.1f}", str(len(listing.damaged))),
        )
    console.print(shown)
    for listing in done:
        for name, reason in listing.damaged:
            console.print(f"damaged: {name}: {reason}", markup=False, highlight=False, soft_wrap=True)
    if any(listing.damaged for listing in done):
        raise typer.Exit(1)


@app.command()
def simulate(
    trace: Annotated[
        str, typer.Argument(help="a trace (JSON lines), or chat, rag, agents or mixed to generate one")
    ],
    config: Annotated[Path | None, typer.Option(help="nodes, tiers, speeds: a TOML file")] = None,
    compare: Annotated[str, typer.Option(help="eviction policies side by side, such as lru,s3fifo")] = "",
    sweep: Annotated[str, typer.Option(help="capacities of a tier, such as memory=4GiB,8GiB")] = "",
    json_path: Annotated[Path | None, typer.Option("--json", help="where to write the figures")] = None,
    png_path: Annotated[Path | None, typer.Option("--png", help="where to plot hits by capacity")] = None,
    requests: Annotated[int, typer.Option(help="of a generated trace", min=1, max=10**7)] = 2000,
    seed: Annotated[int, typer.Option(help="of a generated trace")] = 0,
    save: Annotated[Path | None, typer.Option(help="where to write the trace")] = None,
) -> None:
    """Take a trace of requests through nodes and tiers: hits, bytes, times to the first token, cost."""
    from kvkit.simulate.errors import SimulationError
    from kvkit.simulate.report import run

    policies = [name.strip() for name in compare.split(",") if name.strip()]
    try:
        run(trace, config, policies, sweep, json_path, png_path, requests, seed, save, Console())
    except SimulationError as error:
        _fail(str(error))


@app.command()
def top(
    url: Annotated[str, typer.Argument(help="the HTTP endpoint of a cache")] = "http://127.0.0.1:9477",
    token_file: Annotated[
        Path | None,
        typer.Option(help="its token; default: KVKIT_SERVER__TOKEN, else, on this host, your own"),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="print one frame and return")] = False,
    interval: Annotated[float, typer.Option(min=0.1, max=3600.0, help="seconds between frames")] = 1.0,
) -> None:
    """Watch a cache that runs: hit rate, tokens and bytes per second, latencies, states of the tiers."""
    from kvkit.server import ServerError
    from kvkit.top import TopError, token_for, watch

    try:
        watch(url, token_for(url, token_file), Console(), interval_s=interval, once=once)
    except (TopError, ServerError) as error:
        _fail(str(error))
    except KeyboardInterrupt:
        pass


def main() -> None:
    """Run the command line."""
    app()


def _check_config(path: Path, console: Console) -> None:
    from kvkit.config import ConfigError, load_config

    try:
        config = load_config(path)
    except ConfigError as error:
        _fail(str(error))
    console.print(f"{path}: correct", markup=False, soft_wrap=True)
    console.print_json(json.dumps(config.model_dump(mode="json")))
    policy = config.resolved_policy()
    for setting in ("retrieve_from", "store_to", "write_back_to"):
        console.print(f"{setting}: {', '.join(getattr(policy, setting)) or 'none'}", markup=False)


def _fail(message: str) -> None:
    Console(stderr=True).print(f"[red]error:[/red] {escape(message)}", highlight=False, soft_wrap=True)
    raise typer.Exit(1)
