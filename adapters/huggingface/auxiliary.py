"""Token scores from a smaller auxiliary model: the question's attention in its last layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvkit.blend.plan import BlendPlan

PART_TOKENS = 512


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
            return self._paid(tokens.astype(np.int64), int(plan.question[0]))[None]
        theirs, own = self._tokenizers
        pieces = theirs.batch_decode(tokens[:, None].tolist(), clean_up_tokenization_spaces=False)
        ends = np.cumsum([len(piece) for piece in pieces])
        read = own("".join(pieces), return_offsets_mapping=True)
        ids, spans = np.array(read["input_ids"]), np.array(read["offset_mapping"])
        asked = np.flatnonzero(spans[:, 1] > np.append(0, ends)[plan.question[0]])
        paid = self._paid(ids, int(asked[0]) if len(asked) else len(ids) - 1)
        by_character, wide = np.zeros(int(ends[-1]) + 1), spans[:, 1] > spans[:, 0]
        each = paid[wide] / (spans[wide, 1] - spans[wide, 0])
        np.add.at(by_character, spans[wide, 0], each)
        np.add.at(by_character, spans[wide, 1], -each)
        upto = np.append(0, np.cumsum(np.cumsum(by_character)))
        return np.diff(upto[np.append(0, ends)]).astype(np.float32)[None]

    @torch.inference_mode()
    def _paid(self, ids: NDArray[np.int64], question: int) -> NDArray[np.float32]:
        """Return the mean attention of the tokens from `question` on to each token, float32 [T]."""
        given, cache = torch.from_numpy(ids)[None].to(self._model.device), None
        for start in range(0, question, PART_TOKENS):
            part = given[:, start : min(start + PART_TOKENS, question)]
            cache = self._model(part, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values
        asked = given[:, question:]
        made = self._model(asked, past_key_values=cache, output_attentions=True, logits_to_keep=1)
        last = made.attentions[-1][0].float().mean((0, 1)).cpu().numpy()
        paid = np.zeros(len(ids), np.float32)
        paid[len(ids) - len(last) :] = last  # a sliding window covers the last tokens only
        return paid
