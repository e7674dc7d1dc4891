"""`kvkit bench serve`: workloads on several servers, side by side."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path
from urllib.parse import urlsplit

from rich.console import Console

from kvkit.config import Config, load_config
from kvkit.lab.files import BenchError, check_folders, model_folder, split_options, write_figures
from kvkit.lab.serve import memory
from kvkit.lab.serve.client import Target, connect, counted_hits, drive
from kvkit.lab.serve.options import Targets, Traffic
from kvkit.lab.serve.replay import replayed
from kvkit.lab.serve.report import Measured, as_json, draw, tables
from kvkit.lab.serve.systems import (
    CHUNK_TOKENS,
    DEFAULT,
    STAGING_BYTES,
    SYSTEMS,
    WITH_CACHE,
    Setup,
    ended_by_sigterm,
    missing,
    started,
)
from kvkit.lab.serve.workloads import WORKLOADS, CompletionRequest, Workload, arriving, document_qa
from kvkit.lab.simulate.traces import trace_of
from kvkit.observe.progress import Report
from kvkit.observe.terminal import print_text, show

TRACE = "trace"
"""Name of the workload that replays a trace."""


def run(traffic: Traffic, targets: Targets, json_path: Path, png_path: Path | None, console: Console) -> None:
    """Measure, print tables, write figures and a picture. Skips systems that are not installed.

    Raises:
        BenchError: an option is wrong, nothing is left to measure, or a file cannot be written. Also after
            printing and writing all results, if a system did not start or answer, or a request failed.
        ConfigError, ModelError: kvkit's configuration is wrong, or the model cannot be fetched.
    """
    known = _available_workloads(traffic)
    workloads = _parse_names("workloads", traffic.workloads, tuple(known)) or tuple(known)
    urls = targets.url or []
    systems = _parse_names("systems", targets.systems, SYSTEMS) or (() if urls else DEFAULT)
    check_folders(json_path, png_path)
    options = split_options(targets.vllm)
    settings = None if targets.config is None else load_config(targets.config)
    chunk_tokens = CHUNK_TOKENS if settings is None else settings.chunk_tokens
    report = partial(print_text, console=console)
    chosen = _installed(systems, report)
    if not chosen and not urls:
        raise BenchError("nothing to measure: install vLLM, or name a server with --url")
    lost: dict[str, str] = {}
    running = [connect(*_split_name(url), targets.model) for url in urls]
    names = [*chosen, *(server.name for server in running)]
    if len(set(names)) < len(names):
        raise BenchError(f"url: names are {', '.join(names)}, want each once; give them as NAME=URL")
    with ended_by_sigterm(), tempfile.TemporaryDirectory(prefix="kvkit-bench-") as folder:
        name = model_folder(targets.model, console) if chosen else ""
        setup = Setup(name, targets.memory_gib, targets.config, options, Path(folder), chunk_tokens)
        if chosen:
            setup = _with_memory_options(setup, settings, chosen, targets.interleave)
            report(setup.memory)
        groups: list[Sequence[str | Target]] = [*([system] for system in chosen), running]
        if targets.interleave:
            groups = [[*chosen, *running]]
        measurements = _measure_groups(groups, setup, {w: known[w] for w in workloads}, traffic, lost, report)
    results = [measurements[key] for key in product(workloads, names) if key in measurements]
    if results:
        for table in tables(results):
            show(table, console)
        model = targets.model
        write_figures(
            json_path,
            command=_command(workloads, traffic),
            seed=traffic.seed,
            model=Path(model).name if model and Path(model).is_dir() else model,
            load=asdict(traffic) | {"workloads": workloads},
            interleave=targets.interleave,
            memory_gib=targets.memory_gib,
            vllm_options=list(options),
            chunk_tokens=chunk_tokens,
            memory=setup.memory,
            left_out=lost,
            **as_json(results),
        )
        report(f"figures: {json_path}")
        if png_path is not None:
            draw(results, png_path)
            report(f"picture: {png_path}")
    _check_complete(results, lost)


def _installed(systems: Sequence[str], report: Report) -> list[str]:
    """Return those of `systems` that are installed, and print why the others are left out."""
    chosen = []
    for system in systems:
        if reason := missing(system):
            report(f"{system}: left out, {reason}")
        else:
            chosen.append(system)
    return chosen


def _measure_groups(
    groups: Sequence[Sequence[str | Target]],
    setup: Setup,
    workloads: Mapping[str, Workload],
    traffic: Traffic,
    lost: dict[str, str],
    report: Report,
) -> dict[tuple[str, str], Measured]:
    """Measure groups of servers, one after the other; returns all rounds by workload and server.

    Servers of a group run at once and alternate. Mutates `lost`: adds the reason for each server that failed.
    """
    measurements: dict[tuple[str, str], Measured] = {}
    for servers in groups:
        with ExitStack() as stack:
            ready = _start_all(servers, setup, stack, lost, report)
            for measured in measure(ready, workloads, traffic, lost, report):
                key = measured.workload, measured.system
                measurements[key] = measurements[key] + measured if key in measurements else measured
    return measurements


def _check_complete(results: Sequence[Measured], lost: Mapping[str, str]) -> None:
    """Check that no server was lost and no request failed.

    Raises:
        BenchError: see `run`.
    """
    if lost:
        raise BenchError("\n".join(lost.values()))
    for measured in results:
        for error in filter(None, (answer.error for answer in measured.answers)):
            raise BenchError(f"{measured.workload} on {measured.system}: {error}")


def measure(
    servers: Sequence[Target],
    workloads: Mapping[str, Workload],
    traffic: Traffic,
    lost: dict[str, str],
    report: Report,
) -> Iterator[Measured]:
    """Measure and yield every round of every workload on each server; each round starts with another one.

    Mutates `lost`: adds the reason for each server that does not answer; these are skipped.
    """
    ready = []
    for server in servers:
        kills = memory.kills()
        if (error := _warm_up(server, traffic)) is None:
            ready.append(server)
            continue
        reason = memory.killed(kills)
        message = error if reason is None else f"{error} ({reason})"
        lost[server.name] = f"{server.name}: {server.url} does not answer: {message}"
        report(f"{server.name}: left out, it does not answer")
    for number in range(traffic.rounds if ready else 0):
        rotation = number % len(ready)
        for workload, make in workloads.items():
            requests = _round_requests(make, traffic, number)
            for server in [*ready[rotation:], *ready[:rotation]]:
                report(f"round {number + 1} of {traffic.rounds}: {workload} on {server.name}")
                kills = memory.kills()
                measured = _measure(server, workload, requests, traffic)
                if any(answer.error for answer in measured.answers) and (reason := memory.killed(kills)):
                    lost[server.name] = f"{server.name}: {reason} during {workload}"
                yield measured


def _available_workloads(traffic: Traffic) -> dict[str, Workload]:
    """Return the available workloads: only the trace, if there is one.

    Raises:
        BenchError: the options exclude each other.
        ConfigError: the trace cannot be read.
    """
    if not traffic.trace:
        if traffic.speed is not None:
            raise BenchError(f"speed = {traffic.speed:g}: it applies to a trace; want --trace, or --rate")
        if (token := traffic.tool_call_token) is not None:
            raise BenchError(f"tool_call_token = {token}: it applies to a trace; want --trace")
        return dict(WORKLOADS)
    if traffic.workloads or traffic.rate is not None:
        raise BenchError(
            f"trace = {traffic.trace!r}: want no workloads and no rate with a trace; use --speed"
        )
    trace = trace_of(traffic.trace, traffic.requests)

    def send(seed: int, requests: int, words: int) -> list[CompletionRequest]:
        return replayed(trace, seed, requests, traffic.speed, traffic.tool_call_token)

    return {TRACE: send}


def _round_requests(make: Workload, traffic: Traffic, number: int) -> list[CompletionRequest]:
    """Return the requests of one round; its seed is the given seed plus its number."""
    seed = traffic.seed + number
    requests = make(seed, traffic.requests, traffic.words)
    requests = [replace(request, max_tokens=traffic.max_tokens) for request in requests]
    return requests if traffic.rate is None else arriving(requests, traffic.rate, seed)


def _warm_up(server: Target, traffic: Traffic) -> str | None:
    """Send requests, so that the server compiles and opens what it needs; return an error or None.

    The second request repeats the document of the first one, to cover the work of a first hit.
    """
    requests = document_qa(traffic.seed + traffic.rounds, 2, traffic.words, questions=2)
    errors = (answer.error for answer in drive(server, requests, 1, traffic.timeout_s)[0])
    return next((error for error in errors if error is not None), None)


def _measure(
    server: Target, workload: str, requests: Sequence[CompletionRequest], traffic: Traffic
) -> Measured:
    before = counted_hits(server)
    answers, wall_s = drive(server, requests, traffic.concurrency, traffic.timeout_s)
    after = counted_hits(server)
    reported = [answer.cached_tokens for answer in answers if answer.cached_tokens is not None]
    counted_tokens = after - before if before is not None and after is not None else None
    return Measured(
        server.name, workload, tuple(answers), wall_s, sum(reported) if reported else counted_tokens
    )


def _parse_names(setting: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    """Split names at commas.

    Raises:
        BenchError: a name is unknown or repeated.
    """
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in known:
            raise BenchError(f"{setting} = {name!r}: want some of {', '.join(known)}")
    if len(set(names)) < len(names):
        raise BenchError(f"{setting} = {','.join(names)!r}: want each once")
    return names


def _command(workloads: Sequence[str], traffic: Traffic) -> str:
    """Return a command that sends the same requests, without options for one machine."""
    sizes = f"--requests {traffic.requests} --words {traffic.words} --max-tokens {traffic.max_tokens}"
    times = f"--concurrency {traffic.concurrency} --rounds {traffic.rounds} --seed {traffic.seed}"
    rate = "" if traffic.rate is None else f" --rate {traffic.rate}"
    if traffic.trace:
        speed = "" if traffic.speed is None else f" --speed {traffic.speed}"
        if traffic.tool_call_token is not None:
            speed += f" --tool-call-token {traffic.tool_call_token}"
        return f"kvkit bench serve --trace {traffic.trace}{speed} {sizes} {times}"
    return f"kvkit bench serve --workloads {','.join(workloads)} {sizes} {times}{rate}"


def _with_memory_options(
    setup: Setup, config: Config | None, systems: Sequence[str], interleave: bool
) -> Setup:
    """Return `setup` with options for vLLM's memory, sized by the machine and the other servers.

    Raises:
        MemoryTooSmall: the servers do not fit.
    """
    cache_bytes = (setup.memory_gib << 30) + STAGING_BYTES if config is None else memory.tier_bytes(config)
    cache_count = len(WITH_CACHE.intersection(systems))
    share = memory.share(
        setup.model,
        servers=len(systems) if interleave else 1,
        tiers=cache_bytes * (cache_count if interleave else min(1, cache_count)),
        options=setup.options,
    )
    return replace(setup, options=(*share.options, *setup.options), memory=share.description)


def _start_all(
    servers: Sequence[str | Target], setup: Setup, stack: ExitStack, lost: dict[str, str], report: Report
) -> list[Target]:
    """Start servers and return those that run. Mutates `lost`: adds the reason for each that failed."""
    ready = []
    for server in servers:
        if isinstance(server, Target):
            ready.append(server)
            continue
        report(f"{server}: starting")
        try:
            target = connect(server, stack.enter_context(started(server, setup)))
            ready.append(replace(target, blends=server == "kvkit-blend"))
        except BenchError as error:
            lost[server] = str(error)
            report(f"{server}: left out, it does not start")
    return ready


def _split_name(url: str) -> tuple[str, str]:
    """Split "NAME=URL" into name and URL; a plain URL is named by its host and port."""
    named = re.fullmatch(r"([^=:/]+)=(.*)", url)
    return (named[1], named[2]) if named else (urlsplit(url).netloc, url)
