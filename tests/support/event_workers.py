"""Workers of the vLLM connector over small real tiers, and the KV events that their reports come to.

vLLM's scheduler and its model are left out: requests are lists of tokens, saved and loaded as they come.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import reduce
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from vllm.distributed.kv_events import BlockRemoved, KVCacheEvent
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm_rank import BLOCK, CHUNK, TABLE, Rank

from kvkit.adapters.engine.lookup_request import LookupRequest, Sequence
from kvkit.adapters.vllm.events import Events, TierBlocksStored, TiersCleared
from kvkit.adapters.vllm.step import LoadTask, SaveTask, WorkerReport
from kvkit.adapters.vllm.tier_reports import TierReports
from kvkit.lab.testbed.waiting import wait_for
from kvkit.tiers.settings import TierConfig

TIERS = {"memory": TierConfig(capacity=1 << 20), "disk": TierConfig(url="file:///kv")}
Held = set[tuple[str, Any]]
"""Tiers, and the hashes of blocks that they hold."""


def hash_block(before: bytes | None, tokens: list[int], salt: str | None = None) -> bytes:
    return hashlib.sha256((before or b"") + repr((tokens, salt)).encode()).digest()


@dataclass
class Request:
    """Of vLLM's, what events need."""

    request_id: str
    all_token_ids: list[int]
    cache_salt: str | None = None
    lora_request: Any = None
    mm_features: list[Any] = field(default_factory=list)
    prompt_embeds: None = None

    @property
    def block_hashes(self) -> list[bytes]:
        found: list[bytes] = []
        for block in range(len(self.all_token_ids) // BLOCK):
            tokens = self.all_token_ids[block * BLOCK : (block + 1) * BLOCK]
            found.append(hash_block(found[-1] if found else None, tokens, self.cache_salt))
        return found


class Listener:
    """What somebody knows who heard all events, and whether that is all, as they say."""

    def __init__(self) -> None:
        self.held: Held = set()
        self.complete = False

    def hear(self, events: list[KVCacheEvent]) -> None:
        for event in events:
            if isinstance(event, TiersCleared):
                self.held.clear()
                self.complete = event.complete
            elif isinstance(event, TierBlocksStored):
                self.held |= {(str(event.ownership), block) for block in event.block_hashes}
                self.complete = event.complete
            elif isinstance(event, BlockRemoved):
                gone = {(str(event.ownership), block) for block in event.block_hashes}
                assert gone <= self.held, "what is removed was told as stored"
                self.held -= gone


class ToldEngine:
    """Ranks over tiers in `folder`, each with its own folder on disk; a memory of 5 records, a disk of 9.

    Attributes:
        known: prompts that were saved or found since it was started.
    """

    def __init__(self, folder: Path, ranks: int = 1, groups: int = 1, buffer_steps: int = 10_000) -> None:
        self._folder, self._count, self._groups = folder, ranks, groups
        self._buffer_steps = buffer_steps
        self._numbers = count()
        self.start()

    def start(self) -> None:
        """Open it, be it again: the memory is empty then."""
        self.ranks = [
            Rank(
                self._folder / str(rank),
                "async",
                groups=self._groups,
                ranks=(rank, self._count),
                memory="64KiB",
                disk="112KiB",
                reports_tiers=True,
            )
            for rank in range(self._count)
        ]
        self.events = Events(TIERS, CHUNK, BLOCK, self._count, 1, self._buffer_steps, hash_block)
        self.known: set[tuple[int, ...]] = set()
        self._requests: dict[str, Request] = {}
        self._epoch = ""

    def close(self) -> None:
        for rank in self.ranks:
            rank.worker.close()

    def reset(self) -> None:
        """As vLLM's `reset_prefix_cache` does; the workers hear of it in their next step."""
        self._epoch = f"epoch {next(self._numbers)}"
        self.events.begin_epoch(self._epoch)
        self.known.clear()

    def save(self, tokens: list[int], salt: str = "") -> None:
        """Save all chunks of a prompt."""
        request = self._request(tokens, salt)
        chunks = len(tokens) // CHUNK
        self.events.expect(request, 0, chunks)
        task = SaveTask(request.request_id, sequence_of(request), 0, (TABLE[: chunks * CHUNK // BLOCK],))
        for rank in self.ranks:
            rank.step(saves=[task], epoch=self._epoch)
            rank.worker.end_saves()
        self._note(tokens, chunks)

    def look_up(self, tokens: list[int], salt: str = "", *, load: bool = False) -> int:
        """Tokens of a prompt that every rank finds, and loads if it is told to."""
        request, number = self._request(tokens, salt), next(self._numbers)
        request_id = request.request_id
        lookup = LookupRequest(request_id, number, sequence_of(request))
        self.hear(*(answers(rank, lookup, self._epoch) for rank in self.ranks))
        found = self._found
        if load and found:
            task = LoadTask(request_id, number, 0, found, (TABLE[: found // BLOCK],))
            for rank in self.ranks:
                received, _, _ = rank.step(loads=[task], epoch=self._epoch)
                while not received:
                    received, _, _ = rank.step(idle=True, epoch=self._epoch)
        else:
            for rank in self.ranks:
                rank.step(finished=(request_id,), epoch=self._epoch)
        return found

    def clear(self, tier: str, rank: int = 0) -> None:
        self.ranks[rank].worker.cache.clear(tier)

    def damage(self, chance: random.Random) -> None:
        """Make one record on one rank's disk differ in a byte."""
        files = sorted(self._folder.glob("*/*/*/c.*"))
        if files:
            file = chance.choice(files)
            record = bytearray(file.read_bytes())
            record[5000] ^= 1
            file.write_bytes(record)

    def told(self) -> list[KVCacheEvent]:
        """The events since the last call, once nothing is under way, and what was held before is listed."""
        for rank in self.ranks:
            rank.worker.cache.flush()
            rank.step(idle=True, epoch=self._epoch)
            rank.worker.cache.flush()
        while True:
            reports = [rank.worker.report() for rank in self.ranks]
            self.hear(*(report for report in reports if report is not None))
            if not any(lists(rank) for rank in self.ranks):
                return self.events.take()

    def hear(self, *reports: WorkerReport) -> None:
        """Do with the reports of one step what the connector's scheduler side does."""
        if not reports:
            return
        report = reduce(WorkerReport.aggregate, reports)
        found = [answer.tokens for answer in report.answers]
        self._found = min(found, default=0) // CHUNK * CHUNK
        for answer in report.answers:
            request = self._requests[answer.request_id]
            self.events.expect(request, 0, answer.tokens // CHUNK)
        if found and self._found:
            self._note(request.all_token_ids, self._found // CHUNK)
        self.events.update_from_workers(report)

    def held(self, texts: set[tuple[int, ...]]) -> Held:
        """What all ranks' tiers hold of the last chunks of some prompts, by the names of records."""
        found: Held = set()
        for tokens in texts:
            request = Request("", list(tokens))
            hashes = request.block_hashes[-CHUNK // BLOCK :]
            for tier in TIERS:
                if all(holds(rank, tier, tokens) for rank in self.ranks):
                    found |= {(tier, maybe_convert_block_hash(block)) for block in hashes}
        return found

    def query(self, tokens: list[int]) -> int:
        """What the workers' endpoints would answer."""
        held = [
            rank.worker.cache.query(tokens, rank.worker.namespaces.named(None, "")) for rank in self.ranks
        ]
        return min(hit.tokens for hit in held)

    def _note(self, tokens: list[int], chunks: int) -> None:
        self.known |= {tuple(tokens[: i * CHUNK]) for i in range(1, chunks + 1)}

    def _request(self, tokens: list[int], salt: str) -> Request:
        request = Request(f"r{next(self._numbers)}", tokens, salt or None)
        self._requests[request.request_id] = request
        return request


def sequence_of(request: Request) -> Sequence:
    return Sequence(np.array(request.all_token_ids, np.int32), None, request.cache_salt or "")


def lists(rank: Rank) -> bool:
    """Whether chunks from before the start of a rank are left to report."""
    return any(part.is_listing for part in rank.worker.capabilities if isinstance(part, TierReports))


def answers(rank: Rank, lookup: LookupRequest, epoch: str) -> WorkerReport:
    """The report with the answer to a lookup, and with all that was to be told before."""
    rank.step(lookups=[lookup], idle=True, epoch=epoch)
    found: list[WorkerReport] = []

    def answered() -> bool:
        report = rank.worker.report()
        found.extend([] if report is None else [report])
        return any(report.answers for report in found)

    wait_for(answered)
    return reduce(WorkerReport.aggregate, found)


def holds(rank: Rank, tier: str, tokens: tuple[int, ...]) -> bool:
    """Whether a rank's tier holds the last chunk of some tokens."""
    cache, space = rank.worker.cache, rank.worker.namespaces.named(None, "")
    names = cache.chunks(list(tokens), space).names[-len(cache.layout.groups) :]
    return all(cache.tiers[tier].size(name) is not None for name in names)


def prompts() -> list[list[int]]:
    """Prompts of three chunks, of which some begin alike: more than the tiers hold."""
    return [
        [first * 1000 + i for i in range(CHUNK)] + [second * 100 + i for i in range(2 * CHUNK)]
        for first in (1, 2)
        for second in range(4)
    ]


def beginnings() -> set[tuple[int, ...]]:
    """Whatever of `prompts` ends with a chunk."""
    return {tuple(text[: i * CHUNK]) for text in prompts() for i in (1, 2, 3)}


def lives(engine: ToldEngine, seed: int, rounds: int) -> Iterator[str]:
    """Have an engine save, load, lose and forget things at random; yields after each, with what it was."""
    chance, texts = random.Random(seed), prompts()
    for _ in range(rounds):
        what = chance.choices(
            ["save", "load", "look", "clear", "damage", "reset", "restart"], [8, 6, 3, 1, 2, 0.4, 1]
        )[0]
        text = chance.choice(texts)[: chance.choice([CHUNK, 2 * CHUNK, 3 * CHUNK])]
        if what == "save":
            engine.save(text)
        elif what in ("load", "look"):
            engine.look_up(text, load=what == "load")
        elif what == "clear":
            engine.clear(chance.choice([*TIERS]), chance.randrange(len(engine.ranks)))
        elif what == "damage":
            engine.damage(chance)
        elif what == "reset":
            engine.reset()
        else:
            engine.close()
            engine.start()
        yield what
