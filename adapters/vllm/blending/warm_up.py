"""Compile kvkit's attention for a rank's pages when the engine starts, so that no blend waits for it."""

from __future__ import annotations

import logging
import time

import torch

from kvkit.adapters.vllm.blending.attention import scoring
from kvkit.adapters.vllm.blending.rows import AttentionLayer, RowRunner

log = logging.getLogger(__name__)


def warm_up_attention(rows: RowRunner) -> None:
    """Compile and load the kernels of attention that blends on a GPU may need. Mutates no pages.

    Kernels that Triton has cached are loaded only. On a CPU there are none.
    """
    if rows.device.type == "cpu":
        return
    from kvkit.kernels.attention.warm_up import BatchLimits, PagedLayer, launches  # Triton: not on every CPU

    def paged(layer: AttentionLayer) -> PagedLayer:
        module = layer.module
        k, v = module.kv_cache.split([module.head_size, module.head_size_v], -1)
        return PagedLayer(k, v, module.num_heads, scoring(module))

    began, count = time.monotonic(), 0
    limits = BatchLimits(rows.max_rows, rows.max_runs, rows.config.model_config.max_model_len)
    with torch.cuda.device(rows.device), torch.inference_mode():
        for launch in launches(map(paged, rows.layers), limits, output=rows.kvkit_attention is not None):
            launch.run()
            count += 1
        torch.cuda.synchronize(rows.device)
    log.info("%d kernels of attention for blends are ready, after %.1f s", count, time.monotonic() - began)
