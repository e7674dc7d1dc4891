"""`kvkit report`: the contents of running caches and stores, as one self-contained HTML page.

Everything from a store or an endpoint is shown as text: names may contain anything.
"""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from operator import attrgetter
from typing import Any

from kvkit.environment import DISTRIBUTION, printable, version_of
from kvkit.lab.watch.top import Snapshot, by_tier, short, totals
from kvkit.observe.inspect import ArrayListing, StoredRecord, list_records, list_tier
from kvkit.observe.metrics import METRICS
from kvkit.tiers.settings import TierConfig

_MOST_ROWS = 5
"""Maximum number of largest, oldest and damaged records to list."""
_MOST_CHARS = 120
_STYLE = """
:root { color-scheme: light dark; --line: #8884; --bar: #4b8bbe55; --wrong: #d1495b; --good: #3a8f5c }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 85em; padding: 0 1em }
h2 { margin: 2em 0 .5em; padding-bottom: .2em; border-bottom: 2px solid var(--bar); overflow-wrap: anywhere }
h3 { margin: 1.5em 0 .3em; font-size: 1em }
ul { display: flex; flex-wrap: wrap; gap: .6em; list-style: none; padding: 0 }
li { padding: .5em .9em; border: 1px solid var(--line); border-radius: .5em }
div { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .2em .5em; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top }
th { font-weight: 600; white-space: nowrap }
td { overflow-wrap: break-word; max-width: 40em }
td.number { text-align: right; white-space: nowrap }
td.share { background: linear-gradient(var(--bar), var(--bar)) no-repeat left / var(--share) 100% }
td.wrong { color: var(--wrong); font-weight: 600 } td.good { color: var(--good) }
"""
_STATES = {"ok": "good", "open": "wrong"}


def cell(text: object, style: str = "", share: float | None = None) -> str:
    """Return a cell of a table; `style` names classes of the style sheet, `share` (0 to 1) is shaded."""
    plain = printable(str(text))
    cut = plain if len(plain) <= _MOST_CHARS else plain[:_MOST_CHARS] + "…"
    shade = "" if share is None else f' style="--share: {100 * share:.1f}%"'
    return f'<td class="{style}"{shade}>{escape(cut)}</td>'


def number(text: object, style: str = "", share: float | None = None) -> str:
    """Return a cell with its text at the right edge."""
    return cell(text, f"number {style}", share)


def page(sections: Iterable[str], now: float, title: str = "kvkit report") -> str:
    """Return the page of these sections; `now` in seconds since 1970."""
    created = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(now))
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<meta charset="utf-8">',
            # keeps a browser from loading or running anything that a name injects
            '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
            "style-src 'unsafe-inline'\">",
            '<meta name="viewport" content="width=device-width">',
            f"<title>{title}</title>\n<style>{_STYLE}</style>\n<h1>{title}</h1>",
            f"<p>{created}, {escape(platform.node())}, kvkit {version_of(DISTRIBUTION)}</p>",
            *sections,
            "</html>\n",
        ]
    )


def cache_section(now: Snapshot) -> str:
    """Return the section of a running cache: hits, tiers, health and non-zero counts since it opened."""
    titles, rows = by_tier(now)
    tiers = [
        "".join([cell(name), cell(state, _STATES.get(state, "")), *map(number, cells)])
        for name, state, *cells in rows
    ]
    lookup_tokens = now.sum("kvkit_lookup_tokens_total")
    hits = []
    for tier in now.tiers:
        hit_tokens = now.sum("kvkit_hit_tokens_total", tier=tier["name"])
        share = min(1.0, hit_tokens / lookup_tokens) if lookup_tokens else 0.0
        description = [cell(tier.get(field) or "") for field in ("name", "scope", "codec", "precision")]
        hits.append(
            "".join([*description, number(short(hit_tokens)), number(f"{share:.1%}", "share", share)])
        )
    known = set(re.findall(r"^\| (kvkit_\w+)", METRICS, re.MULTILINE))  # leaves out the samples of histograms
    counts = [
        cell(name) + cell(", ".join(f"{k}={v}" for k, v in sorted(labels))) + number(f"{value:,.0f}")
        for (name, labels), value in now.samples.items()
        if value and name in known
    ]
    found_by = ("tier", "scope", "codec", "precision", "tokens", "of tokens looked up")
    return "\n".join(
        [
            heading(now.url),
            tiles(totals(now)),
            table("Hits", found_by, hits),
            table("Tiers", titles, tiers),
            table("Counts that are not 0", ("metric", "labels", "value"), counts),
        ]
    )


def store_section(name: str, config: TierConfig, now: float) -> tuple[str, int]:
    """Read and verify a tier's stores; return their section and the number of damaged records.

    Raises:
        OSError, ValueError: see `kvkit.observe.inspect.list_tier`.
    """
    listings = [listing for listing, complete in list_tier(name, config) if complete]
    records = list(list_records(name, config))
    total_bytes = sum(record.bytes for record in records)
    damaged = [entry for listing in listings for entry in listing.damaged]
    arrays = {listing.array: [r for r in records if r.array == listing.array] for listing in listings}
    rows = [_array_row(listing, arrays[listing.array], total_bytes, now) for listing in listings]
    dated = sorted((record for record in records if record.written is not None), key=attrgetter("written"))
    largest = sorted(records, key=attrgetter("bytes"), reverse=True)
    sections = [
        heading(name),
        tiles(
            [
                f"{_bytes(total_bytes)} in {len(records)} records",
                f"{short(sum(listing.tokens for listing in listings))} tokens",
                f"{len({listing.array.partition('/')[0] for listing in listings})} namespaces",
                f"{len(damaged)} damaged",
            ]
        ),
        table("Namespaces", _COLUMNS, rows),
    ]
    for title, listed in (("Largest records", largest), ("Oldest records", dated)):
        record_rows = [cell(r.name) + number(_bytes(r.bytes)) + _age(r, now) for r in listed[:_MOST_ROWS]]
        sections.append(table(title, ("record", "bytes", "written"), record_rows))
    damage_rows = [cell(location) + cell(reason, "wrong") for location, reason in damaged[:_MOST_ROWS]]
    sections.append(table(f"Damaged records: {len(damaged)}", ("record", "damage"), damage_rows))
    return "\n".join(sections), len(damaged)


_COLUMNS = (
    "namespace",
    "group",
    "model",
    "dtype",
    "tokens",
    "bytes",
    "records",
    "damaged",
    "oldest",
    "newest",
)


def _array_row(listing: ArrayListing, records: Sequence[StoredRecord], total_bytes: int, now: float) -> str:
    digest, _, group = listing.array.rpartition("/")
    size = sum(record.bytes for record in records)
    dated = sorted((r for r in records if r.written is not None), key=attrgetter("written"))
    precision = str(listing.namespace.get("layout", "")).partition("-")[2]
    cells = [
        cell(digest),
        number(group),
        cell(listing.namespace.get("model", "no zarr.json")),
        cell(f"{listing.namespace.get('dtype', '')} {precision}"),
        number(short(listing.tokens)),
        number(_bytes(size), "share", size / total_bytes if total_bytes else 0.0),
        number(len(records)),
        number(len(listing.damaged), "wrong" * bool(listing.damaged)),
        *(_age(record, now) for record in (dated[:1] + dated[-1:])),
    ]
    return "".join(cells)


def settings_section(title: str, tables: Mapping[str, Any]) -> str:
    """Return the section of settings by dotted names; `tables` come from `model_dump(mode="json")`."""
    rows = [cell(name) + cell(value) for name, value in _flatten(tables)]
    return heading(title) + table("Settings", ("setting", "value"), rows)


def _flatten(tables: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, object]]:
    for name, value in tables.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name}", value


def table(title: str, columns: Sequence[str], rows: Sequence[str]) -> str:
    """Return a titled table; empty without rows."""
    if not rows:
        return ""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "\n".join(f"<tr>{row}</tr>" for row in rows)
    return f"<h3>{escape(title)}</h3>\n<div><table>\n<tr>{head}</tr>\n{body}\n</table></div>"


def heading(text: str) -> str:
    """Return a section's heading."""
    return f"<h2>{escape(printable(text))}</h2>\n"


def tiles(texts: Iterable[str]) -> str:
    """Return a list of short texts, each in a box."""
    return f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in texts)}</ul>"


def _bytes(size: float) -> str:
    return f"{short(size)}B" if size >= 1000 else f"{size:.0f} B"


def _age(record: StoredRecord, now: float) -> str:
    if record.written is None:
        return cell("")
    seconds = max(0.0, now - record.written)
    size, unit = next(
        ((size, unit) for size, unit in ((86400, "d"), (3600, "h"), (60, "min")) if seconds >= size), (1, "s")
    )
    return number(f"{seconds / size:.1f} {unit} ago")
