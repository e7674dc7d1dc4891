"""OpenTelemetry spans, under the traces that requests come with; without OpenTelemetry, or a provider, none.

Spans have the context of W3C's `traceparent` and `tracestate`, which vLLM and `kvkit router` pass on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HEADERS = ("traceparent", "tracestate")


def trace_headers(headers: Mapping[str, str] | None) -> dict[str, str]:
    """Return those of a request's headers that name its trace; empty: it came without one."""
    found = {name.lower(): value for name, value in (headers or {}).items() if name.lower() in HEADERS}
    return found if "traceparent" in found else {}


def find_tracer(name: str) -> Any:
    """Return the tracer of this process's provider; None: there is no provider, or no OpenTelemetry."""
    try:
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
    except ImportError:
        return None
    provider = trace.get_tracer_provider()
    return provider.get_tracer(name) if isinstance(provider, TracerProvider) else None


def context_of(headers: Mapping[str, str]) -> Any:
    """Return the context of a trace, for a span below it."""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract(headers)
