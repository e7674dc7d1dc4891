"""Shapes of models' KV and heads, from options or a Hugging Face config; problems are made from them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from kvkit.format.layout import KVLayout, LayerGroup
from kvkit.kernels.checks import FLOATS


class ShapeError(ValueError):
    """An impossible model shape. Names the setting, its value and what is expected."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Model shape that the kernels' problems depend on; the defaults are Llama-3.1-8B's.

    Args:
        heads, kv_heads: number of heads of queries, and of K and V; groups are of equal size.
        head, v_head: channels of a head of K, and of V (0: as many as K).
        latent: channels of an MLA latent; 0: none. V is so many first channels of K, of one KV head.
        layers: number of layers.
        block: tokens of a page.
        dtype: torch's name of the dtype.
        window: tokens of a sliding window; 0: none.
        softcap: soft-cap of the scores; 0: none.
        rotary: rotary channels (0: all; for MLA, those after the latent).
        name: name of the model, for output.

    Raises:
        ShapeError: the values do not fit together.
    """

    heads: int = 32
    kv_heads: int = 8
    head: int = 128
    v_head: int = 0
    latent: int = 0
    layers: int = 32
    block: int = 16
    dtype: str = "bfloat16"
    window: int = 0
    softcap: float = 0.0
    rotary: int = 0
    name: str = ""

    def __post_init__(self) -> None:
        for name in ("heads", "kv_heads", "head", "layers", "block"):
            if getattr(self, name) < 1:
                raise ShapeError(f"{name}={getattr(self, name)}: want at least 1")
        for name in ("v_head", "latent", "window", "softcap", "rotary"):
            if getattr(self, name) < 0:
                raise ShapeError(f"{name}={getattr(self, name)}: want at least 0")
        if self.heads % self.kv_heads:
            raise ShapeError(f"heads={self.heads}: want a multiple of kv_heads={self.kv_heads}")
        if self.latent and (self.latent >= self.head or self.kv_heads != 1):
            raise ShapeError(f"latent={self.latent}: want less than head={self.head}, and kv_heads=1")
        if self.rotary % 2 or self.rotary > self.head - self.latent:
            raise ShapeError(f"rotary={self.rotary}: want an even number, at most {self.head - self.latent}")
        if self.dtype not in FLOATS:
            raise ShapeError(f"dtype={self.dtype}: want one of {', '.join(FLOATS)}")

    def __str__(self) -> str:
        """Return the name, and the fields that differ from the defaults."""
        items = ((field.name, getattr(self, field.name), field.default) for field in fields(self))
        changed = [f"{name}={value}" for name, value, default in items if value != default and name != "name"]
        return " ".join([self.name, *changed] if self.name else changed) or "Llama-3.1-8B"

    @property
    def torch_dtype(self) -> torch.dtype:
        """Dtype of K, V and queries."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def v_size(self) -> int:
        """Channels of V in attention."""
        return self.latent or self.v_head or self.head

    def group(self) -> LayerGroup:
        """Return the layer group of the model's pages."""
        return LayerGroup(
            tuple(range(self.layers)),
            kv_heads=self.kv_heads,
            k_size=self.head,
            v_size=0 if self.latent else self.v_size,
            dtype=self.dtype,
            block_tokens=self.block,
        )


def with_settings(shape: ModelShape, text: str) -> ModelShape:
    """Return `shape` with some fields replaced, as in heads=32,kv_heads=4,head=96.

    Raises:
        ShapeError: a field is unknown, its value has another type, or the fields do not fit together.
    """
    known = {field.name: type(field.default) for field in fields(shape)}
    settings: dict[str, Any] = {}
    for setting in filter(None, map(str.strip, text.split(","))):
        name, _, value = setting.partition("=")
        if name not in known:
            raise ShapeError(f"{setting}: no such setting; want some of {', '.join(known)}")
        try:
            settings[name] = msgspec.convert(value, known[name], strict=False)
        except msgspec.ValidationError as error:
            raise ShapeError(f"{setting}: want {known[name].__name__}") from error
    return replace(shape, **settings)


def shapes_of(model: str) -> tuple[ModelShape, ...]:
    """Return the shapes of a model's layers: one, or one for each sliding window of its layers.

    Args:
        model: a Hugging Face config file, its folder, or a model's id on the hub, with a config in the local
            cache or to download.

    Raises:
        ShapeError: there is no such config, its KV is of another kind, or transformers is missing.
        kvkit.format.layout.LayoutError: the config lacks values.
    """
    try:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(model)
    except ImportError as error:
        raise ShapeError(f"{model}: reading it needs transformers: {error}") from error
    except Exception as error:  # transformers' configs raise many types
        message = " ".join(str(error).split())[:300]
        raise ShapeError(f"{model}: want a config.json, its folder or a hub id: {message}") from error
    text = config.get_text_config()
    dtype = str(getattr(text, "dtype", None) or "bfloat16").removeprefix("torch.")
    latent = getattr(text, "kv_lora_rank", None) or 0
    rope = getattr(text, "rope_parameters", None) or {}
    partial = getattr(text, "partial_rotary_factor", None) or rope.get("partial_rotary_factor") or 1
    return tuple(
        ModelShape(
            heads=text.num_attention_heads,
            kv_heads=group.kv_heads,
            head=group.k_size,
            v_head=group.v_size,
            latent=latent,
            layers=len(group.layers),
            dtype=dtype,
            window=group.window or 0,
            softcap=getattr(text, "attn_logit_softcapping", None) or 0.0,
            rotary=0 if latent else int(group.k_size * partial),
            name=Path(model).parent.name if model.endswith(".json") else Path(model).name,
        )
        for group in KVLayout.from_config(config, dtype=dtype).groups
    )
