"""The command `kvkit router`."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated, Any

import typer


def router(
    prefill: Annotated[
        list[str] | None,
        typer.Option(help="a prefill engine, as [NAME=]URL[,cache=URL][,events=ADDRESS]...; can be repeated"),
    ] = None,
    decode: Annotated[
        list[str] | None,
        typer.Option(help="a decode engine, as for --prefill; add ,handoff=ADDRESS if it receives KV"),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="a TOML file with these and all other settings")] = None,
    host: Annotated[str | None, typer.Option(help="address to listen on; default: 127.0.0.1")] = None,
    port: Annotated[int | None, typer.Option(help="default: 8000")] = None,
) -> None:
    """Serve OpenAI's API from vLLM prefill engines and vLLM decode engines."""
    from kvkit.settings import ConfigError

    try:
        from kvkit.router.app import serve
        from kvkit.router.settings import parse_engine_options, read_router_config
    except ImportError as error:
        sys.exit(f"{error.name} is missing: pip install 'kvkit-llm[router]'")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        options: dict[str, Any] = {"host": host, "port": port}
        for role, given in (("prefill", prefill), ("decode", decode)):
            options[role] = parse_engine_options(given or [], role)
        options = {name: value for name, value in options.items() if value not in (None, {})}
        serve(read_router_config(config, **options))
    except ConfigError as error:
        sys.exit(str(error))
