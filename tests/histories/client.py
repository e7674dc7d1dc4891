"""A process with a cache that does what chance says, notes it, and compares every byte that it loads."""

from __future__ import annotations

import random
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from histories.history import HANDOFF, MEMORY, PEER, STORE
from histories.recorder import Recorder
from kvkit.cache import Cache
from kvkit.config import load_config, open_cache
from kvkit.handoff.chunk_sender import ChunkSender
from kvkit.handoff.protocol.states import Phase
from kvkit.handoff.sender import HandoffError
from kvkit.handoff.tier import HandoffTier
from kvkit.lab.testbed.engine_stub import Engine, small_layout, small_namespace
from kvkit.tiers import health
from kvkit.transfer.sequence import Chunks, Hit

CHUNK = 8
PATHS = ("00000", "00011", "01100", "10101")
"""Sequences of chunks, which begin alike: a chunk is the path to it."""

TIMEOUT_S = 20.0
"""The longest wait of a cache, where nothing but a busy machine makes it wait."""

HANDOFF_S = 1.0
"""The longest pause of a transfer, and wait for its other side, which may be cut off."""

PAUSES_S = (0.2, 0.4)
"""For so long a tier that failed is passed over: a run of seconds is to see it used again."""

COMPUTED_S = 0.0, 0.02
"""From and to: how long after its first piece an engine has computed a prompt's second."""

SURE_S = 1.0
"""An operation that took longer may have met a deadline: what it missed may be there."""

WITHIN_S = 60.0
"""Whatever is waited for comes within so many seconds, or never."""

SHARED: Mapping[str, float] = {"load": 6, "lookup": 3, "store": 5, "remove": 2, "clear": 0.8, "reset": 0.2}
PREFILL: Mapping[str, float] = {"send": 8, "load": 3, "lookup": 1, "store": 1}
DECODE: Mapping[str, float] = {"use": 6, "load": 6, "store": 2, "clear": 0.2, "reset": 0.1}


@dataclass(frozen=True, slots=True)
class Member:
    """A part that a process plays.

    Attributes:
        tiers, handoff: settings of its cache.
        does: how often it does what, against each other.
        threads: that do so.
        timeout_s: the longest wait of its cache.
    """

    tiers: Mapping[str, Any]
    does: Mapping[str, float]
    threads: int = 2
    handoff: Mapping[str, Any] | None = None
    timeout_s: float = TIMEOUT_S


@dataclass(eq=False)
class Client:
    """One process of a run: opens a cache, has threads use it until the end, and closes it.

    Args:
        folder: of the run, with the notes, and the name of the process that is the peer in a file.
    """

    member: Member
    process: str
    seed: int
    folder: Path
    recorder: Recorder = field(init=False)
    cache: Cache = field(init=False)

    def __post_init__(self) -> None:
        self.recorder = Recorder(self.folder, self.process)
        health.PAUSES_S = PAUSES_S  # type: ignore[assignment]
        layout = small_layout()
        config = load_config(
            chunk_tokens=CHUNK,
            staging="1MiB",
            timeout_s=self.member.timeout_s,
            tiers=dict(self.member.tiers),
            handoff=None if self.member.handoff is None else dict(self.member.handoff),
        )
        self.cache = open_cache(config, layout, small_namespace(layout, CHUNK))

    def live(self, until_s: float) -> None:
        """Do things until then, on the monotonic clock, and close."""
        hands = [Hand(self, number) for number in range(self.member.threads)]
        threads = [threading.Thread(target=hand.work, args=(until_s,)) for hand in hands]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.close()

    def close(self) -> None:
        """Close the cache, which is to lose no slot."""
        staging = self.cache.staging
        try:
            self.cache.close()
            staging.check_integrity()
            assert staging.free == staging.slots, f"{staging.slots - staging.free} slots are lost"
        except Exception:
            self.recorder.failed(None, traceback.format_exc())

    def peer(self) -> str | None:
        """The process that listens where this one's peer does."""
        if self.member.handoff is None or self.member.handoff["role"] != "prefill":
            return None
        return (self.folder / PEER).read_text()


class Hand:
    """One thread of a client, with an engine of its own."""

    def __init__(self, client: Client, number: int) -> None:
        self.client = client
        self.cache = client.cache
        self.recorder = client.recorder
        self.name = f"{client.process}-{number}"
        self.chance = random.Random(f"{client.seed} {self.name}")
        self.engine = Engine(self.cache.layout, self.cache.namespace)
        self.base = self.cache.namespace
        self.epoch = "0"
        self._resets = 0
        self._sends = 0
        self._damaged = 0

    def work(self, until_s: float) -> None:
        """Do one thing after the other until then."""
        does: dict[str, Callable[[], None]] = {
            "load": self.load,
            "lookup": self._lookup_alone,
            "store": self.store,
            "remove": self.remove,
            "clear": lambda: self.clear(self.chance.choice(self.kept_tiers())),
            "reset": self.reset,
            "send": self.send,
            "use": self.use,
        }
        names, weights = zip(*self.client.member.does.items(), strict=True)
        while time.monotonic() < until_s:
            (name,) = self.chance.choices(names, weights)
            self.attempt(does[name])

    def attempt(self, act: Callable[[], None]) -> None:
        """Note it where something fails that must not."""
        try:
            act()
        except Exception:
            self.recorder.failed(None, traceback.format_exc())

    def _lookup_alone(self) -> None:
        self.lookup()

    def lookup(self, path: str | None = None) -> Hit:
        """What the cache says that it holds."""
        path = path or self._path()
        sought = list(self.cache.policy.retrieve_from)
        op = self.recorder.begin("lookup", self._labels(path), sought, peer=self.client.peer())
        before = self._failures()
        hit = self.cache.lookup(_tokens(path), self.engine.namespace)
        found = [[segment.tier, segment.stop - segment.start] for segment in hit.plan.segments]
        self._end(op, before, found=found)
        return hit

    def load(self, path: str | None = None) -> None:
        """Look up, load what was found, and compare it."""
        path = path or self._path()
        hit = self.lookup(path)
        count, tokens = hit.plan.chunks, _tokens(path)
        if not count:
            return
        self.engine.wipe()
        table = self.engine.table(len(tokens))
        labels, tiers = self._labels(path)[:count], list(self.cache.policy.retrieve_from)
        back = list(self.cache.policy.write_back_to)
        op = self.recorder.begin("load", labels, tiers, back=back, peer=self.client.peer())
        before = self._failures()
        loaded = self.cache.load(hit, self.engine.places(table))
        self.cache.flush(WITHIN_S)  # what is written back
        by, chunks = list(loaded.by_tier), loaded.tokens // CHUNK
        (read,) = self.engine.read(tokens, table, chunks)
        keys = self.engine.keys(tokens)
        wrong = [labels[i] for i, data in enumerate(read) if data != self.engine.kv(keys[i], 0).tobytes()]
        found = [[by[0] if len(by) == 1 else "", chunks]]
        self._end(op, before, found=found, wrong=wrong)

    def store(self) -> None:
        """Store a sequence, or only what comes after a gap."""
        path = self._path()
        first = self.chance.randrange(len(path)) if self.chance.random() < 0.3 else 0
        targets = self.kept_tiers() if self.chance.random() < 0.7 else [STORE]
        tokens = _tokens(path)
        table = self.engine.table(len(tokens))
        self.engine.compute(tokens, table)
        chunks = self._chunks(path).part(first, len(path))
        blocks = CHUNK // self.engine.layout.groups[0].block_tokens
        places = self.engine.places(table[first * blocks :])
        op = self.recorder.begin("store", self._labels(path)[first:], targets)
        settled = threading.Event()

        def on_done() -> None:
            self.recorder.note(op, "settled")
            settled.set()

        self.cache.store_chunks(
            chunks,
            places,
            to=targets,
            on_stored=lambda tier, chunk: self.recorder.note(op, "stored", tier=tier, chunk=chunk),
            on_done=on_done,
        ).result(WITHIN_S)
        self.recorder.end(op)
        if self.chance.random() < 0.5:
            settled.wait(WITHIN_S)

    def remove(self) -> None:
        """Delete a chunk or two of a sequence, which leaves a gap."""
        path = self._path()
        first = self.chance.randrange(len(path))
        stop = min(len(path), first + self.chance.choice((1, 2)))
        names = self._chunks(path).records(first, stop)
        for tier in self.kept_tiers():
            self._removing(
                self.recorder.begin("remove", self._labels(path)[first:stop], [tier]),
                partial(self.cache.tiers[tier].delete, names),
            )

    def clear(self, tier: str) -> None:
        """Delete all that a tier holds, whose chunks are not named, and look."""
        self._removing(self.recorder.begin("clear", [], [tier]), partial(self.cache.clear, tier))
        for path in PATHS:
            self.lookup(path)

    def reset(self) -> None:
        """Have nothing found that was stored before, as `kvkit.adapters.vllm.worker.Worker` does."""
        self._resets += 1
        self.epoch = f"{self.name}/{self._resets}"
        self.engine.namespace = replace(self.base, revision=f"{self.base.revision}#{self.epoch}")
        for name, tier in self.cache.tiers.items():
            if tier.slots or name == HANDOFF:
                self.clear(name)
        for path in PATHS:
            self.load(path)

    def send(self) -> None:
        """Hand a sequence to the peer, in two pieces: one of `PATHS`, or one that nobody else has."""
        fresh = "".join(self.chance.choices("23456789abcdef", k=len(PATHS[0])))
        path = fresh if self.chance.random() < 0.4 else self._path()
        self._sends += 1
        transfer = f"{self.name}-{self._sends}:{path}"
        tier, peers = self.cache.tiers[HANDOFF], self.client.member.handoff
        assert isinstance(tier, HandoffTier)
        assert tier.sender is not None
        assert peers is not None
        chunks, tokens = self._chunks(path), _tokens(path)
        table = self.engine.table(len(tokens))
        self.engine.compute(tokens, table)
        places = self.engine.places(table)
        sender = ChunkSender(tier.sender, self.engine.layout, self.cache.writes)
        half = self.chance.randrange(len(chunks))
        op = self.recorder.begin(
            "send", self._labels(path), [HANDOFF], transfer=transfer, peer=self.client.peer()
        )
        every = False
        try:
            sending = tier.sender.open(transfer, peers["peers"][PEER], chunks.names, HANDOFF_S)
            every = sending.admitted.result(WITHIN_S) == len(chunks)
            if half:
                sender.send(chunks.part(0, half), places)
                time.sleep(self.chance.uniform(*COMPUTED_S))
            if self.chance.random() < 0.1:
                tier.sender.cancel(transfer)
            if every:  # else what it has from others may be there before
                self.recorder.note(op, "last")
            sender.send(chunks, places)
            ok = sending.done.result(WITHIN_S) == 0
        except HandoffError:
            ok = False
        self.recorder.end(op, ok=ok, peer=self.client.peer())

    def use(self) -> None:
        """Load what was handed over, and release it; or look for what still comes, and give it up."""
        tier = self.cache.tiers[HANDOFF]
        assert isinstance(tier, HandoffTier)
        assert tier.receiver is not None
        began = time.monotonic_ns()
        transfers = tier.receiver.transfers()
        ready = [name for name, phase in transfers.items() if phase is Phase.COMMITTED]
        self.recorder.note(None, "listed", since=began, ready=ready)
        if not transfers:
            self.lookup()
            return
        transfer = self.chance.choice(ready if ready and self.chance.random() < 0.7 else list(transfers))
        path = transfer.partition(":")[2]
        self.load(path)
        if self.chance.random() < (0.7 if transfer in ready else 0.03):
            labels = [f"0:{path[: i + 1]}" for i in range(len(path))]
            op = self.recorder.begin("release", labels, [HANDOFF], transfer=transfer)
            tier.receiver.release(transfer)
            self.recorder.end(op, ok=True)

    def _removing(self, op: int, act: Callable[[], object]) -> None:
        try:
            act()
        except OSError:  # a tier that does not answer
            self.recorder.end(op, ok=False)
        else:
            self.recorder.end(op, ok=True)

    def _end(self, op: int, before: tuple[object, float], **came: object) -> None:
        """End an operation that looked; it is sure of what it missed where nothing failed meanwhile."""
        failures, began = before
        after, now = self._failures()
        sure = failures == after and now - began < SURE_S
        damaged = self.cache.counts().damaged
        count = sum(damaged.values())
        told = str(dict(damaged)) if count > self._damaged else ""
        self._damaged = count
        self.recorder.end(op, sure=sure, damaged=told, peer=self.client.peer(), **came)

    def _failures(self) -> tuple[object, float]:
        """What failed so far, which is like nothing else where a tier is passed over; and the time."""
        counts = self.cache.counts()
        healthy = all(state in ("ok", "slow") for state in self.cache.tier_states().values())
        failures = (dict(counts.read_errors), dict(counts.timeouts)) if healthy else object()
        return failures, time.monotonic()

    def kept_tiers(self) -> list[str]:
        """Tiers that keep what is stored."""
        return [name for name in (MEMORY, STORE) if name in self.cache.tiers]

    def _path(self) -> str:
        path = self.chance.choice(PATHS)
        return path[: self.chance.randint(1, len(path))]

    def _labels(self, path: str) -> list[str]:
        return [f"{self.epoch}:{path[: i + 1]}" for i in range(len(path))]

    def _chunks(self, path: str) -> Chunks:
        return self.cache.chunks(_tokens(path), self.engine.namespace)


def look_at_all(client: Client) -> None:
    """What is there in the end: all is looked at, cleared, and looked at again."""
    hand = Hand(client, 0)
    for path in PATHS:
        hand.attempt(partial(hand.load, path))
    for tier in hand.kept_tiers():
        hand.attempt(partial(hand.clear, tier))
    for path in PATHS:
        hand.attempt(partial(hand.load, path))


def _tokens(path: Sequence[str]) -> npt.NDArray[np.int32]:
    """The token ids of a path: int32 [chunks * CHUNK]."""
    heads = ["".join(path[: i + 1]) for i in range(len(path))]
    chunks = [np.random.default_rng(zlib.crc32(head.encode())).integers(0, 1000, CHUNK) for head in heads]
    return np.concatenate(chunks).astype(np.int32)
