"""A conversation over a prefill engine and a decode engine behind the router, and over plain vLLM.

P hands what it computes to D. D stores its turns in a folder that P reads: P computes none of them again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.table import Table

from kvkit.adapters import smollm2
from kvkit.bench.client import Answer, Server, ask, connect, loaded_tokens
from kvkit.bench.systems import Setup, ended_by_sigterm, missing, routed, started
from kvkit.bench.workloads import chat
from kvkit.environment import describe

TURNS = 4
WORDS = 1600
"""Of all turns."""
CHUNK_TOKENS = 128
_TIMEOUT_S = 300.0


class PdError(RuntimeError):
    """The conversation cannot be had. The message says why."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn over both engines.

    Attributes:
        prefill_hits: prompt tokens that P did not compute, by the tier they came from.
        decode_received: prompt tokens that D did not compute, by tier.
        ttft_s, plain_ttft_s: seconds to the first piece of text, over the router and from plain vLLM.
        identical: whether both gave the same text.
    """

    prompt_tokens: int
    prefill_hits: dict[str, int]
    decode_received: dict[str, int]
    ttft_s: float
    plain_ttft_s: float
    identical: bool


def run(model: str | None, options: Sequence[str], json_path: Path, console: Console) -> list[Turn]:
    """Have the conversation twice, print it as a table and write its figures; returns its turns.

    Args:
        model: hub id or folder; None: SmolLM2-135M-Instruct from its PyPI package.
        options: more of vLLM's command line.

    Raises:
        PdError: vLLM is missing, or a request failed.
        StartError: a server cannot be started.
    """
    lacking = missing("kvkit")
    if lacking is not None:
        raise PdError(f"demo --pd: {lacking}")
    with TemporaryDirectory(prefix="kvkit-pd-") as name, ended_by_sigterm():
        folder = Path(name)
        setup = Setup(model or str(smollm2.fetch()), 1, None, tuple(options), folder)
        with console.status("plain vLLM"), started("plain", setup) as url:
            plain = [answer for answer, _ in converse(connect("plain", url), [])]
        with ExitStack() as stack:
            status = stack.enter_context(console.status("two engines and the router"))
            address = f"unix://{folder}/decode/socket"
            urls = {}
            for role, text in engine_settings(folder, address).items():
                (folder / role).mkdir(mode=0o700)
                config = folder / f"{role}.toml"
                config.write_text(text)
                one = replace(setup, folder=folder / role, config=config)
                urls[role] = stack.enter_context(started("kvkit", one))
            router = stack.enter_context(routed(urls["prefill"], urls["decode"], address, folder))
            status.update("the conversation")
            engines = [connect(role, url) for role, url in urls.items()]
            pd = converse(connect("router", router), engines)
    turns = [
        Turn(a.prompt_tokens, of_p, of_d, a.ttft_s, p.ttft_s, a.text == p.text)
        for (a, (of_d, of_p)), p in zip(pd, plain, strict=True)
    ]
    console.print(table(turns))
    figures = {"turns": [asdict(turn) for turn in turns], **describe()}
    json_path.write_text(json.dumps(figures, indent=1) + "\n")
    return turns


def engine_settings(folder: Path, address: str) -> dict[str, str]:
    """kvkit's settings for P and for D, which listens at `address`, as TOML by role."""
    pool = f'chunk_tokens = {CHUNK_TOKENS}\n[tiers.pool]\nurl = "file://{folder}/pool"\nscope = "shared"\n'
    return {
        "decode": pool
        + '[policy]\nretrieve_from = ["handoff", "pool"]\nstore_to = ["pool"]\nwrite_back_to = []\n'
        + f'[handoff]\nrole = "decode"\nlisten = ["{address}"]\nbuffer = "256MiB"\n',
        "prefill": pool
        + '[policy]\nretrieve_from = ["pool"]\nstore_to = ["handoff"]\nwrite_back_to = []\n'
        + '[handoff]\nrole = "prefill"\n',
    }


def converse(server: Server, engines: Sequence[Server]) -> list[tuple[Answer, list[dict[str, int]]]]:
    """The answer to each turn, and what each of `engines` loaded meanwhile, by tier.

    Raises:
        PdError: a request failed.
        ClientError: an engine does not tell what it loaded.
    """
    history = ""
    found = []
    before = [loaded_tokens(engine) for engine in engines]
    for number, request in enumerate(chat(0, TURNS, WORDS, TURNS), 1):
        history += request.text
        answer = ask(server, request, history, _TIMEOUT_S)
        if answer.error is not None:
            raise PdError(f"turn {number} of {server.name}: {answer.error}")
        history += answer.text
        after = [loaded_tokens(engine) for engine in engines]
        grown = [
            {tier: count - old.get(tier, 0) for tier, count in new.items() if count > old.get(tier, 0)}
            for old, new in zip(before, after, strict=True)
        ]
        before = after
        found.append((answer, grown))
    return found


def table(turns: Sequence[Turn]) -> Table:
    """The turns as a table."""
    shown = Table("turn", "prompt", "P loaded", "D loaded", "TTFT", "plain vLLM", "same text")
    for number, turn in enumerate(turns, 1):
        shown.add_row(
            str(number),
            f"{turn.prompt_tokens} tokens",
            _by_tier(turn.prefill_hits),
            _by_tier(turn.decode_received),
            f"{turn.ttft_s:.2f} s",
            f"{turn.plain_ttft_s:.2f} s",
            "yes" if turn.identical else "no",
        )
    return shown


def _by_tier(tokens: dict[str, int]) -> str:
    return ", ".join(f"{count} from {tier}" for tier, count in tokens.items()) or "nothing"
