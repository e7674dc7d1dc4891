"""Whose KV it is, as far as vLLM tells: the ids that stand for a request's tokens, and the model's name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvkit.adapters.vllm.messages import TokenIds
from kvkit.chunks import as_tokens

SAMPLE_BYTES = 4096
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_NOT_KV = ("_name_or_path", "_commit_hash", "transformers_version", "architectures", "dtype", "torch_dtype")
"""Entries of a model's config that say nothing about KV, or are in the namespace already."""


def identity(tokens: Sequence[int], features: Iterable[tuple[str, int, int]] = ()) -> TokenIds:
    """The ids that stand for `tokens` in keys: int32 [T]. Mutates nothing.

    The placeholders of an image (or other media) are alike whatever it shows. In their place come ids made
    from its identifier, negative ones, which no token has.

    Args:
        tokens: token ids [T].
        features: (identifier, offset, length) of each medium; those behind T do not count.
    """
    ids = as_tokens(tokens)
    media = [(name, offset, min(offset + length, len(ids))) for name, offset, length in features]
    if not any(offset < stop for _, offset, stop in media):
        return ids
    ids = ids.copy()
    for name, offset, stop in media:
        if offset < stop:
            ids[offset:stop] = pseudo_tokens(name, stop - offset)
    return ids


def pseudo_tokens(identifier: str, count: int) -> TokenIds:
    """`count` negative ids, int32, that differ wherever identifiers differ; a prefix of any longer run."""
    digest = hashlib.shake_128(identifier.encode()).digest(4 * count)
    return (-1 - (np.frombuffer(digest, "<u4") & 0x7FFFFFFF).astype(np.int64)).astype(np.int32)


def model_identity(model: str, revision: str | None, config: Any, extra: Sequence[object]) -> tuple[str, str]:
    """(name, revision) of the weights for a namespace.

    A folder's name is its last part, so that machines which have it elsewhere share; its revision is a
    fingerprint of the files. A hub's is the commit if vLLM knows it. Both go with a digest of the model's
    config, which holds what was overridden (RoPE scaling, windows).

    Args:
        model: hub id or folder.
        revision: as it was asked for.
        config: Hugging Face config, as vLLM uses it.
        extra: other settings that decide KV bytes, such as the quantisation.
    """
    folder = Path(model)
    if folder.is_dir():
        name, weights = folder.resolve().name, folder_fingerprint(folder)
    else:
        name, weights = model, str(getattr(config, "_commit_hash", None) or revision or "")
    described = {k: v for k, v in config.to_dict().items() if k not in _NOT_KV}
    digest = hashlib.blake2b(digest_size=8)
    digest.update(json.dumps(described, sort_keys=True, default=str).encode())
    digest.update(json.dumps([str(value) for value in extra]).encode())
    return name, f"{weights}+{digest.hexdigest()}"


def folder_fingerprint(folder: Path) -> str:
    """32 hex digits of the names, sizes and the first and last 4 KiB of a folder's weight files."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(path for pattern in _WEIGHTS for path in folder.glob(pattern)):
        size = path.stat().st_size
        digest.update(f"{path.name}|{size}|".encode())
        with open(path, "rb") as file:
            digest.update(file.read(SAMPLE_BYTES))
            file.seek(max(0, size - SAMPLE_BYTES))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
