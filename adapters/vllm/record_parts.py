"""Whether an engine's ranks load slices of records, as they do with more ranks than `record_ranks`."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_cache_interface import KVCacheSpec

from kvkit.adapters.vllm import pages
from kvkit.adapters.vllm.settings import Settings
from kvkit.config import Config
from kvkit.settings import ConfigError


def loads_parts(
    vllm_config: Any, specs: list[dict[str, KVCacheSpec]], settings: Settings, config: Config
) -> bool:
    """Return whether records hold more heads than a rank has, so that ranks only load slices of them.

    Raises:
        ConfigError: they do, but the engine is to hand off or to blend.
    """
    ranks, stages = settings.record_ranks, settings.record_stages
    heads = pages.rank_heads(vllm_config, specs, ranks, stages)
    all_specs = (spec for of_table in specs for spec in of_table.values())
    if heads is None or not any(heads.reads_parts(spec) for spec in all_specs):
        return False
    for name, value in (("handoff", config.handoff), ("blend", settings.blend)):
        if value is not None:
            raise ConfigError(
                f"record_ranks = {ranks}: this engine's {heads.ranks} ranks have parts of such records, "
                f"which can be loaded, but not handed off or blended; want {heads.ranks}, or no {name}"
            )
    return True
