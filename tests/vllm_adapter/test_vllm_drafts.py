"""Speculative decoding stores no rejected token, and hits and handoff work beside it.

First over the connector's two sides and real pages, then over real vLLM.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("vllm")

import draft_models
from scheduler_engine import scheduler_of
from small_models import VOCABULARY
from test_vllm_scheduler import Request, answer, new_scheduler, request, step
from vllm_engine import BLOCK, Engine, Settings, connector, on_disk, prompt
from vllm_rank import BLOCK as PAGE
from vllm_rank import BLOCKS, CHUNK, IDS, SAVE, SPECS, Pair, Rank

from kvkit.adapters.engine.lookup_request import LookupRequest, Sequence
from kvkit.adapters.vllm.checks import check_arrangement
from kvkit.adapters.vllm.settings import read_settings
from kvkit.adapters.vllm.step import LoadTask, SaveTask, StepMetadata
from kvkit.format import record
from kvkit.settings import ConfigError

Records = dict[tuple[int, ...], dict[int, NDArray[np.float32]]]
"""Layers of records, by the tokens of their chunks and the number of their group."""

LAYERS = {"model.layers.0": SPECS[0], "model.layers.1": SPECS[0], "model.layers.2": SPECS[1]}
"""The last one is a draft's."""


def records(folder: Path) -> Records:
    """What a store holds, float32 [layers, values] each."""
    found: Records = {}
    for file in sorted(folder.rglob("c.*")):
        data = memoryview(file.read_bytes())
        header, places, damage = record.examine(lambda at, size, data=data: data[at : at + size], len(data))
        assert damage is None
        layers = np.stack([np.frombuffer(data[at : at + size], np.float32) for at, size in places])
        found.setdefault(tuple(header.tokens.tolist()), {})[header.group] = layers
    return found


class DraftingEngine:
    """Computes one request in vLLM's steps over real pages, where a draft is right by chance.

    The model's pages have each token itself as its KV, the draft's the token after it. No token comes twice.

    Args:
        ahead: whether a step is planned before the one before it is over, as with asynchronous scheduling.
    """

    def __init__(self, rank: Rank, seed: int, ahead: bool, total: int) -> None:
        self._total = total
        self._rank, self._ahead, self._chance = rank, ahead, Random(seed)
        self._scheduler = scheduler_of(CHUNK, (PAGE,))
        self._new = itertools.count(1)
        self.request = Request("a", self._tokens(21), 21)
        self._table = list(range(1, BLOCKS))
        self._scheduler.update_state_after_alloc(self.request, (self._table,), 0)
        self._drafted: list[int] = []
        self._computed = 0  # tokens whose KV stays

    def generate(self) -> None:
        """Generate up to `total` tokens, and have the request's blocks freed, and used by others."""
        planned: deque[tuple[StepMetadata, int]] = deque()
        while self.request.num_tokens < self._total:
            planned.append(self._plan())
            if not self._ahead or len(planned) == 2:
                self._take(*planned.popleft())
        keeps = self._scheduler.request_finished(self.request, (self._table,))
        for in_flight, _ in planned:
            self._rank.run(in_flight)
        freed: list[str] = []
        for _ in range(3):
            last = self._scheduler.plan({}, lambda _: None)
            last.idle = False  # others compute meanwhile
            freed += self._rank.run(last, ["a"])[2]
        assert freed == ["a"] * keeps, "told once"
        self._rank.fill(-1.0)
        self._rank.worker.cache.flush()

    def _tokens(self, count: int) -> list[int]:
        return list(itertools.islice(self._new, count))

    def _plan(self) -> tuple[StepMetadata, int]:
        """A step: 8 tokens of the prompt, or one token and what is drafted behind it."""
        left = self.request.num_tokens - self.request.num_computed_tokens
        count = min(left, 8) if left > 1 else 1 + draft_models.DRAFTED
        planned = self._scheduler.plan({"a": count}, lambda _: (self._table,))
        self.request.num_computed_tokens += count
        return planned, count

    def _take(self, planned: StepMetadata, count: int) -> None:
        known, first = self.request.tokens, self._computed
        given = (known + self._drafted)[first : first + count]
        right = self._chance.randint(0, len(self._drafted))
        sampled = [] if first + count < len(known) else [*self._drafted[:right], *self._tokens(1)]
        rejected = len(self._drafted) - right
        self._computed += len(given) - rejected

        def draft() -> None:
            after = (known + sampled)[first + 1 : self._computed + 1]
            self._write(["model.layers.2"], first, after + [0] * draft_models.DRAFTED)

        self._rank.run(planned, (), lambda: self._write([*LAYERS][:2], first, given), draft)
        self._drafted = self._tokens(draft_models.DRAFTED) if sampled else []
        self.request.num_computed_tokens -= rejected
        self.request.tokens = (known + sampled)[: self._total]

    def _write(self, layers: list[str], first: int, values: list[int]) -> None:
        for position, value in enumerate(values, first):
            for name in layers:
                self._rank.pages[name][self._table[position // PAGE], :, position % PAGE] = float(value)


@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "overlapping"])
def test_records_hold_what_was_accepted_alone(tmp_path: Path, ahead: bool) -> None:
    """Neither tokens nor KV of what was rejected, and the KV of drafts as it is after they ran."""
    for seed in range(12):  # what ends a request may fill a chunk, or lie behind one, by a few tokens
        folder = tmp_path / str(seed)
        rank = Rank(folder, "async", specs=LAYERS, drafts=True)
        with closing(rank.worker):
            engine = DraftingEngine(rank, seed, ahead, 4 * CHUNK + 1 - seed % 4)
            engine.generate()
        found, tokens = records(folder), engine.request.tokens
        assert len(found) == (len(tokens) - 1) // CHUNK
        for first in range(0, len(found) * CHUNK, CHUNK):
            groups = found[tuple(tokens[first : first + CHUNK])]
            for group, shift in enumerate((0, 1)):
                held = groups[group].reshape(-1, CHUNK // PAGE, 2, PAGE, 2 * SPECS[group].head_size)
                expected = np.array(tokens[first + shift : first + shift + CHUNK], np.float32)
                wanted = expected.reshape(CHUNK // PAGE, 1, PAGE, 1)
                assert np.array_equal(held, np.broadcast_to(wanted, held.shape))


@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize(
    ("tokens", "has", "found", "usable"),
    [(33, 0, 32, 28), (32, 0, 32, 28), (30, 0, 24, 20), (33, 28, 32, 28), (8, 0, 8, 4), (33, 0, 0, 0)],
)
def test_the_end_of_a_hit_is_computed_again(
    tokens: int, has: int, found: int, usable: int, windows: bool
) -> None:
    """There an EAGLE head has KV of tokens that came after in another sequence; vLLM has `has` tokens."""
    scheduler, a = new_scheduler(recompute_last_block=True, windows=windows), request(tokens)
    waits = scheduler.get_num_new_matched_tokens(a, has)
    asked = step(scheduler)
    if asked.lookups:
        assert waits == (None, False)
        answer(scheduler, asked, found)
    usable = usable // 8 * 8 if windows else usable
    count = max(0, usable - has)
    assert scheduler.get_num_new_matched_tokens(a, has) == (count, count > 0)


def test_steps_that_wait_for_a_load_know_of_its_failure_before_drafts_run(tmp_path: Path) -> None:
    """vLLM asks between the model and its draft, and has anything saved after that."""
    rank = Rank(tmp_path, "layerwise", specs=LAYERS, drafts=True)
    with closing(rank.worker):
        rank.save()
        assert rank.found() == len(IDS)
        rank.worker.cache.clear("memory")
        rank.worker.cache.clear("disk")
        told: list[set[int]] = []
        load = StepMetadata(9, loads=[LoadTask("a", 1, 0, CHUNK, ([7, 8],))], saves=[SAVE])
        before = rank.stored("disk")
        rank.run(load, draft=lambda: told.append(rank.worker.invalid_blocks()))
        rank.worker.end_saves()
        assert told == [{7, 8}]
        report = rank.worker.report()
        assert report is not None
        assert report.failed_step == 9
        assert rank.stored("disk") == before, "nothing that rests on it"


def test_blocks_stay_until_what_is_handed_off_and_saved_last_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Then vLLM is told so, once; so is the log."""
    caplog.set_level(logging.INFO, "kvkit.adapters.engine.request_stats")
    with closing(Pair(tmp_path, drafts=True)) as pair:
        pair.prefill.step(sends=[pair.send()])
        last = SaveTask("a", Sequence(IDS), 0, SAVE.blocks, last=True)
        told = [*pair.prefill.step(("a",), saves=[last], ended={"a": len(IDS)})[2]]
        assert told == [], "the save has not begun"
        while not told:
            told += pair.prefill.step()[2]
        for _ in range(3):
            told += pair.prefill.step()[2]
        assert told == ["a"]
        pair.prefill.worker.cache.flush()
    assert caplog.messages == ["a: of 48 prompt tokens hit none; stored 48 (memory), 48 (disk)"]


def test_an_engine_without_the_draft_hands_nothing_off_and_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its records lack the draft's KV. What it stores is not found either."""
    monkeypatch.setattr("kvkit.adapters.engine.lookups.ALLOCATION_WAIT_S", 0.1)
    with closing(Pair(tmp_path, specs=LAYERS, draft="eagle head 1f+2e")) as pair:
        pair.prefill.worker.close()
        model = dict(list(LAYERS.items())[:2])
        pair.prefill = Rank(tmp_path / "d", "async", {"role": "prefill"}, specs=model)
        pair.prefill.save()
        assert (pair.prefill.found(), pair.decode.found()) == (len(IDS), 0)
        pair.finish(*pair.prefill.step(("a",), sends=[pair.send()]))
        said = (
            "draft: node '.*' has '.*', '.*' has '.*'; want both engines with the same draft, or both without"
        )
        assert (found := re.search(f"a: nothing is handed off: .*{said}", caplog.text)) is not None
        assert "has 'eagle head 1f+2e'" in found[0]
        assert "has ''" in found[0]
        ask = LookupRequest("a", 1, Sequence(IDS), transfer="t", computed_remotely=True)
        pair.decode.step(lookups=[ask], idle=True)
        assert pair.decode.heard() == 0


def test_a_pipeline_that_would_save_its_last_stage_alone_is_refused() -> None:
    settings, config = read_settings({"kvkit": on_disk(Path("/kv"))})
    engine = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_role="kv_both"),
        parallel_config=SimpleNamespace(world_size=2, pipeline_parallel_size=2),
        model_config=SimpleNamespace(multimodal_config=None),
        speculative_config=SimpleNamespace(method="eagle"),
        use_v2_model_runner=False,
        max_concurrent_batches=1,
    )
    with pytest.raises(ConfigError, match="pipeline_parallel_size = 2: with speculative decoding"):
        check_arrangement(settings, config, engine, 1)
    engine.use_v2_model_runner = True
    check_arrangement(settings, config, engine, 1)


OPTIONS: Settings = {
    "skip_tokenizer_init": True,
    "max_num_batched_tokens": 256,
    "kv_cache_memory_bytes": 64 << 20,
}
PROMPT, GENERATED = prompt(3 * BLOCK - 20, seed=364, vocabulary=VOCABULARY), 24
"""Together they fill three chunks."""
DRAFTED, ACCEPTED = (f"vllm:spec_decode_num_{what}_tokens_total{{}}" for what in ("draft", "accepted"))
LOADED, HANDED = (f"vllm:kvkit_loaded_tokens_total{{tier={tier}}}" for tier in ("disk", "handoff"))
COUNTED = DRAFTED, ACCEPTED, LOADED, HANDED
HEADS = "eagle", "eagle3", "mtp"
RIGHT = "draft_model", "eagle", "mtp"
"""Whose drafts are right now and then."""


@pytest.fixture(scope="module")
def process() -> Iterator[Engine]:
    with Engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def plain(process: Engine, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[int], Records]:
    """What the model answers without a draft, and has stored."""
    folder = tmp_path_factory.mktemp("plain")
    process.open(connector(on_disk(folder / "kv")), draft_models.target(folder / "model"), **OPTIONS)
    (tokens,) = process.text(PROMPT, tokens=GENERATED)
    process.flush()
    return tokens, records(folder / "kv")


def counted(process: Engine, before: Settings | None = None) -> Settings:
    """Tokens drafted, accepted, and loaded from disk or handed off, since `before`."""
    found = process.metrics()
    return {name: found.get(name, 0) - (before or {}).get(name, 0) for name in COUNTED}


def preempted(process: Engine) -> Settings:
    """The answer, under a salt of its own, where all blocks are lost while it is generated."""
    process.submit("preempted", PROMPT, GENERATED, cache_salt="preempted")
    process.step(4)  # two are the prompt's, and one samples four tokens at most
    process.do("preempt")
    while not (found := process.step(1)):
        pass
    return found["preempted"]


@pytest.mark.parametrize("kind", draft_models.KINDS)
def test_a_hit_is_as_good_as_computing(
    kind: str, process: Engine, plain: tuple[list[int], Records], tmp_path: Path
) -> None:
    """For tokens and drafts, and after a preemption; what is stored is what is stored without a draft, and
    the draft's KV.

    vLLM's own cache computes the end of a hit again where kvkit does, and gets nothing on top.
    """
    model, speculation = draft_models.made(kind, tmp_path)
    options = OPTIONS | {"speculative_config": speculation, "enable_prefix_caching": True}
    process.open(connector(on_disk(tmp_path / "kv")), model, **options)
    before = counted(process)
    (cold,) = process.generate([PROMPT], GENERATED)
    computed = counted(process, before)
    usable = BLOCK if kind in HEADS else 2 * BLOCK
    assert process.cached(PROMPT, tokens=1) == [usable]
    assert counted(process, before)[LOADED] == 0
    process.flush()
    process.do("reset", False)
    before = counted(process)
    (warm,) = process.generate([PROMPT], GENERATED)
    assert counted(process, before) == computed | {LOADED: usable}, "the draft, too, finds its KV"
    assert computed[DRAFTED] > computed[ACCEPTED] >= (kind in RIGHT)
    assert (cold["cached"], warm["cached"]) == (0, usable)
    assert cold["tokens"] == warm["tokens"]
    before = counted(process)
    assert preempted(process)["tokens"] == cold["tokens"]
    assert counted(process, before)[LOADED] == usable, "what it had stored itself"
    process.flush()
    found, answered = records(tmp_path / "kv"), PROMPT + cold["tokens"]
    chunks = [tuple(answered[i * BLOCK : (i + 1) * BLOCK]) for i in range(3)]
    assert sorted(found) == sorted(chunks), "nothing but what was answered"
    if kind != "mtp":  # which is of another model
        assert cold["tokens"] == plain[0]
        numbers = process.do("call", "draft_models", "layer_numbers")[0]
        layers = [numbers[f"model.layers.{i}.self_attn.attn"] for i in range(draft_models.LAYERS)]
        for chunk, groups in plain[1].items():
            np.testing.assert_allclose(found[chunk][0][layers], groups[0], atol=1e-4)


def test_a_draft_s_kv_is_held_in_fewer_bits_with_the_model_s(
    process: Engine, plain: tuple[list[int], Records], tmp_path: Path
) -> None:
    model, speculation = draft_models.made("eagle", tmp_path)
    settings = on_disk(tmp_path / "kv") | {"precision": "int8", "unchecked_precision": True}
    process.open(connector(settings), model, **OPTIONS, speculative_config=speculation)
    before = counted(process)
    (cold,) = process.text(PROMPT, tokens=GENERATED)
    computed = counted(process, before)
    process.flush()
    before = counted(process)
    assert process.text(PROMPT, tokens=GENERATED) == [cold] == [plain[0]]
    assert counted(process, before) == computed | {LOADED: BLOCK}, "as many drafts are right"


def test_a_draft_s_kv_is_handed_off(
    process: Engine, plain: tuple[list[int], Records], tmp_path: Path
) -> None:
    """From P, which drafts in vain, to D, whose drafts are as good as if it had computed the prompt."""
    model, speculation = draft_models.made("eagle", tmp_path)
    address, options = f"unix://{tmp_path}/socket", OPTIONS | {"speculative_config": speculation}
    receives = {"role": "decode", "listen": [address], "buffer": "16MiB", "max_prefill_tokens": 500}
    sends = {"role": "prefill"}
    process.open(connector({"handoff": receives}, role="kv_consumer"), model, **options)
    before = counted(process)
    assert process.text(PROMPT, tokens=GENERATED) == [plain[0]]
    computed = counted(process, before)
    with Engine() as prefill:
        prefill.open(connector({"handoff": sends}, role="kv_producer"), model, **options)
        asked = {"do_remote_decode": True, "do_remote_prefill": False, "handoff": address}
        (first,) = prefill.generate([PROMPT], 1, extra_args={"kv_transfer_params": asked})
        before = counted(process)
        passed = {"kv_transfer_params": first["handoff"]}
        (second,) = process.generate([PROMPT], GENERATED, extra_args=passed)
    found = counted(process, before)
    assert second["tokens"] == plain[0]
    assert (found[ACCEPTED], found[HANDED]) == (computed[ACCEPTED], 3 * BLOCK)
