"""Identities for kvkit's tiers under vLLM's own offloading, which tells its tiers only the model's name."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from kvkit.adapters.vllm.identity import draft_identity, model_identity

log = logging.getLogger(__name__)

TIER_MODULE = "kvkit.adapters.vllm_tier.tier"
"""`module_path` of kvkit's secondary tier."""


def identify_tiers(vllm_config: Any) -> None:
    """Set `identity` in the settings of kvkit's secondary tiers that have none. Mutates the settings.

    With adapters it stays unset: vLLM's hashes have an adapter's path, whose files may change.
    """
    transfer = vllm_config.kv_transfer_config
    tiers = list(_own_tiers(transfer.kv_connector_extra_config if transfer else {}))
    if not tiers:
        return
    if vllm_config.lora_config is not None:
        log.warning(
            "secondary_tiers: with LoRA adapters, pages do not outlive this engine; give `identity`, a name "
            "of the contents of the weights and of all adapters"
        )
        return
    dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
    identity = " ".join([*model_identity(vllm_config), dtype, draft_identity(vllm_config)]).strip()
    for tier in tiers:
        tier["identity"] = identity


def _own_tiers(extra: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield kvkit's secondary tiers without identity, those of a `MultiConnector`'s connectors among them."""
    for tier in extra.get("secondary_tiers", ()):
        if tier.get("module_path") == TIER_MODULE and not tier.get("identity"):
            yield tier
    for connector in extra.get("connectors", ()):
        yield from _own_tiers(connector.get("kv_connector_extra_config", {}))
