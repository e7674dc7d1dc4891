"""The model of the engines: a folder of links with one changeable tensor, and a LoRA adapter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from kvkit.lab.files import BenchError

if TYPE_CHECKING:
    import torch

_FACTOR = -0.5
"""Factor that changes the tensor."""
_ADAPTER_SEED, _RANK, _SCALE = 0, 8, 0.05
_CHANGED = ("v_proj.weight", "qkv_proj.weight", "c_attn.weight", "query_key_value.weight", "kv_b_proj.weight")
"""Endings of names of tensors that compute V: the first such tensor is changed."""


def linked(model: Path, folder: Path) -> Path:
    """Make and return `folder`, with links to all files of a model."""
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).symlink_to(file.resolve())
    return folder


class ChangedWeights:
    """One tensor of a folder made by `linked`, to be changed and restored.

    Raises:
        BenchError: no tensor in the folder computes V.
    """

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        self.folder = folder
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as weights:
                for name in sorted(weights.keys()):
                    if name.endswith(_CHANGED):
                        self._file, self.tensor, self._before = file, name, file.resolve()
                        return
        raise BenchError(f"{folder}: no tensor in *.safetensors ends with {', '.join(_CHANGED)}")

    def change(self) -> None:
        """Replace the tensor in the folder by the changed one."""
        from safetensors import safe_open
        from safetensors.torch import save_file

        with safe_open(self._before, framework="pt") as weights:
            names = list(weights.keys())
            tensors: dict[str, torch.Tensor] = {name: weights.get_tensor(name) for name in names}
            metadata = weights.metadata()
        tensors[self.tensor] = tensors[self.tensor] * _FACTOR
        self._file.unlink()
        save_file(tensors, self._file, metadata)

    def restore(self) -> None:
        """Restore the original tensor."""
        self._file.unlink()
        self._file.symlink_to(self._before)


def make_adapter(model: Path, folder: Path) -> Path:
    """Make a LoRA adapter in `folder` with random weights for every layer's K and V.

    Raises:
        BenchError: the model has no k_proj and v_proj, as Llama-like models have.
    """
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    generator, tensors = torch.Generator().manual_seed(_ADAPTER_SEED), {}
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            names = list(weights.keys())
            for name in names:
                if name.endswith(("self_attn.k_proj.weight", "self_attn.v_proj.weight")):
                    out_features, in_features = weights.get_slice(name).get_shape()
                    prefix = f"base_model.model.{name.removesuffix('.weight')}"
                    tensors[f"{prefix}.lora_A.weight"] = (
                        torch.randn(_RANK, in_features, generator=generator) * _SCALE
                    )
                    tensors[f"{prefix}.lora_B.weight"] = (
                        torch.randn(out_features, _RANK, generator=generator) * _SCALE
                    )
    if not tensors:
        raise BenchError(f"{model} has no k_proj and v_proj: name an adapter with --lora")
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    adapter_config = {
        "peft_type": "LORA",
        "r": _RANK,
        "lora_alpha": _RANK,
        "target_modules": ["k_proj", "v_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(adapter_config))
    return folder
