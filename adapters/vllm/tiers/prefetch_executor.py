"""Prefetches of one rank, for requests that wait in vLLM's queue."""

from __future__ import annotations

from kvkit.adapters.engine.prefetches import Prefetches
from kvkit.adapters.vllm.capability import Capability, WorkerContext
from kvkit.adapters.vllm.step import StepMetadata


class PrefetchExecutor(Capability):
    """The prefetches of one rank, as the scheduler requests them."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self.prefetches = Prefetches(context.cache)

    def begin_step(self, step: StepMetadata) -> None:
        for request_id in step.cancelled_prefetches:
            self.prefetches.end_request(request_id)
        for task in step.prefetches:
            namespace = self._context.namespaces.of(task.sequence)
            if namespace is not None:
                self.prefetches.add(task.request_id, task.sequence.tokens, namespace, task.computed)
        self.prefetches.start_next()

    def drop_kv(self) -> None:
        self.prefetches.end_all()

    def close(self) -> None:
        self.prefetches.end_all()
