"""Options of `kvkit bench serve`: requests and servers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests sent to every server."""

    workloads: Annotated[
        str,
        typer.Option(
            help="document-qa, document-permutation, chat, system-prompt, rag, random; default: all"
        ),
    ] = ""
    trace: Annotated[
        str,
        typer.Option(
            help="a trace instead of workloads, as in `kvkit simulate`: file, chat, rag, agents or mixed; "
            "sends its first --requests prompts at their lengths"
        ),
    ] = ""
    speed: Annotated[
        float | None,
        typer.Option(
            min=1e-3, max=1e6, help="speed-up of the trace's arrival times; default: send when a slot is free"
        ),
    ] = None
    tool_call_token: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="token id that answers begin with (by logit_bias) where the trace's call a tool; one of the "
            "server's tool_calls. default: answers are the model's",
        ),
    ] = None
    requests: Annotated[int, typer.Option(min=2, max=10**6, help="requests per workload and round")] = 16
    words: Annotated[int, typer.Option(min=64, max=10**6, help="words per prompt, about a token each")] = 1500
    max_tokens: Annotated[int, typer.Option(min=1, max=10**6, help="tokens per answer")] = 16
    concurrency: Annotated[int, typer.Option(min=1, max=1024, help="maximum requests in flight")] = 1
    rate: Annotated[
        float | None,
        typer.Option(min=1e-3, max=1e6, help="requests per second; default: send when a slot is free"),
    ] = None
    rounds: Annotated[
        int, typer.Option(min=1, max=1000, help="rounds of each workload, each with other text")
    ] = 1
    seed: Annotated[
        int, typer.Option(min=0, help="seed of the text; change it for a cache that persists between runs")
    ] = 0
    timeout_s: Annotated[float, typer.Option(min=0.1, max=86400, help="timeout of a request, in seconds")] = (
        300.0
    )


@dataclass(frozen=True, slots=True)
class Targets:
    """Servers to measure: running ones, and ones to start."""

    systems: Annotated[
        str,
        typer.Option(
            help="vLLM servers to start: plain, prefix-caching, kvkit, kvkit-blend, lmcache; default: plain, "
            "kvkit, lmcache; none with --url"
        ),
    ] = ""
    url: Annotated[
        list[str] | None,
        typer.Option(help="a running OpenAI-compatible server, also as NAME=URL; can be repeated"),
    ] = None
    model: Annotated[
        str | None,
        typer.Option(help="hub id, folder, gemma or qwen-0.5b; default: SmolLM2, a URL's first model"),
    ] = None
    memory_gib: Annotated[int, typer.Option(min=1, help="GiB of kvkit's memory tier, and of LMCache's")] = 1
    config: Annotated[Path | None, typer.Option(help="kvkit's TOML file, instead of that memory tier")] = None
    vllm: Annotated[str, typer.Option(help="additional options of vLLM, such as '--dtype float32'")] = ""
    interleave: Annotated[
        bool, typer.Option("--interleave", help="start all systems at once; they take turns")
    ] = False
