"""Pages of another engine's cache as records, each under a key that the engine chose.

The engine's keys name tokens; everything else that determines a page's bytes is in the namespace. A page
moves whole and depends on no other page, so it is a chunk of one "token" with one opaque page, and pages may
be stored and found in any order. Tiers, policies, health and counters are those of a `Cache`.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from kvkit.cache import Cache
from kvkit.config import Config, open_cache
from kvkit.format.layout import KVLayout, LayerGroup, Namespace, canonical_json
from kvkit.kernels.pages.api import Pages
from kvkit.settings import ConfigError
from kvkit.transfer.clearing import clear, delete
from kvkit.transfer.load import Load
from kvkit.transfer.lookup import find_with_pending
from kvkit.transfer.policy import DEFAULT_REQUEST_POLICY, RequestPolicy, for_request
from kvkit.transfer.sequence import Chunks, Hit, SequencePages, formats_of
from kvkit.workers import Closed, Transfer, Workers

THREADS = 8
"""Threads for lookups and loads; they mostly wait for tiers, which have threads of their own."""

OnStored = Callable[[bool], object]
"""Called once, from any thread, when a store has ended; True if a tier has every page."""


@dataclass(frozen=True, slots=True)
class KeyedChunks(Chunks):
    """Pages of another engine as chunks, none of which depends on the chunk before it.

    Attributes:
        positions: first token of each in its request, for `policy`.
    """

    positions: tuple[int, ...] = ()

    def policy_at(self, chunk: int) -> RequestPolicy:
        return self.policy.at(self.positions[chunk]) if self.positions else self.policy

    def identity(self, chunk: int) -> tuple[bytes, bytes, NDArray[np.int32]]:
        return self.parent, self.keys[chunk], self.tokens[chunk : chunk + 1]

    def part(self, start: int, stop: int | None = None) -> KeyedChunks:
        chosen = slice(start, stop)
        return replace(
            self,
            tokens=self.tokens[chosen],
            keys=self.keys[chosen],
            names=self.names[chosen],
            first=self.first + start,
            positions=self.positions[chosen],
        )


class KeyedStore:
    """Tiers for pages of another engine. Thread-safe; a context manager that closes it.

    Args:
        config: tiers and policy. Chunk size and digest are replaced: a chunk is a page, and keys are SHA-256.
        largest_bytes: bytes of the largest page.
        model: name of the weights.
        dtype: dtype in which the model computes, or that of its pages.
        weights: fingerprint of the weights' contents.
        salt: keeps tenants apart.

    Attributes:
        cache: the tiers, for counters and flushes.
        workers: threads for lookups and loads.

    Raises:
        ConfigError: a setting does not fit pages of another engine, or a tier cannot be opened.
    """

    def __init__(
        self, config: Config, largest_bytes: int, *, model: str, dtype: str, weights: str, salt: str = ""
    ) -> None:
        if config.handoff is not None:
            raise ConfigError("handoff: not for pages of another engine; want tiers alone")
        self._config = config.model_copy(update={"chunk_tokens": 1, "hash": "sha256"})
        self._fields = {"model": model, "dtype": dtype, "revision": weights, "salt": salt}
        layout = self._layout(largest_bytes)
        self.cache: Cache = open_cache(self._config, layout, self._config.namespace(layout, **self._fields))
        self.workers = Workers(THREADS, "kvkit-keyed-pages")

    @property
    def largest_bytes(self) -> int:
        """Bytes of the largest page."""
        return self.cache.layout.groups[0].k_size

    def pages(self, page_bytes: int, determines: object, **fields: str) -> KeyedPages:
        """Return the pages of one kind; opens nothing.

        Args:
            page_bytes: bytes of a page.
            determines: all that determines its bytes besides tokens and weights, such as layout and ranks:
                plain data.
            fields: `model`, `dtype`, `weights` or `salt`, if they differ from the store's.

        Raises `ConfigError` if a page is larger than the store's largest.
        """
        if page_bytes > self.largest_bytes:
            raise ConfigError(
                f"page_bytes = {page_bytes}: this store was opened for pages of {self.largest_bytes}"
            )
        layout = self._layout(page_bytes)
        described = hashlib.sha256(canonical_json(determines)).hexdigest()[:32]
        if "weights" in fields:
            fields["revision"] = fields.pop("weights")
        known = self._fields | fields
        known["revision"] += f"+{described}"
        return KeyedPages(self, layout, self._config.namespace(layout, **known))

    def close(self) -> None:
        """Finish pending work, then close the tiers, within the configured `shutdown_timeout_s` each."""
        self.workers.close(self.cache.shutdown_timeout_s)
        self.cache.close()

    def __enter__(self) -> KeyedStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _layout(self, page_bytes: int) -> KVLayout:
        group = LayerGroup((0,), 1, page_bytes, 0, "uint8", block_tokens=1, page_bytes=page_bytes)
        return self._config.layout(KVLayout((group,)))


class KeyedPages:
    """Pages of one kind in a `KeyedStore`, which makes it. Thread-safe."""

    def __init__(self, store: KeyedStore, layout: KVLayout, namespace: Namespace) -> None:
        self.cache, self._workers = store.cache, store.workers
        self._layout, self._namespace = layout, namespace
        (self._format,) = formats_of(layout, namespace)

    def begin_epoch(self, epoch: str) -> None:
        """Find and store only pages of this epoch from now on; moves that began before keep theirs.

        The empty name is that of the first epoch.
        """
        mark = f"#{epoch}" if epoch else ""
        namespace = replace(self._namespace, revision=f"{self._namespace.revision}{mark}")
        (self._format,) = formats_of(self._layout, namespace)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return self._format.layer_bytes

    def memory(self, pages: torch.Tensor) -> Pages:
        """Describe the engine's memory, uint8 [pages, page_bytes], for loads and stores; copies nothing.

        Raises `LaunchError` if it has another shape.
        """
        return Pages.of(self._format.group, [pages])

    def scattered(self, pages: Sequence[torch.Tensor]) -> tuple[Pages, NDArray[np.int64]]:
        """Describe pages of the engine that lie anywhere in memory, and return the row of each.

        See `kvkit.kernels.pages.memory.Pages.scattered`.
        """
        return Pages.scattered(self._format.group, pages)

    def held(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether a tier holds its page. A tier that fails counts as empty."""
        chunks, tiers = self._chunks(keys), self.cache.tier_set
        found = np.zeros(len(keys), bool)
        by_tier = dict[str, int]()
        for tier in for_request(tiers.policy, chunks.policy).retrieve_from:
            missing = np.flatnonzero(~found)
            if len(missing) and tiers.usable(tier):
                names = [chunks.names[i] for i in missing]
                here = missing[held_each(partial(tiers.ask, tier), names)]
                found[here] = True
                by_tier[tier] = len(here)
        with tiers.counting() as counts:
            counts.lookups += 1
            counts.lookup_tokens += len(keys)
            counts.hit_tokens.update({tier: count for tier, count in by_tier.items() if count})
        return [bool(each) for each in found]

    def leading(self, keys: Sequence[bytes]) -> int:
        """Return the length of the leading run of keys whose pages are held."""
        chunks, tiers = self._chunks(keys), self.cache.tier_set
        plan = find_with_pending(tiers, chunks, 0.0)
        with tiers.counting() as counts:
            counts.lookups += 1
            counts.lookup_tokens += len(keys)
            counts.hit_tokens.update(plan.by_tier())
        return plan.chunks

    def load(self, keys: Sequence[bytes], memory: Pages, rows: ArrayLike) -> int:
        """Load pages into `rows` of the engine's memory; return how many leading ones were loaded.

        A page is verified before the engine's memory is written: other rows stay unchanged, and so does the
        row of a page that is missing, damaged or late.
        """
        return self._load(keys, memory, rows, Transfer())

    def load_async(self, keys: Sequence[bytes], memory: Pages, rows: ArrayLike) -> Transfer[int]:
        """Run `load` in the background; `cancel` ends it soon, and the memory is in use until it is done."""
        move = partial(self._load, keys, memory, rows)
        return Transfer.start(self._workers, move, urgent=True)

    def store(
        self,
        keys: Sequence[bytes],
        memory: Pages,
        rows: ArrayLike,
        on_stored: OnStored,
        policy: RequestPolicy = DEFAULT_REQUEST_POLICY,
        positions: Sequence[int] = (),
    ) -> None:
        """Store pages that a target tier lacks, in the background.

        The rows must not change until `on_stored` was called. A store that is not complete after the cache's
        `timeout_s`, because a tier hangs, counts as failed; what was copied by then is still stored.

        Args:
            policy: that of the request that computed the pages.
            positions: first token of each page in that request, if `policy` has prefixes.
        """
        chunks, stored = self._chunks(keys, policy, positions), set[int]()
        reports = itertools.count()

        def report(complete: bool) -> None:
            if not next(reports):  # the first one counts
                deadline.cancel()
                on_stored(complete)

        def end_late() -> None:
            transfer.release_pages()
            report(False)

        def check() -> None:
            unreported = [keys[i] for i in range(len(keys)) if i not in stored]
            report(not unreported or all(self._are_held(unreported)))

        def done() -> None:
            try:
                self._workers.start(check)  # a tier's thread must not wait for answers of tiers
            except Closed:
                report(False)

        deadline = threading.Timer(self.cache.timeout_s, end_late)
        deadline.name, deadline.daemon = "kvkit-keyed-pages", True
        pages = SequencePages(memory, blocks=np.asarray(rows, np.int64))
        try:
            transfer = self.cache.store_chunks(
                chunks, pages, on_stored=lambda _, i: stored.add(i), on_done=done
            )
        except Closed:  # `done` was called
            return
        try:
            deadline.start()  # ends at once if it was cancelled before
        except RuntimeError:  # no thread can be had, so nothing would end the store if a tier hangs
            end_late()

    def pin(self, keys: Sequence[bytes], seconds: float) -> None:
        """Protect pages from eviction for some seconds, in tiers that can."""
        chunks = self._chunks(keys)
        for tier in self.cache.tiers:
            self.cache.tier_set.pin(tier, chunks, seconds)

    def retain(self, keys: Sequence[bytes], policy: RequestPolicy, positions: Sequence[int]) -> None:
        """Apply a request's retention to pages that tiers hold, as a store would, in the background."""
        chunks, tiers = self._chunks(keys, policy, positions), self.cache.tier_set

        def retain() -> None:
            for tier in tiers.tiers:
                for part, policy_there in chunks.retained(len(chunks)):
                    if tiers.usable(tier):
                        tiers.retain(tier, part.names, policy_there)

        self._workers.start(retain)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note that pages are used, for eviction; returns at once."""
        names = self._chunks(keys).names
        tiers = self.cache.tier_set

        def ask() -> None:
            for tier in tiers.tiers:
                if tiers.usable(tier):
                    tiers.ask(tier, names)

        self._workers.start(ask)

    def names(self, keys: Sequence[bytes]) -> list[str]:
        """Return the names of the pages' records, by which tiers report them (`TierSet.subscribe`)."""
        return list(self._chunks(keys).names)

    def delete(self, keys: Sequence[bytes]) -> None:
        """Delete pages from all tiers.

        Raises `OSError` or `TimeoutError` of the first tier that fails; the others are asked, too.
        """
        names, failures = self.names(keys), list[OSError]()
        for tier in self.cache.tiers:
            try:
                delete(self.cache.tier_set, tier, names, self.cache.timeout_s)
            except OSError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def clear(self) -> int:
        """Delete these pages from all tiers; return how many records were deleted.

        Raises `OSError` or `TimeoutError` if some could not be deleted.
        """
        prefix, timeout_s = f"{self._format.array}/", self.cache.timeout_s
        return sum(clear(self.cache.tier_set, name, timeout_s, prefix) for name in self.cache.tiers)

    def _load(self, keys: Sequence[bytes], memory: Pages, rows: ArrayLike, transfer: Transfer[int]) -> int:
        chunks = self._chunks(keys)
        hit = Hit(chunks, find_with_pending(self.cache.tier_set, chunks, 0.0))
        pages = SequencePages(memory, blocks=np.asarray(rows, np.int64))
        return Load(self.cache.writes, hit, [pages]).run(transfer).tokens

    def _chunks(
        self,
        keys: Collection[bytes],
        policy: RequestPolicy = DEFAULT_REQUEST_POLICY,
        positions: Sequence[int] = (),
    ) -> KeyedChunks:
        seed = self._format.digest
        digests = [hashlib.sha256(seed + key).digest() for key in keys]
        return KeyedChunks(
            np.zeros(len(digests), np.int32),
            digests,
            [self._format.name(digest) for digest in digests],
            (self._format,),
            seed,
            policy,
            positions=tuple(positions),
        )

    def _are_held(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether a tier holds its page, without counting a lookup."""
        chunks, tiers = self._chunks(keys), self.cache.tier_set
        return [
            any(tiers.usable(tier) and tiers.ask(tier, [name]) for tier in tiers.tiers)
            for name in chunks.names
        ]


def held_each(leading: Callable[[Sequence[str]], int], names: Sequence[str]) -> list[int]:
    """Return the indices of the `names` that are held, from a function that counts leading ones.

    A run of names that are held takes few calls, and each missing one takes one.
    """
    found, start, size = list[int](), 0, 1
    while start < len(names):
        asked = names[start : start + size]
        run = leading(asked)
        found += range(start, start + run)
        start += run if run == len(asked) else run + 1
        size = 2 * size if run == len(asked) else 1
    return found
