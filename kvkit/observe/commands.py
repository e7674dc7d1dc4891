"""The command `kvkit inspect`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvkit.settings import import_from_here

if TYPE_CHECKING:
    from rich.table import Table

    from kvkit.observe.inspect import ArrayListing


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

    from kvkit.environment import printable
    from kvkit.format import urls
    from kvkit.observe.inspect import listing_json
    from kvkit.observe.terminal import print_json, show

    console = Console()

    def print_line(text: str) -> None:
        console.print(printable(text), markup=False, highlight=False, soft_wrap=True)

    try:
        listings = _read_listings(store, config)
    except (OSError, ValueError, ImportError) as error:
        sys.exit(urls.hide(str(error), store))
    if as_json:
        print_json({"store": urls.shown(store), "arrays": list(map(listing_json, listings))}, indent=1)
        raise typer.Exit(any(listing.damaged for listing in listings))
    if not listings:
        print_line(f"{urls.shown(store)}: no records")
        return
    show(_listing_table(listings), console)
    for listing in listings:
        for name, reason in listing.damaged:
            print_line(f"damaged: {name}: {reason}")
    if any(listing.damaged for listing in listings):
        raise typer.Exit(1)


def _read_listings(store: str, config: Path | None) -> list[ArrayListing]:
    """Read all of a store, or of a tier of a configuration file, and report the progress."""
    from rich.console import Console

    from kvkit.config import load_config
    from kvkit.observe.inspect import list_store, list_tier
    from kvkit.observe.progress import spaced, timed

    completed, report = [], spaced(timed(Console(stderr=True)))
    if config is None:
        listings = list_store(store, report)
    else:
        import_from_here()  # eviction policies
        tiers = load_config(config).tiers
        if store not in tiers:
            sys.exit(f"{config}: no tier {store!r}; the tiers are {', '.join(tiers) or 'none'}")
        listings = list_tier(store, tiers[store], report)
    for listing, complete in listings:
        report(f"reading {listing.array}: {listing.chunks} chunks")
        if complete:
            completed.append(listing)
    return completed


def _listing_table(listings: Sequence[ArrayListing]) -> Table:
    """Return a table with a row for each array."""
    from rich.markup import escape
    from rich.table import Column, Table

    from kvkit.environment import printable

    numbers = (Column(name, justify="right") for name in ("chunks", "tokens", "MB", "damaged"))
    listing_table = Table("namespace", "group", "model", *numbers)
    for listing in listings:
        digest, _, group = listing.array.rpartition("/")
        precision = str(listing.namespace.get("layout", "")).partition("-")[2]
        fields = *(listing.namespace.get(name, "") for name in ("model", "dtype")), precision
        model = " ".join(map(str, fields)).strip()
        listing_table.add_row(
            *(escape(digest), escape(group), escape(printable(model or "no zarr.json")), str(listing.chunks)),
            *(str(listing.tokens), f"{listing.bytes / 1e6:.1f}", str(len(listing.damaged))),
        )
    return listing_table
