"""Channels over TCP, with optional TLS; payloads are received directly into their slots."""

from __future__ import annotations

import socket
import ssl
import time

from kvkit.handoff.transport.channel import BACKLOG, Channel, Listener, connecting
from kvkit.handoff.transport.stream import Stream
from kvkit.handoff.transport.tls import TlsStream


class TcpListener(Listener):
    """Listening socket, with TLS if a context is given."""

    def __init__(self, host: str, port: int, timeout_s: float, tls: ssl.SSLContext | None) -> None:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        sock = socket.create_server((host, port), family=family, backlog=BACKLOG)
        super().__init__(sock, f"tcp://{name(sock.getsockname())}", timeout_s)
        self._tls = tls

    def _channel(self, connection: socket.socket) -> Channel:
        peer = name(connection.getpeername())
        tune(connection, self._timeout_s)
        stream = Stream(connection) if self._tls is None else TlsStream(connection, self._tls, None)
        return Channel(stream, peer=peer, timeout_s=self._timeout_s)


def connect(host: str, port: int, timeout_s: float, tls: ssl.SSLContext | None) -> Channel:
    """Return a channel to the endpoint that listens at `host` and `port`.

    Raises:
        ChannelError: no endpoint listens there, it did not answer within `timeout_s` seconds, or its
            certificate is not valid for `host`.
    """
    address = f"tcp://{name((host, port))}"
    stream = open_stream(address, host, port, timeout_s, tls)
    return Channel(stream, peer=address, timeout_s=timeout_s)


def open_stream(address: str, host: str, port: int, timeout_s: float, tls: ssl.SSLContext | None) -> Stream:
    """Connect to `host` and `port`; errors name `address`.

    Raises:
        ChannelError: as `connect`.
    """
    deadline = time.monotonic() + timeout_s
    with connecting(address):
        sock = socket.create_connection((host, port), timeout_s)
        try:
            tune(sock, timeout_s)
            stream = Stream(sock)
            if tls is not None:
                stream = TlsStream(sock, tls, host)
                stream.handshake(deadline)
        except BaseException:
            sock.close()
            raise
    return stream


def name(address: tuple[object, ...]) -> str:
    """Return host:port as in a URL."""
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"


def tune(sock: socket.socket, timeout_s: float) -> None:
    """Send small frames at once, and detect within about `timeout_s` that the peer's host is gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    interval_s = max(1, int(timeout_s / 3))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, interval_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(timeout_s * 1000)))
