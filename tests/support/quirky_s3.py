"""An S3 server of a few lines that does what some do: deny what is missing, refuse conditions, conflict."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar, Literal

Quirk = Literal["no list", "501", "400", "409", "409 once"]


class Handler(BaseHTTPRequestHandler):
    """Objects by path, in memory. Signatures are not looked at."""

    protocol_version = "HTTP/1.1"
    objects: ClassVar[dict[str, bytes]]
    quirk: ClassVar[Quirk]
    asked: ClassVar[Counter[str]]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.asked[self.command] += 1
        path, _, query = self.path.partition("?")
        found = self.objects.get(path)
        if "list-type" in query:
            self.says(403, "AccessDenied")
        elif found is None:
            denied = self.quirk == "no list"
            self.says(403 if denied else 404, "AccessDenied" if denied else "NoSuchKey")
        elif (asked := self.headers.get("Range")) is not None:
            first, last = asked.removeprefix("bytes=").split("-")
            part = found[int(first) : int(last) + 1]
            where = f"bytes {first}-{int(first) + len(part) - 1}/{len(found)}"
            self.answers(206, part, {"Content-Range": where})
        else:
            self.answers(200, found)

    def do_PUT(self) -> None:
        self.asked["PUT"] += 1
        path, data = self.path.partition("?")[0], self.rfile.read(int(self.headers["Content-Length"]))
        if "If-None-Match" in self.headers:
            if self.quirk in ("501", "400"):
                code = {"501": "NotImplemented", "400": "InvalidArgument"}[self.quirk]
                self.says(int(self.quirk), code)
                return
            if self.quirk == "409" or (self.quirk == "409 once" and self.asked["PUT"] == 1):
                self.says(409, "ConditionalRequestConflict")
                return
            if path in self.objects:
                self.says(412, "PreconditionFailed")
                return
        self.objects[path] = data
        self.answers(200, b"")

    def do_DELETE(self) -> None:
        self.objects.pop(self.path, None)
        self.answers(204, b"")

    def says(self, status: int, code: str) -> None:
        self.answers(status, f"<?xml version='1.0'?><Error><Code>{code}</Code></Error>".encode())

    def answers(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        more = {"ETag": '"x"', "Last-Modified": "Sat, 28 Nov 2026 00:00:00 GMT"}
        for name, value in {**more, **(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def quirky_s3(quirk: Quirk) -> Iterator[tuple[type[Handler], dict[str, str]]]:
    """The server's objects and counts of requests, and a tier's options for it."""
    handler = type("Quirky", (Handler,), {"quirk": quirk, "objects": {}, "asked": Counter()})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        keys = {"access_key_id": "known", "secret_access_key": "secret", "region": "us-east-1"}
        try:
            yield handler, keys | {"endpoint": f"http://127.0.0.1:{server.server_port}"}
        finally:
            server.shutdown()
            thread.join()
