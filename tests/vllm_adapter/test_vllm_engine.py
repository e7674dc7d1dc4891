"""A real vLLM engine with kvkit gives the tokens that it gives without, and the expected hits."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import torch

from kvkit.lab.testbed.engine_stub import POISON

pytest.importorskip("aiohttp")
pytest.importorskip("vllm")

from event_subscriber import Following, addresses
from metric_names import documented
from small_models import QWEN, VOCABULARY, save
from transformers import AutoModelForCausalLM
from vllm_engine import BLOCK, Engine, Settings, connector, on_disk
from vllm_engine import prompt as prompt_of

from kvkit.adapters.huggingface.growing import GrowingCache
from kvkit.adapters.vllm import stats
from kvkit.format.record import read_header
from kvkit.lab.quality.judge import MeasuredModel
from kvkit.lab.quality.precision import restore
from kvkit.lab.testbed.waiting import wait_for
from kvkit.router.index import BlockIndex


def prompt(tokens: int, seed: int = 0) -> list[int]:
    return prompt_of(tokens, seed, VOCABULARY)


LONG, SHORT = prompt(600, seed=1), prompt(300, seed=2)
SHARED = prompt(400, seed=3)
FAMILY = [SHARED + prompt(80, seed=10 + i) for i in range(5)]
"""Prompts that begin alike."""

Expected = Callable[..., list[int]]


class OneModel(Engine):
    """An engine that opens one small model."""

    def __init__(self, model: Path) -> None:
        super().__init__()
        self.model = model

    def open(self, transfer: Settings | None, model: Path | None = None, **options: Any) -> Self:
        return super().open(transfer, model or self.model, skip_tokenizer_init=True, **options)


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with OneModel(save(QWEN, tmp_path_factory.mktemp("model"))) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(process: Engine) -> Expected:
    """What an engine without kvkit answers: asked before any other engine is opened."""
    process.open(None)
    known: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def ask(prompts: list[list[int]], tokens: int = 8) -> None:
        for given, answer in zip(prompts, process.text(*prompts, tokens=tokens), strict=True):
            known[tuple(given), tokens] = answer

    ask([LONG, SHORT, *FAMILY])
    ask([SHORT], 100)
    ask([second_turn(known[tuple(SHORT), 100])])
    ask([prompt(250, seed=20 + i) for i in range(3)], 40)
    return lambda given, tokens=8: known[tuple(given), tokens]


def second_turn(answer: list[int]) -> list[int]:
    return [*SHORT, *answer, *prompt(40, seed=4)]


def whole(tokens: int) -> int:
    """The tokens of a prompt that can come from the cache."""
    return (tokens - 1) // BLOCK * BLOCK


def difference(after: dict[str, float], before: dict[str, float], *names: str) -> list[float]:
    return [after.get(name, 0.0) - before.get(name, 0.0) for name in names]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv")


@pytest.fixture(scope="module")
def tiered(process: Engine, expected: Expected, folder: Path) -> Engine:
    """An engine with memory and a folder."""
    settings = on_disk(folder)
    return process.open(connector({"tiers": {"memory": {"capacity": "128MiB"}} | settings["tiers"]}))


def test_a_second_request_loads_what_the_first_computed(tiered: Engine, expected: Expected) -> None:
    before = tiered.metrics()
    cold, hit = (tiered.generate([LONG])[0] for _ in range(2))
    tiered.flush()
    assert cold["tokens"] == hit["tokens"] == expected(LONG)
    assert (cold["cached"], hit["cached"]) == (0, 512)
    after = tiered.metrics()
    assert difference(
        after,
        before,
        "vllm:kvkit_lookup_tokens_total{}",
        "vllm:kvkit_hit_tokens_total{tier=memory}",
        "vllm:kvkit_loaded_tokens_total{tier=memory}",
        "vllm:kvkit_loaded_tokens_total{tier=disk}",
        "vllm:kvkit_load_errors_total{}",
        "vllm:kvkit_load_bytes_per_second_count{}",
        "vllm:kvkit_store_bytes_per_second_count{}",
        "vllm:external_prefix_cache_hits_total{}",
        "vllm:prompt_tokens_cached_by_source_total{source=host}",
    ) == [1024, 512, 512, 0, 0, 1, 1, 512, 512]


def test_generated_tokens_are_hit_by_the_next_turn(tiered: Engine, expected: Expected) -> None:
    (answer,) = tiered.text(SHORT, tokens=100)
    assert answer == expected(SHORT, 100)
    following = second_turn(answer)
    (found,) = tiered.generate([following])
    assert found["tokens"] == expected(following)
    assert found["cached"] == (300 + 99) // BLOCK * BLOCK  # the last token's KV was not computed


@pytest.mark.parametrize("tokens", [84, 85, 86])
def test_a_chunk_that_fills_at_the_end_is_saved(tiered: Engine, tokens: int) -> None:
    """Of 300 + 85 tokens, the last is sampled when the 384th is computed."""
    given = prompt(300, seed=30 + tokens)
    (answer,) = tiered.text(given, tokens=tokens)
    filled = (300 + tokens - 1) // BLOCK * BLOCK
    assert tiered.cached([*given, *answer, *prompt(BLOCK)], tokens=1) == [filled]


def test_requests_at_a_time_share_a_prefix(tiered: Engine, expected: Expected) -> None:
    cold = tiered.generate(FAMILY)
    warm = tiered.generate(FAMILY)
    for given, first, second in zip(FAMILY, cold, warm, strict=True):
        assert first["tokens"] == second["tokens"] == expected(given)
        assert second["cached"] == whole(len(given))


def test_a_salt_keeps_tenants_apart(tiered: Engine, expected: Expected) -> None:
    assert tiered.cached(LONG, cache_salt="tenant a") == [0]
    assert tiered.cached(LONG, cache_salt="tenant b") == [0]
    (found,) = tiered.generate([LONG], cache_salt="tenant a")
    assert (found["cached"], found["tokens"]) == (512, expected(LONG))


def test_a_request_that_must_not_read_computes(tiered: Engine, expected: Expected) -> None:
    assert tiered.cached(LONG) == [512]
    (found,) = tiered.generate([LONG], skip_reading_prefix_cache=True)
    assert (found["cached"], found["tokens"]) == (0, expected(LONG))


def wanting(**wish: Any) -> dict[str, Any]:
    """Sampling parameters of a request that wants this of the cache."""
    return {"extra_args": {"kv_transfer_params": {"kv_cache": wish}}}


def test_a_request_gets_what_it_wants_of_the_cache(tiered: Engine) -> None:
    given = prompt(600, seed=90)
    (cold,) = tiered.generate([given], **wanting(store=False))
    assert tiered.cached(given, **wanting(store_to=["disk"])) == [0], "the first one was not stored"
    assert tiered.cached(given, **wanting(load_from=["memory"], store=False)) == [0]
    (found,) = tiered.generate([given], **wanting(load_from=["disk"], max_load_tokens=300, store=False))
    assert (found["cached"], found["tokens"]) == (2 * BLOCK, cold["tokens"])
    # what is refused costs a request its wishes, but for that nothing is stored
    assert tiered.cached(given, **wanting(load_from=["memory"], keep_s=60, store=False)) == [512]
    assert tiered.cached(given, **wanting(load_from=["memory"])) == [0]


def test_a_handoff_that_the_engine_does_not_take_part_in_is_counted(
    tiered: Engine, expected: Expected
) -> None:
    """It has no `[handoff]`: each request is answered as any other."""
    for side in ("decode", "prefill"):
        before, asked = (
            tiered.metrics(),
            {f"do_remote_{side}": True, "transfer_id": "t", "handoff": "unix:///d"},
        )
        found = tiered.generate([LONG, SHORT], extra_args={"kv_transfer_params": asked})
        assert [answer["tokens"] for answer in found] == [expected(LONG), expected(SHORT)]
        assert [answer["handoff"] for answer in found] == [None, None]
        assert difference(tiered.metrics(), before, "vllm:kvkit_handoffs_refused_total{}") == [2]


def damage(folder: Path, records: slice) -> int:
    """Flip a byte in some of the records below a folder, in the order of their names; how many."""
    files = [f for f in sorted(folder.rglob("*")) if f.is_file() and f.stat().st_size > 1 << 16][records]
    for file in files:
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= POISON
        file.write_bytes(data)
    return len(files)


def test_damaged_records_are_computed_anew(tiered: Engine, expected: Expected, folder: Path) -> None:
    """Policy recompute: the same text, one error counted; and what was computed is stored again."""
    tiered.generate([LONG])
    tiered.flush()
    tiered.do("clear", "memory")
    assert damage(folder, slice(None))
    before = tiered.metrics()
    (found,) = tiered.generate([LONG])
    assert found["tokens"] == expected(LONG)
    assert difference(tiered.metrics(), before, "vllm:kvkit_load_errors_total{}") == [1]
    tiered.flush()
    (again,) = tiered.generate([LONG])
    assert (again["cached"], again["tokens"]) == (512, expected(LONG))


def test_a_reset_forgets_everything(tiered: Engine, expected: Expected) -> None:
    assert tiered.cached(LONG) == [512]
    assert tiered.do("reset", True)
    assert tiered.cached(LONG) == [0]
    (found,) = tiered.generate([LONG])
    assert (found["cached"], found["tokens"]) == (512, expected(LONG))


def test_every_metric_moves(tiered: Engine, folder: Path) -> None:
    """A hit, damaged records, and a save without room."""
    before = tiered.metrics()
    given = prompt(600, seed=77)
    assert [tiered.cached(given) for _ in range(2)] == [[0], [512]]
    tiered.flush()
    tiered.do("clear", "memory")
    assert damage(folder, slice(None))
    tiered.generate([given])
    tiered.do("clear", "memory")
    tiered.do("take_slots")
    tiered.generate([prompt(600, seed=78)])
    tiered.do("give_slots_back")
    tiered.generate([prompt(20)])  # takes the step that tells
    after = tiered.metrics()
    changed = {name.partition("{")[0] for name, value in after.items() if value != before.get(name, 0.0)}
    found = {re.sub("_(total|count)$", "", name) for name in changed}
    assert documented(stats.__doc__) - found == set()


def test_requests_of_an_engine_that_caches_itself(
    process: Engine, expected: Expected, tmp_path: Path
) -> None:
    """vLLM's prefix caching, prompts in pieces, and so few blocks that requests are preempted."""
    process.open(
        connector(on_disk(tmp_path)),
        enable_prefix_caching=True,
        max_num_batched_tokens=256,
        max_num_seqs=4,
        num_gpu_blocks_override=9,
        max_model_len=1024,
    )
    names = (
        "vllm:prompt_tokens_by_source_total{source=local_compute}",
        "vllm:prompt_tokens_by_source_total{source=local_cache_hit}",
        "vllm:prompt_tokens_by_source_total{source=external_kv_transfer}",
    )

    def sources(given: list[int]) -> list[float]:
        before = process.metrics()
        assert process.text(given) == [expected(given)]
        return difference(process.metrics(), before, *names)

    assert sources(LONG) == [600, 0, 0]
    assert sources(LONG) == [88, 512, 0]  # vLLM's own hit is as long as kvkit's
    process.flush()
    assert process.do("reset", False)
    assert sources(LONG) == [88, 0, 512]
    assert process.do("reset", False)
    assert process.text(LONG[:300])  # vLLM now has two blocks, kvkit four
    assert sources(LONG) == [88, 256, 256]

    crowd = [prompt(250, seed=20 + i) for i in range(3)]
    before = process.metrics()
    assert process.text(*crowd, tokens=40) == [expected(given, 40) for given in crowd]
    assert difference(process.metrics(), before, "vllm:num_preemptions_total{}")[0] > 0
    assert process.text(*crowd, tokens=40) == [expected(given, 40) for given in crowd]
    process.flush()


@pytest.mark.parametrize("load", ["sync", "layerwise"])
def test_loads_that_a_step_waits_for(process: Engine, expected: Expected, tmp_path: Path, load: str) -> None:
    process.open(connector(on_disk(tmp_path), load=load))
    cold, hit = (process.generate([SHORT])[0] for _ in range(2))
    assert (cold["cached"], hit["cached"]) == (0, 256)
    assert cold["tokens"] == hit["tokens"] == expected(SHORT)
    assert process.cached(LONG[:400]) == [0]
    process.flush()
    # the step that fails to load three chunks completes a fourth, which rests on them and must not be kept
    assert damage(tmp_path, slice(None)) == 5
    before = process.metrics()
    (found,) = process.generate([LONG])
    assert found["tokens"] == expected(LONG)
    assert difference(process.metrics(), before, "vllm:kvkit_load_errors_total{}") == [1]
    process.flush()
    (again,) = process.generate([LONG])
    assert (again["cached"], again["tokens"]) == (512, expected(LONG))


def test_a_load_that_fails_can_fail_its_request_alone(
    process: Engine, expected: Expected, tmp_path: Path
) -> None:
    process.open(connector(on_disk(tmp_path), policy="fail"))
    process.text(LONG)
    process.flush()
    assert damage(tmp_path, slice(None)) == 4
    process.text(SHORT)
    process.flush()
    broken, whole = process.generate([LONG, SHORT])
    assert (broken["reason"], broken["tokens"]) == ("error", [])
    assert (whole["reason"], whole["tokens"], whole["cached"]) == ("length", expected(SHORT), 256)
    (after,) = process.generate([LONG])  # what was damaged is gone
    assert after["tokens"] == expected(LONG)


def test_two_connectors_in_one_engine(process: Engine, expected: Expected, tmp_path: Path) -> None:
    """kvkit first, then vLLM's example, which kvkit's misses are left to."""
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "example")},
    }
    both = [connector(on_disk(tmp_path / "kvkit")), example]
    process.open(
        {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": both},
        },
        disable_hybrid_kv_cache_manager=True,
    )
    cold, hit = (process.generate([LONG])[0] for _ in range(2))
    assert (cold["cached"], hit["cached"]) == (0, 512)
    assert cold["tokens"] == hit["tokens"] == expected(LONG)
    process.flush()


def test_a_router_knows_what_an_engine_holds(process: Engine, expected: Expected, tmp_path: Path) -> None:
    """By events of vLLM's own cache and of kvkit's tiers, which name the same blocks; so after a restart."""
    where = addresses(tmp_path)
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": where["events"],
        "replay_endpoint": where["replay"],
    }
    started = partial(
        process.open,
        connector(on_disk(tmp_path / "kv")),
        enable_prefix_caching=True,
        kv_events_config=events,
    )
    started()

    async def index() -> BlockIndex:
        async with Following(tmp_path) as router:
            await router.until_current()
            return router.follower.index

    def known() -> tuple[int, int]:
        """With vLLM's own cache, and without, once a step has sent what is new."""
        process.text(prompt(20))
        found = asyncio.run(index())
        one, other = (found.held_tokens(LONG, None, "salt", engine_cache=both) for both in (True, False))
        return one, other

    assert known() == (0, 0)
    process.text(LONG, cache_salt="salt")
    process.flush()
    wait_for(lambda: known() == (512, 512))
    process.do("clear", "disk")
    wait_for(lambda: known() == (512, 0))
    process.text(LONG)
    process.flush()
    started()

    def listed() -> set[Any]:
        process.text(prompt(20))
        found = asyncio.run(index())
        assert found.held_tokens(LONG, None, "", engine_cache=False) == 512 or not found.complete
        return {*found._engine.locations, *found._tiers.locations} if found.complete else set()

    wait_for(lambda: bool(listed()))
    before = listed()
    process.text(LONG)
    assert len(listed()) == len(before), "vLLM has other names for them"


@pytest.mark.parametrize("short_of", ["blocks", "places"])
def test_what_queued_requests_hit_comes_from_memory(
    process: Engine, expected: Expected, tmp_path: Path, short_of: str
) -> None:
    """It is stored on disk alone, and brought near while another request computes.

    vLLM asks about a request that it has no blocks for, and not about one that it has no place for. The other
    one has no whole chunk, so that it waits for no lookup.
    """
    tiers = {"memory": {"capacity": "128MiB"}} | on_disk(tmp_path)["tiers"]
    policy = {"store_to": ["disk"], "write_back_to": ["memory"]}
    few: Settings = {"max_num_seqs": 1}
    if short_of == "blocks":
        few = {"num_gpu_blocks_override": 7, "max_model_len": 6 * BLOCK}
    process.open(connector({"tiers": tiers, "policy": policy, "chunk_tokens": 4 * BLOCK}), **few)
    assert process.text(LONG) == [expected(LONG)]
    process.flush()
    process.do("clear", "memory")
    before = process.metrics()
    other, queued = process.generate([prompt(4 * BLOCK - 1, seed=40), LONG], tokens=60)
    assert (other["cached"], queued["cached"]) == (0, 512)
    assert queued["tokens"][:8] == expected(LONG)
    found = difference(
        process.metrics(),
        before,
        "vllm:kvkit_loaded_tokens_total{tier=memory}",
        "vllm:kvkit_loaded_tokens_total{tier=disk}",
        "vllm:kvkit_load_errors_total{}",
    )
    assert found == [512, 0, 0]


def test_what_is_loaded_by_layers_is_written_back(
    process: Engine, expected: Expected, tmp_path: Path
) -> None:
    memory = {"memory": {"capacity": "128MiB"}}
    policy = {"store_to": ["disk"], "write_back_to": ["memory"]}
    process.open(
        connector({"tiers": memory | on_disk(tmp_path)["tiers"], "policy": policy}, load="layerwise")
    )
    assert process.text(LONG) == [expected(LONG)]
    process.flush()
    for tier in ("disk", "memory"):
        before = process.metrics()
        (found,) = process.generate([LONG])
        assert (found["cached"], found["tokens"]) == (512, expected(LONG))
        name = f"vllm:kvkit_loaded_tokens_total{{tier={tier}}}"
        assert difference(process.metrics(), before, name) == [512]


@torch.inference_mode()
@pytest.mark.parametrize(
    ("divided", "shape"), [({}, (6, 2)), ({"record_ranks": 2, "record_stages": 3}, (2, 1))]
)
def test_kv_of_fewer_bits_is_hit(
    process: OneModel, expected: Expected, tmp_path: Path, divided: Settings, shape: tuple[int, int]
) -> None:
    """What is said over it is what transformers' model says over KV that the reference quantised."""
    settings = {"precision": "fp8", "unchecked_precision": True, **on_disk(tmp_path)}
    process.open(connector(settings, **divided))
    cold, hit = (process.generate([LONG], logprobs=20)[0] for _ in range(2))
    assert cold["tokens"] == expected(LONG)
    assert (cold["cached"], hit["cached"]) == (0, 512)
    model = MeasuredModel(AutoModelForCausalLM.from_pretrained(process.model, dtype=torch.float32).eval())
    ids, kv = np.array(LONG, np.int32), GrowingCache(model.layout, len(LONG), torch.device("cpu"))
    model.logits(ids[:512], kv)
    restore(kv, kv, 512, "fp8")
    said = model.logits(ids[512:], kv)[-1].log_softmax(-1)
    wanted = {token: float(said[int(token)]) for token in hit["likely"][0]}
    assert hit["likely"][0] == pytest.approx(wanted, abs=5e-3)
    assert cold["likely"][0] != pytest.approx(hit["likely"][0], abs=5e-3)
    process.flush()
    first, *others = tmp_path.rglob("c.*")
    assert len(others) + 1 == 4 * 12 // (shape[0] * shape[1])
    header = read_header(first.read_bytes())
    assert (header.dtype, header.shape) == ("fp8 of float32", (*shape, BLOCK, 2 * 32 + 8))


@pytest.mark.parametrize("load", ["async", "sync"])
def test_what_comes_of_fewer_bits_is_its_request_s_own(
    process: Engine, expected: Expected, tmp_path: Path, load: str
) -> None:
    """What a tier has with fewer bits is loaded neither for others, nor into memory, nor to be built on."""
    few = {"disk": {"url": f"file://{tmp_path}", "precision": "int8", "codec": "zstd"}}
    tiers = {"memory": {"capacity": "128MiB"}} | few
    unchecked = {"tiers": tiers, "unchecked_precision": True}
    process.open(connector(unchecked, load=load), enable_prefix_caching=True)
    names = (
        "vllm:kvkit_hit_tokens_total{tier=memory}",
        "vllm:kvkit_approximate_tokens_total{tier=disk}",
        "vllm:kvkit_loaded_tokens_total{tier=disk}",
        "vllm:prompt_tokens_by_source_total{source=local_cache_hit}",
        "vllm:kvkit_stored_tokens_total{tier=memory}",
        "vllm:kvkit_stored_tokens_total{tier=disk}",
    )

    def told(given: list[int]) -> list[float]:
        before = process.metrics()
        process.text(given, tokens=1)
        process.flush()
        process.text(prompt(20))  # a step of its own, which tells what was stored
        return difference(process.metrics(), before, *names)

    assert told(LONG) == [0, 0, 0, 0, 512, 512]
    assert told(LONG) == [0, 0, 0, 512, 0, 0]  # vLLM has it as it was computed
    process.do("clear", "memory")
    assert process.do("reset", False)
    longer = LONG + prompt(200, seed=5)
    for given in (LONG, LONG, longer, longer):
        assert told(given) == [0, 512, 512, 0, 0, 0]
    process.do("clear", "disk")
    assert told(LONG) == [0, 0, 0, 0, 512, 512]
    assert process.text(LONG) == [expected(LONG)]
