"""Logits processor for vLLM that forces a given text, and records the model's predictions at each token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

FOLLOW = "kvkit_follow"
"""Key in a request's `extra_args`, with the tokens to generate and a file for their log probabilities."""

_Follow = Callable[[list[int], torch.Tensor], torch.Tensor]


class TeacherForcedText(AdapterLogitsProcessor):  # type: ignore[misc]  # vLLM is not typed for mypy
    """Force a request's tokens, and write the model's log probabilities at each, [tokens, V], to a file."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> _Follow | None:
        request = (params.extra_args or {}).get(FOLLOW)
        if request is None:
            return None
        recorded: dict[int, torch.Tensor] = {}

        def follow(output: list[int], logits: torch.Tensor) -> torch.Tensor:
            position = len(output)
            if position >= len(request["tokens"]):  # a step that vLLM scheduled past the request's end
                return logits
            recorded[position] = logits.float().log_softmax(-1).cpu()
            if position == len(request["tokens"]) - 1:
                np.save(request["file"], torch.stack([recorded[i] for i in range(position + 1)]).numpy())
            forced = torch.full_like(logits, float("-inf"))
            forced[request["tokens"][position]] = 0.0
            return forced

        return follow
