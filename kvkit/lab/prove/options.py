"""The options of `kvkit prove`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer


@dataclass(frozen=True, slots=True)
class ProveOptions:
    """Options of `kvkit prove`."""

    kv_transfer_config: Annotated[
        str, typer.Option(help="kvkit, a connector's name, vLLM's JSON, or a file with that JSON")
    ] = "kvkit"
    model: Annotated[
        str | None, typer.Option(help="hub id, folder, gemma or qwen-0.5b; default: SmolLM2-135M")
    ] = None
    url: Annotated[str | None, typer.Option(help="a running server with the connector")] = None
    reference: Annotated[str | None, typer.Option(help="with --url: a running server without it")] = None
    prefill_config: Annotated[
        str | None,
        typer.Option(help="like --kv-transfer-config, for an engine that computes prompts to hand off"),
    ] = None
    scenarios: Annotated[str, typer.Option(help="names separated by commas; default: all of them")] = ""
    seed: Annotated[int | None, typer.Option(min=0, help="seed of the prompts; default: random")] = None
    chunk_tokens: Annotated[int, typer.Option(min=16, max=4096, help="chunk size of the connector")] = 128
    dtype: Annotated[
        str | None, typer.Option(help="float32, float16 or bfloat16; default: float32, bfloat16 on a GPU")
    ] = None
    lora: Annotated[Path | None, typer.Option(help="a LoRA adapter; default: random, if possible")] = None
    store_pid: Annotated[int | None, typer.Option(help="the store's process, killed at the end")] = None
    vllm: Annotated[str, typer.Option(help="further vLLM options for every engine")] = ""
