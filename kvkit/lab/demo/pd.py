"""Conversation over a prefill engine (P) and a decode engine (D) behind the router, and over plain vLLM.

The four flows differ only in the settings of the two engines:

    handoff   P sends the KV of every prompt to D
    pool      also, D stores prompts and answers in a shared folder; P finds the next turn's prefix there
    pull      also, P looks up the prefix in D's memory tier and pulls it
    both      also, P looks it up in the folder first, then in D's memory tier
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.table import Table

from kvkit.lab.files import BenchError, check_folders, model_folder, split_options, write_figures
from kvkit.lab.serve import memory
from kvkit.lab.serve.client import Completion, Target, ask, connect, loaded_tokens
from kvkit.lab.serve.systems import Setup, ended_by_sigterm, missing, routed, started
from kvkit.lab.serve.workloads import chat
from kvkit.lab.simulate.report import panels
from kvkit.observe.progress import Report, timed
from kvkit.observe.terminal import print_text, show

TURNS = 4
WORDS = 1600
"""Words of all turns together."""
CHUNK_TOKENS = 256
BLOCK_BYTES = 1 << 30
"""Maximum bytes of KV blocks per server: one conversation needs no more."""
TIER_BYTES = 5 << 28
"""Bytes of both engines: staging twice, the memory tier, the buffer."""
FLOWS = ("handoff", "pool", "pull", "both")
_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class PdTurn:
    """Measurements of one turn, over both engines and over plain vLLM."""

    prompt_tokens: int
    prefill_hits: dict[str, int]  # tokens of records loaded by P, by tier
    decode_received: dict[str, int]  # tokens of records loaded by D, by tier
    ttft_s: float  # time to the first piece of text, through the router
    plain_ttft_s: float
    identical: bool  # whether both gave the same text


def run(
    flow: str, model: str | None, vllm: str, json_path: Path, png_path: Path, console: Console
) -> list[PdTurn]:
    """Hold the conversation twice, print a table, write figures and a picture; returns the turns.

    Args:
        flow: one of `FLOWS`.
        model: hub id, folder or gemma; None: SmolLM2-135M-Instruct; both from PyPI packages.
        vllm: additional options of vLLM; options about memory override kvkit's choice.

    Raises:
        BenchError: an argument is wrong, the folder to write to does not exist, vLLM is missing, the machine
            has too little memory for both engines, a server cannot be started, or a request failed.
        ModelError: the model cannot be fetched.
    """
    if flow not in FLOWS:
        raise BenchError(f"flow = {flow!r}: want one of {', '.join(FLOWS)}")
    check_folders(json_path, png_path)
    options = split_options(vllm)
    if lacking := missing("kvkit"):
        raise BenchError(f"demo --pd: {lacking}")
    with TemporaryDirectory(prefix="kvkit-pd-") as folder_name, ended_by_sigterm():
        folder = Path(folder_name)
        half, other_half = _halves(sorted(os.sched_getaffinity(0)))
        name = model_folder(model, console)
        share = memory.share(name, servers=2, tiers=TIER_BYTES, most=BLOCK_BYTES, options=options)
        print_text(share.description, console)
        chosen = (*share.options, *options)
        setup = Setup(name, 1, None, chosen, folder, cores=half, memory=share.description)
        report = timed(console)
        report("starting plain vLLM")
        with started("plain", setup) as url:
            plain = [answer for answer, _ in converse(connect("plain", url), [], report)]
        pd = _through_router(flow, setup, (half, other_half), report)
    turns = [
        PdTurn(a.prompt_tokens, prefill_hits, decode_received, a.ttft_s, p.ttft_s, a.text == p.text)
        for (a, (prefill_hits, decode_received)), p in zip(pd, plain, strict=True)
    ]
    show(table(turns), console)
    write_figures(
        json_path,
        command=f"kvkit demo --pd --flow {flow}",
        seed=0,
        flow=flow,
        turns=[asdict(turn) for turn in turns],
    )
    print_text(f"figures: {json_path}", console)
    draw(turns, png_path)
    print_text(f"picture: {png_path}", console)
    return turns


def _through_router(
    flow: str, setup: Setup, halves: Sequence[tuple[int, ...]], report: Report
) -> list[tuple[Completion, list[dict[str, int]]]]:
    """Hold the conversation with a router over a prefill and a decode engine, each on cores of its own."""
    folder = setup.folder
    address = f"unix://{folder}/decode/handoff/socket"
    with ExitStack() as stack:
        urls = []
        for (role, text), cores in zip(settings(flow, address, folder / "pool").items(), halves, strict=True):
            (folder / role).mkdir()
            report(f"starting the engine for {role}")
            config = folder / role / "kvkit.toml"
            config.write_text(text)
            engine = replace(setup, config=config, folder=folder / role, cores=cores)
            urls.append(stack.enter_context(started("kvkit", engine)))
        prefill, decode = urls
        router = stack.enter_context(routed(prefill, decode, folder, address))
        engines = [connect("P", prefill), connect("D", decode)]
        return converse(connect("router", router), engines, report)


def _halves(cores: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the cores of each engine: on shared cores, a waiting vLLM worker blocks the other engine."""
    middle = len(cores) // 2
    return (tuple(cores[:middle]), tuple(cores[middle:])) if middle else ((), ())


def settings(flow: str, address: str, pool: Path) -> dict[str, str]:
    """Return the TOML text of each engine, by role; `address`: D's handoff address, `pool`: shared folder."""
    pools, pulls = flow in ("pool", "both"), flow in ("pull", "both")
    shared = [f'[tiers.pool]\nurl = "file://{pool}"\nscope = "shared"'] if pools else []
    memory_tier = ['[tiers.memory]\ncapacity = "256MiB"'] if pulls else []
    stored_tiers = ["memory"] * pulls + ["pool"] * pools
    peers = [f'peers = {{ decode = "{address}" }}'] if pulls else []
    handoff_table = f'[handoff]\nrole = "decode"\nbuffer = "512MiB"\nlisten = ["{address}"]'
    prefill_policy = _policy(["pool"] * pools + ["decode"] * pulls, ["handoff"])
    decode_policy = _policy(["handoff", *stored_tiers], stored_tiers)
    common = f'chunk_tokens = {CHUNK_TOKENS}\nstaging = "256MiB"'
    return {
        "prefill": "\n".join([common, *shared, '[handoff]\nrole = "prefill"', *peers, prefill_policy]),
        "decode": "\n".join([common, *memory_tier, *shared, handoff_table, decode_policy]),
    }


def _policy(retrieve_from: list[str], store_to: list[str]) -> str:
    lists = f"retrieve_from = {json.dumps(retrieve_from)}\nstore_to = {json.dumps(store_to)}"
    return f"[policy]\n{lists}\nwrite_back_to = []\n"


def converse(
    server: Target, engines: Sequence[Target], report: Report
) -> list[tuple[Completion, list[dict[str, int]]]]:
    """Hold the conversation; returns for each turn the answer and the tokens each engine loaded, by tier.

    Raises:
        BenchError: a request failed, or the metrics of an engine cannot be read.
    """
    history = ""
    turns = []
    before = [loaded_tokens(engine) for engine in engines]
    for number, request in enumerate(chat(0, TURNS, WORDS, TURNS), 1):
        history += request.text
        report(f"{server.name}: turn {number} of {TURNS}")
        answer = ask(server, request, history, _TIMEOUT_S)
        if answer.error is not None:
            raise BenchError(f"turn {number} of {server.name}: {answer.error}")
        history += answer.text
        after = [loaded_tokens(engine) for engine in engines]
        increases = [dict(Counter(new) - Counter(old)) for old, new in zip(before, after, strict=True)]
        turns.append((answer, increases))
        before = after
    return turns


def table(turns: Sequence[PdTurn]) -> Table:
    """Return the turns as a table."""
    columns = ("turn", "prompt", "P loaded", "D loaded", "TTFT", "plain vLLM", "same text")
    numbers = ("turn", "prompt", "TTFT", "plain vLLM")
    shown = Table(caption="engines load whole records")
    for name in columns:
        shown.add_column(name, justify="right" if name in numbers else "left")
    for number, turn in enumerate(turns, 1):
        shown.add_row(
            str(number),
            f"{turn.prompt_tokens} tokens",
            by_tier(turn.prefill_hits),
            by_tier(turn.decode_received),
            f"{turn.ttft_s:.2f} s",
            f"{turn.plain_ttft_s:.2f} s",
            "yes" if turn.identical else "no",
        )
    return shown


def draw(turns: Sequence[PdTurn], path: Path) -> None:
    """Draw a panel per turn: P, D and the pool, with an arrow for each load and its tokens."""
    figure, all_axes = panels(len(turns), 3.6, 2.6)
    for number, (axes, turn) in enumerate(zip(all_axes, turns, strict=True), 1):
        axes.set(title=f"turn {number}: {turn.prompt_tokens} tokens", xlim=(-0.5, 2.5), ylim=(-0.6, 1.5))
        axes.axis("off")
        computed = max(1, turn.prompt_tokens - sum(turn.prefill_hits.values()))
        own = max(1, turn.prompt_tokens - sum(turn.decode_received.values()))
        boxes = {"P": f"P\ncomputes {computed}", "D": f"D\ncomputes {own}"}
        loads = _outside_loads(turn)
        if any(tier == "pool" for _, tier, _ in loads):
            boxes["pool"] = "pool"
        for name, text in boxes.items():
            box = {"boxstyle": "round", "fc": "#e8eef4"}
            axes.text(*_POSITIONS[name], text, ha="center", va="center", bbox=box)
        for name, tier, tokens in loads:
            origin = _ORIGINS[tier]
            (x, y), (to_x, to_y) = _POSITIONS[origin], _POSITIONS[name]
            lift = 0.15 if (origin, name) == ("D", "P") else -0.15 if origin == "P" else 0.0
            gap = 16 if origin == "pool" else 44  # from the middle of a box, in points
            arrow = {"arrowstyle": "->", "color": "#2e4057", "shrinkA": gap, "shrinkB": 44}
            axes.annotate("", (to_x, to_y + lift), (x, y + lift), arrowprops=arrow)
            above = lift + (0.12 if lift >= 0 else -0.22)
            axes.text((x + to_x) / 2, (y + to_y) / 2 + above, str(tokens), ha="center", fontsize=8)
    figure.savefig(path, dpi=120)


_POSITIONS = {"P": (0.0, 0.0), "D": (2.0, 0.0), "pool": (1.0, 1.2)}
_ORIGINS = {"pool": "pool", "decode": "D", "handoff": "P"}
"""Engine or store that the KV of each tier comes from."""


def _outside_loads(turn: PdTurn) -> list[tuple[str, str, int]]:
    """Return (engine, tier, tokens) of loads from outside an engine, so without D's own memory tier."""
    both = [("P", turn.prefill_hits), ("D", turn.decode_received)]
    return [(name, tier, count) for name, hits in both for tier, count in hits.items() if tier in _ORIGINS]


def by_tier(tokens: Mapping[str, int]) -> str:
    """Return the number of tokens per tier in words."""
    return ", ".join(f"{count} from {tier}" for tier, count in tokens.items()) or "nothing"
