"""Spans of the router's requests: the whole, the lookup, and the hop to each engine, which gets its trace."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kvkit.observe.tracing import context_of, trace_headers
from kvkit.settings import ConfigError

_PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"  # as vLLM reads it


class Traces:
    """Where spans go to: an OTLP endpoint, as vLLM's `--otlp-traces-endpoint`.

    Args:
        endpoint: URL of the endpoint; None: there are no spans.

    Raises:
        ConfigError: OpenTelemetry is missing, or its protocol is unknown.
    """

    def __init__(self, endpoint: str | None) -> None:
        self._provider = None if endpoint is None else _open_provider(endpoint)
        self._tracer: Any = self._provider and self._provider.get_tracer("kvkit.router")

    @contextmanager
    def span(
        self, name: str, headers: Mapping[str, str], **attributes: str | int
    ) -> Iterator[dict[str, str]]:
        """Span what runs inside, below the trace of `headers` or as a new trace.

        Yields the headers for requests below the span: `headers` with its trace in place of theirs.
        """
        if self._tracer is None:
            yield dict(headers)
            return
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        described = {f"kvkit.{key}": value for key, value in attributes.items()}
        context = context_of(trace_headers(headers))
        with self._tracer.start_as_current_span(name, context, attributes=described):
            below: dict[str, str] = {}
            TraceContextTextMapPropagator().inject(below)
            yield {key: value for key, value in headers.items() if key.lower() not in below} | below

    def close(self) -> None:
        """Send what was not sent yet. May wait for the endpoint, some seconds at most."""
        if self._provider is not None:
            self._provider.shutdown()


def _open_provider(endpoint: str) -> Any:
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            f"otlp_traces_endpoint = {endpoint!r}: {error.name} is missing: pip install 'kvkit-llm[tracing]'"
        ) from error
    protocol = os.environ.get(_PROTOCOL, "grpc")
    if protocol not in ("grpc", "http/protobuf"):
        raise ConfigError(f"{_PROTOCOL} = {protocol!r}: want grpc or http/protobuf")
    exporter = GrpcExporter(endpoint, insecure=True) if protocol == "grpc" else HttpExporter(endpoint)
    provider = TracerProvider(resource=Resource.create({"service.name": "kvkit-router"}))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider
