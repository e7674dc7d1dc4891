"""OpenTelemetry spans, under the traces that requests come with; without OpenTelemetry, or a provider, none.

Spans have the context of W3C's `traceparent` and `tracestate`, which vLLM and `kvkit router` pass on.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

HEADERS = ("traceparent", "tracestate")


def trace_headers(headers: Mapping[str, str] | None) -> dict[str, str]:
    """Return those of a request's headers that name its trace; empty: it came without one."""
    found = {name.lower(): value for name, value in (headers or {}).items() if name.lower() in HEADERS}
    return found if "traceparent" in found else {}


def find_tracer(name: str) -> Any:
    """Return a tracer of this process's provider; None: there is no provider, or no OpenTelemetry.

    OpenTelemetry takes ids from `random`, which vLLM seeds, equally in all of its workers; so a trace that
    passes two engines would have each id twice, and collectors drop one. This tracer's ids are the system's.
    """
    try:
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.id_generator import IdGenerator
    except ImportError:
        return None

    class SystemIds(IdGenerator):
        def generate_span_id(self) -> int:
            return 1 + secrets.randbelow(2**64 - 1)

        def generate_trace_id(self) -> int:
            return 1 + secrets.randbelow(2**128 - 1)

    provider = trace.get_tracer_provider()
    if not isinstance(provider, TracerProvider):
        return None
    tracer: Any = provider.get_tracer(name)
    tracer.id_generator = SystemIds()
    return tracer


def context_of(headers: Mapping[str, str]) -> Any:
    """Return the context of a trace, for a span below it."""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract(headers)
