"""The cache: look up, load and store a token sequence's KV. Start reading here.

    hit = cache.lookup(tokens)         # how much is there, and where: moves nothing
    loaded = cache.load(hit, place)    # into the engine's pages; may be less than the hit, and says so
    ...                                # the engine computes the rest
    cache.store(tokens, place)         # whole chunks; returns when the pages may be reused

`Cache` carries out what the pure modules decide: `chunks` names the chunks, `plan` and `policy` say what
moves from where to where, `record` what is to be trusted. The steps of a load are numbered in `Cache.load`.
"""

from __future__ import annotations

import copy
import functools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvkit import plan as planning
from kvkit import record
from kvkit.chunks import JIT_CHUNKS, as_tokens, chunk_keys
from kvkit.kernels import launch
from kvkit.kernels.launch import Pages
from kvkit.layout import KVLayout, LayerGroup, Namespace
from kvkit.plan import RetrievePlan, Segment
from kvkit.policy import Policy
from kvkit.policy import check as check_policy
from kvkit.reads import MAX_IN_FLIGHT, SegmentReads, keep_whole
from kvkit.record import Damage, RecordFormat
from kvkit.rope import Rotation
from kvkit.staging import Lease, Staging, StagingTimeout, release_all
from kvkit.threads import Workers
from kvkit.tiers.base import DamagedObject, OnComplete, Tier
from kvkit.tiers.health import Health

log = logging.getLogger(__name__)

Ids = npt.NDArray[np.int64]
T = TypeVar("T")

ASKING_THREADS = 4
"""Threads that ask tiers outside this process, so that a caller can stop waiting."""


class CacheError(RuntimeError):
    """The cache cannot do what was asked. The message names the argument."""


class CacheTimeout(TimeoutError):
    """Puts were still under way at the deadline."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the KV of one sequence lies in an engine, for one layer group.

    Args:
        pages: the engine's pages of the group.
        blocks: int64 [>= chunks * chunk_tokens / block_tokens], the sequence's block table, or
        slots: int64 [>= chunks * chunk_tokens], a slot (block * N + offset) per token; one of the two.
    """

    pages: Pages
    blocks: Ids | None = None
    slots: Ids | None = None


@dataclass(frozen=True, slots=True)
class Chunks:
    """The whole chunks of one token sequence in one namespace: what every step works on.

    Attributes:
        tokens: int32 [chunks * chunk_tokens].
        keys: a key per chunk.
        names: an object name per record: chunk 0's groups, chunk 1's groups, ...
        formats: a record format per group.
    """

    tokens: npt.NDArray[np.int32]
    keys: list[bytes]
    names: list[str]
    formats: tuple[RecordFormat, ...]

    def __len__(self) -> int:
        return len(self.keys)

    def identity(self, chunk: int) -> tuple[bytes, bytes, npt.NDArray[np.int32]]:
        """Parent key, key and token ids of a chunk."""
        form = self.formats[0]
        size = form.namespace.chunk_tokens
        parent = self.keys[chunk - 1] if chunk else form.digest
        return parent, self.keys[chunk], self.tokens[chunk * size : (chunk + 1) * size]


@dataclass(frozen=True, slots=True)
class Hit:
    """The leading run that can be had: `tokens` tokens, whole chunks, `by_tier` of them at each tier."""

    chunks: Chunks
    plan: RetrievePlan

    @property
    def tokens(self) -> int:
        return self.plan.chunks * self._chunk_tokens

    @property
    def by_tier(self) -> dict[str, int]:
        return {tier: n * self._chunk_tokens for tier, n in self.plan.by_tier().items()}

    @property
    def _chunk_tokens(self) -> int:
        return self.chunks.formats[0].namespace.chunk_tokens


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load put into the engine: the first `tokens` tokens, `by_tier` of them from each tier."""

    tokens: int
    by_tier: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Stored:
    """What a store started: `tokens` are in whole chunks, of which `new_tokens` go to at least one tier."""

    tokens: int
    new_tokens: int


@dataclass(slots=True)
class Counts:
    """What happened since the cache was opened.

    Attributes:
        lookups, lookup_tokens: calls of lookup, and the tokens asked for.
        loaded_tokens: tokens loaded, by tier.
        stored_records: records that were put completely, by tier.
        damaged: records that did not verify, by (tier, cause).
        read_errors, write_errors: records that a tier failed to deliver or to take, by tier.
        timeouts: reads that missed their deadline, by tier.
    """

    lookups: int = 0
    lookup_tokens: int = 0
    loaded_tokens: Counter[str] = field(default_factory=Counter)
    stored_records: Counter[str] = field(default_factory=Counter)
    damaged: Counter[tuple[str, Damage]] = field(default_factory=Counter)
    read_errors: Counter[str] = field(default_factory=Counter)
    write_errors: Counter[str] = field(default_factory=Counter)
    timeouts: Counter[str] = field(default_factory=Counter)


class Cache:
    """KV of token sequences, in tiers. Thread-safe; a context manager that closes.

    Args:
        layout: of the engine's KV.
        namespace: what decides KV bytes besides tokens; `lookup` and `store` take another one per call.
        tiers: in the order in which the default policy seeks them. The cache closes them.
        staging: slots of at least one record each. The cache closes it.
        policy: what goes where; None: `Policy.default`.
        timeout_s: the longest that any single wait may take, in seconds.

    Raises:
        PolicyError: the policy names no tier of these.
        CacheError: two tiers share a name, or the slots are too small or too few.
    """

    def __init__(
        self,
        layout: KVLayout,
        namespace: Namespace,
        tiers: Sequence[Tier],
        *,
        staging: Staging,
        policy: Policy | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        self.layout = layout
        self.namespace = namespace
        self.tiers = {tier.name: tier for tier in tiers}
        if len(self.tiers) != len(tiers):
            raise CacheError(f"tiers: two share a name, {[tier.name for tier in tiers]}")
        biggest = max(form.record_bytes for form in _formats(layout, namespace))
        if staging.slot_bytes < biggest:
            raise CacheError(f"staging.slot_bytes={staging.slot_bytes}: a record takes {biggest}")
        if staging.slots < len(layout.groups):
            raise CacheError(f"staging.slots={staging.slots}: a chunk takes {len(layout.groups)}")
        self.policy = check_policy(policy or Policy.default(self.tiers), self.tiers)
        self.staging = staging
        self.timeout_s = timeout_s
        self._lock = threading.Lock()
        self._counts = Counts()
        self._described: set[tuple[str, str]] = set()
        self._health = {name: Health() for name in self.tiers}
        self._puts = _Outstanding()
        self._workers = Workers(ASKING_THREADS, "kvkit-ask")
        self._closed = False
        self._warm = self._workers.submit(_warm_up)

    def lookup(self, tokens: Any, namespace: Namespace | None = None) -> Hit:
        """How long a leading run of `tokens` (int32 [T]; numpy, torch or list) can be had, and where.

        Reads no payload and changes nothing. A tier that fails holds nothing.
        """
        chunks = self._chunk(tokens, namespace)
        with self._lock:
            self._counts.lookups += 1
            self._counts.lookup_tokens += len(chunks.tokens)
        return Hit(chunks, self._find(chunks, RetrievePlan(len(chunks)), frozenset()))

    def load(self, hit: Hit, place: Place | Sequence[Place], rotate: Rotation | None = None) -> Loaded:
        """Put the KV of `hit` into the engine's pages. Mutates the pages of the tokens loaded, no others.

        A record that turns out missing, damaged or late is a miss: it is sought in the other tiers, and if
        it is nowhere the load ends before it. What is loaded is always a leading run.

        Args:
            place: where to put it, one per layer group (a single one for a layout of one group).
            rotate: by how many positions keys move on the way, for every chunk of the hit (blending). What is
                written back to other tiers stays as it was computed.

        Raises:
            CacheError: a place does not match the layout or is too short for the hit.
            RopeError: `rotate` has deltas for another number of chunks.
        """
        chunks, plan = hit.chunks, RetrievePlan(hit.plan.chunks, hit.plan.segments)
        places = self._places(place, plan.chunks, chunks)
        if rotate is not None:
            rotate.resolve(plan.chunks, self._chunk_tokens(chunks))
        loaded: Counter[str] = Counter()
        bad: set[tuple[str, int]] = set()
        done = 0
        while done < plan.chunks:
            # 1. the next segment: consecutive chunks at one tier
            segment = next(s for s in plan.segments if s.start <= done < s.stop)
            # 2. read its records into slots, 3. verify them, 4. unpack them, 5. write them back
            rest = Segment(segment.tier, done, segment.stop)
            stop, error = self._load_segment(rest, chunks, places, rotate)
            loaded[segment.tier] += stop - done
            done = stop
            if isinstance(error, StagingTimeout):  # another tier would not help
                break
            # 6. what could not be had there is sought elsewhere
            if error is not None:
                bad.add((segment.tier, done))
                plan = self._find(chunks, planning.clip(plan, done), bad)
        size = self._chunk_tokens(chunks)
        by_tier = {tier: n * size for tier, n in loaded.items() if n}
        with self._lock:
            self._counts.loaded_tokens.update(by_tier)
        return Loaded(done * size, by_tier)

    def store(
        self, tokens: Any, place: Place | Sequence[Place], namespace: Namespace | None = None
    ) -> Stored:
        """Put the whole chunks of `tokens` (int32 [T]) that a target tier lacks. Reads the engine's pages.

        Returns when the pages may be reused; tiers go on writing (`flush` waits for them). Where slots stay
        taken until the deadline, the rest is not stored, and the result says so.

        Raises:
            CacheError: a place does not match the layout or is too short for the tokens.
        """
        chunks = self._chunk(tokens, namespace)
        places = self._places(place, len(chunks), chunks)
        size, groups = self._chunk_tokens(chunks), len(chunks.formats)
        resident = {t: self._ask(t, chunks.names) // groups for t in self.policy.store_to if self._usable(t)}
        usable = Policy((), tuple(resident))
        plan = planning.plan_store(len(chunks), usable, resident)
        for segment in plan.segments:
            self._describe(segment.tier, chunks.formats)
        position = plan.start
        while position < plan.stop:
            count = min(MAX_IN_FLIGHT, plan.stop - position)
            try:
                leases = self.staging.acquire(count * groups, self.timeout_s, at_least=groups)
            except StagingTimeout as error:
                log.warning("store stopped after %d of %d chunks: %s", position, plan.stop, error)
                break
            count = keep_whole(leases, groups)
            try:
                self._pack(chunks, places, position, leases)
                self._put(plan.segments, chunks, position, leases)
            finally:
                release_all(leases)
            position += count
        return Stored(len(chunks) * size, max(0, position - plan.start) * size)

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until every put that was started is complete or has failed.

        Raises:
            CacheTimeout: some are still under way after `timeout_s` (default: the cache's).
        """
        limit = self.timeout_s if timeout_s is None else timeout_s
        left = self._puts.wait(limit)
        if left:
            raise CacheTimeout(f"{left} puts are still under way after {limit} s")

    def counts(self) -> Counts:
        """A copy of what was counted so far."""
        with self._lock:
            return copy.deepcopy(self._counts)

    def check_integrity(self) -> None:
        """Prove that no slot is lost.

        Raises:
            AssertionError: one is. This is a defect in kvkit or in a tier.
        """
        self.staging.check_integrity()

    def close(self) -> None:
        """Flush, then close tiers and staging. Puts that miss the deadline are logged and left behind."""
        if self._closed:
            return
        self._closed = True
        try:
            self.flush()
        except CacheTimeout as error:
            log.warning("close: %s", error)
        for tier in self.tiers.values():
            try:
                self._bounded(tier, tier.close)
            except Exception as error:
                log.warning("tier %r did not close: %s", tier.name, error or type(error).__name__)
        self._workers.close(self.timeout_s if self._warm.running() else 0.0)
        self.staging.close()

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # the way in

    def _find(self, chunks: Chunks, plan: RetrievePlan, bad: Iterable[tuple[str, int]]) -> RetrievePlan:
        """`plan` gone on with what the tiers hold from its end, but for (tier, chunk) pairs in `bad`."""
        groups = len(chunks.formats)
        grew = True
        while grew and not plan.complete:
            grew = False
            for tier in self.policy.retrieve_from:
                start = plan.chunks
                stop = min((c for t, c in bad if t == tier and c >= start), default=plan.wanted)
                if start == stop or not self._usable(tier):
                    continue
                run = self._ask(tier, chunks.names[start * groups : stop * groups]) // groups
                plan = planning.extend(plan, tier, run)
                grew = grew or run > 0
        return plan

    def _load_segment(
        self, segment: Segment, chunks: Chunks, places: Sequence[Place], rotate: Rotation | None
    ) -> tuple[int, BaseException | None]:
        """Load chunks of one tier in order, reads running ahead; where that ended, and why if early."""
        groups = len(chunks.formats)
        reads = SegmentReads(
            self.tiers[segment.tier], chunks.names, groups, segment, self.staging, self.timeout_s
        )
        position = segment.start
        try:
            while position < segment.stop:
                reads.fill()
                ready = reads.take_ready()
                try:
                    good, damage = self._verified(segment.tier, chunks, position, ready)
                    leases = ready[: good * groups]
                    if leases:
                        self._unpack(chunks, places, position, leases, rotate)
                        self._write_back(segment.tier, chunks, position, leases)
                finally:
                    release_all(ready)
                position += good
                if damage is not None:
                    return position, damage
                if reads.failed is not None and isinstance(reads.error, DamagedObject):
                    self._drop(segment.tier, reads.failed, reads.error.damage)
                elif reads.error is not None:
                    self._failed(segment.tier, reads.error)
                if reads.error is not None:
                    return position, reads.error
                self._health[segment.tier].worked()
        finally:
            reads.abandon()
        return position, None

    def _verified(
        self, tier: str, chunks: Chunks, first: int, leases: Sequence[Lease]
    ) -> tuple[int, DamagedObject | None]:
        """How many whole chunks of `leases` are what they should be; drops the first record that is not."""
        groups = len(chunks.formats)
        for i, lease in enumerate(leases):
            chunk, group = first + i // groups, i % groups
            damage = record.verify(chunks.formats[group], lease.buffer[: lease.used], *chunks.identity(chunk))
            if damage is not None:
                name = chunks.names[chunk * groups + group]
                self._drop(tier, name, damage)
                return i // groups, DamagedObject(f"{name}: {damage}", damage)
        return len(leases) // groups, None

    def _drop(self, tier: str, name: str, damage: Damage) -> None:
        log.warning("tier %r: %s is damaged (%s) and will be deleted", tier, name, damage)
        with self._lock:
            self._counts.damaged[tier, damage] += 1
        try:
            self._bounded(self.tiers[tier], lambda: self.tiers[tier].delete([name]))
        except Exception as error:
            log.warning("tier %r: %s could not be deleted: %s", tier, name, error)

    def _write_back(self, source: str, chunks: Chunks, first: int, leases: Sequence[Lease]) -> None:
        """Give validated records to the tiers that the policy names; the slots are shared, not copied."""
        stop = first + len(leases) // len(chunks.formats)
        near = [name for name, tier in self.tiers.items() if tier.near]
        taken = RetrievePlan(stop, (Segment(source, first, stop),))
        plan = planning.plan_write_back(taken, stop, self.policy, near)
        segments = [s for s in plan.segments if self._usable(s.tier)]
        for segment in segments:
            self._describe(segment.tier, chunks.formats)
        self._put(segments, chunks, first, leases)

    # the way back

    def _put(self, segments: Sequence[Segment], chunks: Chunks, first: int, leases: Sequence[Lease]) -> None:
        """Start putting sealed records, chunk `first` on, into the tiers whose segment has them."""
        groups = len(chunks.formats)
        last = first + len(leases) // groups
        for segment in segments:
            start, stop = max(first, segment.start), min(last, segment.stop)
            if start >= stop:
                continue
            names = chunks.names[start * groups : stop * groups]
            held = leases[(start - first) * groups : (stop - first) * groups]
            on_complete = self._expect(segment.tier, names)
            try:
                self.tiers[segment.tier].put(names, held, on_complete)
            except Exception as error:
                log.exception("tier %r: put failed", segment.tier)
                for name in names:
                    on_complete(name, error)

    def _expect(self, tier: str, names: Sequence[str]) -> OnComplete:
        """A callback that takes one report per name; whatever a tier does, none is counted twice."""
        pending = set(names)
        self._puts.add(len(pending))

        def on_complete(name: str, error: BaseException | None) -> None:
            with self._lock:
                if name not in pending:
                    return
                pending.remove(name)
                if error is None:
                    self._counts.stored_records[tier] += 1
                else:
                    self._counts.write_errors[tier] += 1
            if error is not None:
                log.warning("tier %r did not take %s: %s", tier, name, error)
            self._puts.done()

        return on_complete

    def _pack(self, chunks: Chunks, places: Sequence[Place], first: int, leases: Sequence[Lease]) -> None:
        """Fill slots with the sealed records of chunks `first` on, groups side by side."""
        groups = len(chunks.formats)
        count = len(leases) // groups
        for g, (form, place) in enumerate(zip(chunks.formats, places, strict=True)):
            mine = leases[g::groups]
            payloads = [record.payload(form, lease.array) for lease in mine]
            blocks, slots = _rows(place, form, first, count)
            launch.pack(place.pages, payloads, blocks=blocks, slots=slots)
            for i, lease in enumerate(mine):
                record.seal(form, lease.buffer, *chunks.identity(first + i))
                lease.used = form.record_bytes

    def _unpack(
        self,
        chunks: Chunks,
        places: Sequence[Place],
        first: int,
        leases: Sequence[Lease],
        rotate: Rotation | None,
    ) -> None:
        groups = len(chunks.formats)
        count = len(leases) // groups
        if rotate is not None:
            rotate = Rotation(rotate.rope, rotate.delta[first : first + count])
        for g, (form, place) in enumerate(zip(chunks.formats, places, strict=True)):
            payloads = [record.payload(form, lease.array) for lease in leases[g::groups]]
            blocks, slots = _rows(place, form, first, count)
            launch.unpack(place.pages, payloads, blocks=blocks, slots=slots, rotate=rotate)

    # small things

    def _chunk(self, tokens: Any, namespace: Namespace | None) -> Chunks:
        formats = _formats(self.layout, namespace or self.namespace)
        first = formats[0]
        size = first.namespace.chunk_tokens
        ids = as_tokens(tokens)
        keys = chunk_keys(ids, size, first.digest, first.namespace.hash)
        if len(formats) == 1:
            names = [first.name(key) for key in keys]
        else:
            names = [form.name(key) for key in keys for form in formats]
        return Chunks(ids[: len(keys) * size], keys, names, formats)

    def _places(self, place: Place | Sequence[Place], count: int, chunks: Chunks) -> Sequence[Place]:
        places = [place] if isinstance(place, Place) else list(place)
        if len(places) != len(self.layout.groups):
            raise CacheError(f"place: {len(places)} given, the layout has {len(self.layout.groups)} groups")
        for g, (p, form) in enumerate(zip(places, chunks.formats, strict=True)):
            if (p.blocks is None) == (p.slots is None):
                raise CacheError(f"place[{g}]: give blocks or slots, one of the two")
            rows = p.blocks if p.blocks is not None else p.slots
            per_chunk = form.namespace.chunk_tokens // (
                form.group.block_tokens if p.blocks is not None else 1
            )
            if rows is None or len(rows) < count * per_chunk:
                kind = "blocks" if p.blocks is not None else "slots"
                have = 0 if rows is None else len(rows)
                raise CacheError(
                    f"place[{g}].{kind}: {have} entries, {count} chunks take {count * per_chunk}"
                )
        return places

    @staticmethod
    def _chunk_tokens(chunks: Chunks) -> int:
        return chunks.formats[0].namespace.chunk_tokens

    def _describe(self, tier: str, formats: Sequence[RecordFormat]) -> None:
        """Have the tier keep zarr.json for these arrays, once."""
        for form in formats:
            if (tier, form.array) in self._described:
                continue
            target = self.tiers[tier]
            try:
                metadata = record.zarr_metadata(form, target.codec)
                self._bounded(target, partial(target.describe, form.array, metadata))
                self._described.add((tier, form.array))
            except Exception as error:
                log.warning("tier %r: %s has no zarr.json yet: %s", tier, form.array, error)

    def _ask(self, tier: str, names: Sequence[str]) -> int:
        try:
            return self._bounded(self.tiers[tier], lambda: self.tiers[tier].run(names))
        except Exception as error:
            log.warning("tier %r could not be asked: %s", tier, error or type(error).__name__)
            self._failed(tier, error)
            return 0

    def _bounded(self, tier: Tier, call: Callable[[], T]) -> T:
        """What `call` returns; a tier outside this process gets until the deadline to answer."""
        return call() if tier.near else self._workers.submit(call).result(self.timeout_s)

    def _usable(self, tier: str) -> bool:
        return self._health[tier].usable(time.monotonic())

    def _failed(self, tier: str, error: BaseException) -> None:
        if isinstance(error, FileNotFoundError | StagingTimeout):  # neither is the tier's fault
            return
        self._health[tier].failed(time.monotonic())
        with self._lock:
            if isinstance(error, TimeoutError):
                self._counts.timeouts[tier] += 1
            else:
                self._counts.read_errors[tier] += 1


class _Outstanding:
    """Counts what was started and not yet reported."""

    def __init__(self) -> None:
        self._count = 0
        self._changed = threading.Condition()

    def add(self, count: int) -> None:
        with self._changed:
            self._count += count

    def done(self) -> None:
        with self._changed:
            self._count -= 1
            if self._count == 0:
                self._changed.notify_all()

    def wait(self, timeout_s: float) -> int:
        """Wait for all; how many are left at the deadline."""
        with self._changed:
            self._changed.wait_for(lambda: self._count == 0, timeout_s)
            return self._count


def _warm_up() -> None:
    """Load the compiled kernels, or compile them, before the first request waits for that."""
    group = LayerGroup(layers=(0,), kv_heads=1, k_size=1, v_size=0, dtype="uint8", block_tokens=1)
    pages = Pages.of(group, group.pages(1))
    block = np.zeros((1, 1), np.int64)
    launch.pack(pages, [np.zeros(1, np.uint8)], blocks=block)
    launch.unpack(pages, [np.zeros(1, np.uint8)], blocks=block)
    chunk_keys(np.zeros(JIT_CHUNKS, np.int32), 1, bytes(16))


@functools.lru_cache(maxsize=1024)
def _formats(layout: KVLayout, namespace: Namespace) -> tuple[RecordFormat, ...]:
    """A record format per layer group; remembered, since requests share few namespaces."""
    return tuple(RecordFormat.of(layout, group, namespace) for group in range(len(layout.groups)))


def _rows(place: Place, form: RecordFormat, first: int, count: int) -> tuple[Ids | None, Ids | None]:
    """The block ids or the slots of chunks [first, first + count), a row per chunk."""
    size = form.namespace.chunk_tokens
    return (
        _cut(place.blocks, size // form.group.block_tokens, first, count),
        _cut(place.slots, size, first, count),
    )


def _cut(ids: Ids | None, per_chunk: int, first: int, count: int) -> Ids | None:
    if ids is None:
        return None
    return ids[first * per_chunk : (first + count) * per_chunk].reshape(count, per_chunk)
