"""`kvkit top`: a live view of one cache in a terminal, from its HTTP endpoint.

Between two frames counts are per second, and quantiles are of the interval. A single frame, and the first of
several, shows totals and quantiles since the cache was opened.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args
from urllib.parse import SplitResult, urlsplit

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from kvkit.environment import printable
from kvkit.format.urls import shown
from kvkit.observe.access import DEFAULT_PORT, token_for
from kvkit.observe.terminal import FittedTable
from kvkit.settings import ConfigError
from kvkit.transfer.counters import Direction, Histogram
from kvkit.workers import Workers

_Labels = frozenset[tuple[str, str]]
_COLOURS = {"ok": "green", "slow": "yellow", "half-open": "yellow", "open": "red"}
_LOSSES, _FAILED = ("evicted", "refused", "damaged"), ("errors", "timeouts")
NARROW = ("tier", "state", "queue", "hit tok", "get B", "get p99", "put B", "put p99", "errors")
"""Columns of a frame that is not wide."""
_TIER_TOTALS = (
    *("hit_tokens", "loaded_tokens", "loaded_bytes", "stored_bytes"),
    *(f"{loss}_records" for loss in _LOSSES),
    *_FAILED,
)
_MOST_BYTES = 64 << 20
TRANSFERS = "kvkit_transfer_seconds"


class TopError(RuntimeError):
    """A cache cannot be shown. The message names its URL and the remedy."""


class _TokenRefused(TopError):
    """An endpoint answers, but refuses the token or its absence."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A cache at one moment.

    Attributes:
        at: time of the snapshot by the reader's clock, in seconds.
        url: URL of the endpoint.
        tiers: reply of /tiers.
        samples: value of each metric, by name and labels.
    """

    at: float
    url: str
    tiers: list[dict[str, Any]]
    samples: Mapping[tuple[str, _Labels], float]

    def check(self) -> None:
        """Check that this is the snapshot of a cache, so that no later reader fails on it.

        Raises:
            Exception: ValueError, or any error from reading malformed contents.
        """
        if not isinstance(self.tiers, list) or not all(isinstance(t["name"], str) for t in self.tiers):
            raise ValueError("/tiers names no tiers")
        for tier in self.tiers:
            for direction in get_args(Direction):
                times = self.histogram(TRANSFERS, tier["name"], direction)
                if times is not None and not (times.bounds and min(times.buckets) >= 0):
                    raise ValueError(f"{TRANSFERS} is no histogram")

    def sum(self, name: str, **labels: str) -> float:
        """Return the sum of the samples with this name and these labels, whatever their other labels."""
        required = labels.items()
        return sum(v for (n, have), v in self.samples.items() if n == name and required <= have)

    def histogram(self, name: str, tier: str, direction: Direction) -> Histogram | None:
        """Return the histogram of that name, or None if nothing was transferred."""
        labels = {("tier", tier), ("direction", direction)}
        rows = sorted(
            (float(dict(have)["le"]), int(v))
            for (n, have), v in self.samples.items()
            if n == f"{name}_bucket" and labels <= have
        )
        if not rows:
            return None
        cumulative = [0, *(count for _, count in rows)]
        buckets = [after - before for before, after in pairwise(cumulative)]
        return Histogram(tuple(bound for bound, _ in rows[:-1]), buckets)


def visit(url: str, token_file: Path | None, timeout_s: float) -> Snapshot:
    """Fetch a snapshot with the token that `token_for` finds.

    Without a token the request is sent anyway: if nothing answers, that is the error to report.

    Raises:
        TopError: see `fetch`; or the endpoint requires a token, and there is none.
    """
    try:
        token = token_for(url, token_file)
    except ConfigError as error:
        try:
            return fetch(url, "", timeout_s)
        except _TokenRefused:
            raise TopError(f"{url}: requires a token: {error}") from error
    return fetch(url, token, timeout_s)


def fetch(url: str, token: str, timeout_s: float) -> Snapshot:
    """Fetch a snapshot from the endpoint at `url` (http or https), within `timeout_s` seconds in all.

    Raises:
        TopError: nothing answers in time, the token is refused, or `url` is no endpoint of kvkit's.
    """
    address = _split_url(url)
    worker = Workers(1, "kvkit-fetch")  # a peer that sends single bytes slowly evades socket timeouts
    future = worker.submit(partial(_fetch_unlimited, address, url, token, timeout_s))
    worker.close(0.0)
    try:
        return future.result(timeout_s)
    except TimeoutError:
        raise _no_answer(url, f"no whole answer within {timeout_s:g} s") from None


def _fetch_unlimited(address: SplitResult, url: str, token: str, timeout_s: float) -> Snapshot:
    """Fetch a snapshot as `fetch` does, but without a limit for the whole exchange.

    Raises:
        TopError: see `fetch`.
        TimeoutError: the endpoint sends nothing for `timeout_s` seconds.
    """
    connection_type = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
    # not urllib, which would send the token to a proxy or to the target of a redirect
    connection = connection_type(address.hostname or "", address.port, timeout=timeout_s)
    base = address.path.rstrip("/")
    try:
        text = _get(connection, f"{base}/metrics", token, url)
        tiers = json.loads(_get(connection, f"{base}/tiers", token, url))
        families = text_string_to_metric_families(text)
        samples = {(s.name, frozenset(s.labels.items())): s.value for f in families for s in f.samples}
        snapshot = Snapshot(time.monotonic(), url, tiers, samples)
        snapshot.check()
    except (TopError, TimeoutError):
        raise
    except (OSError, http.client.HTTPException) as error:
        raise _no_answer(url, printable(str(error)) or type(error).__name__) from error
    except Exception as error:  # parsers do not document their errors on foreign content
        reason = printable(str(error)) or type(error).__name__
        raise TopError(f"{url}: answers, but is no endpoint of kvkit's: {reason}") from error
    finally:
        connection.close()
    return snapshot


def _no_answer(url: str, reason: str) -> TopError:
    return TopError(
        f"{url}: nothing answers there: {reason}. Name the URL of a cache that runs, "
        "or start one with enabled = true in [server] of its configuration"
    )


def frame(
    now: Snapshot, before: Snapshot | None = None, *, wide: bool = False, endless: bool = False
) -> Group:
    """Build the display of `now`: changes per second since `before`, or totals without it.

    Args:
        wide: True: all columns; False: those of `NARROW`.
        endless: whether lines have no width limit; see `FittedTable`.
    """
    figures = totals(now, before)
    titles, rows = by_tier(now, before)
    columns = [column for column, title in enumerate(titles) if wide or title.removesuffix("/s") in NARROW]
    shown = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        shown.add_column(titles[column], justify="left" if column < 2 else "right")
    for name, state, *cells in rows:
        styled_state = f"[{_COLOURS.get(state, 'default')}]{escape(printable(state))}[/]"
        row = (escape(printable(name)), styled_state, *cells)
        shown.add_row(*(row[column] for column in columns))
    lines = (now.url, "   ".join(figures[:3]), "   ".join(figures[3:]), "")
    return Group(*(Text(line, overflow="fold") for line in lines), FittedTable(shown, endless))


def totals(now: Snapshot, before: Snapshot | None = None) -> tuple[str, ...]:
    """Return the figures of the whole cache as texts."""
    per = "/s" if before else ""
    lookup_tokens, hit_tokens = (
        _change(now, before, f"kvkit_{kind}_tokens_total") for kind in ("lookup", "hit")
    )
    return (
        f"hit rate {100 * hit_tokens / lookup_tokens:.1f} %" if lookup_tokens else "hit rate -",
        f"lookups{per} {short(_change(now, before, 'kvkit_lookups_total'))}",
        f"tokens{per} {short(lookup_tokens)}",
        f"slots {now.sum('kvkit_slots_in_use'):.0f} of {now.sum('kvkit_slots'):.0f}",
        f"pending puts {now.sum('kvkit_puts_under_way'):.0f}",
    )


def by_tier(now: Snapshot, before: Snapshot | None = None) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the headings, and a row for each tier: its name, its state, numbers."""
    per = "/s" if before else ""
    gets = f"get B{per}", "get p50", "get p99"
    puts = f"put B{per}", "put p50", "put p99"
    rates = (f"hit tok{per}", f"load tok{per}", *gets, *puts)
    rows = []
    for tier in now.tiers:
        name = tier["name"]
        change = partial(_change, now, before, tier=name)
        row = (
            name,
            str(tier.get("state", "")),
            short(now.sum("kvkit_queue_depth", tier=name)),
            short(change("kvkit_hit_tokens_total")),
            short(change("kvkit_loaded_tokens_total")),
            short(change("kvkit_loaded_bytes_total")),
            *_quantiles(now, before, name, "get"),
            short(change("kvkit_stored_bytes_total")),
            *_quantiles(now, before, name, "put"),
            *(short(now.sum(f"kvkit_{loss}_records_total", tier=name)) for loss in _LOSSES),
            *(short(now.sum(f"kvkit_{failure}_total", tier=name)) for failure in _FAILED),
        )
        rows.append(row)
    return ("tier", "state", "queue", *rates, *_LOSSES, *_FAILED), rows


def _change(now: Snapshot, before: Snapshot | None, name: str, **labels: str) -> float:
    """Return the change per second since `before`, or the total without it."""
    if before is None:
        return now.sum(name, **labels)
    return (now.sum(name, **labels) - before.sum(name, **labels)) / (now.at - before.at)


def watch(fetch_now: Callable[[], Snapshot], console: Console, *, interval_s: float, wide: bool) -> None:
    """Print frames of what `fetch_now` returns until interrupted.

    Raises:
        TopError: see `fetch`; the endpoint may also go away later.
    """
    before = fetch_now()
    with Live(frame(before, wide=wide), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(interval_s)
            now = fetch_now()
            restarted = now.sum("kvkit_lookups_total") < before.sum("kvkit_lookups_total")
            live.update(frame(now, None if restarted else before, wide=wide), refresh=True)
            before = now


def as_json(now: Snapshot) -> dict[str, Any]:
    """Describe a snapshot in plain numbers: totals since the cache opened; times in seconds, or null."""
    lookup_tokens, hit_tokens = now.sum("kvkit_lookup_tokens_total"), now.sum("kvkit_hit_tokens_total")
    tiers = []
    for tier in now.tiers:
        name = tier["name"]
        total = partial(now.sum, tier=name)
        entry = {"name": name, "state": str(tier.get("state", "")), "queue_depth": total("kvkit_queue_depth")}
        entry |= {key: total(f"kvkit_{key}_total") for key in _TIER_TOTALS}
        for direction in get_args(Direction):
            times = now.histogram(TRANSFERS, name, direction)
            for share in (50, 99):
                entry[f"{direction}_p{share}_s"] = times.quantile(share / 100) if times else None
        tiers.append(entry)
    return {
        "url": now.url,
        "hit_rate": hit_tokens / lookup_tokens if lookup_tokens else None,
        "lookups": now.sum("kvkit_lookups_total"),
        "lookup_tokens": lookup_tokens,
        "hit_tokens": hit_tokens,
        "slots": now.sum("kvkit_slots"),
        "slots_in_use": now.sum("kvkit_slots_in_use"),
        "pending_writes": now.sum("kvkit_puts_under_way"),
        "tiers": tiers,
    }


def _split_url(url: str) -> SplitResult:
    """Split an endpoint's URL.

    Raises:
        TopError: the URL is invalid, or holds credentials.
    """
    try:
        address = urlsplit(url)
        is_http = address.scheme in ("http", "https")
        valid = is_http and address.hostname and address.port != 0 and shown(url) == url
    except ValueError:
        valid = False
    if not valid:
        raise TopError(f"URL = {shown(url)!r}: want an address such as http://127.0.0.1:{DEFAULT_PORT}")
    return address


def _get(connection: http.client.HTTPConnection, path: str, token: str, url: str) -> str:
    connection.request("GET", path, headers={"Authorization": f"Bearer {token}"} if token else {})
    reply = connection.getresponse()
    body = reply.read(_MOST_BYTES).decode()
    if reply.status in (401, 403):
        raise _TokenRefused(f"{url}: refuses the token; give the one of that endpoint (--token-file)")
    if reply.status != 200:
        raise ValueError(f"{path} answers {reply.status} {reply.reason}")
    return body


def _quantiles(now: Snapshot, before: Snapshot | None, tier: str, direction: Direction) -> tuple[str, str]:
    """Return median and 99th percentile of the time of a transfer."""
    times = now.histogram(TRANSFERS, tier, direction)
    earlier = before.histogram(TRANSFERS, tier, direction) if before else None
    if times and earlier and times.bounds == earlier.bounds:
        new = [a - b for a, b in zip(times.buckets, earlier.buckets, strict=True)]
        times = Histogram(times.bounds, new)
    if times is None:
        return "-", "-"
    return _format_time(times.quantile(0.5)), _format_time(times.quantile(0.99))


def _format_time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def short(number: float) -> str:
    """Format a number with four digits and a decimal prefix: 12.34 k."""
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.4g} {prefix}"
    return f"{number:.4g}"
