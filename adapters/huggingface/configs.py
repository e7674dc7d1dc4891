"""Entries of a Hugging Face config that affect a model's KV."""

from __future__ import annotations

import json
from typing import Any

NOT_KV = ("_name_or_path", "_commit_hash", "transformers_version", "dtype", "torch_dtype")
"""Entries that do not affect KV, or are in the namespace already."""


def described(config: Any) -> dict[str, Any]:
    """Return the entries that may affect KV, overrides included (RoPE scaling, windows)."""
    return {name: value for name, value in config.to_dict().items() if name not in NOT_KV}


def stable_json(value: Any) -> bytes:
    """Return JSON with sorted keys, of any or mixed types; values without a JSON form become their `str`."""
    return json.dumps(_sorted(value), default=str).encode()


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        named = {key if isinstance(key, (str, int, float)) else str(key): value[key] for key in value}
        names = sorted(named, key=lambda name: (type(name).__name__, name))
        return {name: _sorted(named[name]) for name in names}
    return [_sorted(item) for item in value] if isinstance(value, (list, tuple)) else value
