"""Identities of the models and adapters that vLLM serves, by their contents rather than their names."""

from __future__ import annotations

import hashlib
import logging
import re
import uuid
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch

from kvkit.adapters.engine.weights import fingerprint, folder_fingerprint
from kvkit.adapters.huggingface.configs import described, stable_json
from kvkit.adapters.vllm import compat
from kvkit.config import Config
from kvkit.format.layout import KVLayout, Namespace

log = logging.getLogger(__name__)

_LOADED_FROM_FOLDERS = {
    *("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "pt", "npcache"),
    *("bitsandbytes", "gguf", "sharded_state", "runai_streamer", "runai_streamer_sharded", "dummy"),
}
"""vLLM's load formats that read weights from the model's folder, or none at all."""
_COMMIT = re.compile(r"[0-9a-f]{40}")
CONFIGS = ("model_config", "cache_config", "load_config", "attention_config")
"""vLLM's configs that may determine the KV of any model."""
_NOT_KV = {
    "model_config": {
        *("model", "model_weights", "runner", "convert", "tokenizer", "tokenizer_mode", "trust_remote_code"),
        *("dtype", "seed", "hf_config", "hf_text_config", "is_submodel_config", "hf_config_path", "hf_token"),
        *("word_embeddings_untied_by_checkpoint", "allowed_local_media_path", "allowed_media_domains"),
        *("revision", "code_revision", "tokenizer_revision", "max_model_len", "spec_target_max_model_len"),
        *("quantization", "quantization_config", "allow_deprecated_quantization", "enforce_eager"),
        *("return_sampling_mask", "max_logprobs", "logprobs_mode", "use_fp64_gumbel", "enable_trace_replay"),
        *("disable_cascade_attn", "skip_tokenizer_init", "enable_prompt_embeds", "served_model_name"),
        *("config_format", "hf_overrides", "model_class_overrides", "generation_config", "model_impl"),
        *("override_generation_config", "enable_sleep_mode", "sleep_preserve_parameter_names"),
        *("sleep_mode_backend", "sleep_mode_offload_cudagraph", "enable_nccl_comm_suspend"),
        *("enable_cumem_allocator", "logits_processors", "io_processor_plugin", "renderer_num_workers"),
        *("pooler_config", "multimodal_config"),
    },
    "cache_config": {
        *("block_size", "user_specified_block_size", "kv_cache_layout", "prefix_match_unit", "cache_dtype"),
        *("gpu_memory_utilization", "is_attention_free", "num_gpu_blocks_override", "sliding_window"),
        *("enable_prefix_caching", "prefix_caching_hash_algo", "prefix_cache_retention_interval"),
        *("mamba_page_size_padded", "skip_page_size_padded", "mamba_block_size", "mamba_cache_mode"),
        # layouts have the dtypes of states; vLLM sets this by the CPU's kind, even for models without states
        *("mamba_cache_dtype", "mamba_ssm_cache_dtype"),
        *("enable_mamba_shared_prefix_checkpoint", "num_gpu_blocks", "num_cpu_blocks", "hash_block_size"),
        *("effective_attention_block_size", "kv_cache_size_tokens", "kv_cache_max_concurrency"),
        *("cache_hit_alignment_tokens", "kv_cache_memory_bytes", "kv_offloading_size"),
        *("kv_offloading_backend", "simple_cpu_offload_num_blocks"),
    },
    "load_config": {
        *("load_format", "download_dir", "safetensors_load_strategy", "safetensors_prefetch_num_threads"),
        *("safetensors_prefetch_block_size", "model_loader_extra_config", "device", "ignore_patterns"),
        *("use_tqdm_on_load", "pt_load_map_location"),
    },
    "attention_config": {
        *("backend", "minimax_m3_msa_decode_backend", "backend_per_kind", "flash_attn_version"),
        *("flash_attn_max_num_splits_for_cuda_graph", "tokenspeed_mla_min_split_kv", "trtllm_ragged_backend"),
        *("tq_max_kv_splits_for_cuda_graph", "use_trtllm_attention", "mla_prefill_backend"),
        *("sparse_mla_prefill_workspace_factor", "flex_attn_block_m", "flex_attn_block_n"),
        *("flex_attn_q_block_size", "flex_attn_kv_block_size", "indexer_tp_shard_min_rows"),
        *("minimax_m3_indexer_cp",),
    },
    "multimodal_config": {
        *("language_model_only", "limit_per_prompt", "enable_mm_embeds", "media_io_kwargs"),
        *(
            "mm_processor_kwargs",
            "mm_device_do_normalize",
            "mm_processor_cache_gb",
            "mm_processor_cache_type",
        ),
        *("mm_hasher_algorithm", "mm_shm_cache_max_object_size_mb", "mm_encoder_only", "mm_encoder_tp_mode"),
        *("mm_encoder_attn_backend", "mm_encoder_attn_dtype", "mm_encoder_fp8_scale_save_path"),
        *("mm_encoder_fp8_scale_save_margin", "interleave_mm_strings", "skip_mm_profiling"),
        *("video_pruning_rate", "video_pruning_method", "mm_tensor_ipc", "allow_missing_mm_embeddings"),
        *("mm_ipc_gpu_memory_gb",),
    },
    "speculative_config": {
        *("enforce_eager", "num_speculative_tokens", "model", "method", "draft_tensor_parallel_size"),
        *("tensor_parallel_size", "moe_backend", "attention_backend", "max_model_len", "revision"),
        *("disable_padded_drafter_batch", "disable_eagle_block_drop", "use_local_argmax_reduction"),
        *("prompt_lookup_max", "prompt_lookup_min", "target_model_config", "target_parallel_config"),
        *("num_speculative_tokens_per_batch_size", "draft_model_config", "draft_parallel_config"),
        *("suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests", "draft_load_config"),
        *("suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob", "rejection_sample_method"),
        *("synthetic_acceptance_rates", "synthetic_acceptance_length", "enable_adaptive_verification"),
        *("draft_sample_method", "dspark_draft_topk", "disable_lookahead_block_hashes"),
        *("draft_lm_head_quantization", "xpress_topc", "fly_window_size", "fly_entropy_threshold"),
        *("fly_entropy_top_k",),
    },
    "lora_config": {
        *("max_lora_rank", "max_loras", "fully_sharded_loras", "max_cpu_loras", "lora_dtype"),
        *("default_mm_loras", "specialize_active_lora", "max_lora_cls_labels"),
    },
}
"""Fields of vLLM's configs that do not determine the KV of given tokens, or are covered elsewhere: by
`model_identity`, the layout, or the digests of media."""
_OFF = {"cache_config": {"replayssm_buffer_len": 16, "swa_bounded_replay": True}}
"""Values of other fields that change no KV by themselves."""
_ADAPTER_FILES = re.compile(r"adapter_config\.json|adapter_model\.(safetensors|bin|pt)")


def model_identity(vllm_config: Any) -> tuple[str, str]:
    """Return (name, revision) of an engine's model for a namespace.

    The name is the hub id, or the last part of the folder's path, so that machines with different paths can
    share KV. The revision is the fingerprint of the weights (the commit, for a hub id), with a digest of the
    model's config as vLLM uses it and of the other settings that determine KV. If the weights cannot be
    identified, the revision is unique to this engine.
    """
    model, load = vllm_config.model_config, vllm_config.load_config
    name, weights = weights_of(model, load)
    inputs = [described(model.hf_config), load.load_format, load.model_loader_extra_config]
    if load.load_format == "dummy":
        inputs.append(model.seed)
    inputs += [model.quantization, model.quantization_config, vllm_config.cache_config.cache_dtype]
    inputs += [model.model_impl, model.model_class_overrides, model.code_revision]
    if "longrope" in str(inputs[0]):  # vLLM chooses the factors by the longest prompt that it allows
        inputs.append(model.max_model_len)
    if model.multimodal_config is not None:
        media = model.multimodal_config
        inputs += [media.video_pruning_rate, media.video_pruning_method, media.mm_encoder_attn_dtype]
    other_settings = {
        kind: set_fields(getattr(vllm_config, kind), kind) for kind in CONFIGS if hasattr(vllm_config, kind)
    }
    other_settings["multimodal_config"] = set_fields(model.multimodal_config, "multimodal_config")
    set_by_kind = {kind: values for kind, values in other_settings.items() if values}
    if set_by_kind:
        inputs.append(set_by_kind)
    return name, f"{weights}+{_digest(inputs)}"


def draft_identity(vllm_config: Any) -> str:
    """Return the identity of a draft model with KV beside the model's; empty if there is none."""
    draft = vllm_config.speculative_config
    try:
        if draft is None or not compat.keeps_draft_kv(draft):
            return ""
    except compat.MissingName as error:
        log.warning("%s", error)
        return f"unknown-{uuid.uuid4().hex}"
    model = draft.draft_model_config
    name, weights = weights_of(model, draft.draft_load_config or vllm_config.load_config)
    other_settings = set_fields(draft, "speculative_config")
    inputs = [described(model.hf_config), *([other_settings] if other_settings else [])]
    return f"{draft.method} {name} {weights}+{_digest(inputs)}"


def lora_settings(lora_config: Any) -> str:
    """Return the identity of vLLM's LoRA settings that determine KV, besides the adapter itself."""
    other_settings = set_fields(lora_config, "lora_config")
    if lora_config.target_modules:
        other_settings["target_modules"] = sorted(lora_config.target_modules)
    dtype = str(lora_config.lora_dtype).removeprefix("torch.")
    return f"{dtype}/{_digest([other_settings])}" if other_settings else dtype


def set_fields(config: Any, kind: str) -> dict[str, Any]:
    """Return the fields of one of vLLM's configs that are set and may determine KV, by name.

    A field that vLLM adds is included if it is set, until `_NOT_KV` or `_OFF` excludes it. Values that are
    false, empty, "auto" or "none" count as not set.
    """
    if config is None:
        return {}
    names = [field.name for field in fields(config)] if is_dataclass(config) else sorted(vars(config))
    values = {name: getattr(config, name) for name in names if name not in _NOT_KV[kind] and name[0] != "_"}
    off = _OFF.get(kind, {})
    return {
        name: _plain(value)
        for name, value in values.items()
        if value and value not in ("auto", "none") and off.get(name) != value
    }


def _plain(value: Any) -> Any:
    """Return a config field's value as plain data, equal in every process for equal values."""
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(str(item) for item in value)
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _digest(inputs: list[Any]) -> str:
    return hashlib.blake2b(stable_json(inputs), digest_size=8).hexdigest()


def adapter_files(folder: Path) -> list[Path]:
    """Return the files of a LoRA adapter's config and weights, as vLLM looks for them.

    Raises:
        OSError: the folder cannot be read, or there are no such files.
    """
    found = sorted(
        path for path in folder.iterdir() if _ADAPTER_FILES.fullmatch(path.name) and path.is_file()
    )
    if not found:
        raise FileNotFoundError(f"{folder} holds no LoRA adapter")
    return found


def adapter_fingerprint(folder: Path) -> str:
    """Return 32 hex digits of the names and contents of `adapter_files`.

    Raises:
        OSError: as for `adapter_files`, or a file cannot be read.
    """
    return fingerprint(folder, adapter_files(folder))


def weights_of(model: Any, load: Any) -> tuple[str, str]:
    """Return (name, identity of the weights) for vLLM's model and load configs."""
    source = model.model_weights or model.model
    path = Path(source)
    name = path.resolve().name if path.exists() else source
    try:
        if load.load_format not in _LOADED_FROM_FOLDERS:
            raise LookupError(f"load_format = {load.load_format!r} does not load them from the folder")
        if path.is_dir():
            return name, folder_fingerprint(path)
        if path.is_file():  # one file of a split model stands for all its files
            pattern = re.sub(r"-\d{5}-of-", "-*-of-", re.sub(r"([\[*?])", r"[\1]", path.name))
            return name, fingerprint(path.parent, sorted(path.parent.glob(pattern)))
        return name, _commit(model, load)
    except (OSError, LookupError) as error:
        consequence = "neither other engines nor this one after a restart use its KV"
        log.warning("%s: its weights are not known, so %s: %s", source, consequence, error)
        return name, f"unknown-{uuid.uuid4().hex}"


def _commit(model: Any, load: Any) -> str:
    """Return the commit of a model that is named by its hub id.

    Raises:
        LookupError: the commit is not known.
    """
    from huggingface_hub import snapshot_download

    if model.model_weights:
        raise LookupError("they are in an object store")
    if reason := compat.missing_reason("modelscope"):
        raise LookupError(reason)
    if compat.find("envs").VLLM_USE_MODELSCOPE:  # Hugging Face's cache may have another model of that name
        raise LookupError("they come from ModelScope")
    loaded_commit = None if model.hf_config_path else getattr(model.hf_config, "_commit_hash", None)
    for commit in (loaded_commit, model.revision):
        if commit and _COMMIT.fullmatch(commit):
            return str(commit)
    try:
        snapshot = snapshot_download(
            model.model, revision=model.revision, cache_dir=load.download_dir, local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise LookupError("no commit is known, and the hub's cache has none") from error
    return Path(snapshot).name


def rank_namespace(vllm_config: Any, config: Config, layout: KVLayout, ranks_share: bool) -> Namespace:
    """Return the namespace of a rank's KV, without adapter and salt.

    Args:
        ranks_share: True if a rank's records hold heads that other ranks have too.
    """
    parallel = vllm_config.parallel_config
    name, revision = model_identity(vllm_config)
    return config.namespace(
        layout,
        model=name,
        dtype=str(vllm_config.model_config.dtype).removeprefix("torch."),
        revision=revision,
        draft=draft_identity(vllm_config),
        rank=parallel.rank % parallel.world_size,
        world=parallel.world_size,
        ranks_share=ranks_share,
        isa=_instruction_set(vllm_config) if layout.groups[0].opaque else "",
    )


def _instruction_set(vllm_config: Any) -> str:
    """Return an identity of the order of K within vLLM's CPU pages."""
    return f"{compat.cpu_page_order(vllm_config)}/{torch.backends.cpu.get_cpu_capability()}"
