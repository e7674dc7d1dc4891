"""What a Hugging Face config says of a model's KV."""

from __future__ import annotations

from typing import Any

_NOT_KV = ("_name_or_path", "_commit_hash", "transformers_version", "dtype", "torch_dtype")
"""Entries that say nothing about KV, or are in the namespace already."""


def described(config: Any) -> dict[str, Any]:
    """The entries that may decide KV, with what was overridden (RoPE scaling, windows)."""
    return {name: value for name, value in config.to_dict().items() if name not in _NOT_KV}
