"""Worker extension of vLLM that copies an engine's pages for `kvkit prove`, with any connector.

`--worker-extension-cls kvkit.lab.prove.page_probe.PageProbe` adds its methods to every worker;
`collective_rpc` calls them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from xxhash import xxh3_128_hexdigest

from kvkit.adapters.vllm import compat


def prompt_name(tokens: Sequence[int], adapter: str | None) -> str:
    """Return the name of a prompt's page files, up to the first dot."""
    return xxh3_128_hexdigest(np.asarray(tokens, np.int32).tobytes() + (adapter or "").encode())


@dataclass(slots=True)
class _FollowedRequest:
    """Running request, its blocks, and whether its pages were written."""

    name: str
    prompt_tokens: int
    blocks: tuple[list[int], ...]  # of each KV cache group
    written: bool = False


class PageProbe:
    """Worker methods that have each prompt's pages written to a file once the prompt is computed."""

    model_runner: Any

    def prove_watch(self, folder: str) -> dict[str, str]:
        """Write pages to `folder` from now on. The caller and this worker must share the folder."""
        path = Path(folder)
        path.stat()
        watch = vars(self).get("_prove")
        if watch is None:
            watch = vars(self)["_prove"] = _Watch(self.model_runner, int(vars(self).get("rank", 0)))
        watch.folder = path
        return {"dtype": str(watch.dtype).removeprefix("torch.")}

    def prove_skipped(self) -> list[int]:
        """Return the number of tokens that requests did not have to compute, in a list of one.

        They are counted when a request is first scheduled and when it resumes after a preemption.
        """
        return [vars(self)["_prove"].skipped]


class _Watch:
    """Observer of a model runner's steps, which writes the pages of requests that the scheduler runs."""

    def __init__(self, runner: Any, rank: int) -> None:
        self.folder = Path()
        self.skipped = 0
        self._rank = rank
        self._config = runner.kv_cache_config
        self._layers: Mapping[str, Any] = compat.attention_layers(runner.vllm_config)
        self.dtype = runner.vllm_config.model_config.dtype
        self._running: dict[str, _FollowedRequest] = {}
        self._written: Counter[str] = Counter()
        compat.after_steps(runner, self._after_step)

    def _after_step(self, scheduled: Any) -> None:
        for name in scheduled.finished_req_ids:
            self._running.pop(name, None)
        computed = {}
        for new in scheduled.scheduled_new_reqs:
            tokens = new.prompt_token_ids or []
            adapter = None if new.lora_request is None else new.lora_request.lora_name
            blocks = tuple(list(ids) for ids in new.block_ids)
            self._running[new.req_id] = _FollowedRequest(prompt_name(tokens, adapter), len(tokens), blocks)
            computed[new.req_id] = new.num_computed_tokens
            self.skipped += new.num_computed_tokens
        cached = scheduled.scheduled_cached_reqs
        for name, ids, count in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            computed[name] = count
            if (followed := self._running.get(name)) is None:
                continue
            if name in cached.resumed_req_ids:
                followed.blocks, followed.written = tuple(list(group) for group in ids), False
                self.skipped += count
            elif ids is not None:
                for known_blocks, group in zip(followed.blocks, ids, strict=True):
                    known_blocks.extend(group)
        for name, followed in self._running.items():
            computed_tokens = computed.get(name, 0) + scheduled.num_scheduled_tokens.get(name, 0)
            if name in computed and not followed.written and computed_tokens >= followed.prompt_tokens:
                followed.written = True
                self._write(followed)

    def _write(self, request: _FollowedRequest) -> None:
        from safetensors.torch import save_file

        number = self._written[request.name]
        self._written[request.name] += 1
        path = self.folder / f"{request.name}.{number}.rank{self._rank}"
        save_file(dict(self._pages(request)), path.with_suffix(".part"))
        path.with_suffix(".part").rename(f"{path}.safetensors")

    def _pages(self, request: _FollowedRequest) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each attention layer's full blocks of the prompt, `[B, H, N, C]`; NaN for missing blocks."""
        layer_number = 0
        for group, blocks in zip(self._config.kv_cache_groups, request.blocks, strict=True):
            ids = torch.tensor(
                blocks[: request.prompt_tokens // group.kv_cache_spec.block_size], dtype=torch.long
            )
            for layer in group.layer_names:
                pages = getattr(self._layers.get(layer), "kv_cache", None)
                if not isinstance(pages, torch.Tensor) or pages.ndim != 4 or not pages.is_floating_point():
                    continue
                # the kernel's blocks may be smaller than vLLM's
                kernel_blocks = pages.shape[0] // self._config.num_blocks
                indices = (
                    (ids[:, None] * kernel_blocks + torch.arange(kernel_blocks)).flatten().to(pages.device)
                )
                block_pages = pages[indices].cpu()
                # vLLM's null block stands for missing blocks
                block_pages[indices.cpu() < kernel_blocks] = float("nan")
                layer_number += 1
                yield f"{layer_number:04d} {layer}", block_pages.contiguous()
