"""Records in a cluster of Redis or Valkey servers, each of which holds the keys of some hash slots."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from kvkit.format.names import is_record
from kvkit.tiers.base import too_large
from kvkit.tiers.redis import PREFIX, RedisTier, command_packer, connection_options, key_of
from kvkit.tiers.registry import TIERS
from kvkit.tiers.settings import TierConfig

_NAMES_PER_REQUEST = 512


class RedisClusterTier(RedisTier):
    """Records as in `RedisTier`, in all servers of a cluster.

    The client asks one of the servers that the URL names for the others, and again after a failure: a replica
    may have taken over. While a slot has no server, calls for its records fail.

    Args:
        config: as for `RedisTier`, with the URL redis+cluster://<host>:<port>[,<host>:<port>...], or
            rediss+cluster://... for TLS.
    """

    def _connect(self, config: TierConfig) -> None:
        url = config.urls[0]
        self._nodes = _parse_nodes(self.name, url)
        self._address = ", ".join(f"{host}:{port}" for host, port in self._nodes)
        self._options = connection_options(config) | {"ssl": url.startswith("rediss")}
        self._packer = command_packer()
        self._connected: Any = None
        self._is_stale = False
        self._lock = threading.Lock()

    @property
    def _client(self) -> Any:
        """The client, once a server has told of the others. Raises the client's errors."""
        from redis.cluster import ClusterNode, RedisCluster

        with self._lock:
            if self._connected is not None and not self._is_stale:
                return self._connected
            if self._connected is None:
                nodes = [ClusterNode(host, port) for host, port in self._nodes]
                self._connected = RedisCluster(
                    startup_nodes=nodes, require_full_coverage=False, **self._options
                )
            else:
                self._connected.nodes_manager.initialize()
            for node in self._connected.get_nodes():  # RedisCluster takes no packer for connections
                pool = self._connected.get_redis_connection(node).connection_pool
                pool.connection_kwargs["command_packer"] = self._packer
            self._is_stale = False
            return self._connected

    def scan(self) -> Iterator[tuple[str, int]]:
        seen: set[str] = set()
        batch: list[str] = []
        with self._translate_errors("the records", "cannot be listed"):
            for key in self._client.scan_iter(match=f"{PREFIX}*", count=_NAMES_PER_REQUEST):
                name = key.decode(errors="replace").removeprefix(PREFIX)
                if is_record(name) and name not in seen:
                    seen.add(name)
                    batch.append(name)
        for first in range(0, len(batch), _NAMES_PER_REQUEST):
            names = batch[first : first + _NAMES_PER_REQUEST]
            with self._translate_errors("the records", "cannot be listed"):
                pipe = self._client.pipeline()
                for name in names:
                    pipe.strlen(key_of(name))
                sizes = pipe.execute(raise_on_error=False)
            for name, size in zip(names, sizes, strict=True):
                if isinstance(size, int) and size:
                    yield name, size

    def close(self) -> None:
        super(RedisTier, self).close()
        if self._connected is not None:
            self._connected.close()

    def _request(
        self, name: str, commands: Sequence[tuple[Any, ...]], buffers: Sequence[memoryview]
    ) -> list[int | None]:
        from redis import exceptions

        with self._translate_errors(name, "cannot be read"):
            client = self._client
            node = client.get_node_from_key(key_of(name))
            pool = client.get_redis_connection(node).connection_pool
            try:
                return self._exchange(pool, name, commands, buffers)
            except (exceptions.AskError, exceptions.TryAgainError):  # the slot moves, or has moved
                replies = [client.execute_command(*command) for command in commands]
                return [_copied(name, reply, buffer) for reply, buffer in zip(replies, buffers, strict=True)]
            except (exceptions.ConnectionError, exceptions.TimeoutError, ConnectionError, TimeoutError):
                self._is_stale = True
                raise

    def _explain_cluster(self, error: Exception) -> str:
        return f"the cluster of {self._address}: {error}"


def _copied(name: str, payload: bytes | None, buffer: memoryview) -> int | None:
    """Copy a payload to the beginning of `buffer`; return its bytes, None for nil. Mutates `buffer`."""
    if payload is None:
        return None
    if len(payload) > len(buffer):
        raise too_large(name, len(payload), len(buffer))
    buffer[: len(payload)] = payload
    return len(payload)


def _parse_nodes(tier: str, url: str) -> list[tuple[str, int]]:
    """Return host and port of each server that `url` names.

    Raises:
        ValueError: the URL is invalid, has a username, or a database, of which a cluster has one. The message
            omits the URL: it may have a password.
    """
    scheme, _, rest = url.partition("://")
    if "@" in rest:
        raise ValueError(f"tier {tier!r}: url: give username and password as settings, not in the URL")
    servers, _, database = rest.partition("/")
    wanted = (
        f"tier {tier!r}: url: want redis+cluster://<host>:<port>[,<host>:<port>...], or rediss+cluster://"
    )
    if scheme not in TIERS["redis cluster"].schemes or database not in ("", "0"):
        raise ValueError(wanted)
    found = []
    for server in servers.split(","):
        try:
            address = urlsplit(f"//{server}")
            found.append((address.hostname or "", address.port or 6379))
        except ValueError:
            raise ValueError(wanted) from None
    if not all(host for host, _ in found):
        raise ValueError(wanted)
    return found
