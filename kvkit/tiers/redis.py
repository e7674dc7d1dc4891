"""Records in a Redis or Valkey server, which hosts can share: a tier for small records.

The server's own `maxmemory` and `maxmemory-policy` control eviction. A lookup asks the server, in one round
trip per 512 records.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BufferedReader, RawIOBase
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kvkit.format.names import is_record
from kvkit.format.record import Damage
from kvkit.staging import Staging
from kvkit.tiers.base import (
    DamagedObject,
    Ranges,
    ThreadedTier,
    TierError,
    TierFull,
    cut_short,
    default_threads,
    too_large,
)
from kvkit.tiers.folder import check_name
from kvkit.tiers.registry import TIERS
from kvkit.tiers.settings import TierConfig, tier_at

if TYPE_CHECKING:
    from redis import Connection

PREFIX = "kvkit:"
"""Prefix of every key, so that other programs can use the same server.

The tier needs these ACL permissions: ~kvkit:* +get +set +exists +strlen +getrange +unlink +scan +select."""

_NAMES_PER_REQUEST = 512
_LINE_BYTES = 1 << 16
_COPIED_BYTES = 1 << 12  # up to this size, parts of commands are copied into one buffer
_AHEAD_BYTES = 64  # small, as bytes read ahead of a payload must be copied
_DATABASE = re.compile("/?[0-9]*")


class RedisTier(ThreadedTier):
    """Records as string values of a Redis or Valkey server, under `PREFIX` and their names.

    There are no retries, and no wait for the server exceeds `timeout_s`. The tier opens without the server;
    until the server answers, each get and put fails.

    Args:
        config: settings, or the URL alone: redis://<host>:<port>/<database>, or rediss://... for TLS. Up to
            `threads` reads and writes run in parallel, with a connection each.

    Raises:
        ValueError: a setting is invalid; the message names the choices.
        ModuleNotFoundError: the package redis is missing.
    """

    reads_ranges = True

    def __init__(self, config: TierConfig | str, name: str = "redis") -> None:
        if isinstance(config, str):
            config = tier_at(config)
        super().__init__(name, config.threads or default_threads())
        self.scope = config.scope
        self._timeout_s = config.timeout_s
        self._connect(config)

    def _connect(self, config: TierConfig) -> None:
        """Prepare the client; connects nowhere yet."""
        address = _parse(self.name, config.urls[0])
        from redis import ConnectionPool, Redis
        from redis.connection import Connection, SSLConnection

        self._address = f"{address['host']}:{address['port']}"
        self._pool = ConnectionPool(
            connection_class=SSLConnection if config.urls[0].startswith("rediss:") else Connection,
            **address,
            **connection_options(config),
            command_packer=command_packer(),
        )
        self._client = Redis(connection_pool=self._pool)

    @classmethod
    def open(cls, name: str, config: TierConfig, staging: Staging) -> RedisTier:
        return cls(config, name)

    def match_prefix(self, names: Sequence[str]) -> int:
        for first in range(0, len(names), _NAMES_PER_REQUEST):
            with self._translate_errors(f"{len(names)} records", "cannot be looked up"):
                pipe = self._client.pipeline(transaction=False)
                for name in names[first : first + _NAMES_PER_REQUEST]:
                    pipe.exists(key_of(name))
                held = pipe.execute()
            if not all(held):
                return first + int(held.index(0))
        return len(names)

    def read(self, name: str, buffer: memoryview) -> int:
        (size,) = self._request(name, [("GET", key_of(name))], [buffer])
        if size is None:
            raise FileNotFoundError(f"tier {self.name!r} does not hold {name}")
        return size

    def get_ranges(self, name: str, ranges: Ranges, buffers: Sequence[memoryview]) -> None:
        """Read parts of one record, as in `Tier`, in one round trip."""
        commands = [("GETRANGE", key_of(name), offset, offset + size - 1) for offset, size in ranges]
        targets = [buffer[:size] for (_, size), buffer in zip(ranges, buffers, strict=True)]
        for count, (offset, size) in zip(self._request(name, commands, targets), ranges, strict=True):
            if count != size:
                if self.size(name) is None:
                    raise FileNotFoundError(f"tier {self.name!r} does not hold {name}")
                raise cut_short(name, count or 0, offset, size)

    def write(self, name: str, record: memoryview) -> None:
        with self._translate_errors(name, "cannot be written"):
            if not self._client.exists(key_of(name)):
                self._client.set(key_of(name), record, nx=True)

    def delete(self, names: Sequence[str]) -> None:
        for first in range(0, len(names), _NAMES_PER_REQUEST):
            with self._translate_errors(f"{len(names)} records", "cannot be deleted"):
                pipe = self._client.pipeline(transaction=False)
                for name in names[first : first + _NAMES_PER_REQUEST]:
                    pipe.unlink(key_of(name))
                pipe.execute()

    def size(self, name: str) -> int | None:
        """Return the bytes of a record; None if it is missing, or a value of another type has its key."""
        try:
            with self._translate_errors(name, "cannot be looked up"):
                return int(self._client.strlen(key_of(name))) or None
        except DamagedObject:
            return None

    def scan(self) -> Iterator[tuple[str, int]]:
        cursor, seen = 0, set()
        while True:
            with self._translate_errors("the records", "cannot be listed"):
                cursor, keys = self._client.scan(cursor, match=f"{PREFIX}*", count=_NAMES_PER_REQUEST)
                names = [key.decode(errors="replace").removeprefix(PREFIX) for key in keys]
                names = [name for name in names if is_record(name) and name not in seen]
                seen.update(names)
                pipe = self._client.pipeline(transaction=False)
                for name in names:
                    pipe.strlen(key_of(name))
                sizes = pipe.execute(raise_on_error=False)
            for name, size in zip(names, sizes, strict=True):
                if isinstance(size, int) and size:
                    yield name, size
            if not cursor:
                return

    def close(self) -> None:
        super().close()
        self._pool.disconnect()

    def _request(
        self, name: str, commands: Sequence[tuple[Any, ...]], buffers: Sequence[memoryview]
    ) -> list[int | None]:
        """Send commands and read each reply's payload into its buffer; return the bytes, None for nil.

        Mutates `buffers`.
        """
        with self._translate_errors(name, "cannot be read"):
            return self._exchange(self._pool, name, commands, buffers)

    def _exchange(
        self, pool: Any, name: str, commands: Sequence[tuple[Any, ...]], buffers: Sequence[memoryview]
    ) -> list[int | None]:
        """Do what `_request` says over a connection of `pool`. Raises the client's errors.

        This bypasses redis-py, which copies a payload two or three times and takes almost twice as long
        (benchmarks/micro/bench_s3.py). Mutates `buffers`.
        """
        deadline = time.monotonic() + self._timeout_s
        connection = pool.get_connection()
        try:
            for command in commands:
                connection.send_command(*command)
            reader = BufferedReader(_Incoming(connection._sock, deadline), _AHEAD_BYTES)
            sizes = [_receive(connection, reader, name, buffer) for buffer in buffers]
            connection._sock.settimeout(self._timeout_s)
        except BaseException:
            connection.disconnect()  # replies may still arrive
            raise
        finally:
            pool.release(connection)
        return sizes

    @contextmanager
    def _translate_errors(self, subject: str, failure: str) -> Iterator[None]:
        """Raise tier errors, which show no password, in place of the client's errors."""
        from redis import exceptions

        try:
            yield
        except exceptions.OutOfMemoryError as error:
            raise TierFull(f"tier {self.name!r}: {subject} {failure}: {error}") from None
        except (exceptions.TimeoutError, TimeoutError):
            reason = f"{self._address} did not answer within timeout_s={self._timeout_s}"
        except (exceptions.AuthenticationError, exceptions.NoPermissionError) as error:
            reason = f"{self._address} refuses the username or the password: {error}"
        except (exceptions.AskError, exceptions.ClusterDownError) as error:
            reason = self._explain_cluster(error)
        except exceptions.ResponseError as error:
            if str(error).startswith("WRONGTYPE"):
                reason = f"{subject}: a value of another type has its key"
                raise DamagedObject(reason, Damage.FOREIGN) from None
            reason = f"{self._address}: {error}"
        except (exceptions.RedisError, exceptions.RedisClusterException) as error:
            reason = f"{self._address}: {error}"
        except TierError:
            raise
        except (ConnectionError, EOFError) as error:
            reason = f"{self._address}: {str(error) or type(error).__name__}"
        else:
            return
        raise TierError(f"tier {self.name!r}: {subject} {failure}: {reason}")

    def _explain_cluster(self, error: Exception) -> str:
        """Return why a server of a cluster did not answer for a key."""
        return (
            f"{self._address} is part of a Redis Cluster, where each server holds some of the keys; want "
            f"redis+cluster://{self._address}"
        )


def connection_options(config: TierConfig) -> dict[str, Any]:
    """Return the arguments of connections: no retries, and no wait beyond `timeout_s`."""
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    return {
        "username": config.username,
        "password": config.plain_password(),
        "socket_timeout": config.timeout_s,
        "socket_connect_timeout": config.timeout_s,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,  # no push messages between replies: payloads are read from the socket
    }


def command_packer() -> Any:
    """Return what sends a payload from its slot; hiredis, the default if it is installed, copies it."""
    from redis.connection import Encoder, PythonRespSerializer

    return PythonRespSerializer(_COPIED_BYTES, Encoder("utf-8", "strict", False).encode)


class _Incoming(RawIOBase):
    """Data that a socket receives before a deadline.

    Timeouts of single reads do not suffice: a server that sends a byte now and then never exceeds them.
    """

    def __init__(self, socket: Any, deadline: float) -> None:
        self._socket, self._deadline = socket, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        remaining_s = self._deadline - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError
        self._socket.settimeout(remaining_s)
        return int(self._socket.recv_into(buffer))


def _receive(
    connection: Connection, reader: BufferedReader[Any], name: str, buffer: memoryview
) -> int | None:
    """Receive the payload of one reply into `buffer`; return its bytes, None for nil. Mutates `buffer`.

    Raises:
        DamagedObject: the payload is larger than the buffer.
        RedisError: the server reports an error.
        ConnectionError: the server closed the connection, or sent a line without an end.
    """
    line = reader.readline(_LINE_BYTES)
    if not line.endswith(b"\r\n"):
        raise ConnectionError("the server closed the connection, or sent a line without an end")
    if line[:1] == b"-":
        raise connection._parser.parse_error(line[1:-2].decode(errors="replace"))
    size = int(line[1:])
    if size < 0:
        return None
    if size > len(buffer):
        raise too_large(name, size, len(buffer))
    if reader.readinto(buffer[:size]) < size or len(reader.read(2)) < 2:
        raise ConnectionError("the server closed the connection")
    return size


def key_of(name: str) -> str:
    check_name(name)
    return f"{PREFIX}{name}"


def _parse(tier: str, url: str) -> dict[str, Any]:
    """Return host, port and database of `url`.

    Raises:
        ValueError: the URL is invalid or has a username. The message omits the URL: it may have a password.
    """
    try:
        address = urlsplit(url)
        port = address.port or 6379
    except ValueError:
        address, port = urlsplit(""), 0
    if address.username:
        raise ValueError(f"tier {tier!r}: url: give username and password as settings, not in the URL")
    extras = address.query or address.fragment
    if address.scheme not in TIERS["redis"].schemes or not address.hostname or extras:
        raise ValueError(f"tier {tier!r}: url: want redis://<host>:<port>/<database>, or rediss://...")
    if _DATABASE.fullmatch(address.path) is None:
        raise ValueError(
            f"tier {tier!r}: url: want a number for the database, redis://<host>:<port>/<database>"
        )
    return {"host": address.hostname, "port": port, "db": int(address.path[1:] or 0)}
