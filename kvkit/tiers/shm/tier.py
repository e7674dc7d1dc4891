"""The tier of a pool in shared memory: processes of one host hit the records that any of them stores."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

from kvkit.format.record import parent_name
from kvkit.staging import Lease, Staging
from kvkit.tiers.base import DamagedObject, OnComplete, Tier, TierError, TierFull, complete, get_by_copy
from kvkit.tiers.settings import TierConfig
from kvkit.tiers.shm.file import PoolRemoved, pool_path
from kvkit.tiers.shm.pool import Pool
from kvkit.workers import Closed, Workers

log = logging.getLogger(__name__)

T = TypeVar("T")

_THREADS = 2
"""Default threads of a tier, which only copy in memory."""


class ShmTier(Tier):
    """Records in slots of a `Pool`, which callers borrow; a put copies its slot once.

    If the pool's file is removed, the tier fails, and frees the memory when the last lease is released.

    Args:
        path: path of the pool's file.
        staging: arena with slots of the size of the largest record.
        capacity_bytes: capacity of the pool; a record counts as a whole slot.
        threads: threads that copy records.

    Raises:
        ValueError, OSError: as for `kvkit.tiers.shm.file.PoolFile`; or the capacity is below one slot.
    """

    in_memory = True

    def __init__(
        self, path: str, staging: Staging, capacity_bytes: int, name: str = "shm", threads: int = _THREADS
    ) -> None:
        if capacity_bytes < staging.slot_bytes:
            raise ValueError(
                f"tier {name!r}: capacity_bytes={capacity_bytes}, want at least a slot, {staging.slot_bytes}"
            )
        self.name = name
        try:
            self._pool: Pool | None = Pool(path, staging.slot_bytes, capacity_bytes)
        except ValueError as error:
            raise ValueError(f"tier {name!r}: {error}") from None
        self._workers = Workers(threads, f"kvkit-{name}")
        self._lock = threading.Lock()
        self._puts: dict[str, list[tuple[Lease, OnComplete]]] = {}  # pending puts, duplicates included

    @classmethod
    def open(cls, name: str, config: TierConfig, staging: Staging) -> ShmTier:
        return cls(
            pool_path(config.urls[0]), staging, config.capacities[0] or 0, name, config.threads or _THREADS
        )

    def match_prefix(self, names: Sequence[str]) -> int:
        return self._call(lambda pool: pool.use_run(names))

    def pin(self, names: Sequence[str], seconds: float) -> int:
        return self._call(lambda pool: pool.pin(names, seconds))

    def prioritise(self, names: Sequence[str], priority: int) -> None:
        self._call(lambda pool: pool.prioritise(names, priority))

    def borrow(self, name: str) -> Lease | None:
        try:
            return self._call(lambda pool: pool.lend(name))
        except TierError as error:
            if not isinstance(error, PoolRemoved):  # that is logged already
                log.warning("tier %r: %s", self.name, error)
            return None

    def get(self, names: Sequence[str], leases: Sequence[Lease], on_complete: OnComplete) -> None:
        get_by_copy(self, names, leases, on_complete)

    def put(self, names: Sequence[str], leases: Sequence[Lease], on_complete: OnComplete) -> None:
        pool_error: OSError | None = None
        for name, lease in zip(names, leases, strict=True):
            share = lease.share()
            with self._lock:
                self._puts.setdefault(name, []).append((share, on_complete))
                if len(self._puts[name]) > 1:
                    continue
            try:
                if pool_error:
                    raise pool_error
                # taken here, in the order of the names, so that the pool has each record's parent
                slot = self._call(partial(self._take, name, share))
            except OSError as error:
                if not isinstance(error, TierFull | DamagedObject):
                    pool_error = error  # do not wait for the mutex again
                self._complete(name, error)
                continue
            if slot is None:
                self._complete(name, None)
                continue
            try:
                self._workers.start(partial(self._write, name, slot, share))
            except Closed:
                slot.release()
                self._complete(name, TierError(f"tier {self.name!r} is closed"))

    def delete(self, names: Sequence[str]) -> None:
        self._call(lambda pool: pool.remove(names))

    def size(self, name: str) -> int | None:
        return self._call(lambda pool: pool.size(name))

    def scan(self) -> Iterator[tuple[str, int]]:
        return iter(self._call(Pool.listed))

    def waiting(self) -> int:
        return self._workers.waiting

    def close(self) -> None:
        self._workers.close()
        pool = self._pool
        if pool is not None:
            pool.close()

    def _call(self, use: Callable[[Pool], T]) -> T:
        """Return use(pool).

        Raises:
            PoolRemoved: the pool was removed.
            TierError: as for `use`.
        """
        pool = self._pool
        if pool is None:
            raise PoolRemoved(f"the pool of tier {self.name!r} was removed")
        try:
            return use(pool)
        except PoolRemoved as error:
            self._abandon(pool, error)
            raise

    def _abandon(self, pool: Pool, error: PoolRemoved) -> None:
        """Stop using a removed pool, whose memory other processes need."""
        with self._lock:
            if self._pool is not pool:
                return
            self._pool = None
        log.warning(
            "tier %r: %s; this process stops using it and frees its memory. Restart the process to use the "
            "pool that others may have made since",
            self.name,
            str(error),  # the error's traceback would keep the pool for as long as the log record exists
        )
        with suppress(RuntimeError):  # if no thread can start, the memory stays until the process ends
            threading.Thread(
                target=pool.close_when_unused, name=f"kvkit-{self.name}-leave", daemon=True
            ).start()

    def _take(self, name: str, share: Lease, pool: Pool) -> Lease | None:
        """Lease a slot for the record in `share`; None if the pool holds it."""
        slot = pool.take(name, share.used, parent_name(share.buffer, name))
        self.evicted = pool.evicted
        return slot

    def _write(self, name: str, slot: Lease, source: Lease) -> None:
        """Copy a record into its slot, and publish it."""
        error: BaseException | None = None
        try:
            with slot:
                slot.record[:] = source.record
                self._call(lambda pool: pool.publish(name, slot))
        except BaseException as caught:  # a tier's thread must survive any error
            error = caught
        self._complete(name, error)

    def _complete(self, name: str, error: BaseException | None) -> None:
        """Complete all pending puts of a record."""
        with self._lock:
            puts = self._puts.pop(name)
        for lease, on_complete in puts:
            complete(on_complete, name, lease, error)
