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

    compared, wrong = 0, ""
    for path in sorted(found.glob(f"{name}.*.safetensors")):
        rank = path.name.split(".")[2]
        known = sorted(reference.glob(f"{name}.*.{rank}.safetensors"))
        if known:
            count, where = compare_pages(load_file(known[0]), load_file(path), tolerance)
            compared += count
            wrong = wrong or (f"{rank}, {where}" if where else "")
        path.unlink()
    return compared, wrong


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
    compared, wrong = 0, []
    for layer in sorted(expected):
        one, other = expected[layer].float(), found[layer].float()
        there = ~(one.isnan() | other.isnan()).flatten(2).all(2)
        compared += int(there.sum())
        scale = one.nan_to_num().abs().max().item() or 1.0
        apart = (one - other).abs().nan_to_num(float("inf")).flatten(2).amax(2) / scale
        for block, head in ((apart > tolerance) & there).nonzero().tolist():
            share = apart[block, head].item()
            wrong.append((block, layer.partition(" ")[2], head, share))
    if not wrong:
        return compared, ""
    block, layer, head, share = wrong[0]
    return compared, (
        f"layer {layer}, block {block}, head {head} is the first of {len(wrong)} pages that differ "
        f"(of {compared}): by {share:.2g} of the layer's largest element, {tolerance:g} is tolerated"
    )
