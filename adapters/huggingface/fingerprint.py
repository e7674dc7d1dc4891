"""The fingerprint of a Hugging Face model: all that its KV depends on, which is its weights and config."""

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

_PIECE_ELEMENTS = 1 << 24
"""Elements of a tensor that are hashed at a time."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_BOOKKEEPING = ("_parameters", "_buffers", "_modules")
"""Attributes of every module that `named_parameters` and similar methods cover."""


def model_fingerprint(model: Any) -> str:
    """Return 32 hex digits that depend on every byte of a model's weights and buffers, and on its config.

    Weights are parameters, buffers, entries that modules add to `state_dict()` (packed weights of quantised
    modules), and tensors in attributes of modules. Hashing runs at memory speed; tensors on a GPU are copied
    to the host in pieces. XXH3 detects changes, but not collisions that an attacker constructed.

    Raises:
        ConfigError: something that decides the KV cannot be read: PEFT adapters, forward hooks, offloaded
            weights, or weights of a kind that does not expose its bytes.
    """
    for name, module in model.named_modules():
        _check_module(name or "model", module)
    digest = hashlib.blake2b(digest_size=16)
    for name, value in sorted(_weights(model), key=lambda entry: entry[0]):
        digest.update(json.dumps([name, *_describe(name, value)]).encode())
    digest.update(stable_json(described(model.config)))
    return digest.hexdigest()


def _check_module(name: str, module: torch.nn.Module) -> None:
    kind = type(module).__name__
    if any(base.__module__.partition(".")[0] == "peft" for base in type(module).__mro__):
        raise ConfigError(
            f"model: {name} is a {kind} of PEFT: no parameter shows which adapters are active, and at "
            "which scale; want them merged (merge_and_unload), or unloaded"
        )
    hooks = [hook for attribute in _HOOKS for hook in getattr(module, attribute).values()]
    if hooks:
        hook_name = getattr(hooks[0], "__qualname__", type(hooks[0]).__name__)
        raise ConfigError(
            f"model: {name} has a forward hook ({hook_name}): no parameter shows what it changes; want it "
            "removed, or no cache"
        )


def _weights(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield name and value of all weights of a model: parameters and buffers first, then others."""
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


def _describe(name: str, value: Any) -> list[Any]:
    """Return a JSON-compatible description that differs between different values.

    Raises:
        ConfigError: the value's bytes cannot be read.
    """
    if isinstance(value, torch.Tensor):
        return _describe_tensor(name, value)
    if isinstance(value, np.ndarray):
        return _describe_tensor(name, torch.from_numpy(np.ascontiguousarray(value)))
    if isinstance(value, dict):
        return ["dict", *([str(key), *_describe(f"{name}.{key}", item)] for key, item in value.items())]
    if isinstance(value, (list, tuple)):
        return ["list", *(_describe(f"{name}.{i}", item) for i, item in enumerate(value))]
    if isinstance(value, torch.ScriptObject):
        try:
            return ["object", *_describe(name, value.__getstate__())]
        except RuntimeError as error:
            raise _unreadable(name, value) from error
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return [str(value)]
    if isinstance(value, (bytes, bytearray)):
        return [xxhash.xxh3_128_hexdigest(value)]
    raise _unreadable(name, value)


def _describe_tensor(name: str, tensor: torch.Tensor) -> list[Any]:
    """Describe a tensor by a hash of its bytes; a composite one by its inner tensors."""
    if tensor.is_meta:
        raise ConfigError(
            f"model: {name} is offloaded (on the device 'meta'): its weights cannot be seen; want a model "
            "that is in memory completely"
        )
    kind = [list(tensor.shape), str(tensor.dtype)]
    if hasattr(tensor, "__tensor_flatten__"):
        names, context = tensor.__tensor_flatten__()
        inner = [_describe(f"{name}.{inner_name}", getattr(tensor, inner_name)) for inner_name in names]
        return [*kind, type(tensor).__name__, str(context), *inner]
    if tensor.is_quantized:
        scheme = str(tensor.qscheme())
        scales: tuple[Any, Any] = (
            (tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points())
            if "channel" in scheme
            else (tensor.q_scale(), tensor.q_zero_point())
        )
        return [*kind, scheme, _describe(name, scales), *_describe_tensor(name, tensor.int_repr())]
    if tensor.layout != torch.strided:
        raise _unreadable(name, tensor)
    digest = xxhash.xxh3_128()
    try:
        for elements in torch.split(tensor.detach().reshape(-1), _PIECE_ELEMENTS):
            digest.update(elements.contiguous().cpu().view(torch.uint8).numpy().data)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise _unreadable(name, tensor) from error
    return [*kind, digest.hexdigest()]


def _unreadable(name: str, value: Any) -> ConfigError:
    return ConfigError(
        f"model: {name} is a {type(value).__name__}, whose weights cannot be seen: two models would look "
        "alike; want weights in parameters, buffers or state_dict()"
    )
