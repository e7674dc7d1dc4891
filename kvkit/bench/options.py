"""The options of `kvkit bench serve`: what is sent, and to whom."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer


@dataclass(frozen=True, slots=True)
class Traffic:
    """What every server is sent."""

    workloads: Annotated[
        str,
        typer.Option(
            help="document-qa, document-permutation, chat, system-prompt, rag, random; default: all of them"
        ),
    ] = ""
    trace: Annotated[
        str,
        typer.Option(
            help="a trace in their place, as for `kvkit simulate`: a file, or chat, rag, agents or mixed; "
            "--requests of its prompts, of their lengths"
        ),
    ] = ""
    speed: Annotated[
        float | None,
        typer.Option(min=1e-3, max=1e6, help="times as fast as the trace; default: when there is room"),
    ] = None
    requests: Annotated[int, typer.Option(min=2, max=10**6, help="of a workload, each round")] = 16
    words: Annotated[int, typer.Option(min=64, max=10**6, help="of a prompt, about a token each")] = 1500
    max_tokens: Annotated[int, typer.Option(min=1, max=10**6, help="of an answer")] = 16
    concurrency: Annotated[int, typer.Option(min=1, max=1024, help="requests under way at a time")] = 1
    rate: Annotated[
        float | None, typer.Option(min=1e-3, max=1e6, help="requests per second; default: when there is room")
    ] = None
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="of each workload, with other text")] = 1
    seed: Annotated[int, typer.Option(min=0, help="of the text; a cache that stays wants another")] = 0
    timeout_s: Annotated[float, typer.Option(min=0.1, max=86400, help="of a request")] = 300.0


@dataclass(frozen=True, slots=True)
class Targets:
    """The servers: those that run, and those that are started."""

    systems: Annotated[
        str,
        typer.Option(
            help="vLLM to start: plain, prefix-caching, kvkit, kvkit-blend, lmcache; default: plain, kvkit, "
            "lmcache, none with --url"
        ),
    ] = ""
    url: Annotated[
        list[str] | None,
        typer.Option(help="an OpenAI-compatible server that runs, also as NAME=URL; can be repeated"),
    ] = None
    model: Annotated[
        str | None, typer.Option(help="hub id, folder or gemma; default: SmolLM2-135M, a URL's first model")
    ] = None
    memory_gib: Annotated[int, typer.Option(min=1, help="of kvkit's memory tier, and of LMCache's")] = 1
    config: Annotated[Path | None, typer.Option(help="kvkit's TOML file, in place of that memory tier")] = (
        None
    )
    vllm: Annotated[str, typer.Option(help="more of vLLM's options, such as '--dtype float32'")] = ""
    interleave: Annotated[
        bool, typer.Option("--interleave", help="start all systems at once; they take turns")
    ] = False
