"""Servers that never answer, answer with an error, or are not there."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@contextmanager
def deaf_server() -> Iterator[int]:
    """The port of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as deaf:
        yield deaf.getsockname()[1]


@contextmanager
def http_server(handler: Any) -> Iterator[str]:
    """The URL of a server on HTTP, in this process."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/records"
        server.shutdown()
        thread.join()


@contextmanager
def failing_server(status: int) -> Iterator[str]:
    """The URL of a server that answers everything with this status."""

    class Failing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(status)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http_server(Failing) as url:
        yield url


@contextmanager
def refusing_server(status: int) -> Iterator[str]:
    """The URL of a port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    yield f"http://127.0.0.1:{port}/records"
