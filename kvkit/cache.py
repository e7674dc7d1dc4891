"""The cache: look up, load and store the KV of a token sequence. Start reading here.

    hit = cache.lookup(tokens)         # how many tokens are held, and by which tiers; moves no data
    loaded = cache.load(hit, pages)    # into the engine's pages; may be shorter than the hit
    ...                                # the engine computes the rest
    cache.store(tokens, pages)         # whole chunks; returns when the pages may be reused

`lookup_async`, `load_async` and `store_async` do this in the background and return futures; `prefetch` copies
records to host memory ahead of a load. `transfer.load.Load.run` and `transfer.store.Store.run` number the
steps. Pure modules decide: `plan` and `policy` choose sources and targets, `record` verifies data.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypedDict, Unpack

import numpy as np

from kvkit.format.layout import KVLayout, Namespace
from kvkit.format.quantised import check_quantisable
from kvkit.format.rope import Rotation
from kvkit.kernels.pages.streams import marks
from kvkit.staging import Lease, Staging
from kvkit.tiers.base import Tier
from kvkit.tiers.health import HealthState
from kvkit.transfer.clearing import clear
from kvkit.transfer.closing import close
from kvkit.transfer.counters import Counts
from kvkit.transfer.layer_load import LayerLoad
from kvkit.transfer.layer_store import LayerStore
from kvkit.transfer.load import Load, prefetch, read_chunk
from kvkit.transfer.lookup import find_with_pending, look_up
from kvkit.transfer.policy import (
    DEFAULT_REQUEST_POLICY,
    Policy,
    RequestPolicy,
    check_named,
    for_request,
    in_effect,
)
from kvkit.transfer.policy import check as check_policy
from kvkit.transfer.sequence import (
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
from kvkit.transfer.store import Store, Stored
from kvkit.transfer.tier_set import TierSet
from kvkit.transfer.warm_up import warm_up, warm_up_cpu
from kvkit.transfer.write_pipeline import WritePipeline
from kvkit.workers import ForkGuard, Transfer, Workers

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
"""Threads of each background pool."""

SpaceOf = Callable[[str | None, str], Namespace]
"""Maps a requested model (None: the base) and cache salt to a namespace. Raises `UnknownModel`."""

READING_THREADS = 8
"""Threads per tier that read parts of records for layer-by-layer loads."""


class CacheTimeout(TimeoutError):
    """Some puts were still in flight at the deadline."""


class CacheServer(Protocol):
    """An endpoint for a cache, such as http://127.0.0.1:9477: `kvkit.observe.http.Server`."""

    engine: dict[str, str]

    @property
    def url(self) -> str: ...

    def close(self, timeout_s: float) -> object: ...


class LookupOptions(TypedDict, total=False):
    """Options of `Cache.lookup`."""

    wait_s: float
    first: int
    prefill_tokens_per_s: float | None
    retrieve_from: Sequence[str] | None
    policy: RequestPolicy


class Cache:
    """KV of token sequences, stored in tiers. Thread-safe; a context manager that closes the cache.

    In a fork of its process, its methods raise `kvkit.workers.Forked`, and `close` does nothing.

    Args:
        layout: layout of the engine's KV.
        namespace: default namespace: everything besides tokens that determines KV bytes.
        tiers: tiers, in the default policy's lookup order. The cache closes them.
        staging: slots of at least one record each. The cache closes it.
        policy: tiers to retrieve from, store to and write back to; None: `Policy.default`.
        timeout_s: timeout of any single wait, in seconds.
        shutdown_timeout_s: timeout of `close`, in seconds.
        namespace_of: namespaces by model and salt, where they vary; None: always `namespace`.

    Attributes:
        server: endpoint, closed before the cache; set by `kvkit.config.open_cache` or the cache's owner.

    Raises:
        PolicyError: the policy names an unknown tier.
        CacheError, LayoutError: two tiers share a name; slots or a tier's precision do not fit the layout.
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
        _check_fits(layout, namespace, tiers, staging)
        self.tiers = {tier.name: tier for tier in tiers}
        checked = check_policy(policy or Policy.default(self.tiers), self.tiers)
        in_memory = [tier.name for tier in tiers if tier.in_memory and not tier.read_only]
        self.policy = in_effect(checked, in_memory, [tier.name for tier in tiers if tier.read_only])
        self.staging = staging
        self.timeout_s, self.shutdown_timeout_s = timeout_s, shutdown_timeout_s
        self.namespace_of: SpaceOf = namespace_of or partial(_only_space, namespace)
        self.server: CacheServer | None = None
        self._fork_guard = ForkGuard("this cache")
        tier_set = TierSet(self.tiers, self.policy, staging, timeout_s, layout.copy, layout.copies)
        self._all_writes = WritePipeline(tier_set, len(layout.groups))
        self._threads = _Threads(self.tiers)
        self._closed = False
        self._threads.loading.submit(warm_up_cpu)

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
        """Return how long a leading run of `tokens` (int32 [T]; numpy, torch or list) is held, and where.

        Reads no payload and changes nothing. A tier that fails counts as empty.

        Args:
            wait_s: seconds to wait for pending stores of chunks that no tier holds yet.
            first: number of leading chunks that the engine already has.
            prefill_tokens_per_s: the engine's prefill speed. If given, the run ends where computing becomes
                faster than loading, by the tiers' speeds in the last minute.
            retrieve_from: tiers to ask, instead of the policy's.
            policy: request policy; the load of the hit follows it, too.

        Raises:
            PolicyError: `retrieve_from` or `policy` names an unknown tier.
        """
        chunks = self.chunks(tokens, namespace, policy)
        check_named("retrieve_from", retrieve_from or (), self.tiers)
        if policy.max_load_tokens is not None:
            chunks = chunks.part(0, min(len(chunks), first + policy.max_load_tokens // chunks.chunk_tokens))
        return look_up(self.tier_set, chunks, wait_s, first, prefill_tokens_per_s, retrieve_from)

    def lookup_async(
        self,
        tokens: Any,
        namespace: Namespace | None = None,
        **options: Unpack[LookupOptions],
    ) -> Transfer[Hit]:
        """Run `lookup` in the background."""
        return Transfer.start(self._threads.looking, lambda _: self.lookup(tokens, namespace, **options))

    def query(self, tokens: Any, namespace: Namespace | None = None, wait_s: float = 0.0) -> Hit:
        """Look up `tokens`, waiting up to `wait_s` s for pending stores; counts as a query, not a lookup."""
        chunks = self.chunks(tokens, namespace)
        hit = Hit(chunks, find_with_pending(self.tier_set, chunks, wait_s))
        with self.tier_set.counting() as counts:
            counts.queries += 1
        return hit

    def chunks(
        self, tokens: Any, namespace: Namespace | None = None, policy: RequestPolicy = DEFAULT_REQUEST_POLICY
    ) -> Chunks:
        """Return the whole chunks of `tokens` (int32 [T]), hashed once for several stores of parts of them.

        Raises `PolicyError` if `policy` names an unknown tier.
        """
        self._fork_guard.check()
        check_named("load_from", policy.load_from or (), self.tiers)
        check_named("store_to", policy.store_to or (), self.tiers)
        return Chunks.of(tokens, self.layout, namespace or self.namespace, policy)

    def held_async(self, chunks: Chunks, tiers: Sequence[str]) -> Transfer[int]:
        """Count the leading `chunks` that these tiers hold, in the background; not counted as a lookup.

        Raises `PolicyError` for an unknown tier.
        """
        check_named("tiers", tiers, self.tiers)
        return Transfer.start(
            self._threads.looking, lambda _: find_with_pending(self.tier_set, chunks, 0.0, tiers).chunks
        )

    def load(self, hit: Hit, pages: AllPages, rotate: Rotation | None = None) -> Loaded:
        """Copy the KV of `hit` into the engine's pages. Mutates only the pages of the loaded tokens.

        A missing, damaged or late record is a miss: the load tries the other tiers and, if none has the
        record, ends before it. The loaded tokens are always a leading run. The policy decides which tiers
        they are written back to; approximate KV (see `Loaded`) is never written back.

        Args:
            pages: destination pages, one entry per layer group.
            rotate: position change of the keys, per chunk (blending). Write-backs keep the original keys.

        Raises:
            CacheError: `pages` do not match the layout or are too short for the hit.
            RopeError: `rotate` has deltas for a different number of chunks.
        """
        return self._load(hit, pages, rotate).run(Transfer())

    def load_async(self, hit: Hit, pages: AllPages, rotate: Rotation | None = None) -> Transfer[Loaded]:
        """Run `load` in the background; the pages are in use until the future is done, even if cancelled.

        On a GPU, pages change after the work queued on the current stream. Raises the errors of `load`.
        """
        return Transfer.start(self._threads.loading, self._load(hit, pages, rotate).run, urgent=True)

    def load_layers(self, hit: Hit, pages: AllPages) -> LayerLoad:
        """Return an iterator that loads `hit` one layer at a time. Raises the errors of `load`."""
        pages = check_pages(pages, hit.chunks, hit.plan.chunks, self.layout)
        return LayerLoad(self.writes, self._threads.reading, hit, pages)

    def store_layers(
        self,
        tokens: Any,
        pages: AllPages,
        namespace: Namespace | None = None,
        *,
        policy: RequestPolicy = DEFAULT_REQUEST_POLICY,
    ) -> LayerStore:
        """Run `store` one layer at a time, as the engine completes layers. Raises the errors of `store`."""
        chunks = self.chunks(tokens, namespace, policy)
        pages = check_pages(pages, chunks, len(chunks), self.layout)
        return LayerStore(self.writes, chunks, pages, self._targets(None, chunks))

    @property
    def prefetch_chunks(self) -> int:
        """Maximum chunks to prefetch at once: half of the memory they go to, to spare its other records."""
        tiers = [self.tiers[name] for name in self.policy.write_back_to]
        slots = [tier.slots // 2 for tier in tiers if tier.in_memory and tier.slots]
        return min(slots, default=self.tier_set.prefetched.slots) // len(self.layout.groups)

    def prefetch(self, tokens: Any, namespace: Namespace | None = None, *, first: int = 0) -> Transfer[Hit]:
        """Copy what `tokens` will hit to host memory, in the background; the future returns the hit by then.

        Verified records of the leading run go to the in-memory tiers that the policy writes back to. Without
        such a tier, up to half of the staging slots hold them until a load takes them or others need the
        slots; the load uses them even if its lookup found another tier. Loads do not wait for prefetches,
        which have their own threads and request at most four times a tier's `reads_at_once`.

        Args:
            first: number of leading chunks that the engine already has. The run and the hit begin after them.
                Raises `CacheError` if the tokens have fewer whole chunks.
        """
        chunks = self.chunks(tokens, namespace).part(first)
        move = partial(prefetch, self.writes, chunks)
        return Transfer.start(self._threads.prefetching, move)

    def get_non_blocking(
        self, tokens: Any, chunk: int, namespace: Namespace | None = None
    ) -> Transfer[list[Lease]]:
        """Read and verify the records of one chunk in the background: a lease per layer group.

        The list is empty if no tier has them. The caller releases the leases (`kvkit.staging.release_all`).
        Raises `CacheError` if `tokens` have no such whole chunk.
        """
        chunks = self.chunks(tokens, namespace)
        if not 0 <= chunk < len(chunks):
            raise CacheError(f"chunk={chunk}: the tokens have {len(chunks)} whole chunks")
        read = partial(read_chunk, self.writes, chunks, chunk)
        return Transfer.start(self._threads.loading, read)

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
        """Store the whole chunks of `tokens` (int32 [T]) that a target tier lacks. Reads the engine's pages.

        Returns when the pages may be reused; tiers continue writing (`flush` waits for them). If no slots
        come free before the deadline, the rest is not stored; the result counts the tokens copied.

        Args:
            to: target tiers, instead of the policy's `store_to`.
            first: first chunk to store; `pages` begin there.
            policy: request policy: target tiers and retention, which applies to records already held, too.

        Raises:
            CacheError: `pages` do not match the layout or are too short, or there are fewer than `first`
                chunks.
            PolicyError: `to` or `policy` names an unknown tier.
        """
        chunks = self.chunks(tokens, namespace, policy).part(first)
        pages = check_pages(pages, chunks, len(chunks), self.layout)
        return Store(self.writes, chunks, pages, self._targets(to, chunks)).run(Transfer())

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
        """Run `store` in the background; pages must not change until it is done or `release_pages` returns.

        `ready` is called first, in the background; it returns when the pages are complete (a CUDA event's
        `synchronize`). Without it, pages on a GPU are complete after the work already queued on the current
        stream. Raises the errors of `store`.
        """
        chunks = self.chunks(tokens, namespace, policy).part(first)
        return self.store_chunks(chunks, pages, to=to, ready=ready)

    def store_chunks(
        self,
        chunks: Chunks,
        pages: AllPages,
        *,
        to: Sequence[str] | None = None,
        ready: Callable[[], object] | None = None,
        on_stored: Callable[[str, int], None] | None = None,
        on_done: Callable[[], object] | None = None,
        copy_first: bool = False,
    ) -> Transfer[Stored]:
        """Run `store_async` for `chunks`, or part of them, with callbacks. Raises the errors of `store`.

        Args:
            pages: pages of these chunks alone.
            to, ready: see `store` and `store_async`.
            on_stored: called with a tier's name and a chunk's index in `chunks` when the tier has the whole
                chunk; from any thread, often after the future is done.
            on_done: called once, from any thread, when every put has ended. A hanging tier may delay it
                forever.
            copy_first: copy chunks before asking tiers outside this process what they lack. The pages are
                released without waiting for these tiers, but some copies may be unneeded.
        """
        pages = check_pages(pages, chunks, len(chunks), self.layout)
        after = () if ready else marks(group.pages.device for group in pages)
        targets = self._targets(to, chunks)
        store = Store(self.writes, chunks, pages, targets, ready, on_stored, on_done, copy_first, after)
        return store.start(self._threads.storing)

    def warm_up(self, pages: AllPages) -> Future[None]:
        """Compile and load kernels for such pages in the background: the first GPU load would wait for this.

        Args:
            pages: any pages of one chunk, one entry per layer group, as blocks or as slots. Not mutated.
                Raises `CacheError` if they do not match the layout.
        """
        no_chunks = self.chunks(np.zeros(0, np.int32))
        groups, formats = check_pages(pages, no_chunks, 0, self.layout), no_chunks.formats + no_chunks.states
        return self._threads.storing.submit(partial(warm_up, groups, formats, self.staging, self.timeout_s))

    def pin(self, tokens: Any, seconds: float, namespace: Namespace | None = None) -> int:
        """Pin the chunks of `tokens` for `seconds`; return the most tokens pinned in a single tier."""
        chunks = self.chunks(tokens, namespace)
        return max((self.tier_set.pin(tier, chunks, seconds) for tier in self.tiers), default=0)

    def retain(self, tokens: Any, policy: RequestPolicy, namespace: Namespace | None = None) -> None:
        """Apply the retention of `policy` to these tokens' chunks in tiers that hold them, as a store would.

        Raises `PolicyError` if `policy` names an unknown tier.
        """
        chunks = self.chunks(tokens, namespace, policy)
        for tier in self.tiers if policy.store_to is None else policy.store_to:
            for part, policy_there in chunks.retained(len(chunks)):
                self.tier_set.retain(tier, part.names + part.snapshots, policy_there)

    def note_answer(self, tokens: Any, tool_call: bool, namespace: Namespace | None = None) -> None:
        """Tell tiers whose eviction learns (`sessions`) that an answer, the end of `tokens`, calls a tool."""
        self.tier_set.note_answer(self.chunks(tokens, namespace).names, tool_call)

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until every put started before this call has completed or failed.

        Raises:
            CacheTimeout: some are still in flight after `timeout_s` (default: the cache's).
        """
        limit = self.timeout_s if timeout_s is None else timeout_s
        if unfinished := self.writes.outstanding.wait(limit):
            raise CacheTimeout(f"{unfinished} puts are still in flight after {limit} s")

    def pending_writes(self) -> int:
        """Count the puts a flush would wait for: of records and of array metadata."""
        return self.writes.outstanding.count

    def counts(self) -> Counts:
        """Return a copy of the counters."""
        return self.tier_set.counts()

    def tier_states(self) -> dict[str, HealthState]:
        """Return each tier's health: ok, slow, open (skipped) or half-open (about to be retried)."""
        return self.tier_set.states()

    def queue_depths(self) -> dict[str, int]:
        """Count the reads and writes that wait for a thread, by tier."""
        return {name: tier.waiting() for name, tier in self.tier_set.tiers.items()}

    def clear(self, tier: str, timeout_s: float | None = None) -> int:
        """Delete every record of a tier, in all namespaces; return how many were deleted.

        Raises:
            CacheError: there is no such tier.
            TimeoutError: some are left after `timeout_s` seconds (default: the cache's); call again.
            OSError: a record could not be deleted.
        """
        if tier not in self.tiers:
            raise CacheError(f"tier={tier!r}: no such tier; the tiers are {', '.join(self.tiers)}")
        return clear(self.tier_set, tier, self.timeout_s if timeout_s is None else timeout_s)

    def check_integrity(self) -> None:
        """Raise `AssertionError` if a slot is lost, which is a defect in kvkit or in a tier."""
        self._fork_guard.check()
        self.staging.check_integrity()

    def close(self, timeout_s: float | None = None) -> None:
        """Close the server, finish pending work, then close tiers and staging.

        Takes at most `timeout_s` seconds (default: `shutdown_timeout_s`), and logs what is not saved by then.
        """
        if self._closed or not self._fork_guard.is_here:
            return
        self._closed = True
        deadline = time.monotonic() + (self.shutdown_timeout_s if timeout_s is None else timeout_s)
        if self.server is not None:
            self.server.close(deadline - time.monotonic())
        try:
            close(self.writes, self._threads.all, deadline - time.monotonic())
        finally:
            self.staging.close()

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def tier_set(self) -> TierSet:
        """The tiers with their health and counters."""
        return self.writes.tiers

    @property
    def writes(self) -> WritePipeline:
        """The write pipeline, for records that are sent elsewhere: its slots, counters and flushes."""
        self._fork_guard.check()
        return self._all_writes

    def _targets(self, to: Sequence[str] | None, chunks: Chunks) -> Sequence[str]:
        check_named("to", to or (), self.tiers)
        return for_request(self.policy, chunks.policy).store_to if to is None else to

    def _load(self, hit: Hit, pages: AllPages, rotate: Rotation | None) -> Load:
        pages = check_pages(pages, hit.chunks, hit.plan.chunks, self.layout)
        if rotate is not None:
            rotate.resolve(hit.plan.chunks, hit.chunks.chunk_tokens)
        return Load(self.writes, hit, pages, rotate, marks(group.pages.device for group in pages))


class _Threads:
    """The threads of a cache. They mostly wait for tiers, which have threads of their own."""

    def __init__(self, tiers: Iterable[str]) -> None:
        self.looking = Workers(LOOKING_THREADS, "kvkit-look")
        self.prefetching = Workers(PREFETCHING_THREADS, "kvkit-prefetch")
        self.loading = Workers(LOADING_THREADS, "kvkit-load")
        self.storing = Workers(STORING_THREADS, "kvkit-store")
        self.reading = {name: Workers(READING_THREADS, f"kvkit-layers-{name}") for name in tiers}

    @property
    def all(self) -> Sequence[Workers]:
        """All pools, in the order in which they are closed."""
        return (self.looking, self.prefetching, self.loading, self.storing, *self.reading.values())


def _check_fits(layout: KVLayout, namespace: Namespace, tiers: Sequence[Tier], staging: Staging) -> None:
    """Raise `CacheError` or `LayoutError` if names, slots or precisions of tiers do not fit the layout."""
    names = [tier.name for tier in tiers]
    if len(set(names)) != len(names):
        raise CacheError(f"tiers: two share a name, {names}")
    largest = largest_record_bytes(layout, namespace)
    if staging.slot_bytes < largest:
        raise CacheError(f"staging.slot_bytes={staging.slot_bytes}: a record takes {largest}")
    if staging.slots < len(layout.groups):
        raise CacheError(f"staging.slots={staging.slots}: a chunk takes {len(layout.groups)}")
    check_quantisable(layout, {tier.name: tier.precision for tier in tiers})


def _only_space(namespace: Namespace, model: str | None, salt: str) -> Namespace:
    if model not in (None, namespace.model):
        raise UnknownModel(f"model = {model!r}: not known here; want {namespace.model!r}")
    return replace(namespace, salt=salt) if salt else namespace
