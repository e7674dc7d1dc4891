"""Token scores from a smaller auxiliary model: the attention of the prompt's question in its last layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvkit.blend.plan import BlendPlan

STEP_TOKENS = 512
"""Maximum tokens before the question that the model computes at once."""


class AuxiliaryModel:
    """A model that reads whole prompts, for blending methods with `NeedsAuxiliary`.

    Args:
        model: a Hugging Face causal language model. Its attention is set to "eager", which alone returns
            weights.
        tokenizers: tokenizers of the blended model and of this one (a fast one), if they differ. Scores are
            mapped between their tokens by shared characters; a token that is part of a character counts as
            the text that its tokenizer decodes it to. None: both models have the same token ids.
    """

    def __init__(self, model: Any, tokenizers: tuple[Any, Any] | None = None) -> None:
        model.set_attn_implementation("eager")
        self._model, self._tokenizers = model.eval(), tokenizers

    def __call__(self, tokens: NDArray[np.int32], plan: BlendPlan) -> NDArray[np.float32]:
        """Return the question's attention to each token, float32 [1, N], mean over heads and rows."""
        if self._tokenizers is None:
            return self._attention_to(tokens.astype(np.int64), int(plan.question_positions[0]))[None]
        model_tokenizer, own_tokenizer = self._tokenizers
        texts = model_tokenizer.batch_decode(tokens[:, None].tolist(), clean_up_tokenization_spaces=False)
        ends = np.cumsum([len(text) for text in texts])
        encoded = own_tokenizer("".join(texts), return_offsets_mapping=True)
        ids, spans = np.array(encoded["input_ids"]), np.array(encoded["offset_mapping"])
        query_ids = np.flatnonzero(spans[:, 1] > np.append(0, ends)[plan.question_positions[0]])
        attention = self._attention_to(ids, int(query_ids[0]) if len(query_ids) else len(ids) - 1)
        by_character, nonempty = np.zeros(int(ends[-1]) + 1), spans[:, 1] > spans[:, 0]
        per_character = attention[nonempty] / (spans[nonempty, 1] - spans[nonempty, 0])
        np.add.at(by_character, spans[nonempty, 0], per_character)
        np.add.at(by_character, spans[nonempty, 1], -per_character)
        cumulative = np.append(0, np.cumsum(np.cumsum(by_character)))
        return np.diff(cumulative[np.append(0, ends)]).astype(np.float32)[None]

    @torch.inference_mode()
    def _attention_to(self, ids: NDArray[np.int64], query_start: int) -> NDArray[np.float32]:
        """Return the mean attention of the tokens from `query_start` on to each token, float32 [T]."""
        inputs, cache = torch.from_numpy(ids)[None].to(self._model.device), None
        for start in range(0, query_start, STEP_TOKENS):
            step_inputs = inputs[:, start : min(start + STEP_TOKENS, query_start)]
            cache = self._model(
                step_inputs, past_key_values=cache, use_cache=True, logits_to_keep=1
            ).past_key_values
        question_inputs = inputs[:, query_start:]
        output = self._model(question_inputs, past_key_values=cache, output_attentions=True, logits_to_keep=1)
        weights = output.attentions[-1][0].float().mean((0, 1)).cpu().numpy()
        attention = np.zeros(len(ids), np.float32)
        attention[len(ids) - len(weights) :] = weights  # a sliding window covers the last tokens only
        return attention
