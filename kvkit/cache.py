"""The cache: look up, load and store a token sequence's KV. Start reading here.

    hit = cache.lookup(tokens)         # how much is there, and where: moves nothing
    loaded = cache.load(hit, pages)    # into the engine's pages; may be less than the hit, and says so
    ...                                # the engine computes the rest
    cache.store(tokens, pages)         # whole chunks; returns when the pages may be reused

Each has a twin that returns at once with a future: `lookup_async`, `load_async`, `store_async`; `prefetch`
brings records nearer before they are asked for. The steps are numbered in `kvkit.moving.load.Load.run` and
`kvkit.moving.store.Store.run`; pure modules decide them: `plan` and `policy` say what moves from where to
where, `record` what is to be trusted.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from kvkit.format.layout import KVLayout, LayerGroup, Namespace
from kvkit.format.narrowed import check_narrows
from kvkit.format.rope import Rotation
from kvkit.kernels.pages.api import Pages, pack, unpack
from kvkit.kernels.pages.streams import CudaEvents, marks
from kvkit.moving.closing import close
from kvkit.moving.counts import Counts
from kvkit.moving.layerwise import LayerLoad, LayerStore, Lend
from kvkit.moving.load import Load, prefetch, read_chunk
from kvkit.moving.policy import (
    DEFAULT_REQUEST_POLICY,
    Policy,
    RequestPolicy,
    check_named,
    for_request,
    in_effect,
)
from kvkit.moving.policy import check as check_policy
from kvkit.moving.sequence import (
    AllPages,
    CacheError,
    Chunks,
    Hit,
    Loaded,
    SequencePages,
    UnknownModel,
    check_pages,
    largest_record_bytes,
)
from kvkit.moving.store import Store, Stored
from kvkit.moving.tier_set import TierHeldListener, TierSet
from kvkit.moving.warm_up import warm_up
from kvkit.moving.writes import WritePipeline
from kvkit.staging import Lease, Staging
from kvkit.tiers.base import Tier
from kvkit.tiers.health import HealthState
from kvkit.workers import ForkGuard, Transfer, Workers

log = logging.getLogger(__name__)

__all__ = [
    "Cache",
    "CacheError",
    "CacheServer",
    "CacheTimeout",
    "Counts",
    "Hit",
    "Loaded",
    "SequencePages",
    "Stored",
]

LOADING_THREADS, STORING_THREADS, LOOKING_THREADS, PREFETCHING_THREADS = 4, 2, 4, 2
"""What goes on in the background at a time. It mostly waits for tiers, which have threads of their own."""

SpaceOf = Callable[[str | None, str], Namespace]
"""What is stored for a requested model (an adapter, say; None: the base) and salt. Raises `UnknownModel`."""

READING_THREADS = 8
"""Layers of records that are read at a time, of each tier."""


class CacheTimeout(TimeoutError):
    """Puts were still under way at the deadline."""


class CacheServer(Protocol):
    """Where others reach a cache, such as http://127.0.0.1:9477: `kvkit.observe.http.Server`."""

    @property
    def url(self) -> str: ...

    def close(self, timeout_s: float) -> object: ...


class Cache:
    """KV of token sequences, in tiers. Thread-safe; a context manager that closes.

    It belongs to the process that opened it: in a fork of that, whatever is asked of it raises
    `kvkit.workers.Forked`, and `close` does nothing.

    Args:
        layout: of the engine's KV.
        namespace: what decides KV bytes besides tokens; every call takes another one.
        tiers: in the order in which the default policy seeks them. The cache closes them.
        staging: slots of at least one record each. The cache closes it.
        policy: what goes where; None: `Policy.default`.
        timeout_s: the longest that any single wait may take, in seconds.
        shutdown_timeout_s: the longest that `close` may take, in seconds.
        namespace_of: of an engine whose namespace changes, or that has adapters; None: always `namespace`.

    Attributes:
        server: closed before the cache is; None unless `kvkit.config.open_cache` or its owner sets one.

    Raises:
        PolicyError: the policy names no tier of these.
        CacheError, LayoutError: tiers share a name; the slots, or a tier's precision, do not fit the layout.
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
        shutdown_timeout_s: float = 30.0,
        namespace_of: SpaceOf | None = None,
    ) -> None:
        self.layout = layout
        self.namespace = namespace
        self.tiers = {tier.name: tier for tier in tiers}
        if len(self.tiers) != len(tiers):
            raise CacheError(f"tiers: two share a name, {[tier.name for tier in tiers]}")
        biggest = largest_record_bytes(layout, namespace)
        if staging.slot_bytes < biggest:
            raise CacheError(f"staging.slot_bytes={staging.slot_bytes}: a record takes {biggest}")
        if staging.slots < len(layout.groups):
            raise CacheError(f"staging.slots={staging.slots}: a chunk takes {len(layout.groups)}")
        check_narrows(layout, {tier.name: tier.precision for tier in tiers})
        checked = check_policy(policy or Policy.default(self.tiers), self.tiers)
        self.policy = in_effect(checked, [tier.name for tier in tiers if tier.near and not tier.transient])
        self.staging = staging
        self.timeout_s, self.shutdown_timeout_s = timeout_s, shutdown_timeout_s
        self.namespace_of: SpaceOf = namespace_of or partial(_only_space, namespace)
        self.server: CacheServer | None = None
        self._fork_guard = ForkGuard("this cache")
        tier_set = TierSet(self.tiers, self.policy, staging, timeout_s, layout.copy, layout.copies)
        self._all_puts = WritePipeline(tier_set, len(layout.groups))
        self._loading = Workers(LOADING_THREADS, "kvkit-load")
        self._storing = Workers(STORING_THREADS, "kvkit-store")
        self._looking = Workers(LOOKING_THREADS, "kvkit-look")
        self._prefetching = Workers(PREFETCHING_THREADS, "kvkit-prefetch")
        self._reading = {name: Workers(READING_THREADS, f"kvkit-layers-{name}") for name in self.tiers}
        self._closed = False
        self._loading.submit(_warm_up)

    def lookup(
        self,
        tokens: Any,
        namespace: Namespace | None = None,
        *,
        wait_s: float = 0.0,
        first: int = 0,
        prefill_tokens_per_s: float | None = None,
        retrieve_from: Sequence[str] | None = None,
        policy: RequestPolicy = DEFAULT_REQUEST_POLICY,
    ) -> Hit:
        """How long a leading run of `tokens` (int32 [T]; numpy, torch or list) is available, and where.

        Reads no payload and changes nothing. A tier that fails holds nothing.

        Args:
            wait_s: seconds to wait, if need be, for chunks that this cache is storing and no tier has yet.
            first: chunks that the engine has and will not load.
            prefill_tokens_per_s: how fast the engine computes. Where it is known, the run ends where going on
                computing is faster than loading, by what was measured of the tiers in the last minute.
            retrieve_from: tiers to seek, instead of the policy's.
            policy: what the request wants otherwise; the load of the hit keeps to it, too.

        Raises:
            PolicyError: `retrieve_from` or `policy` names a tier that does not exist.
        """
        chunks = self.chunks(tokens, namespace, policy)
        check_named("retrieve_from", retrieve_from or (), self.tiers)
        if policy.max_load_tokens is not None:
            chunks = chunks.part(0, min(len(chunks), first + policy.max_load_tokens // chunks.chunk_tokens))
        plan = found = self._puts.find_with_pending(chunks, wait_s, retrieve_from)
        if prefill_tokens_per_s is not None:
            compute_s = chunks.chunk_tokens / prefill_tokens_per_s
            plan = self._tier_set.trim_by_cost(found, chunks.groups, first, compute_s)
            plan = found if plan == found else self._puts.with_states(chunks, plan, 0.0, retrieve_from)
        hit = Hit(chunks, plan)
        declined = Counter(Hit(chunks, found).by_tier) - Counter(hit.by_tier)
        if declined:
            log.info("tokens that are computed, as loading them is slower: %s", dict(declined))
        with self._tier_set.counting() as counts:
            counts.lookups += 1
            counts.lookup_tokens += len(chunks.tokens)
            counts.hit_tokens.update(hit.by_tier)
            counts.approximate_tokens.update(hit.approximate)
            counts.declined_tokens.update(declined)
        return hit

    def lookup_async(
        self,
        tokens: Any,
        namespace: Namespace | None = None,
        *,
        wait_s: float = 0.0,
        first: int = 0,
        prefill_tokens_per_s: float | None = None,
        retrieve_from: Sequence[str] | None = None,
        policy: RequestPolicy = DEFAULT_REQUEST_POLICY,
    ) -> Transfer[Hit]:
        """`lookup` in the background."""
        look = partial(self.lookup, tokens, namespace, wait_s=wait_s, first=first)
        look = partial(look, prefill_tokens_per_s=prefill_tokens_per_s, retrieve_from=retrieve_from)
        look = partial(look, policy=policy)
        return Transfer.start(self._looking, lambda _: look())

    def query(self, tokens: Any, namespace: Namespace | None = None, wait_s: float = 0.0) -> Hit:
        """How long a leading run of `tokens` is held, and where, for who loads nothing: counts as a query.
        Waits up to `wait_s` seconds for what is being stored."""
        chunks = self.chunks(tokens, namespace)
        hit = Hit(chunks, self._puts.find_with_pending(chunks, wait_s))
        with self._tier_set.counting() as counts:
            counts.queries += 1
        return hit

    def chunks(
        self, tokens: Any, namespace: Namespace | None = None, policy: RequestPolicy = DEFAULT_REQUEST_POLICY
    ) -> Chunks:
        """The whole chunks of `tokens` (int32 [T]), hashed once, for who stores them part by part.

        Raises:
            PolicyError: `policy` names a tier that does not exist.
        """
        self._fork_guard.check()
        check_named("load_from", policy.load_from or (), self.tiers)
        check_named("store_to", policy.store_to or (), self.tiers)
        return Chunks.of(tokens, self.layout, namespace or self.namespace, policy)

    def held_async(self, chunks: Chunks, tiers: Sequence[str]) -> Transfer[int]:
        """How many of `chunks`, from the first on, these tiers hold, in the background; counts as no lookup.

        Raises `PolicyError` where one does not exist.
        """
        check_named("tiers", tiers, self.tiers)
        return Transfer.start(
            self._looking, lambda _: self._puts.find_with_pending(chunks, 0.0, tiers).chunks
        )

    def load(self, hit: Hit, pages: AllPages, rotate: Rotation | None = None) -> Loaded:
        """Put the KV of `hit` into the engine's pages. Mutates the pages of the tokens loaded, no others.

        A record that turns out missing, damaged or late is a miss: it is sought in the other tiers, and if
        it is nowhere the load ends before it. What is loaded is always a leading run; the policy may have it
        written back to nearer tiers. The result says what is approximate: it is written back to none.

        Args:
            pages: where to put it, one per layer group.
            rotate: by how many positions keys move on the way, for every chunk of the hit (blending). What is
                written back to other tiers stays as it was computed.

        Raises:
            CacheError: `pages` do not match the layout or are too short for the hit.
            RopeError: `rotate` has deltas for another number of chunks.
        """
        return self._load(hit, pages, rotate).run(Transfer())

    def load_async(self, hit: Hit, pages: AllPages, rotate: Rotation | None = None) -> Transfer[Loaded]:
        """`load` in the background: the pages are in use until the future is done, cancelled or not.

        On a GPU they change after what the current stream has now. Raises what `load` does.
        """
        return Transfer.start(self._loading, self._load(hit, pages, rotate).run, urgent=True)

    def load_layers(self, hit: Hit, pages: AllPages) -> LayerLoad:
        """`load` one layer at a time: an iterator over the layers, in model order, as they arrive.

        Raises what `load` does.
        """
        pages = check_pages(pages, hit.chunks, hit.plan.chunks, self.layout)
        return LayerLoad(self._puts, self._reading, hit, pages)

    def store_layers(
        self,
        tokens: Any,
        pages: AllPages,
        namespace: Namespace | None = None,
        *,
        policy: RequestPolicy = DEFAULT_REQUEST_POLICY,
    ) -> LayerStore:
        """`store` one layer at a time, as the engine completes them. Raises what `store` does."""
        return self.store_chunk_layers(self.chunks(tokens, namespace, policy), pages)

    def store_chunk_layers(
        self, chunks: Chunks, pages: AllPages, to: Sequence[str] | None = None, lend: Lend | None = None
    ) -> LayerStore:
        """`store_layers` of chunks, whose slots `lend` may give. `pages` are of these chunks alone."""
        self._fork_guard.check()
        pages = check_pages(pages, chunks, len(chunks), self.layout)
        return LayerStore(self._puts, chunks, pages, self._targets(to, chunks), lend)

    @property
    def prefetch_chunks(self) -> int:
        """Chunks that can be prefetched at a time, half of what the memory holds that they go to: more would
        displace each other, or most of what is near."""
        near = [tier for name in self.policy.write_back_to if (tier := self.tiers[name]).near]
        slots = min((tier.slots // 2 for tier in near if tier.slots), default=self._tier_set.prefetched.slots)
        return slots // len(self.layout.groups)

    def prefetch(self, tokens: Any, namespace: Namespace | None = None, *, first: int = 0) -> Transfer[Hit]:
        """Bring what `tokens` will hit nearer, in the background; the future is what is available then.

        Verified records of the leading run go to the tiers in memory that the policy writes back to; without
        any, up to half of the staging slots hold them until a load takes them or others need the room. A load
        takes from there what was further away at its lookup. It does not wait for prefetches: these have
        threads of their own, and ask a tier for no more than four times what it reads at once.

        Args:
            first: chunks that the engine has. The run, and the hit, begin after them.

        Raises:
            CacheError: the tokens have fewer than `first` whole chunks.
        """
        chunks = self._part(tokens, namespace, first)
        return Transfer.start(self._prefetching, partial(prefetch, self._puts, chunks))

    def get_non_blocking(
        self, tokens: Any, chunk: int, namespace: Namespace | None = None
    ) -> Transfer[list[Lease]]:
        """The records of one chunk of `tokens`, in the background: verified, a lease per layer group.

        The list is empty if no tier has them. The caller releases the leases (`kvkit.staging.release_all`).

        Raises:
            CacheError: `tokens` have no such whole chunk.
        """
        chunks = self.chunks(tokens, namespace)
        if not 0 <= chunk < len(chunks):
            raise CacheError(f"chunk={chunk}: the tokens have {len(chunks)} whole chunks")
        return Transfer.start(self._loading, partial(read_chunk, self._puts, chunks, chunk))

    def store(
        self,
        tokens: Any,
        pages: AllPages,
        namespace: Namespace | None = None,
        *,
        to: Sequence[str] | None = None,
        first: int = 0,
        policy: RequestPolicy = DEFAULT_REQUEST_POLICY,
    ) -> Stored:
        """Put the whole chunks of `tokens` (int32 [T]) that a target tier lacks. Reads the engine's pages.

        Returns when the pages may be reused; tiers go on writing (`flush` waits for them). Where slots stay
        taken until the deadline, the rest is not stored, and the result says so.

        Args:
            to: tiers, instead of the policy's `store_to`.
            first: the chunk to begin with: those before it are not stored, and `pages` begin there.
            policy: what the request wants otherwise: where it is stored, and how it is evicted there, which
                goes for what a target has already, too.

        Raises:
            CacheError: `pages` do not match the layout or are too short for the tokens, or the tokens have
                fewer than `first` whole chunks.
            PolicyError: `to` or `policy` names a tier that does not exist.
        """
        chunks = self._part(tokens, namespace, first, policy)
        pages = check_pages(pages, chunks, len(chunks), self.layout)
        return Store(self._puts, chunks, pages, self._targets(to, chunks)).run(Transfer())

    def store_async(
        self,
        tokens: Any,
        pages: AllPages,
        namespace: Namespace | None = None,
        *,
        to: Sequence[str] | None = None,
        first: int = 0,
        ready: Callable[[], object] | None = None,
        policy: RequestPolicy = DEFAULT_REQUEST_POLICY,
    ) -> Transfer[Stored]:
        """`store` in the background: pages must not change until it is done, or `release_pages` returns.

        `ready` is called first, there; it returns when the pages hold what is to be stored (a CUDA event's
        `synchronize`). Without it, pages on a GPU hold that once the current stream has done what it has now.
        Raises what `store` does.
        """
        return self.store_chunks(self._part(tokens, namespace, first, policy), pages, to=to, ready=ready)

    def store_chunks(
        self,
        chunks: Chunks,
        pages: AllPages,
        *,
        to: Sequence[str] | None = None,
        ready: Callable[[], object] | None = None,
        on_stored: Callable[[str, int], None] | None = None,
        on_done: Callable[[], object] = lambda: None,
        copy_first: bool = False,
    ) -> Transfer[Stored]:
        """`store_async` of chunks, or a part of some (`Chunks.part`), that tells how it goes on.

        Raises what `store` does.

        Args:
            pages: of these chunks alone.
            to, ready: as in `store` and `store_async`.
            on_stored: called with the name of a tier and the number of a chunk among `chunks` when that tier
                has it completely; from any thread, and often after the future is done.
            on_done: called once, when no tier is to get any of them any more; likewise. A tier that hangs may
                delay it without end.
            copy_first: whether chunks are copied before tiers outside this process are asked what they lack.
                The pages come free without waiting for them, and what they have was copied for nothing.
        """
        pages = check_pages(pages, chunks, len(chunks), self.layout)
        after = () if ready else _marks(pages)
        ready = ready or (lambda: None)
        targets = self._targets(to, chunks)
        store = Store(self._puts, chunks, pages, targets, ready, on_stored, on_done, copy_first, after)
        try:
            transfer = Transfer.start(self._storing, store.run)
        except BaseException:
            store.abort()
            raise
        transfer.add_done_callback(lambda done: store.abort() if done.cancelled() else None)
        return transfer

    def warm_up(self, pages: AllPages) -> Future[None]:
        """Have what the first moves of such pages start compiled and loaded, in the background.

        For pages on a GPU: without it the first load waits for the compiler. Nothing is moved.

        Args:
            pages: one per layer group, of a chunk, as blocks or as slots; which ones does not matter.

        Raises:
            CacheError: they do not match the layout.
        """
        none = self.chunks(np.zeros(0, np.int32))
        groups = check_pages(pages, none, 0, self.layout)

        def carry_out() -> None:
            self.staging.ready.wait(self.timeout_s)  # memory that is not pinned takes another way
            (lease,) = self.staging.acquire(1, self.timeout_s)
            with lease:
                warm_up(groups, none.formats + none.states, lease)

        return self._storing.submit(carry_out)

    def watch(self, tiers: Sequence[str], held_listener: TierHeldListener) -> bool:
        """Have told from now on what `tiers` hold, as records are put, found, evicted, dropped and deleted.

        What they hold already is told at once. Whether that is all that they ever hold: they are this host's
        alone. If not, it may be left out, and what a server evicts by itself is told when a lookup or a read
        misses it.
        """
        return self._tier_set.watch(tiers, held_listener)

    def pin(self, tokens: Any, seconds: float, namespace: Namespace | None = None) -> int:
        """Have tiers evict none of these tokens' chunks for so long; how many tokens one or more hold."""
        chunks = self.chunks(tokens, namespace)
        return max((self._tier_set.pin(tier, chunks, seconds) for tier in self.tiers), default=0)

    def retain(self, tokens: Any, policy: RequestPolicy, namespace: Namespace | None = None) -> None:
        """Have tiers evict what they hold of these tokens' chunks as a request wants, as if it stored them.

        Raises:
            PolicyError: `policy` names a tier that does not exist.
        """
        chunks = self.chunks(tokens, namespace, policy)
        for tier in self.tiers if policy.store_to is None else policy.store_to:
            self._tier_set.retain(tier, chunks.names + chunks.snapshots, policy)

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until every put that was started before this call is complete or has failed.

        Raises:
            CacheTimeout: some are still under way after `timeout_s` (default: the cache's).
        """
        limit = self.timeout_s if timeout_s is None else timeout_s
        if left := self._puts.outstanding.wait(limit):
            raise CacheTimeout(f"{left} puts are still under way after {limit} s")

    def puts_under_way(self) -> int:
        """Puts that a flush would wait for: of records, and of what describes their arrays."""
        return self._puts.outstanding.count

    def counts(self) -> Counts:
        """A copy of what was counted so far."""
        return self._tier_set.counts()

    def note_blend(self, reused: int, selected: int, computed: int) -> None:
        """Count the tokens of a prompt that was blended: reused, selected among them, and computed ones."""
        with self._tier_set.counting() as counts:
            counts.blend_reused_tokens += reused
            counts.blend_selected_tokens += selected
            counts.blend_computed_tokens += computed

    def tier_states(self) -> dict[str, HealthState]:
        """Whether each tier is ok, slow, open (passed over) or half-open (about to be tried)."""
        return self._tier_set.states()

    def queue_depths(self) -> dict[str, int]:
        """Reads and writes that wait for a thread, by tier."""
        return {name: tier.waiting() for name, tier in self._tier_set.tiers.items()}

    def clear(self, tier: str, timeout_s: float | None = None) -> int:
        """Delete every record of a tier, whatever its namespace; how many there were.

        Raises:
            CacheError: there is no such tier.
            TimeoutError: some are left after `timeout_s` seconds (default: the cache's); call again.
            OSError: one could not be deleted.
        """
        if tier not in self.tiers:
            raise CacheError(f"tier={tier!r}: no such tier; the tiers are {', '.join(self.tiers)}")
        return self._tier_set.clear(tier, self.timeout_s if timeout_s is None else timeout_s)

    def check_integrity(self) -> None:
        """Prove that no slot is lost.

        Raises:
            AssertionError: one is. This is a defect in kvkit or in a tier.
        """
        self._fork_guard.check()
        self.staging.check_integrity()

    def close(self, timeout_s: float | None = None) -> None:
        """Close the server, finish what was started, then close tiers and staging.

        All of it takes `timeout_s` seconds at most (default: the cache's `shutdown_timeout_s`). What is not
        saved by then is logged.
        """
        if self._closed or not self._fork_guard.is_here:
            return
        self._closed = True
        until = time.monotonic() + (self.shutdown_timeout_s if timeout_s is None else timeout_s)
        if self.server is not None:
            self.server.close(until - time.monotonic())
        background = (self._looking, self._prefetching, self._loading, self._storing)
        try:
            close(self._puts, (*background, *self._reading.values()), until - time.monotonic())
        finally:
            self.staging.close()

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _puts(self) -> WritePipeline:
        """For the process that opened the cache."""
        self._fork_guard.check()
        return self._all_puts

    @property
    def _tier_set(self) -> TierSet:
        return self._puts.tiers

    def _part(
        self,
        tokens: Any,
        namespace: Namespace | None,
        first: int,
        policy: RequestPolicy = DEFAULT_REQUEST_POLICY,
    ) -> Chunks:
        chunks = self.chunks(tokens, namespace, policy)
        return chunks.part(first, len(chunks))

    def _targets(self, to: Sequence[str] | None, chunks: Chunks) -> Sequence[str]:
        check_named("to", to or (), self.tiers)
        return for_request(self.policy, chunks.policy).store_to if to is None else to

    def _load(self, hit: Hit, pages: AllPages, rotate: Rotation | None) -> Load:
        pages = check_pages(pages, hit.chunks, hit.plan.chunks, self.layout)
        if rotate is not None:
            rotate.resolve(hit.plan.chunks, hit.chunks.chunk_tokens)
        return Load(self._puts, hit, pages, rotate, _marks(pages))


def _only_space(namespace: Namespace, model: str | None, salt: str) -> Namespace:
    if model not in (None, namespace.model):
        raise UnknownModel(f"model = {model!r}: not known here; known is {namespace.model!r}")
    return replace(namespace, salt=salt) if salt else namespace


def _marks(pages: Sequence[SequencePages]) -> CudaEvents:
    """What the engine's streams have so far, of the thread that asks for a move."""
    return marks(group.pages.device for group in pages)


def _warm_up() -> None:
    """Load the CPU's compiled kernels, or compile them, before the first request waits for that."""
    group = LayerGroup(layers=(0,), kv_heads=1, k_size=1, v_size=0, dtype="uint8", block_tokens=1)
    pages = Pages.of(group, group.pages(1))
    block = np.zeros((1, 1), np.int64)
    pack(pages, [np.zeros(1, np.uint8)], blocks=block)
    unpack(pages, [np.zeros(1, np.uint8)], blocks=block)
