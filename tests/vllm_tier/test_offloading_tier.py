"""Under vLLM's own offloading, chunks come back from kvkit's tiers as they were, or not at all."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from offloading import BYTES, CHUNK_TOKENS, CONFIG, PARALLEL, Offloading, keys
from page_attacks import files
from page_blocks import blocks, check_printed, on_page, run_shell
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    ReqContext,
    ScheduleEndContext,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.config import OffloadingCacheConfig, OffloadingGroupConfig, OffloadingModelConfig
from vllm.v1.kv_offload.tiering.base import TransferJob

from kvkit.adapters.engine.keyed_pages import THREADS
from kvkit.adapters.vllm.offloading import TIER_MODULE
from kvkit.adapters.vllm_tier.tier import KVKitTier, page_layout
from kvkit.settings import ConfigError
from kvkit.tiers.testing.contract import DEADLINE_S

KEYS = keys(20)


@pytest.fixture
def offloading(tmp_path: Path) -> Iterator[Offloading]:
    found = Offloading(tmp_path)
    yield found
    found.tier._pages.cache.check_integrity()
    found.shutdown()


def test_chunks_come_back_after_a_restart(offloading: Offloading, tmp_path: Path) -> None:
    assert offloading.found(KEYS) == 0
    offloading.compute(KEYS)
    assert len(files(tmp_path)) == len(KEYS)
    offloading.forget()
    assert offloading.found(KEYS) == len(KEYS)
    later = Offloading(tmp_path)
    assert later.found(KEYS) == len(KEYS)
    later.shutdown()


def test_what_is_not_there_is_a_miss(offloading: Offloading) -> None:
    offloading.compute(KEYS[:6])
    offloading.forget()
    assert offloading.found([*KEYS[:6], KEYS[10], KEYS[3]]) == 6


def test_a_damaged_chunk_ends_what_is_found(offloading: Offloading, tmp_path: Path) -> None:
    """Chunks before it are taken, and the next request computes it again; vLLM does not ask for ever."""
    offloading.compute(KEYS)
    offloading.forget()
    file = tmp_path / offloading.tier._pages._chunks([KEYS[4]]).names[0]
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert offloading.found(KEYS) == 4
    assert not file.exists()
    offloading.compute(KEYS[4:5])
    offloading.forget()
    assert offloading.found(KEYS) == len(KEYS)


def test_a_failed_load_leaves_a_newer_lookup_alone(offloading: Offloading, tmp_path: Path) -> None:
    """Of another request, for the same chunk: vLLM 0.32 by itself would end its scheduler."""
    tier, (key,) = offloading.tier, KEYS[:1]
    offloading.compute([key])
    first, second = ReqContext(req_id="first"), ReqContext(req_id="second")
    for request in (first, second):
        tier.on_new_request(request)

    def answered(request: ReqContext, answer: LookupResult) -> bool:
        found = tier.lookup(key, request) is answer
        tier.on_schedule_end(ScheduleEndContext((), ()))
        return bool(found)

    offloading.until(lambda: answered(first, LookupResult.HIT))
    (file,) = files(tmp_path)
    file.unlink()
    rows = np.zeros(1, np.int64)
    tier.submit_load(TransferJob(999, [key], rows, is_promotion=True, req_context=first))
    tier.on_request_finished(first)
    assert tier.lookup(key, second) is LookupResult.RETRY
    tier.drain_jobs()
    (result,) = tier.get_finished_jobs()
    assert not result.success
    offloading.until(lambda: answered(second, LookupResult.MISS))


@pytest.mark.parametrize(
    "change",
    [
        {"model": OffloadingModelConfig("org/other", "bfloat16")},
        {"model": OffloadingModelConfig("org/model", "fp8")},
        {"kv_cache_layout": "HND"},
        {"cache": OffloadingCacheConfig(8, 1)},
        {"groups": (CONFIG.groups[0], OffloadingGroupConfig(32, ("c",), 1))},
        {"groups": (CONFIG.groups[0], OffloadingGroupConfig(16, ("d",), 1))},
        {"parallel": replace(PARALLEL, world_size=2, pp_size=2)},
        {"canonical_layout": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_engine_finds_nothing(tmp_path: Path, change: dict[str, Any]) -> None:
    assert page_layout(CONFIG) != page_layout(replace(CONFIG, **change)) or "model" in change
    with_pages = Offloading(tmp_path)
    with_pages.compute(KEYS[:4])
    with_pages.shutdown()
    other = Offloading(tmp_path, replace(CONFIG, **change))
    assert other.found(KEYS[:4]) == 0
    other.shutdown()


def test_other_weights_find_nothing(tmp_path: Path) -> None:
    """An engine whose weights are not identified keeps its chunks to itself."""
    for identity in ("w", "v", "", ""):
        engine = Offloading(tmp_path, identity=identity)
        assert engine.found(KEYS[:4]) == 0
        engine.compute(KEYS[:4])
        engine.forget()
        assert engine.found(KEYS[:4]) == 4
        engine.shutdown()


def test_ranks_share_chunks_that_are_the_same_for_any_number_of_them() -> None:
    agnostic = replace(PARALLEL, is_parallelism_agnostic=True)
    two = replace(agnostic, tp_size=2, world_size=2)
    assert page_layout(replace(CONFIG, parallel=agnostic)) == page_layout(replace(CONFIG, parallel=two))


def test_events_name_what_is_stored(offloading: Offloading, tmp_path: Path) -> None:
    offloading.compute(KEYS)
    ours = [(key, event) for key, event in offloading.events if event.medium is KVKitTier.medium]
    assert [key for key, _ in ours] == KEYS
    assert {(event.removed, event.locality) for _, event in ours} == {(False, Locality.LOCAL)}
    assert {get_offload_group_idx(key) for key, _ in ours} == {0, 1}


def test_new_weights_begin_an_epoch(offloading: Offloading, tmp_path: Path) -> None:
    """Chunks of earlier weights are not found, those of a request that began with them are not stored, and
    engines with one version of weights share."""
    offloading.compute(KEYS[:4])
    with offloading.request() as old:
        offloading.tier.weights_changed()
        offloading.forget()
        offloading.begin_store(KEYS[4:6], old)
        offloading.until(lambda: not offloading.manager._jobs)
        offloading.forget()
        assert offloading.found(KEYS[:1]) == offloading.found(KEYS[4:6]) == 0
    offloading.tier.set_weight_version("7")
    offloading.tier.connector_reset()
    offloading.compute(KEYS[6:8])
    offloading.forget()
    assert offloading.found(KEYS[6:8]) == 2
    other = Offloading(tmp_path)
    assert other.found(KEYS[6:8]) == 0
    other.tier.set_weight_version("7")
    assert other.found(KEYS[6:8]) == 2
    other.shutdown()
    offloading.tier.connector_reset()
    offloading.forget()
    assert offloading.found(KEYS[6:8]) == 0


HINT = KvHintAction(
    "a", "kv.retain", "1.0", {"directives": [{"start": 0, "end": CHUNK_TOKENS + 4, "priority": 60}]}
)


@pytest.mark.parametrize("when", ["stored", "held"])
@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({}, 0),
        ({"kv_hints": KvHintsEnvelope("0.1", "m", [HINT])}, 4),
        ({"kv_transfer_params": {"kv_cache": {"keep_s": 600}}}, 8),
        ({"kv_transfer_params": {"kv_cache": {"keep_s": 6000}}}, 0),
    ],
)
def test_what_a_request_wants_kept_outlives_what_is_newer(
    tmp_path: Path, fields: dict[str, Any], kept: int, when: str
) -> None:
    """Of both groups, the chunks of the tokens that a hint names; nothing where limits are exceeded."""
    tiers = {"disk": {"url": str(tmp_path), "capacity": int(16.5 * BYTES)}}
    kvkit = {"staging": "4MiB", "timeout_s": DEADLINE_S, "tiers": tiers}
    limits = {"max_keep_s": 600, "max_priority": 80}
    offloading = Offloading(tmp_path, kvkit=kvkit, requests=limits)
    first, newer = keys(8, seed=1), keys(40, seed=2)
    if when == "stored":
        offloading.compute(first, **fields)
    else:
        offloading.compute(first)
        with offloading.request(**fields) as context:
            for i, key in enumerate(first):
                context.set_offload_key_position(key, (i // 2 + 1) * CHUNK_TOKENS)
            offloading.manager.touch(first, context)
            all_threads = threading.Barrier(THREADS + 1)
            offloading.tier._store.workers.start(*[partial(all_threads.wait, DEADLINE_S)] * THREADS)
            all_threads.wait(DEADLINE_S)  # so that the thread with the touch has ended it
    for start in range(0, 40, 8):
        offloading.compute(newer[start : start + 8])
    offloading.forget()
    assert offloading.found(first) == kept
    offloading.shutdown()


def test_a_tier_that_a_request_may_not_name_costs_it_its_policy_alone(
    offloading: Offloading, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM's scheduler goes on, and the chunks are stored as ever."""
    offloading.compute(KEYS, kv_transfer_params={"kv_cache": {"store_to": ["nowhere"]}})
    assert "store_to = 'nowhere': want some of secondary_tiers: requests.store_to: disk" in caplog.text
    offloading.forget()
    assert offloading.found(KEYS) == len(KEYS)


def test_what_is_to_be_stored_nowhere_is_not_stored(offloading: Offloading, tmp_path: Path) -> None:
    offloading.compute(KEYS, kv_transfer_params={"kv_cache": {"store": False}})
    assert not files(tmp_path)
    offloading.forget()
    assert offloading.found(KEYS) == 0


@pytest.mark.parametrize("kind", ["store", "load_async"])
def test_a_move_that_cannot_begin_has_failed(
    kind: str, offloading: Offloading, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM's scheduler goes on, hears of it, and can be shut down."""

    def refuse(*_: object, **__: object) -> None:
        raise ValueError("no")

    if kind == "load_async":
        offloading.compute(KEYS[:4])
        offloading.forget()
    with monkeypatch.context() as patched:
        patched.setattr(offloading.tier._pages, kind, refuse)
        if kind == "store":
            offloading.compute(KEYS[:4])
            offloading.forget()
        assert offloading.found(KEYS[:4]) == 0
    assert "4 chunks failed: ValueError('no')" in caplog.text
    assert not offloading.tier.has_pending_work()


def test_chunks_of_groups_that_the_settings_lack_are_stored_if_their_place_does_not_matter(
    tmp_path: Path,
) -> None:
    """As vLLM's own tests make the tier."""
    offloading = Offloading(tmp_path, replace(CONFIG, groups=()))
    context = ReqContext(req_id="one")
    offloading.tier.on_new_request(context)
    offloading.tier.submit_store(TransferJob(1, KEYS[:2], np.arange(2), False, context))
    offloading.tier.drain_jobs()
    assert [result.success for result in offloading.tier.get_finished_jobs()] == [True]
    offloading.shutdown()


@pytest.mark.parametrize(("keeps", "kept"), [(True, 4), (False, 0)])
def test_chunks_are_kept_over_a_sleep_if_the_operator_says_so(tmp_path: Path, keeps: bool, kept: int) -> None:
    offloading = Offloading(tmp_path, keep_over_sleep=keeps)
    offloading.compute(KEYS[:4])
    offloading.tier.falls_asleep()
    offloading.tier.connector_reset()
    offloading.tier.wakes_up()
    offloading.forget()
    assert offloading.found(KEYS[:4]) == kept
    offloading.tier.connector_reset()
    offloading.forget()
    assert offloading.found(KEYS[:4]) == 0
    offloading.shutdown()


def test_a_reset_waits_for_moves_under_way(offloading: Offloading) -> None:
    """vLLM reuses its memory afterwards: nothing of the tier's touches it."""
    with offloading.request() as context:
        offloading.begin_store(KEYS, context)
        offloading.forget()
        assert all(job._ended.is_set() for job in offloading.tier._under_way.values())
    offloading.until(lambda: not offloading.manager._jobs)
    assert offloading.found(KEYS) == len(KEYS)


def test_a_shutdown_amid_moves(tmp_path: Path) -> None:
    engine = Offloading(tmp_path)
    engine.compute(KEYS)
    engine.forget()
    with engine.request() as context:
        for key in KEYS:
            engine.manager.lookup(key, context)
        engine.step(context.req_id)
        engine.until(lambda: engine.manager.lookup(KEYS[0], context) is not LookupResult.RETRY)
        engine.step()
    engine.shutdown()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kvkit": {}}, "secondary_tiers: no tiers; give kvkit_config, or kvkit with tiers in it"),
        ({"url": "/x"}, "secondary_tiers: url: unknown"),
        ({"locality": "HERE"}, "locality.*'LOCAL' or 'REMOTE'"),
        ({"kvkit": {"tiers": {"ram": {}}}}, "tiers.ram: .* needs a capacity"),
        ({"kvkit": {"precision": "fp8", "tiers": {"disk": {"url": "/tmp/kvkit"}}}}, "precision='fp8'"),
        ({"kvkit": {"staging": 1, "tiers": {"disk": {"url": "/tmp/kvkit"}}}}, "staging"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_setting_that_cannot_be_is_named(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Offloading(tmp_path, **settings)


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file is found right, a tier with it stores, and its listing is as shown."""
    page = "docs/serve/offloading.md"
    text = on_page("docs/serve/offloading.md", "[tiers").replace(
        "file:///var/cache", f"file://{tmp_path}/cache"
    )
    (tmp_path / "kvkit.toml").write_text(text)
    check_printed(
        page, "kvkit doctor", run_shell(on_page("docs/serve/offloading.md", "kvkit doctor"), tmp_path).stdout
    )
    model = OffloadingModelConfig("/models/Qwen3-0.6B", "bfloat16")
    engine = Offloading(
        tmp_path, replace(CONFIG, model=model), kvkit={}, kvkit_config=str(tmp_path / "kvkit.toml")
    )
    engine.compute(KEYS)
    engine.shutdown()
    check_printed(
        page,
        "kvkit inspect",
        run_shell(on_page("docs/serve/offloading.md", "kvkit inspect"), tmp_path).stdout,
    )
    served = next(block.text for block in blocks(page, "sh") if block.text.startswith("vllm serve"))
    extra = json.loads(served.split("'")[1])["kv_connector_extra_config"]
    assert extra["secondary_tiers"][0]["module_path"] == TIER_MODULE
