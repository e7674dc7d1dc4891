"""A collector of OpenTelemetry spans: the server that OTLP over HTTP is sent to."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Collection
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from kvkit.lab.testbed.waiting import wait_for
from kvkit.tiers.testing.contract import DEADLINE_S

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
"""The header of a client's trace, from the specification's example."""
PROTOCOL = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_BSP_SCHEDULE_DELAY": "50"}
"""Environment of a process that sends spans here, and soon."""


@dataclass(frozen=True)
class Received:
    """A span that came in."""

    name: str
    trace: str
    id: str
    parent: str
    attributes: dict[str, Any]
    began_ns: int
    ended_ns: int
    failed: bool


class Collector:
    """The server, on a free port; a context manager."""

    def __init__(self) -> None:
        self._spans: list[Received] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(DEADLINE_S)

    def spans(self, names: Collection[str]) -> dict[str, Received]:
        """The spans with these names, once each has come: of each name the first."""
        wait_for(lambda: set(names) <= {span.name for span in self._spans})
        return {span.name: span for span in reversed(self._spans) if span.name in names}

    def names(self) -> list[str]:
        """Names of all spans so far."""
        return [span.name for span in self._spans]

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        received = self._spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    data = gzip.decompress(data)
                asked = ExportTraceServiceRequest.FromString(data)
                for resource in asked.resource_spans:
                    for scope in resource.scope_spans:
                        received.extend(map(_received, scope.spans))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        return Handler


def _received(span: Any) -> Received:
    attributes = {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}
    return Received(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        attributes,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        span.status.code == 2,
    )
