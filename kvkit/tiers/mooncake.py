"""Records in a Mooncake Store: memory pooled by machines, reached over TCP or RDMA without a copy.

A master tracks which machine has a record and evicts records; every client may contribute memory to the pool.
A lookup asks the master, in one round trip per 512 records. If a machine dies, its records are lost, but the
master reports them as held until it notices (`client_ttl`, 10 s), and reading them fails.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import urlopen

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationError, field_validator

from kvkit.format.names import is_record
from kvkit.format.record import Damage
from kvkit.format.urls import shown
from kvkit.settings import explain
from kvkit.staging import Lease, Staging
from kvkit.tiers.base import (
    DamagedObject,
    OnComplete,
    Ranges,
    Tier,
    TierError,
    TierFull,
    start_moves,
)
from kvkit.tiers.folder import check_name
from kvkit.tiers.registry import TIERS
from kvkit.tiers.settings import TierConfig, tier_at
from kvkit.workers import Workers

log = logging.getLogger(__name__)

PREFIX = "kvkit:"
"""Prefix of every key, so that other programs can use the same pool."""

THREADS = 4

_PORT = 50051
_NAMES_PER_REQUEST = 512
_BATCH = 8  # records per transfer: enough to hide the master's latency, few enough to report early
_MIN_SEGMENT = 16 << 20  # Mooncake's minimum

# return codes of a client; others are errors of the transfer (-800) or of the master (-900 and below)
_POOL_FULL, _WRONG_SIZE = -200, -600
_EXISTS = -705
_MISSING = (-703, -704, -710, -712)  # missing, incomplete, or on a machine that is gone
_REASONS = {
    -707: "it took longer than the master's lease",
    -800: "the machine that holds it cannot be reached",
    -900: "the master cannot be reached",
    -901: "the master does not answer",
}

_TRANSFER_TIMEOUT_S = 60.0
"""Time in seconds after which Mooncake returns from a transfer, although it may still be in flight."""


class MooncakeOptions(BaseModel):
    """The `options` of a tier on Mooncake, under the names of Mooncake's own settings."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)
    protocol: Literal["tcp", "rdma"] = Field("tcp", description="transport of records")
    rdma_devices: str = Field("", description="such as mlx5_0,mlx5_1; empty: those that Mooncake finds")
    global_segment_size: ByteSize = Field(
        ByteSize(0), description="memory that this process contributes to the pool; 0: it is only a client"
    )
    local_hostname: str | None = Field(
        None, description="this host's address for other clients; none: that of its route to the master"
    )
    metadata_server: str = Field("P2PHANDSHAKE", description="metadata server of all clients of the pool")
    metrics_port: int = Field(9003, description="the master's metrics port, which lists keys", ge=1, le=65535)

    @field_validator("global_segment_size")
    @classmethod
    def _check_segment_size(cls, size: ByteSize) -> ByteSize:
        if 0 < size < _MIN_SEGMENT:
            raise ValueError(f"{int(size)} bytes: want 0 or at least {_MIN_SEGMENT} bytes")
        return size


class MooncakeTier(Tier):
    """Records as objects of a Mooncake Store, under `PREFIX` and their names.

    The tier opens without the master: until the master answers, each get and put fails. `timeout_s` sets
    Mooncake's own timeouts (MC_RPC_TIMEOUT_MS, ...) for the whole process, unless the environment does.

    Records move without a copy. Neither Mooncake's master nor its clients authenticate who reads or writes
    registered memory, so their ports belong in private networks. Slots are registered only for RDMA, which
    needs it: those of `staging` until `close`, others for each move.

    Args:
        config: settings, or the URL alone: mooncake://<master's host>:<port>. Each of `threads` transfers up
            to 8 records at a time. `timeout_s` limits, in seconds, an answer of the master and the time for
            which a transfer may stall; values above 30 count as 30.
        staging: arena of the slots.

    Raises:
        ValueError: a setting is invalid, and the message names the choices; or a system library that the
            package mooncake needs is missing.
        ModuleNotFoundError: the package mooncake is missing.
    """

    reads_ranges = True

    def __init__(self, config: TierConfig | str, staging: Staging, name: str = "mooncake") -> None:
        if isinstance(config, str):
            config = tier_at(config)
        threads = config.threads or THREADS
        self._master = _parse(name, config.urls[0])
        self._options = _options(name, config.plain_options())
        self._timeout_s = config.timeout_s
        _set_timeouts(config.timeout_s)
        try:
            from mooncake.store import MooncakeDistributedStore
        except ModuleNotFoundError:
            raise
        except ImportError as error:  # a library of the system
            raise ValueError(f"tier {name!r}: {error}: apt-get install libibverbs1") from error

        self.name = name
        self.scope = config.scope
        self.reads_at_once = threads * _BATCH
        self._new_store: Callable[[], Any] = MooncakeDistributedStore
        self._uses_rdma = self._options.protocol == "rdma"
        self._staging = staging  # must outlive the client
        self._arena = (staging.arrays[0].ctypes.data, staging.slot_bytes * staging.slots)
        self._changed = threading.Condition()
        self._store: Any = None
        self._calls = 0
        self._disconnecting = 0
        self._closed = False
        self._workers = Workers(threads, f"kvkit-{name}")
        if self._options.global_segment_size:  # a process that contributes no memory connects on first use
            self._workers.start(self._connect_early)

    @classmethod
    def open(cls, name: str, config: TierConfig, staging: Staging) -> MooncakeTier:
        return cls(config, staging, name)

    def match_prefix(self, names: Sequence[str]) -> int:
        for first in range(0, len(names), _NAMES_PER_REQUEST):
            keys = [_key(name) for name in names[first : first + _NAMES_PER_REQUEST]]
            with self._client() as store:
                codes = store.batch_is_exist(keys)
            for i, code in enumerate(codes):
                if code < 0:
                    raise self._error(f"{len(names)} records cannot be looked up", code)
                if code == 0:
                    return first + i
        return len(names)

    def get(self, names: Sequence[str], leases: Sequence[Lease], on_complete: OnComplete) -> None:
        start_moves(self, self._workers, self._read, names, leases, on_complete, urgent=True, batch=_BATCH)

    def put(self, names: Sequence[str], leases: Sequence[Lease], on_complete: OnComplete) -> None:
        start_moves(self, self._workers, self._write, names, leases, on_complete, urgent=False, batch=_BATCH)

    def get_ranges(self, name: str, ranges: Ranges, buffers: Sequence[memoryview]) -> None:
        """Read parts of one record, as in `Tier`, with one transfer and one copy."""
        sizes = [size for _, size in ranges]
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        payload = np.empty(sum(sizes), np.uint8)
        key, address = _key(name), payload.ctypes.data
        with self._client() as store, self._registered(store, [payload]):
            ((codes,),) = store.get_into_ranges(
                [address], [[key]], [[starts]], [[[offset for offset, _ in ranges]]], [[sizes]]
            )
        for code, (offset, size), start, buffer in zip(codes, ranges, starts, buffers, strict=True):
            if code == _WRONG_SIZE:
                raise DamagedObject(f"{name}: it ends before offset {offset + size}", Damage.TRUNCATED)
            if code < 0:
                raise self._read_error(name, code)
            buffer[:size] = payload.data[start : start + size]

    def delete(self, names: Sequence[str]) -> None:
        for first in range(0, len(names), _NAMES_PER_REQUEST):
            batch = names[first : first + _NAMES_PER_REQUEST]
            with self._client() as store:
                # True, by force: else the lease of a recent read would keep a record
                codes = store.batch_remove([_key(name) for name in batch], True)
            for name, code in zip(batch, codes, strict=True):
                if code < 0 and code not in _MISSING:
                    raise self._error(f"{name} cannot be deleted", code)

    def size(self, name: str) -> int | None:
        with self._client() as store:
            size = int(store.get_size(_key(name)))
        if size in _MISSING:
            return None
        if size < 0:
            raise self._error(f"{name} cannot be looked up", size)
        return size

    def scan(self) -> Iterator[tuple[str, int]]:
        """Yield (name, bytes) of every record, from the master's list of keys on its metrics port."""
        host = self._master.rpartition(":")[0]
        url = f"http://{host}:{self._options.metrics_port}/get_all_keys"
        try:
            with urlopen(url, timeout=self._timeout_s) as response:
                keys = response.read().decode(errors="replace").splitlines()
        except (URLError, OSError) as error:
            raise TierError(f"tier {self.name!r}: the records cannot be listed: {url}: {error}") from error
        for key in keys:
            name = key.removeprefix(PREFIX)
            if key.startswith(PREFIX) and is_record(name):
                size = self.size(name)
                if size is not None:
                    yield name, size

    def waiting(self) -> int:
        return self._workers.waiting

    def close(self) -> None:
        self._workers.close()
        with self._changed:
            self._closed = True
            self._disconnect()

    def _read(self, names: Sequence[str], leases: Sequence[Lease]) -> list[OSError | None]:
        keys, slots = [_key(name) for name in names], [lease.array for lease in leases]
        began = time.monotonic()
        with self._client() as store, self._registered(store, slots if self._uses_rdma else ()):
            counts = store.batch_get_into(keys, [slot.ctypes.data for slot in slots], [len(s) for s in slots])
        if min(counts) < 0 and time.monotonic() - began >= _TRANSFER_TIMEOUT_S:
            with self._changed:
                self._disconnect()  # closing the client ends transfers that still write to these slots
        errors: list[OSError | None] = []
        for name, lease, count in zip(names, leases, counts, strict=True):
            if count < 0:
                errors.append(self._read_error(name, count, len(lease.array)))
            else:
                lease.used = count
                errors.append(None)
        return errors

    def _write(self, names: Sequence[str], leases: Sequence[Lease]) -> list[OSError | None]:
        keys, slots = [_key(name) for name in names], [lease.array for lease in leases]
        with self._client() as store, self._registered(store, slots if self._uses_rdma else ()):
            codes = store.batch_put_from(
                keys, [s.ctypes.data for s in slots], [lease.used for lease in leases]
            )
        return [
            None if code in (0, _EXISTS) else self._write_error(name, code)
            for name, code in zip(names, codes, strict=True)
        ]

    @contextmanager
    def _client(self) -> Iterator[Any]:
        """Yield the client and keep it open during the block: using a closed one would crash the process."""
        with self._changed:
            if self._closed or self._disconnecting:
                raise TierError(f"tier {self.name!r} is closed")
            if self._store is None:
                self._store = self._connect()
            store = self._store
            self._calls += 1
        try:
            yield store
        finally:
            with self._changed:
                self._calls -= 1
                self._changed.notify_all()

    def _connect(self) -> Any:
        """Return a new client, connected to the master; for RDMA, with the arena registered.

        Raises:
            TierError: the master does not answer, or Mooncake refuses.
        """
        host, _, port = self._master.rpartition(":")
        try:  # Mooncake itself would try for 90 s
            with socket.create_connection((host.strip("[]"), int(port)), self._timeout_s) as connection:
                local_host = connection.getsockname()[0]
        except OSError as error:
            raise TierError(f"tier {self.name!r}: the master {self._master}: {error}") from error
        if self._options.local_hostname is not None:
            local_host = self._options.local_hostname
        settings = {
            "local_hostname": local_host,
            "metadata_server": self._options.metadata_server,
            "master_server_addr": self._master,
            "protocol": self._options.protocol,
            "rdma_devices": self._options.rdma_devices,
            "global_segment_size": str(int(self._options.global_segment_size)),
            "local_buffer_size": "0",  # Mooncake's own buffer, used only by calls that copy
        }
        store = self._new_store()
        code = store.setup(settings)
        if code == 0 and self._uses_rdma:
            code = store.register_buffer(*self._arena)
        if code != 0:
            store.close()
            raise self._error("the client cannot be set up", code)
        return store

    def _connect_early(self) -> None:
        """Connect before the first use, so that the pool gets this process's memory."""
        try:
            with self._client():
                pass
        except TierError as error:
            log.warning("%s", error)

    def _disconnect(self) -> None:
        """Close the client once no call uses it; a later call opens another. The caller holds the lock."""
        self._disconnecting += 1
        self._changed.wait_for(lambda: not self._calls)
        if self._store is not None:
            if self._uses_rdma:
                self._store.unregister_buffer(self._arena[0])
            self._store.close()
            self._store = None
        self._disconnecting -= 1

    @contextmanager
    def _registered(self, store: Any, arrays: Sequence[npt.NDArray[np.uint8]]) -> Iterator[None]:
        """Register memory for one call, except memory in the arena if that is registered."""
        start, size = self._arena
        arena = range(start, start + size) if self._uses_rdma else range(0)
        outside = [array for array in arrays if array.ctypes.data not in arena]
        registered = []
        try:
            for array in outside:
                code = store.register_buffer(array.ctypes.data, array.nbytes)
                if code != 0:
                    raise self._error(f"{array.nbytes} bytes cannot be registered", code)
                registered.append(array)
            yield
        finally:
            for array in registered:
                store.unregister_buffer(array.ctypes.data)

    def _read_error(self, name: str, code: int, slot_bytes: int | None = None) -> OSError:
        if code in _MISSING:
            return FileNotFoundError(f"tier {self.name!r} does not hold {name}")
        if code == _WRONG_SIZE and slot_bytes is not None:
            return DamagedObject(f"{name}: it does not fit the slot's {slot_bytes} bytes", Damage.OVERSIZE)
        return self._error(f"{name} cannot be read", code)

    def _write_error(self, name: str, code: int) -> TierError:
        if code == _POOL_FULL:
            return TierFull(f"tier {self.name!r}: {name} cannot be written: the pool has no room")
        return self._error(f"{name} cannot be written", code)

    def _error(self, failure: str, code: int) -> TierError:
        reason = _REASONS.get(code, "Mooncake refuses")
        return TierError(f"tier {self.name!r}: {failure}: {reason} ({code}; master {self._master})")


def _key(name: str) -> str:
    check_name(name)
    return f"{PREFIX}{name}"


def _parse(tier: str, url: str) -> str:
    """Return the master's host:port.

    Raises:
        ValueError: `url` is not mooncake://<host>:<port>.
    """
    try:
        address = urlsplit(url)
        port = address.port or _PORT
    except ValueError:
        address, port = urlsplit(""), 0
    extras = address.username is not None or address.path.strip("/") or address.query or address.fragment
    if address.scheme not in TIERS["mooncake"].schemes or not address.hostname or extras:
        raise ValueError(f"tier {tier!r}: url={shown(url)!r}: want mooncake://<master's host>:<port>")
    host = f"[{address.hostname}]" if ":" in (address.hostname or "") else address.hostname
    return f"{host}:{port}"


def _options(tier: str, options: dict[str, Any]) -> MooncakeOptions:
    """Return the validated options.

    Raises:
        ValueError: an option is unknown or invalid.
    """
    try:
        return MooncakeOptions(**options)
    except ValidationError as error:
        raise ValueError(explain(error, MooncakeOptions, f"tier {tier!r}: options.")) from None


def _set_timeouts(timeout_s: float) -> None:
    """Set Mooncake's timeouts in the environment, unless they are set there.

    Transfers must end well before `_TRANSFER_TIMEOUT_S`: then calls return although a transfer may go on.
    """
    limit_s = min(timeout_s, _TRANSFER_TIMEOUT_S / 2)
    for name in ("MC_RPC_TIMEOUT_MS", "MC_RPC_CONNECT_TIMEOUT_MS"):
        os.environ.setdefault(name, str(math.ceil(1000 * limit_s)))
    for name in ("MC_TCP_STATUS_TIMEOUT_SEC", "MC_TCP_PROGRESS_TIMEOUT_SEC"):
        os.environ.setdefault(name, str(math.ceil(limit_s)))
    os.environ.setdefault("MC_STORE_CLIENT_SETUP_RETRIES", "2")
