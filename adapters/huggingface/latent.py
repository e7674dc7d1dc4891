"""The layers of DeepSeek-like models, whose KV is a latent per token (MLA), as a decoder that blends.

DeepSeek-AI, "DeepSeek-V2", https://arxiv.org/abs/2405.04434. The up-projections are multiplied into queries
and outputs, so that attention has one KV head: its K is the latent and the rotary channels, its V the latent.
A latent does not depend on its position: to move a token, the rotary channels alone are turned.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvkit.adapters.huggingface.blended import HuggingFaceDecoder
from kvkit.adapters.huggingface.growing import GrowingCache
from kvkit.blend.run import Attention, PagedKV
from kvkit.format.rope import Rope
from kvkit.kernels.attention.layer import Scoring
from kvkit.kernels.pages import reference


class LatentDecoder(HuggingFaceDecoder):
    """The layers of a causal language model with latent attention, as a `kvkit.blend.run.Decoder`.

    transformers keeps the latent as K, [B, 1, T, R], and the rotary channels as V, [B, 1, T, P]. The
    constructor verifies the layers as `HuggingFaceDecoder` does.

    Raises:
        BlendError: the model is of another kind; the message names its type and what differs.
    """

    _ATTENTION = ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj", "scaling")

    def attention(self, layer: int) -> Attention:
        return Attention(self._page_rope(), Scoring(float(self.base.layers[layer].self_attn.scaling)))

    def qkv(self, layer: int, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        block = self.base.layers[layer]
        attention, x = block.self_attn, block.input_layernorm(h)
        if attention.q_lora_rank is None:
            q = attention.q_proj(x)
        else:
            q = attention.q_b_proj(attention.q_a_layernorm(attention.q_a_proj(x)))
        sizes = [attention.qk_nope_head_dim, attention.qk_rope_head_dim]
        q_latent, q_rotary = q.unflatten(-1, (-1, sum(sizes))).split(sizes, -1)
        q_latent = torch.einsum("mhn,hnr->mhr", q_latent, self._up_projections(attention)[0])
        latent, k_rotary = attention.kv_a_proj_with_mqa(x).split([attention.kv_lora_rank, sizes[1]], -1)
        latent = attention.kv_a_layernorm(latent)[:, None]
        q_rotary, k_rotary = self._in_order(q_rotary), self._in_order(k_rotary[:, None])
        return torch.cat([q_latent, q_rotary], -1), torch.cat([latent, k_rotary], -1), latent

    def post(self, layer: int, h: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
        _, v_up = self._up_projections(self.base.layers[layer].self_attn)
        return super().post(layer, h, torch.einsum("mhr,hvr->mhv", o, v_up))

    def pages(self, kv: GrowingCache) -> PagedKV:
        """Return pages with copies of a cache's latents and rotary channels."""
        layers = [(torch.cat([layer.room_k, layer.room_v], -1), layer.room_k.clone()) for layer in kv.layers]
        return PagedKV(layers, np.zeros(1, np.int64))

    def write_back(self, pages: PagedKV, kv: GrowingCache) -> None:
        for (k, v), layer in zip(pages.layers, kv.layers, strict=True):
            layer.room_k.copy_(v)
            layer.room_v.copy_(k[..., v.shape[-1] :])

    def moved(
        self, k: torch.Tensor, v: torch.Tensor, shifts: NDArray[np.int64]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        table = torch.from_numpy(self.rope.delta_table(shifts)).to(k.device)
        return k, reference.rotate(v, table, self.rope)

    def _verify_parts(self, attention: Any) -> int:
        self._require(attention, *self._ATTENTION)
        return int(attention.qk_rope_head_dim)

    def _page_rope(self) -> Rope:
        """Return the rope of pages, where the rotary channels follow the latent."""
        first = int(self.base.layers[0].self_attn.kv_lora_rank)
        return Rope(self.rope.inv_freq, self.rope.interleaved, first, self.rope.scale)

    def _in_order(self, rotary: torch.Tensor) -> torch.Tensor:
        """Return rotary channels in the order in which the model caches them."""
        if self.rope.interleaved or not getattr(
            self.base.layers[0].self_attn.config, "rope_interleave", False
        ):
            return rotary
        return torch.cat([rotary[..., 0::2], rotary[..., 1::2]], -1)

    def _up_projections(self, attention: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the up-projections of keys [Hq, N, R] and values [Hq, Dv, R] of a layer."""
        sizes = [attention.qk_nope_head_dim, attention.v_head_dim]
        weight = attention.kv_b_proj.weight.unflatten(0, (-1, sum(sizes)))
        k_up, v_up = weight.split(sizes, 1)
        return k_up, v_up


def decoder_of(model: Any) -> HuggingFaceDecoder:
    """Return a decoder of a Llama-like model, or of one with latent attention.

    Raises:
        BlendError: the model is of another kind.
    """
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "kv_lora_rank", None):
        return LatentDecoder(model)
    return HuggingFaceDecoder(model)
