"""A fingerprint of all that decides a Hugging Face model's KV: its weights, however kept, and its config."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import xxhash

from kvkit.adapters.huggingface.configs import described, stable_json
from kvkit.settings import ConfigError

_PIECE = 1 << 24
"""Elements of a tensor that are hashed at a time."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_BOOKKEEPING = ("_parameters", "_buffers", "_modules")
"""Attributes of every module that `named_parameters` and the like tell."""


def model_fingerprint(model: Any) -> str:
    """32 hex digits of all that decides a model's KV: every byte of its weights and buffers, its config.

    Counted are parameters, buffers, what modules add to `state_dict()` (packed weights of quantised ones),
    and tensors among their attributes. It is made at the speed of memory; what is on a GPU comes over in
    pieces. XXH3 tells changes apart, but not what an attacker built to be alike.

    Raises:
        ConfigError: something that decides its KV cannot be seen: adapters of PEFT, forward hooks, weights
            that are elsewhere (offloaded) or of a kind whose bytes are nowhere.
    """
    for name, module in model.named_modules():
        _check_module(name or "model", module)
    digest = hashlib.blake2b(digest_size=16)
    for name, value in sorted(_held(model), key=lambda entry: entry[0]):
        digest.update(json.dumps([name, *_told(name, value)]).encode())
    digest.update(stable_json(described(model.config)))
    return digest.hexdigest()


def _check_module(name: str, module: torch.nn.Module) -> None:
    kind = type(module).__name__
    if any(base.__module__.partition(".")[0] == "peft" for base in type(module).__mro__):
        raise ConfigError(
            f"model: {name} is a {kind} of PEFT: which adapters are active, and how much, shows in no "
            "parameter; want them merged (merge_and_unload), or unloaded"
        )
    hooks = [hook for kept in _HOOKS for hook in getattr(module, kept).values()]
    if hooks:
        called = getattr(hooks[0], "__qualname__", type(hooks[0]).__name__)
        raise ConfigError(
            f"model: {name} has a forward hook ({called}): what it changes shows in no parameter; want it "
            "removed, or no cache"
        )


def _held(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Names and values of all that weights are kept in, each once."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    yield from tensors.items()
    seen = {id(tensor) for tensor in tensors.values()}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in seen:
            yield f"{name} (state)", value
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in _BOOKKEEPING and _has_weights(value):
                yield f"{path}.{name} (attribute)", value


def _has_weights(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_weights, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_has_weights, value))
    return isinstance(value, (torch.Tensor, np.ndarray, torch.ScriptObject))


def _told(name: str, value: Any) -> list[Any]:
    """Tell a value from others, by what JSON can hold.

    Raises:
        ConfigError: its bytes cannot be seen.
    """
    if isinstance(value, torch.Tensor):
        return _told_tensor(name, value)
    if isinstance(value, np.ndarray):
        return _told_tensor(name, torch.from_numpy(np.ascontiguousarray(value)))
    if isinstance(value, dict):
        return ["dict", *([str(key), *_told(f"{name}.{key}", held)] for key, held in value.items())]
    if isinstance(value, (list, tuple)):
        return ["list", *(_told(f"{name}.{i}", held) for i, held in enumerate(value))]
    if isinstance(value, torch.ScriptObject):
        try:
            return ["object", *_told(name, value.__getstate__())]
        except RuntimeError as error:
            raise _unseen(name, value) from error
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return [str(value)]
    if isinstance(value, (bytes, bytearray)):
        return [xxhash.xxh3_128_hexdigest(value)]
    raise _unseen(name, value)


def _told_tensor(name: str, tensor: torch.Tensor) -> list[Any]:
    """Tell a tensor by its bytes; one that is made of others by theirs, and by how they are put together."""
    if tensor.is_meta:
        raise ConfigError(
            f"model: {name} is offloaded (on the device 'meta'): its weights cannot be seen; want a model "
            "that is in memory as a whole"
        )
    kind = [list(tensor.shape), str(tensor.dtype)]
    if hasattr(tensor, "__tensor_flatten__"):
        parts, how = tensor.__tensor_flatten__()
        inner = [_told(f"{name}.{part}", getattr(tensor, part)) for part in parts]
        return [*kind, type(tensor).__name__, str(how), *inner]
    if tensor.is_quantized:
        scheme = str(tensor.qscheme())
        scales: tuple[Any, Any] = (
            (tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points())
            if "channel" in scheme
            else (tensor.q_scale(), tensor.q_zero_point())
        )
        return [*kind, scheme, _told(name, scales), *_told_tensor(name, tensor.int_repr())]
    if tensor.layout != torch.strided:
        raise _unseen(name, tensor)
    held = xxhash.xxh3_128()
    try:
        for piece in torch.split(tensor.detach().reshape(-1), _PIECE):
            held.update(piece.contiguous().cpu().view(torch.uint8).numpy().data)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise _unseen(name, tensor) from error
    return [*kind, held.hexdigest()]


def _unseen(name: str, value: Any) -> ConfigError:
    return ConfigError(
        f"model: {name} is a {type(value).__name__}, whose weights cannot be seen: two models would look "
        "alike; want weights in parameters, buffers or state_dict()"
    )
