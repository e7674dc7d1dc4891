"""Whose KV it is, as far as vLLM tells: what a model and an adapter are made of, not what they are called."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvkit.adapters.huggingface.configs import described, stable_json
from kvkit.adapters.vllm.contents import default_folder, digests

log = logging.getLogger(__name__)

_LOADED_FROM_FOLDERS = {
    *("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "pt", "npcache"),
    *("bitsandbytes", "gguf", "sharded_state", "runai_streamer", "runai_streamer_sharded", "dummy"),
}
"""vLLM's load formats that take weights from the model's folder, or from nowhere."""
_COMMIT = re.compile(r"[0-9a-f]{40}")
_OTHER_FOLDERS = re.compile(r"\..*|__pycache__|original|runs|checkpoint-\d+")
"""Below a model's folder: vLLM loads nothing from there."""
_OTHER_FILES = re.compile(
    r"\..*|(generation_)?config\.json|tokenizer\.model|.*\.(md|txt|jinja|png|jpe?g|gif|svg|pdf|ipynb)"
    r"|(tokenizer|tokenizer_config|vocab|chat_template|special_tokens_map|added_tokens|trainer_state)\.json"
    r"|training_args\.bin|rng_state.*\.pth|(optimizer|scheduler|scaler)\.(pt|bin)|LICENSE|NOTICE"
)
"""In a model's folder: what decides no KV of given tokens, and the config: the namespace has what vLLM makes
of it."""
_ADAPTER_FILES = re.compile(r"adapter_config\.json|adapter_model\.(safetensors|bin|pt)")


def model_identity(vllm_config: Any) -> tuple[str, str]:
    """(name, revision) of an engine's model for a namespace.

    The name is that of the hub, or the last part of the folder's, so that machines which have it elsewhere
    share. The revision is what the weights hold (the commit, of a model that is named by the hub), with a
    digest of the model's config as vLLM uses it and of what else decides KV. If nobody can tell what the
    weights are, it is this engine's alone.
    """
    model, load = vllm_config.model_config, vllm_config.load_config
    name, weights = weights_of(model, load)
    parts = [described(model.hf_config), load.load_format, load.model_loader_extra_config]
    if load.load_format == "dummy":
        parts.append(model.seed)
    parts += [model.quantization, model.quantization_config, vllm_config.cache_config.cache_dtype]
    parts += [model.model_impl, model.model_class_overrides, model.code_revision]
    if "longrope" in str(parts[0]):  # vLLM takes the factors that fit the longest prompt it allows
        parts.append(model.max_model_len)
    if model.multimodal_config is not None:
        media = model.multimodal_config
        parts += [media.video_pruning_rate, media.video_pruning_method, media.mm_encoder_attn_dtype]
    return name, f"{weights}+{_digest(parts)}"


def draft_identity(vllm_config: Any) -> str:
    """Likewise of the draft whose layers' KV lies beside the model's; empty where there is none."""
    draft = vllm_config.speculative_config
    if draft is None or not draft.uses_draft_kv_cache():
        return ""
    model = draft.draft_model_config
    name, weights = weights_of(model, draft.draft_load_config or vllm_config.load_config)
    return f"{draft.method} {name} {weights}+{_digest([described(model.hf_config)])}"


def _digest(parts: list[Any]) -> str:
    return hashlib.blake2b(stable_json(parts), digest_size=8).hexdigest()


def folder_fingerprint(folder: Path) -> str:
    """32 hex digits of the names and contents of all files below a model's folder that may decide KV.

    Raises:
        OSError: one cannot be read, or a folder not listed.
    """

    def refuse(error: OSError) -> None:
        # where vLLM may not look either, such as lost+found, is nothing that it loads
        if not isinstance(error, PermissionError) or Path(error.filename) == folder:
            raise error

    found: list[Path] = []
    seen: set[Path] = set()
    for place, folders, files in os.walk(folder, onerror=refuse, followlinks=True):
        real = Path(place).resolve()
        # a link to where the walk has been would have no end; which of the two comes first must not vary
        below = [] if real in seen else [f for f in folders if not _OTHER_FOLDERS.fullmatch(f)]
        folders[:] = sorted(below)
        if real not in seen:
            found += [Path(place, name) for name in files if not _OTHER_FILES.fullmatch(name)]
        seen.add(real)
    return _fingerprint(folder, [path for path in found if path.is_file()])


def adapter_files(folder: Path) -> list[Path]:
    """The config and the weights of a LoRA adapter, as vLLM looks for them.

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
    """32 hex digits of the names and contents of `adapter_files`.

    Raises:
        OSError: as there, or one cannot be read.
    """
    return _fingerprint(folder, adapter_files(folder))


def _fingerprint(folder: Path, files: Sequence[Path]) -> str:
    names = sorted((str(path.relative_to(folder)), path) for path in files)
    held = digests([path for _, path in names], default_folder())
    digest = hashlib.blake2b(digest_size=16)
    for (name, _), content in zip(names, held, strict=True):
        digest.update(json.dumps([name, content]).encode())
    return digest.hexdigest()


def weights_of(model: Any, load: Any) -> tuple[str, str]:
    """(name, what tells the weights apart) of vLLM's model and load configs."""
    source = model.model_weights or model.model
    path = Path(source)
    name = path.resolve().name if path.exists() else source
    try:
        if load.load_format not in _LOADED_FROM_FOLDERS:
            raise LookupError(f"load_format = {load.load_format!r} takes them from elsewhere")
        if path.is_dir():
            return name, folder_fingerprint(path)
        if path.is_file():  # one of several parts brings the others
            parts = re.sub(r"-\d{5}-of-", "-*-of-", re.sub(r"([\[*?])", r"[\1]", path.name))
            return name, _fingerprint(path.parent, sorted(path.parent.glob(parts)))
        return name, _commit(model, load)
    except (OSError, LookupError) as error:
        alone = "no other engine shares its KV, nor does this one after a restart"
        log.warning("%s: its weights are not known, so %s: %s", source, alone, error)
        return name, f"unknown-{uuid.uuid4().hex}"


def _commit(model: Any, load: Any) -> str:
    """The commit of a model that is named by the hub.

    Raises:
        LookupError: it is not known.
    """
    from huggingface_hub import snapshot_download
    from vllm import envs

    if model.model_weights:
        raise LookupError("they are in a store of objects")
    if envs.VLLM_USE_MODELSCOPE:  # Hugging Face's cache says nothing of a model of the same name there
        raise LookupError("they come from ModelScope")
    told = None if model.hf_config_path else getattr(model.hf_config, "_commit_hash", None)
    for commit in (told, model.revision):
        if commit and _COMMIT.fullmatch(commit):
            return str(commit)
    try:
        found = snapshot_download(
            model.model, revision=model.revision, cache_dir=load.download_dir, local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise LookupError("no commit is known, and the hub's cache has none") from error
    return Path(found).name
