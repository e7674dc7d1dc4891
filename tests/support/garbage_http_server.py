"""An address at which anything may answer: HTTP's bytes as told, right or wrong, on 127.0.0.1."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from http.client import parse_headers
from socketserver import StreamRequestHandler, ThreadingTCPServer
from threading import Thread
from typing import Any, Self

from kvkit.tiers.testing.contract import DEADLINE_S

WELL = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


def http(
    body: bytes, status: str = "200 OK", kind: str = "application/json", length: int | None = None
) -> bytes:
    """A response. `length`: what it says of the body's; None: what is true."""
    said = len(body) if length is None else length
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {said}"
    return head.encode() + b"\r\n\r\n" + body


def chunk(event: bytes) -> bytes:
    """An event as a chunk of a stream."""
    line = b"data: " + event + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(line), line)


def streamed(*events: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    """A stream of events, in chunks. `end`: what comes behind the last one."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(map(chunk, events)) + end


class Garbage:
    """The server; a context manager. `/health` is answered well.

    Attributes:
        answers: by path, the pieces to be sent; to a path that is not there, nothing is.
        sent: bytes of answers that went out.
        asked: paths of the requests, in order.
    """

    def __init__(self) -> None:
        self.answers: dict[str, Iterable[bytes]] = {}
        self.sent = 0
        self.asked: list[str] = []
        self._server = ThreadingTCPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(DEADLINE_S)

    def _handler(self) -> type[StreamRequestHandler]:
        served = self

        class Handler(StreamRequestHandler):
            timeout = DEADLINE_S

            def handle(self) -> None:
                with suppress(OSError, IndexError):
                    path = self.rfile.readline().split()[1].decode()
                    headers: Any = parse_headers(self.rfile)
                    self.rfile.read(int(headers.get("Content-Length", 0)))
                    if path == "/health":
                        self.wfile.write(WELL)
                        return
                    served.asked.append(path)
                    for piece in served.answers.get(path, ()):
                        self.wfile.write(piece)
                        served.sent += len(piece)

        return Handler
