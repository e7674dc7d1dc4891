"""TLS streams. They encrypt in memory, so that one thread can send while another receives."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from kvkit.handoff.transport.stream import SHORTEST_S, Stream

_PIECE_BYTES = 256 << 10
_FIRST_PIECE_BYTES = 16 << 10
_HANDSHAKE_SEND_S = 1.0


def server_context(certificate: Path, key: Path, ca: Path | None = None) -> ssl.SSLContext:
    """Return a context for listeners. With `ca`, peers must present a certificate that it signed.

    Raises:
        ValueError: a file is missing or invalid.
    """
    context = _context(ssl.PROTOCOL_TLS_SERVER, certificate, key, ca)
    if ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(ca: Path, certificate: Path | None = None, key: Path | None = None) -> ssl.SSLContext:
    """Return a context for connecting. Peers must present a certificate that `ca` signed for their host.

    Raises:
        ValueError: a file is missing or invalid.
    """
    return _context(ssl.PROTOCOL_TLS_CLIENT, certificate, key, ca)


def _context(side: int, certificate: Path | None, key: Path | None, ca: Path | None) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        if certificate is not None:
            context.load_cert_chain(certificate, key)
        if ca is not None:
            context.load_verify_locations(ca)
    except OSError as error:  # also ssl.SSLError
        raise ValueError(f"certificate={certificate}, key={key}, ca={ca}: {error}") from error
    return context


class TlsStream(Stream):
    """Stream that is encrypted by TLS.

    It is not an ssl.SSLSocket, which two threads may not use at once and which has no deadline for a call.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, server_name: str | None) -> None:
        """Wrap a socket. `server_name`: host that the certificate must name; None on the listening side."""
        super().__init__(sock)
        self._received, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._received, self._to_send, server_name is None, server_name)
        self._cipher = threading.Lock()  # for the three above; never held while waiting for the peer
        self._handshaking = threading.Lock()
        self._handshake_done = False
        self._raw = memoryview(bytearray(_FIRST_PIECE_BYTES))

    def send(self, buffers: Sequence[bytes | memoryview], deadline: float) -> None:
        self.handshake(deadline)
        for buffer in buffers:
            data = memoryview(buffer)
            for start in range(0, len(data), _PIECE_BYTES):
                with self._cipher:
                    self._tls.write(data[start : start + _PIECE_BYTES])
                    encrypted = self._to_send.read()
                super().send([encrypted], deadline)

    def read(self, buffer: memoryview, wait_s: float, flags: int = 0) -> int:
        if wait_s <= 0:
            raise TimeoutError
        deadline = time.monotonic() + wait_s
        self.handshake(deadline)
        while True:
            try:
                with self._cipher:
                    return self._tls.read(len(buffer), buffer)  # type: ignore[return-value]
            except ssl.SSLWantReadError:
                if not self._more(deadline):
                    return 0
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                return 0

    def handshake(self, deadline: float) -> None:
        """Agree on keys unless done already. May be called again after a timeout."""
        if self._handshake_done:
            return
        with self._handshaking:
            done: bool = self._handshake_done
            while not done:
                try:
                    self._tls.do_handshake()
                    done = True
                except ssl.SSLWantReadError:
                    pass
                finally:  # also alerts; they fit the socket's buffer
                    if self._to_send.pending:
                        super().send([self._to_send.read()], time.monotonic() + _HANDSHAKE_SEND_S)
                if not done and not self._more(deadline):
                    raise ConnectionError("closed before a TLS session was agreed on")
            self._handshake_done = True

    def _more(self, deadline: float) -> bool:
        """Read more ciphertext; return False at the end of the stream."""
        count = super().read(self._raw, max(deadline - time.monotonic(), SHORTEST_S))
        with self._cipher:
            self._received.write(self._raw[:count])
        if count == len(self._raw) < _PIECE_BYTES:  # records arrive: read larger pieces
            self._raw = memoryview(bytearray(_PIECE_BYTES))
        return count > 0
