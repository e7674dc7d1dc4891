"""The interface of a capability's half on the scheduler's side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvkit.adapters.vllm.request_state import RequestState
from kvkit.adapters.vllm.step import StepMetadata, Tables, WorkerReport

Scheduled = Sequence[tuple[RequestState, int]]
"""Requests that a step computes, each with its number of tokens."""
BlocksOf = Callable[[str], Tables | None]
"""Returns a request's block tables, by its id."""


class Planner:
    """One capability's part of the requests' lives and of each step's message.

    `Scheduler` calls each hook of all planners in turn. A hook mutates the planner and the request's state,
    and does nothing unless the capability overrides it.
    """

    def on_new_request(self, state: RequestState) -> None:
        """Begin a request."""

    def admit(self, state: RequestState, blocks: Tables, tokens: int) -> None:
        """Note that a request got `blocks`, and that `tokens` tokens are to be loaded into them."""

    def plan(self, step: StepMetadata, scheduled: Scheduled, blocks: BlocksOf) -> None:
        """Add this capability's tasks to the message of a step.

        Args:
            scheduled: the step's requests, without those whose KV may be older than the current epoch.
        """

    def update_from_workers(self, report: WorkerReport, requests: Mapping[str, RequestState]) -> None:
        """Apply the workers' report."""

    def request_finished(self, state: RequestState, blocks: Tables | None) -> bool:
        """Forget a request. Return whether a worker will report when its blocks may be freed.

        Args:
            blocks: None: nothing of the request is saved.
        """
        return False

    def reset(self) -> None:
        """Begin an epoch: nothing that was planned before it is stored."""
