"""Records in a Redis or Valkey server: an index and small-record tier that hosts share.

The server's own `maxmemory` and `maxmemory-policy` decide what is evicted. What is held is asked of the
server each time, in one round trip per `_BATCH` records.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kvkit.format.names import is_record
from kvkit.format.record import Damage
from kvkit.staging import Staging
from kvkit.tiers.base import (
    DamagedObject,
    Ranges,
    Scope,
    ThreadedTier,
    TierError,
    TierFull,
    check_scope,
    cut_short,
    default_threads,
    too_large,
)
from kvkit.tiers.folder import check_name
from kvkit.tiers.registry import TIERS
from kvkit.tiers.settings import TierConfig

if TYPE_CHECKING:
    from redis import Connection

PREFIX = "kvkit:"
"""Of every key, so that a server can be shared: what it needs of an ACL is
~kvkit:* +get +set +exists +strlen +getrange +unlink +scan +select."""

_BATCH = 512
_WRONG_TYPE = "WRONGTYPE"
_LINE_BYTES = 1 << 16
_DATABASE = re.compile("/?[0-9]*")


class RedisTier(ThreadedTier):
    """Records as string values of a Redis or Valkey server, under `PREFIX` and their names.

    Nothing is tried twice, and no wait for the server is longer than `timeout_s`. The tier opens without the
    server: what fails is each get and put.

    Args:
        url: redis://<host>:<port>/<database>, or rediss://... for TLS.
        username, password: of an ACL user; a password alone is that of the default user. Never shown.
        threads: reads and writes at a time, each on a connection of its own.
        timeout_s: how long one operation may take, in seconds.

    Raises:
        ValueError: a setting is not what it may be, and the message names the choices.
        ModuleNotFoundError: the package redis is missing.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str = "redis",
        username: str | None = None,
        password: str | None = None,
        threads: int | None = None,
        timeout_s: float = 10.0,
        scope: Scope = "node",
    ) -> None:
        check_scope(name, scope)
        where = _parse(name, url)
        from redis import ConnectionPool, Redis
        from redis.backoff import NoBackoff
        from redis.connection import Connection, SSLConnection
        from redis.retry import Retry

        super().__init__(name, default_threads() if threads is None else threads)
        self.scope = scope
        self.reads_parts = True
        self._timeout_s = timeout_s
        self._where = f"{where['host']}:{where['port']}"
        self._pool = ConnectionPool(
            connection_class=SSLConnection if url.startswith("rediss:") else Connection,
            **where,
            username=username,
            password=password,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
            protocol=2,  # no messages between replies: payloads are read from the socket
        )
        self._client = Redis(connection_pool=self._pool)

    @classmethod
    def open(cls, name: str, config: TierConfig, staging: Staging) -> RedisTier:
        """One on the server of `config`."""
        return cls(
            config.urls[0],
            name=name,
            username=config.username,
            password=config.plain_password(),
            threads=config.threads,
            timeout_s=config.timeout_s,
            scope=config.scope,
        )

    def count_leading(self, names: Sequence[str]) -> int:
        for first in range(0, len(names), _BATCH):
            with self._failing(f"{len(names)} records", "cannot be looked up"):
                pipe = self._client.pipeline(transaction=False)
                for name in names[first : first + _BATCH]:
                    pipe.exists(_key(name))
                found = pipe.execute()
            if not all(found):
                return first + int(found.index(0))
        return len(names)

    def read(self, name: str, buffer: memoryview) -> int:
        with self._failing(name, "cannot be read"), self._connection() as wire:
            wire.send("GET", _key(name))
            size = wire.receive(name, buffer)
        if size is None:
            raise FileNotFoundError(f"tier {self.name!r} does not hold {name}")
        return size

    def get_ranges(self, name: str, ranges: Ranges, buffers: Sequence[memoryview]) -> None:
        """As in `Tier`, in one round trip."""
        with self._failing(name, "cannot be read"), self._connection() as wire:
            for offset, size in ranges:
                wire.send("GETRANGE", _key(name), str(offset), str(offset + size - 1))
            counts = [
                wire.receive(name, buffer[:size]) for (_, size), buffer in zip(ranges, buffers, strict=True)
            ]
        for count, (offset, size) in zip(counts, ranges, strict=True):
            if count != size:
                if self.size(name) is None:
                    raise FileNotFoundError(f"tier {self.name!r} does not hold {name}")
                raise cut_short(name, count or 0, offset, size)

    def write(self, name: str, record: memoryview) -> None:
        with self._failing(name, "cannot be written"):
            if self._client.exists(_key(name)):
                return
            with self._connection() as wire:
                wire.send("SET", _key(name), record, "NX")
                wire.receive(name, memoryview(b""))

    def delete(self, names: Sequence[str]) -> None:
        for first in range(0, len(names), _BATCH):
            with self._failing(f"{len(names)} records", "cannot be deleted"):
                self._client.unlink(*[_key(name) for name in names[first : first + _BATCH]])

    def size(self, name: str) -> int | None:
        """As in `Tier`; None where a value of another type has the record's name."""
        try:
            with self._failing(name, "cannot be looked up"):
                return int(self._client.strlen(_key(name))) or None
        except DamagedObject:
            return None

    def scan(self) -> Iterator[tuple[str, int]]:
        cursor, seen = 0, set()
        while True:
            with self._failing("the records", "cannot be listed"):
                cursor, keys = self._client.scan(cursor, match=f"{PREFIX}*", count=_BATCH)
                names = [key.decode(errors="replace").removeprefix(PREFIX) for key in keys]
                names = [name for name in names if is_record(name) and name not in seen]
                seen.update(names)
                pipe = self._client.pipeline(transaction=False)
                for name in names:
                    pipe.strlen(_key(name))
                sizes = pipe.execute(raise_on_error=False)
            found = zip(names, sizes, strict=True)
            yield from ((name, size) for name, size in found if isinstance(size, int) and size)
            if not cursor:
                return

    def close(self) -> None:
        super().close()
        self._pool.disconnect()

    @contextmanager
    def _connection(self) -> Iterator[_Wire]:
        """A connection for raw payloads; closed after any error, for replies may still be on the way."""
        connection = self._pool.get_connection()
        try:
            wire = _Wire(connection, time.monotonic() + self._timeout_s)
            yield wire
            wire.done()
        except BaseException:
            connection.disconnect()
            raise
        finally:
            self._pool.release(connection)

    @contextmanager
    def _failing(self, what: str, how: str) -> Iterator[None]:
        """Turn the client's errors into those of tiers. None of them shows a password."""
        from redis import exceptions

        try:
            yield
        except (exceptions.OutOfMemoryError, _OutOfMemory) as error:
            raise TierFull(f"tier {self.name!r}: {what} {how}: {error}") from None
        except (exceptions.TimeoutError, TimeoutError):
            reason = f"{self._where} did not answer within timeout_s={self._timeout_s}"
        except (exceptions.AuthenticationError, exceptions.NoPermissionError) as error:
            reason = f"{self._where} refuses the username or the password: {error}"
        except exceptions.ResponseError as error:
            if str(error).startswith(_WRONG_TYPE):
                raise _foreign(what) from None
            reason = f"{self._where}: {error}"
        except exceptions.RedisError as error:
            reason = f"{self._where}: {error}"
        except TierError:
            raise
        except (ConnectionError, EOFError) as error:
            reason = f"{self._where}: {error or type(error).__name__}"
        else:
            return
        raise TierError(f"tier {self.name!r}: {what} {how}: {reason}")


class _OutOfMemory(Exception):
    """The server has no room, and may let nothing go."""


class _Wire:
    """One connection of redis-py whose payloads go from slot to socket and back without a copy.

    redis-py copies a payload two or three times, which takes almost twice as long (benchmarks/bench_s3.py).
    """

    def __init__(self, connection: Connection, deadline: float) -> None:
        self._socket: Any = connection._sock
        self._limit_s = self._socket.gettimeout()
        self._deadline = deadline
        self._ahead = bytearray()

    def done(self) -> None:
        """Leave the connection as it was found, for redis-py."""
        self._socket.settimeout(self._limit_s)

    def send(self, *parts: str | memoryview) -> None:
        """A command, its parts as they are."""
        head = bytearray(b"*%d\r\n" % len(parts))
        for part in parts:
            data = part.encode() if isinstance(part, str) else part
            head += b"$%d\r\n" % len(data)
            if isinstance(data, bytes):
                head += data
            else:
                self._socket.sendall(head)
                self._socket.sendall(data)
                head = bytearray()
            head += b"\r\n"
        self._socket.sendall(head)

    def receive(self, name: str, buffer: memoryview) -> int | None:
        """One reply: a payload, into `buffer`, and its bytes; None for nil; 0 for what has no payload.

        Raises:
            DamagedObject: it is larger than the buffer.
            TierError: the server says that something is wrong.
        """
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"-":
            message = rest.decode(errors="replace")
            if message.startswith("OOM"):
                raise _OutOfMemory(message)
            if message.startswith(_WRONG_TYPE):
                raise _foreign(name)
            raise TierError(f"{name}: the server says: {message}")
        if kind != b"$":
            return 0
        size = int(rest)
        if size < 0:
            return None
        if size > len(buffer):
            raise too_large(name, size, len(buffer))
        done = min(size, len(self._ahead))
        buffer[:done] = self._ahead[:done]
        del self._ahead[:done]
        while done < size:
            done += self._some(buffer[done:size])
        while len(self._ahead) < 2:
            self._more()
        del self._ahead[:2]
        return size

    def _line(self) -> bytes:
        while (end := self._ahead.find(b"\r\n")) < 0:
            if len(self._ahead) > _LINE_BYTES:
                raise TierError("what the server says has no end")
            self._more()
        line = bytes(self._ahead[:end])
        del self._ahead[: end + 2]
        return line

    def _more(self) -> None:
        """Read a little: what is read ahead of a payload has to be copied."""
        piece = bytearray(64)
        self._ahead += piece[: self._some(memoryview(piece))]

    def _some(self, buffer: memoryview) -> int:
        left = self._deadline - time.monotonic()
        if left <= 0:  # a server that trickles never meets a limit to single reads
            raise TimeoutError
        self._socket.settimeout(left)
        count = int(self._socket.recv_into(buffer))
        if count == 0:
            raise ConnectionError("the server closed the connection")
        return count


def _foreign(name: str) -> DamagedObject:
    return DamagedObject(f"{name}: a value of another type lies in its place", Damage.FOREIGN)


def _key(name: str) -> str:
    check_name(name)
    return f"{PREFIX}{name}"


def _parse(tier: str, url: str) -> dict[str, Any]:
    """Host, port and database of `url`.

    Raises:
        ValueError: it has none, or has a password. The message does not show the URL, for the same reason.
    """
    try:
        parts = urlsplit(url)
        port = parts.port or 6379
        named = parts.username or parts.password
        wrong = (
            parts.scheme not in TIERS["redis"].schemes
            or not parts.hostname
            or bool(parts.query or parts.fragment)
        )
    except ValueError:
        named, wrong = None, True
    if named:
        raise ValueError(f"tier {tier!r}: url: give username and password as settings, not in the URL")
    if wrong:
        raise ValueError(f"tier {tier!r}: url: want redis://<host>:<port>/<database>, or rediss://...")
    if _DATABASE.fullmatch(parts.path) is None:
        raise ValueError(
            f"tier {tier!r}: url: want a number for the database, redis://<host>:<port>/<database>"
        )
    return {"host": parts.hostname, "port": port, "db": int(parts.path[1:] or 0)}
