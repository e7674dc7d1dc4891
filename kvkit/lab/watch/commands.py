"""The commands `kvkit report` and `kvkit top`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from kvkit.settings import import_from_here


def report(
    sources: Annotated[
        list[str] | None,
        typer.Argument(help="endpoints (http://...) and stores; default: http://127.0.0.1:9477"),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="a configuration file to show as well; SOURCES then name its tiers; default: all of them"
        ),
    ] = None,
    token_file: Annotated[Path | None, typer.Option(help="the endpoints' token, as for `kvkit top`")] = None,
    html: Annotated[Path, typer.Option(help="where to write the page")] = Path("kvkit-report.html"),
) -> None:
    """Write a page on running caches and stores: contents, hits, health. Reads all, changes nothing."""
    import time

    from kvkit.config import load_config
    from kvkit.format import urls
    from kvkit.lab.watch.report import cache_section, page, settings_section, store_section
    from kvkit.lab.watch.top import TopError, visit
    from kvkit.observe.inspect import tier_of

    import_from_here()  # eviction policies
    loaded_config = None if config is None else load_config(config)
    stores = (
        {}
        if loaded_config is None
        else {name: t for name, t in loaded_config.tiers.items() if not t.in_memory}
    )
    now, sections, damaged, source = time.time(), [], 0, ""
    try:
        for source in sources or stores or ["http://127.0.0.1:9477"]:
            if source.startswith(("http://", "https://")):
                sections.append(cache_section(visit(source, token_file, 30.0)))
                continue
            if loaded_config is not None and source not in loaded_config.tiers:
                sys.exit(
                    f"{config}: no tier {source!r}; the tiers are {', '.join(loaded_config.tiers) or 'none'}"
                )
            tier = tier_of(source) if loaded_config is None else loaded_config.tiers[source]
            section, damaged_count = store_section(urls.shown(source), tier, now)
            sections.append(section)
            damaged += damaged_count
        if loaded_config is not None:
            sections.append(settings_section(str(config), loaded_config.model_dump(mode="json")))
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
        typer.Option(help="file of its token; default: KVKIT_SERVER__TOKEN, else, on this host, your own"),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="print one frame and return")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="print one snapshot, totals since the start, as JSON and return")
    ] = False,
    wide: Annotated[
        bool, typer.Option("--wide", help="show all columns; if they do not fit, one below the other")
    ] = False,
    interval: Annotated[float, typer.Option(min=0.1, max=3600.0, help="seconds between frames")] = 1.0,
) -> None:
    """Watch a running cache: hit rate, tokens and bytes per second, latencies, states of the tiers."""
    from functools import partial

    from rich.console import Console

    from kvkit.lab.watch import top as view
    from kvkit.observe.terminal import is_endless, print_json

    console, fetch_now = Console(), partial(view.visit, url, token_file, max(5.0, interval))
    try:
        if as_json:
            print_json(view.as_json(fetch_now()))
        elif once:
            console.print(view.frame(fetch_now(), wide=wide, endless=is_endless(console)), crop=False)
        else:
            view.watch(fetch_now, console, interval_s=interval, wide=wide)
    except view.TopError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        pass
