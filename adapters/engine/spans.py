"""Spans of one rank's requests, such as a lookup, for requests that come with a trace."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from kvkit.observe.tracing import context_of, find_tracer

Attributes = Mapping[str, str | int]


@dataclass(frozen=True, slots=True)
class Span:
    """A span that has begun. `end` ends it, from any thread; without a call nothing is recorded."""

    spans: RequestSpans
    request_id: str
    name: str
    trace: Mapping[str, str] | None
    began_ns: int = field(default_factory=time.time_ns)

    def end(self, **attributes: str | int) -> None:
        """End the span; attributes get the prefix `kvkit.`."""
        self.spans.record(self, time.time_ns(), attributes)


class RequestSpans:
    """Spans of the requests of one rank. Thread-safe.

    A lookup may be over before a step brings its request's trace: its span waits for that.

    Args:
        rank: rank of the worker, an attribute of each span.
    """

    def __init__(self, rank: int) -> None:
        self._tracer = find_tracer("kvkit")
        self._rank = rank
        self._lock = threading.Lock()
        self._traces: dict[str, Mapping[str, str]] = {}
        self._waiting: defaultdict[str, list[tuple[Span, int, Attributes]]] = defaultdict(list)

    def begin(self, request_id: str, name: str) -> Span:
        """Begin a span of a request."""
        with self._lock:
            return Span(self, request_id, name, self._traces.get(request_id))

    def note_traces(self, traces: Mapping[str, Mapping[str, str]]) -> None:
        """Note the traces of new requests, by request id."""
        if self._tracer is None:
            return
        with self._lock:
            self._traces.update(traces)
            waiting = [each for request_id in traces for each in self._waiting.pop(request_id, ())]
        for span, ended_ns, attributes in waiting:
            self.record(span, ended_ns, attributes)

    def record(self, span: Span, ended_ns: int, attributes: Attributes) -> None:
        """Record a span that has ended."""
        if self._tracer is None:
            return
        with self._lock:
            trace = span.trace or self._traces.get(span.request_id)
            if trace is None:
                self._waiting[span.request_id].append((span, ended_ns, attributes))
                return
        described = {"gen_ai.request.id": span.request_id, "kvkit.rank": self._rank}
        described |= {f"kvkit.{name}": value for name, value in attributes.items()}
        started = self._tracer.start_span(
            span.name, context_of(trace), start_time=span.began_ns, attributes=described
        )
        started.end(ended_ns)

    def forget(self, request_ids: Collection[str]) -> None:
        """Forget requests that are over."""
        if self._tracer is None:
            return
        with self._lock:
            for request_id in request_ids:
                self._traces.pop(request_id, None)
                self._waiting.pop(request_id, None)
