"""A proxy on 127.0.0.1 that passes connections on to a server, and spoils them on demand."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from types import TracebackType
from typing import Literal, Self

from kvkit.lab.testbed.waiting import START_S
from kvkit.tiers.testing.contract import DEADLINE_S

Spoil = Literal["", "slow", "hang", "cut", "error"]


class Proxy:
    """Passes connections on to a port of this host, and spoils them on demand. A context manager.

    Attributes:
        port: where it listens.
        spoil: what it does with what it reads next: "" passes it on; "slow" passes the server's bytes on a
            few at a time; "hang" keeps them; "cut" closes both ends in the middle of the server's answer;
            "error" answers each request itself with HTTP 503.
        denied: where it is not "": requests whose first line has this in it are answered with HTTP 403.
        requests: HTTP request lines that came through.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.1)
        self.port = self._listener.getsockname()[1]
        self.spoil: Spoil = ""
        self.denied = ""
        self.requests: list[str] = []
        self._heard = threading.Condition()
        self._closing = threading.Event()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        for thread in self._threads:
            thread.join(START_S)
        self._listener.close()

    def wait_for_requests(self, count: int) -> None:
        """Return when `count` HTTP requests have come through.

        Raises:
            AssertionError: they have not within `DEADLINE_S`.
        """
        with self._heard:
            assert self._heard.wait_for(lambda: len(self.requests) >= count, DEADLINE_S), self.requests

    def _accept(self) -> None:
        while not self._closing.is_set():
            with suppress(TimeoutError):
                client, _ = self._listener.accept()
                thread = threading.Thread(target=self._serve, args=(client,), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self, client: socket.socket) -> None:
        """One connection: what either end sends goes to the other, in turns."""
        with client, suppress(OSError), socket.create_connection(("127.0.0.1", self._target), 5) as server:
            client.settimeout(0.02)
            server.settimeout(0.02)
            while not self._closing.is_set():
                if not self._pass_request(client, server) or not self._pass_answer(server, client):
                    return

    def _pass_request(self, client: socket.socket, server: socket.socket) -> bool:
        try:
            data = client.recv(1 << 20)
        except TimeoutError:
            return True
        line, _, _ = data.partition(b"\r\n")
        if line.endswith(b"HTTP/1.1"):
            with self._heard:
                self.requests.append(line.decode())
                self._heard.notify_all()
            if self.spoil == "error":
                client.sendall(b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                return False
            if self.denied and self.denied in line.decode():
                client.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                return False
        _send(server, data)
        return bool(data)

    def _pass_answer(self, server: socket.socket, client: socket.socket) -> bool:
        try:
            data = server.recv(1 << 20)
        except TimeoutError:
            return True
        if self.spoil == "hang":
            self._closing.wait()
        elif self.spoil == "slow":
            for i in range(0, len(data), 256):
                _send(client, data[i : i + 256])
                if self._closing.wait(0.05):
                    return False
        elif self.spoil == "cut" and len(data) > 1024:
            _send(client, data[:1024])
            return False
        else:
            _send(client, data)
        return bool(data)


def _send(sock: socket.socket, data: bytes) -> None:
    """All of `data`, however slowly the other end takes it."""
    sock.settimeout(START_S)
    sock.sendall(data)
    sock.settimeout(0.02)
