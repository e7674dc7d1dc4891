"""Comparison of an engine's pages, copied by its probe, with those of the reference."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def compare_files(reference: Path, found: Path, name: str, tolerance: float) -> tuple[int, str]:
    """Compare every copy of a prompt's pages in `found` by `compare_pages`, and delete the copy.

    Args:
        reference, found: folders that probes write to; every rank writes its own files.
        name: name of the prompt, from `prompt_name`.

    Returns:
        the number of pages compared, and the first rank and page that differ, in words; empty: none.
    """
    from safetensors.torch import load_file

    compared, first_difference = 0, ""
    for path in sorted(found.glob(f"{name}.*.safetensors")):
        rank = path.name.split(".")[2]
        reference_paths = sorted(reference.glob(f"{name}.*.{rank}.safetensors"))
        if reference_paths:
            count, difference = compare_pages(load_file(reference_paths[0]), load_file(path), tolerance)
            compared += count
            first_difference = first_difference or (f"{rank}, {difference}" if difference else "")
        path.unlink()
    return compared, first_difference


def compare_pages(
    expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor], tolerance: float
) -> tuple[int, str]:
    """Compare pages, one per layer, block and head.

    Args:
        expected, found: `[blocks, heads, tokens, channels]` by layer, in the order of sorted names; NaN where
            a layer has no page.
        tolerance: largest difference allowed, as a share of the largest element of the layer.

    Returns:
        the number of pages compared, and the first page that differs, in words; empty: none.
    """
    compared, differing = 0, []
    for layer in sorted(expected):
        expected_layer, found_layer = expected[layer].float(), found[layer].float()
        present = ~(expected_layer.isnan() | found_layer.isnan()).flatten(2).all(2)
        compared += int(present.sum())
        scale = expected_layer.nan_to_num().abs().max().item() or 1.0
        differences = (expected_layer - found_layer).abs().nan_to_num(float("inf")).flatten(2).amax(2) / scale
        for block, head in ((differences > tolerance) & present).nonzero().tolist():
            share = differences[block, head].item()
            differing.append((block, layer.partition(" ")[2], head, share))
    if not differing:
        return compared, ""
    block, layer, head, share = differing[0]
    return compared, (
        f"layer {layer}, block {block}, head {head} is the first of {len(differing)} pages that differ "
        f"(of {compared}): by {share:.2g} of the layer's largest element, {tolerance:g} is tolerated"
    )
