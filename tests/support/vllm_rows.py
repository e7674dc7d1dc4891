"""Functions that an engine's process calls on its model runner for tests of rows (`Engine.do`, "call")."""

from __future__ import annotations

import functools
import itertools
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from vllm.distributed import get_pp_group
from vllm.lora.request import LoRARequest

from kvkit.adapters.vllm.blending import check
from kvkit.adapters.vllm.blending.attention import KvkitAttention, KvkitRows
from kvkit.adapters.vllm.blending.copied_rows import CopiedRows
from kvkit.adapters.vllm.blending.cpu_speeds import measure_speeds
from kvkit.adapters.vllm.blending.layer_pages import LayerPages
from kvkit.adapters.vllm.blending.page_order import PageOrder, read_tokens
from kvkit.adapters.vllm.blending.rows import RequestRows, RowRunner
from kvkit.blend.plan import BlendError


def checked(runner: Any) -> list[list[float] | None]:
    """What the check finds of each layer: [scale, channels, first channel, first and last frequency]."""
    _, _, ropes = check.open_row_runner(runner)
    return [r and [r.scale, r.channels, r.first, r.inv_freq[0], r.inv_freq[-1]] for r in ropes]


def refused(runner: Any, falsify: str) -> str:
    """What the check says where rows, the rope that is found or settings of the last stage are false."""
    ropes, run = check._candidate_ropes, RowRunner.run
    falsified = ExitStack()

    def turned_too_far(model: Any) -> Any:
        return [replace(r, inv_freq=tuple(f * 1.01 for f in r.inv_freq)) for r in ropes(model)]

    def without_the_first(rows: RowRunner, given: list[RequestRows], *more: Any, **wanted: Any) -> Any:
        """Rows after a gap attend to blocks that are not theirs."""
        moved = [r if len(r.runs) == 2 else replace(r, blocks=_blocks(runner, 5)) for r in given]
        return run(rows, moved, *more, **wanted)

    cache = runner.vllm_config.cache_config
    try:
        if falsify == "stage":
            cache.kv_sharing_fast_prefill = get_pp_group().is_last_rank
        elif falsify == "rope":
            falsified.enter_context(patch.object(check, "_candidate_ropes", turned_too_far))
        elif falsify == "rows":
            falsified.enter_context(patch.object(RowRunner, "run", without_the_first))
        check.open_row_runner(runner)
    except BlendError as error:
        return str(error)
    finally:
        falsified.close()
        cache.kv_sharing_fast_prefill = False
    return ""


def refusals(runner: Any) -> list[str]:
    """What is said of settings that the engine was not started with."""
    config = runner.vllm_config
    layer = next(iter(config.compilation_config.static_forward_context.values()))
    said = []
    for where, name, value in (
        (config.parallel_config, "enable_eplb", True),
        (config.cache_config, "kv_sharing_fast_prefill", True),
        (layer, "kv_cache_dtype", "fp8"),
        (config.model_config, "runner_type", "pooling"),
    ):
        before = getattr(where, name)
        object.__setattr__(where, name, value)
        try:
            check.refuse_unsupported(runner)
        except BlendError as error:
            said.append(str(error))
        finally:
            object.__setattr__(where, name, before)
    return said


def computed(
    runner: Any,
    prompts: list[list[int]],
    share: float,
    most: int | None = None,
    loras: list[dict[str, Any] | None] | None = None,
) -> dict[str, Any]:
    """Some rows of `prompts`, all in the same runs, computed again where rubbish was put in their place.

    Returns:
        logprobs of the most probable token after each prompt, by its prefill as rows; how much hidden states,
        and K and V of all layers, differ afterwards; rows of each batch by request, and of each call of
        `on_queries`.
    """
    rows = _rows(runner)
    orders = [PageOrder.of(layer.module) for layer in rows.layers]
    whole, at = [], 1
    for ids, lora in zip(prompts, loras or [None] * len(prompts), strict=True):
        blocks = _blocks(runner, at, len(ids))
        at = 1 + max(max(group) for group in blocks)
        whole.append(
            RequestRows(np.array(ids, np.int32), np.arange(len(ids)), blocks, lora and LoRARequest(**lora))
        )
    first: list[list[torch.Tensor]] = [[] for _ in whole]
    for part in rows.batches(whole, most):
        for (which, _), found in zip(part, rows.run([piece for _, piece in part]), strict=False):
            first[which].append(found)
    hidden = [torch.cat(found) for found in first if found]
    kept = _kv(rows, orders, whole)
    rng = np.random.default_rng(0)
    some = [np.sort(rng.permutation(len(w.ids))[: int(share * len(w.ids))]) for w in whole]
    again = [replace(w, ids=w.ids[s], positions=w.positions[s]) for w, s in zip(whole, some, strict=True)]
    for piece in again:
        rubbish = replace(piece, ids=(piece.ids * 7 + 3) % 1000)
        for part in rows.batches([rubbish]):
            rows.run([p for _, p in part])
    dirty = _kv(rows, orders, whole)
    sizes, looks, worst = [], [], []
    for part in rows.batches(again, most):
        pieces = [piece for _, piece in part]
        looked: list[int] = []
        found = rows.run(pieces, lambda layer, q, looked=looked: looked.append(q.shape[0]))
        sizes.append([len(p.ids) for p in pieces])
        looks.append(looked)
        for (which, piece), states in zip(part, found, strict=False):
            worst.append(_worst(states, hidden[which][piece.positions]))
    logits = [rows.model.compute_logits(h[-1:]) for h in hidden]
    return {
        "logprobs": [found.float().log_softmax(-1).max().item() for found in logits if found is not None],
        "hidden": max(worst, default=0.0),
        "dirty": max(_worst(a, b) for a, b in zip(dirty, kept, strict=True)),
        "kv": max(_worst(a, b) for a, b in zip(_kv(rows, orders, whole), kept, strict=True)),
        "sizes": sizes,
        "looks": looks,
    }


def adapters(runner: Any, loras: list[dict[str, Any]], ids: list[int]) -> list[Any]:
    """Which adapters vLLM would apply to its own rows before and after rows of others; rows of each part."""
    rows, manager = _rows(runner), runner.lora_manager
    known = [LoRARequest(**lora) for lora in loras]
    batch = runner.input_batch.lora_id_to_lora_request
    batch |= {known[0].lora_int_id: known[0]}
    runner._set_active_loras((known[0].lora_int_id,), (known[0].lora_int_id,) * 3, {known[0]})
    before = _mapping(manager._adapter_manager)
    given = [
        RequestRows(np.array(ids, np.int32), np.arange(len(ids)), _blocks(runner, at, len(ids)), lora)
        for at, lora in ((1, known[0]), (20, None), (40, known[1]))
    ]
    parts = list(rows.batches(given))
    for part in parts:
        rows.run([piece for _, piece in part])
    after = _mapping(manager._adapter_manager)
    del batch[known[0].lora_int_id]
    return [before == after, [[which for which, _ in part] for part in parts]]


def _mapping(adapters: Any) -> tuple[Any, list[Any]]:
    return adapters._last_mapping, list(adapters.lora_index_to_id)


def stopped(runner: Any, ids: list[int], layers: int) -> list[list[float]]:
    """How far a run of the first `layers` layers changes each layer's K and V, and how many it shows."""
    rows = _rows(runner)
    orders = [PageOrder.of(layer.module) for layer in rows.layers]
    given = RequestRows(np.array(ids, np.int32), np.arange(len(ids)), _blocks(runner, 1, len(ids)))
    seen: list[list[torch.Tensor]] = [[], []]
    kept = []
    for times, wanted in enumerate((rows.count, layers)):
        other = replace(given, ids=(given.ids + times) % 1000)
        rows.run([other], lambda layer, q, times=times: seen[times].append(q.clone()), wanted)
        kept.append(_kv(rows, orders, [given]))
    rows.run([given], None, hidden=False)
    kept.append(_kv(rows, orders, [given]))
    changed = [[_worst(a, b) for a, b in zip(kv, kept[0], strict=True)] for kv in kept[1:]]
    return [*changed, [float(len(queries)) for queries in seen]]


def by_kvkit(
    runner: Any, prompts: list[list[int]], share: float, scale: float = 1.0, plain: bool = False
) -> list[Any]:
    """`computed` by kvkit's attention alone, where vLLM's would take two runs of rows at a time.

    Args:
        scale: falsifies its queries.
        plain: whether as on a GPU, in whose order what lies in the CPU's pages is brought.

    Returns:
        what the check says of that attention, then that.
    """
    begin, attend = RowRunner.__init__, KvkitRows.attend
    pages = LayerPages(RowRunner(runner).layers)

    def with_own(rows: RowRunner, runner: Any) -> None:
        begin(rows, runner)
        rows.kvkit_attention, rows.max_runs = KvkitAttention.of(pages, 1), 2

    def in_order(own: KvkitRows, layer: int, q: torch.Tensor, cache: torch.Tensor, out: torch.Tensor) -> None:
        order = pages.orders[layer]
        assert order is not None
        heads, tokens, _ = order.k.shape
        used = range(own.rows[own.layers[layer]].last_block + 1)
        k, v = (x.view(heads, -1, tokens, x.shape[2]).transpose(0, 1) for x in order.read(cache, used))
        attend(own, layer, q * scale, torch.cat([k, v], -1), out)

    attend_copied = CopiedRows.attend

    def scaled(own: CopiedRows, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        attend_copied(own, layer, q * scale, out)

    with ExitStack() as patches:
        patches.callback(_rows.cache_clear)
        _rows.cache_clear()
        patches.enter_context(patch.object(RowRunner, "__init__", with_own))
        patches.enter_context(patch.object(CopiedRows, "attend", scaled))
        if plain:
            patches.enter_context(patch.object(KvkitRows, "attend", in_order))
            patches.enter_context(patch.object(LayerPages, "opaque", False))
        fits = check.open_kvkit_attention(RowRunner(runner), pages) is not None
        return [fits, computed(runner, prompts, share)]


def speeds(runner: Any) -> list[Any]:
    """Return what is measured of the engine's attention, of kvkit's, and of the copy of a token."""
    rows = RowRunner(runner)
    own = KvkitAttention.of(LayerPages(rows.layers), 1)
    assert own is not None
    found = measure_speeds(rows, own)
    return [list(found.engine), found.kvkit, found.copy]


def speeds_by_group(runner: Any) -> list[Any]:
    """Return the tokens of a block of each KV cache group, and `speeds`."""
    sizes = [group.kv_cache_spec.block_size for group in runner.kv_cache_config.kv_cache_groups]
    return [sizes, speeds(runner)]


def warm_up_stages(runner: Any) -> None:
    """Make what later stages take their input from: on a CPU vLLM does so for compiled models alone."""
    config = runner.vllm_config
    if runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            config.scheduler_config.max_num_batched_tokens, config.model_config.dtype, runner.device
        )


@functools.cache
def _rows(runner: Any) -> RowRunner:
    """One while the engine is there: what a stage sends may be on its way when a run has returned."""
    return RowRunner(runner)


def _blocks(runner: Any, first: int, tokens: int = 1) -> tuple[list[int], ...]:
    """Blocks of the idle engine for `tokens` tokens, from block `first` on; each group has its own."""
    sizes = [group.kv_cache_spec.block_size for group in runner.kv_cache_config.kv_cache_groups]
    counts = np.cumsum([first, *(-(-tokens // size) for size in sizes)]).tolist()
    return tuple(list(range(a, b)) for a, b in itertools.pairwise(counts))


def _kv(rows: RowRunner, orders: list[PageOrder | None], given: list[RequestRows]) -> list[torch.Tensor]:
    found = []
    for layer, order in zip(rows.layers, orders, strict=True):
        for one in given:
            blocks = layer.kernel_blocks(one.blocks[layer.table])
            k, v = read_tokens(layer.module, order, blocks, len(one.ids))
            found += [k.clone(), v.clone()]
    return found


def _worst(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())
