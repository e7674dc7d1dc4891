"""Checks of vLLM's configs: engines that kvkit cannot serve, cannot cache, or can only load for."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from vllm.v1.kv_cache_interface import KVCacheSpec

from kvkit.adapters.vllm import pages
from kvkit.adapters.vllm.media import MIN_CHUNK_TOKENS
from kvkit.adapters.vllm.settings import Settings
from kvkit.config import Config
from kvkit.settings import ConfigError


def why_uncached(vllm_config: Any, kv_cache_config: Any) -> str:
    """Return the reason why no KV of this engine can be cached, as vLLM caches none itself; "" if some can.

    Such a model needs all tokens of a prompt: vLLM does not start from a hit.
    """
    model = vllm_config.model_config
    if not kv_cache_config.kv_cache_groups:
        return f"{model.model} has no KV cache"
    if getattr(model, "runner_type", "") == "pooling" and not getattr(
        model, "is_prefix_caching_supported", True
    ):
        return f"vLLM excludes the pooling of {model.model} from prefix caching"
    return ""


def reads_slices(
    vllm_config: Any, specs: list[dict[str, KVCacheSpec]], settings: Settings, config: Config
) -> bool:
    """Return whether records hold more heads than a rank has, so that ranks load slices and store nothing.

    Raises:
        ConfigError: records do, but the engine is to hand off or to blend.
    """
    ranks, stages = settings.record_ranks, settings.record_stages
    heads = pages.rank_heads(vllm_config, specs, ranks, stages)
    all_specs = (spec for group_specs in specs for spec in group_specs.values())
    if heads is None or not any(heads.reads_slices(spec) for spec in all_specs):
        return False
    for name, value in (("handoff", config.handoff), ("blend", settings.blend)):
        if value is not None:
            raise ConfigError(
                f"record_ranks = {ranks}: this engine's {heads.ranks} ranks have parts of such records, "
                f"which can be loaded, but not handed off or blended; want {heads.ranks}, or no {name}"
            )
    return True


def check_arrangement(
    settings: Settings,
    config: Config,
    vllm_config: Any,
    tables: int,
    running_states: Collection[bool] = (),
) -> None:
    """Check that kvkit can serve an engine of these configs.

    Args:
        tables: number of KV cache groups.
        running_states: for each group of Mamba layers, whether it keeps running states (`state_tables`).

    Raises:
        ConfigError: kvkit cannot serve this arrangement, or its settings conflict with vLLM's.
    """
    _check_blocking_loads(settings, vllm_config, tables)
    _check_states(settings, config, running_states)
    _check_parallel(vllm_config)
    media = vllm_config.model_config.multimodal_config
    if media is not None and config.chunk_tokens < MIN_CHUNK_TOKENS:
        raise ConfigError(
            f"chunk_tokens = {config.chunk_tokens}: want at least {MIN_CHUNK_TOKENS} for a model that takes "
            "images or other media: their digests do not fit into fewer ids"
        )
    _check_role(settings, config, vllm_config)


def _check_blocking_loads(settings: Settings, vllm_config: Any, tables: int) -> None:
    """Check that vLLM can take back a step whose load failed, if steps wait for loads."""
    load, world = settings.load, vllm_config.parallel_config.world_size
    if load == "async":
        return
    if tables > 1 or world > 1:
        raise ConfigError(
            f"load = {load!r}: with {tables} KV cache groups and {world} ranks, vLLM cannot "
            "take back a step whose load failed; want load = 'async'"
        )
    recomputes = vllm_config.kv_transfer_config.kv_load_failure_policy == "recompute"
    if vllm_config.max_concurrent_batches > 1 and recomputes:
        raise ConfigError(
            f"load = {load!r}: with asynchronous scheduling, vLLM cannot take back the step after one whose "
            "load failed; want load = 'async', kv_load_failure_policy = 'fail' or --no-async-scheduling"
        )


def _check_states(settings: Settings, config: Config, running_states: Collection[bool]) -> None:
    """Check that no setting is unsupported for a model with states."""
    bits = next(filter(None, (config.precision, *(tier.precision for tier in config.tiers.values()))), None)
    for name, set_to in (("blend", settings.blend), ("precision", bits)):
        if running_states and set_to is not None:
            raise ConfigError(f"{name}: this model has layers with states, which is unsupported; want none")
    if config.handoff is not None and config.handoff.sends and any(running_states):
        raise ConfigError(
            "handoff: vLLM keeps the states at the end of a prompt's last chunk only with its prefix cache; "
            "want enable_prefix_caching"
        )


def _check_parallel(vllm_config: Any) -> None:
    """Check that each rank has the KV of whole tokens, and can save it."""
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size > 1:
            raise ConfigError(f"{name} = {size}: want 1; kvkit cannot store tokens spread over ranks")
    stages = parallel.pipeline_parallel_size if parallel.world_size > 1 else 1
    if stages > 1 and vllm_config.speculative_config is not None and not vllm_config.use_v2_model_runner:
        raise ConfigError(
            f"pipeline_parallel_size = {stages}: with speculative decoding, vLLM's model runner V1 lets only "
            "the last stage save its KV; want 1"
        )


def _check_role(settings: Settings, config: Config, vllm_config: Any) -> None:
    """Check that what this engine sends and loads fits `kv_role`."""
    load, handoff, role = settings.load, config.handoff, vllm_config.kv_transfer_config.kv_role
    if handoff is not None:
        fitting_role = {"kv_producer": "prefill", "kv_consumer": "decode"}.get(role, "both")
        if {fitting_role, handoff.role} == {"prefill", "decode"}:
            raise ConfigError(
                f"handoff.role = {handoff.role!r}: kv_role is {role!r}; want {fitting_role!r} or 'both'"
            )
        if handoff.receives and load != "async":
            raise ConfigError(f"load = {load!r}: want 'async' for an engine that receives handoffs")
    overlap = vllm_config.max_concurrent_batches > 1
    loads_beside = load == "async" and overlap and role == "kv_producer"
    if loads_beside and (tiers := config.resolved_policy().retrieve_from):
        raise ConfigError(
            f"kv_role = {role!r}: this engine loads from {', '.join(tiers)}, and vLLM keeps the blocks of "
            "overlapping steps apart only for 'kv_both' and 'kv_consumer'; want 'kv_both', or "
            "--no-async-scheduling"
        )
