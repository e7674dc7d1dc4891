"""The commands that show caches and stores: `kvkit inspect`, `kvkit report` and `kvkit top`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from kvkit.settings import import_from_here


def inspect(
    store: Annotated[
        str,
        typer.Argument(help="a folder, shm://, s3://, redis://, mooncake://, any URL that a tier may have"),
    ],
    config: Annotated[
        Path | None, typer.Option(help="a configuration file, of which STORE is the name of a tier")
    ] = None,
) -> None:
    """List a store: namespaces, chunks, tokens, bytes, damaged records. Reads all of it; changes nothing."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Column, Table

    from kvkit.config import load_config
    from kvkit.environment import printable
    from kvkit.format import urls
    from kvkit.observe.inspect import list_store, list_tier

    console = Console()

    def say(text: str) -> None:
        console.print(printable(text), markup=False, highlight=False, soft_wrap=True)

    done = []
    try:
        if config is None:
            listings = list_store(store)
        else:
            import_from_here()  # eviction policies
            tiers = load_config(config).tiers
            if store not in tiers:
                sys.exit(f"{config}: no tier {store!r}; the tiers are {', '.join(tiers) or 'none'}")
            listings = list_tier(store, tiers[store])
        with console.status("reading") as status:
            for listing, complete in listings:
                status.update(f"{escape(listing.array)}: {listing.chunks} records")
                if complete:
                    done.append(listing)
    except (OSError, ValueError, ImportError) as error:
        sys.exit(urls.hide(str(error), store))
    if not done:
        say(f"{urls.shown(store)}: no records")
        return
    shown = Table(Column("namespace", overflow="fold"), "group", "model", "chunks", "tokens", "MB", "damaged")
    for listing in done:
        digest, _, group = listing.array.rpartition("/")
        precision = str(listing.namespace.get("layout", "")).partition("-")[2]
        told = *(listing.namespace.get(name, "") for name in ("model", "dtype")), precision
        model = " ".join(map(str, told)).strip()
        shown.add_row(
            *(escape(digest), escape(group), escape(printable(model or "no zarr.json")), str(listing.chunks)),
            *(str(listing.tokens), f"{listing.bytes / 1e6:.1f}", str(len(listing.damaged))),
        )
    console.print(shown)
    for listing in done:
        for name, reason in listing.damaged:
            say(f"damaged: {name}: {reason}")
    if any(listing.damaged for listing in done):
        raise typer.Exit(1)


def report(
    sources: Annotated[
        list[str] | None,
        typer.Argument(help="endpoints (http://...) and stores; default: http://127.0.0.1:9477"),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="a configuration file, whose settings are shown: SOURCES are its tiers; default: all"
        ),
    ] = None,
    token_file: Annotated[Path | None, typer.Option(help="of endpoints, as for `kvkit top`")] = None,
    html: Annotated[Path, typer.Option(help="where to write the page")] = Path("kvkit-report.html"),
) -> None:
    """Write a page of running caches and stores: what is held, hits, health. Reads all, changes nothing."""
    import time

    from kvkit.config import load_config
    from kvkit.format import urls
    from kvkit.observe.inspect import tier_of
    from kvkit.observe.report import cache_section, page, settings_section, store_section
    from kvkit.observe.top import TopError, fetch, token_for

    import_from_here()  # eviction policies
    given = None if config is None else load_config(config)
    stored = {} if given is None else {name: t for name, t in given.tiers.items() if not t.in_memory}
    now, sections, damaged, source = time.time(), [], 0, ""
    try:
        for source in sources or stored or ["http://127.0.0.1:9477"]:
            if source.startswith(("http://", "https://")):
                sections.append(cache_section(fetch(source, token_for(source, token_file), 30.0)))
                continue
            if given is not None and source not in given.tiers:
                sys.exit(f"{config}: no tier {source!r}; the tiers are {', '.join(given.tiers) or 'none'}")
            tier = tier_of(source) if given is None else given.tiers[source]
            section, wrong = store_section(urls.shown(source), tier, now)
            sections.append(section)
            damaged += wrong
        if given is not None:
            sections.append(settings_section(str(config), given.model_dump(mode="json")))
        html.write_text(page(sections, now), encoding="utf-8")
    except TopError as error:
        sys.exit(str(error))
    except (OSError, ValueError, ImportError) as error:
        sys.exit(urls.hide(str(error), source))
    print(f"{html}: {len(sections)} sections, {damaged} damaged records")


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
    from rich.console import Console

    from kvkit.observe.top import TopError, token_for, watch
    from kvkit.settings import ConfigError

    try:
        watch(url, token_for(url, token_file), Console(), interval_s=interval, once=once)
    except (TopError, ConfigError) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        pass
