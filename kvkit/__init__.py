"""kvkit: compute an LLM's KV cache once, use it everywhere. Start reading at `kvkit.cache`.

Importing it imports nothing else: each name below is imported from its module on first access.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__all__ = ["Cache", "Hit", "Policy", "RequestPolicy", "SequencePages", "Tier", "load_config", "open_cache"]

if TYPE_CHECKING:
    from kvkit.cache import Cache
    from kvkit.config import load_config, open_cache
    from kvkit.tiers.base import Tier
    from kvkit.transfer.policy import Policy, RequestPolicy
    from kvkit.transfer.sequence import Hit, SequencePages
else:
    _HOMES = {
        "Cache": "cache",
        "Hit": "transfer.sequence",
        "Policy": "transfer.policy",
        "RequestPolicy": "transfer.policy",
        "SequencePages": "transfer.sequence",
        "Tier": "tiers.base",
        "load_config": "config",
        "open_cache": "config",
    }

    def __getattr__(name):
        if name not in _HOMES:
            raise AttributeError(f"module 'kvkit' has no attribute {name!r}")
        return getattr(import_module(f"kvkit.{_HOMES[name]}"), name)

    def __dir__():
        return sorted([*globals(), *__all__])
