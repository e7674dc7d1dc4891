"""The command `kvkit inspect`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from kvkit.settings import import_from_here


def inspect(
    store: Annotated[
        str,
        typer.Argument(help="a folder, shm://, s3://, redis://, mooncake:// or any other URL of a tier"),
    ],
    config: Annotated[
        Path | None, typer.Option(help="a configuration file; STORE is then the name of one of its tiers")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="print one JSON document instead of a table")
    ] = False,
) -> None:
    """List a store: namespaces, chunks, tokens, bytes, damaged records. Reads all of it; changes nothing."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Column, Table

    from kvkit.config import load_config
    from kvkit.environment import printable
    from kvkit.format import urls
    from kvkit.observe.inspect import described, list_store, list_tier
    from kvkit.observe.progress import spaced, timed
    from kvkit.observe.terminal import show, tell_json

    console = Console()

    def say(text: str) -> None:
        console.print(printable(text), markup=False, highlight=False, soft_wrap=True)

    done, hint = [], spaced(timed(Console(stderr=True)))
    try:
        if config is None:
            listings = list_store(store, hint)
        else:
            import_from_here()  # eviction policies
            tiers = load_config(config).tiers
            if store not in tiers:
                sys.exit(f"{config}: no tier {store!r}; the tiers are {', '.join(tiers) or 'none'}")
            listings = list_tier(store, tiers[store], hint)
        for listing, complete in listings:
            hint(f"reading {listing.array}: {listing.chunks} chunks")
            if complete:
                done.append(listing)
    except (OSError, ValueError, ImportError) as error:
        sys.exit(urls.hide(str(error), store))
    if as_json:
        tell_json({"store": urls.shown(store), "arrays": [described(listing) for listing in done]}, indent=1)
        raise typer.Exit(any(listing.damaged for listing in done))
    if not done:
        say(f"{urls.shown(store)}: no records")
        return
    numbers = (Column(name, justify="right") for name in ("chunks", "tokens", "MB", "damaged"))
    shown = Table("namespace", "group", "model", *numbers)
    for listing in done:
        digest, _, group = listing.array.rpartition("/")
        precision = str(listing.namespace.get("layout", "")).partition("-")[2]
        told = *(listing.namespace.get(name, "") for name in ("model", "dtype")), precision
        model = " ".join(map(str, told)).strip()
        shown.add_row(
            *(escape(digest), escape(group), escape(printable(model or "no zarr.json")), str(listing.chunks)),
            *(str(listing.tokens), f"{listing.bytes / 1e6:.1f}", str(len(listing.damaged))),
        )
    show(shown, console)
    for listing in done:
        for name, reason in listing.damaged:
            say(f"damaged: {name}: {reason}")
    if any(listing.damaged for listing in done):
        raise typer.Exit(1)
