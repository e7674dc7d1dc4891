"""The options of `kvkit prove`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer


@dataclass(frozen=True, slots=True)
class ProveOptions:
    """What is proven."""

    kv_transfer_config: Annotated[
        str, typer.Option(help="kvkit, the name of a connector, vLLM's JSON, or a file with it")
    ] = "kvkit"
    model: Annotated[str | None, typer.Option(help="hub id, folder or gemma; default: SmolLM2-135M")] = None
    url: Annotated[str | None, typer.Option(help="a server with the connector that runs")] = None
    reference: Annotated[str | None, typer.Option(help="with --url: one without it that runs")] = None
    prefill_config: Annotated[
        str | None,
        typer.Option(help="as --kv-transfer-config, of an engine that computes prompts and hands them off"),
    ] = None
    scenarios: Annotated[str, typer.Option(help="names separated by commas; default: all of them")] = ""
    seed: Annotated[int | None, typer.Option(min=0, help="of the prompts; default: any, it is told")] = None
    chunk_tokens: Annotated[int, typer.Option(min=16, max=4096, help="that the connector stores")] = 128
    dtype: Annotated[
        str | None, typer.Option(help="float32, float16 or bfloat16; default: float32, bfloat16 on a GPU")
    ] = None
    lora: Annotated[Path | None, typer.Option(help="a LoRA adapter; default: one is made, or none")] = None
    store_pid: Annotated[int | None, typer.Option(help="the store's process, which is killed at last")] = None
    vllm: Annotated[str, typer.Option(help="more of vLLM's options, for every engine")] = ""
