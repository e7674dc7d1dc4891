"""Nothing that began before a reset of the cache is stored, sent or found after it."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from small_models import QWEN, VOCABULARY, save
from test_vllm_scheduler import BLOCK, CHUNK, Request, answer, new_scheduler, request, step
from vllm_engine import BLOCK as PAGE
from vllm_engine import Engine, connector, on_disk
from vllm_engine import prompt as prompt_of

from kvkit.adapters.vllm.params import RemoteDecode
from kvkit.adapters.vllm.scheduler import Scheduler
from kvkit.adapters.vllm.step import SaveTask, StepMetadata

BLOCKS = ([1, 2, 3, 4, 5, 6],)


def admit(scheduler: Scheduler, request: Request, computed: int = 0) -> None:
    """Give a request blocks, `computed` of whose tokens vLLM has itself, and load nothing."""
    scheduler.get_num_new_matched_tokens(request, computed)
    for asked in (step(scheduler),):
        if asked.lookups:
            answer(scheduler, asked, 0)
    assert scheduler.get_num_new_matched_tokens(request, computed) == (0, False)
    scheduler.update_state_after_alloc(request, BLOCKS, 0)


def compute(scheduler: Scheduler, request: Request, tokens: int) -> StepMetadata:
    """A step that computes `tokens` tokens of a request."""
    told = step(scheduler, {request.request_id: tokens}, BLOCKS)
    request.num_computed_tokens += tokens
    return told


def stored(told: StepMetadata) -> list[SaveTask]:
    return [save for save in told.saves if save.policy.store_to != ()]


def test_what_runs_is_not_stored_until_it_gets_blocks_anew() -> None:
    scheduler, a = new_scheduler(), request(24)
    admit(scheduler, a)
    assert len(stored(compute(scheduler, a, CHUNK))) == 1
    scheduler.begin_epoch("later")
    assert not stored(compute(scheduler, a, CHUNK))
    a.num_computed_tokens = 0  # preempted
    admit(scheduler, a)
    (save,) = stored(compute(scheduler, a, 2 * CHUNK))
    assert (save.first, len(save.sequence.tokens)) == (0, 2 * CHUNK)


def test_an_async_load_that_ends_after_a_reset_gets_no_new_blocks() -> None:
    """vLLM tells of its blocks again when it is over."""
    scheduler, a = new_scheduler(), request(24)
    scheduler.get_num_new_matched_tokens(a, 0)
    answer(scheduler, step(scheduler), CHUNK)
    assert scheduler.get_num_new_matched_tokens(a, 0) == (CHUNK, True)
    scheduler.update_state_after_alloc(a, BLOCKS, CHUNK)
    step(scheduler)
    scheduler.begin_epoch("later")
    scheduler.update_state_after_alloc(a, BLOCKS, 0)
    a.num_computed_tokens = CHUNK
    assert not stored(compute(scheduler, a, CHUNK))


def test_a_last_save_that_waits_for_a_step_is_not_stored() -> None:
    """Its blocks still come back: the workers hear of it."""
    scheduler, a = new_scheduler(), request(2 * CHUNK)
    admit(scheduler, a)
    compute(scheduler, a, 2 * CHUNK - 1)
    a.num_computed_tokens = 2 * CHUNK
    a.tokens.append(7)
    assert scheduler.request_finished(a, BLOCKS)
    scheduler.begin_epoch("later")
    told = step(scheduler)
    assert [save.last for save in told.saves] == [True]
    assert not stored(told)


def test_a_request_that_ends_after_a_reset_has_no_last_save() -> None:
    scheduler, a = new_scheduler(), request(2 * CHUNK)
    admit(scheduler, a)
    compute(scheduler, a, 2 * CHUNK - 1)
    scheduler.begin_epoch("later")
    a.num_computed_tokens = 2 * CHUNK
    a.tokens.append(7)
    assert not scheduler.request_finished(a, BLOCKS)
    assert not step(scheduler).saves


def test_a_reset_between_an_answer_and_blocks_fails_the_load() -> None:
    """vLLM may start loads a step later; the request would wait for good if nobody told of its load."""
    scheduler, a = new_scheduler(), request(24)
    scheduler.get_num_new_matched_tokens(a, BLOCK)
    answer(scheduler, step(scheduler), 2 * CHUNK)
    assert scheduler.get_num_new_matched_tokens(a, BLOCK) == (2 * CHUNK - BLOCK, True)
    scheduler.begin_epoch("later")
    scheduler.update_state_after_alloc(a, BLOCKS, 2 * CHUNK - BLOCK)
    (load,) = step(scheduler).loads
    assert (load.number, load.start, load.stop) == (0, BLOCK, 2 * CHUNK)
    assert load.blocks == ([-1, 2, 3, 4],)
    assert not stored(compute(scheduler, a, 24))


@pytest.mark.parametrize("keeps_old", [False, True])
def test_what_rests_on_blocks_that_vllm_kept_is_not_stored(keeps_old: bool) -> None:
    scheduler = new_scheduler()
    scheduler.begin_epoch("later", keeps_old)
    a, b = request(24, "a"), request(24, "b")
    admit(scheduler, a, computed=CHUNK)
    a.num_computed_tokens = CHUNK
    assert bool(stored(compute(scheduler, a, CHUNK))) is not keeps_old
    admit(scheduler, b)
    assert stored(compute(scheduler, b, CHUNK))
    scheduler.begin_epoch("last", keeps_old=False)
    c = request(24, "c")
    admit(scheduler, c, computed=CHUNK)
    c.num_computed_tokens = CHUNK
    assert stored(compute(scheduler, c, CHUNK))


def test_a_prompt_is_sent_no_further() -> None:
    scheduler, a = new_scheduler(handoff_of=lambda _: RemoteDecode("t", "tcp://there")), request(24)
    admit(scheduler, a)
    assert len(compute(scheduler, a, CHUNK).sends) == 1
    assert scheduler.answer(a) is not None
    scheduler.begin_epoch("later")
    assert not compute(scheduler, a, 2 * CHUNK).sends
    assert scheduler.answer(a) is None
    assert scheduler.request_finished(a, BLOCKS), "its blocks may still be read"


def begin(engine: Engine, name: str, tokens: list[int]) -> None:
    """Have a request run: it has computed half of its first chunk, at most."""
    engine.submit(name, tokens, tokens=4)
    free, blocks = engine.do("free_blocks")
    while free == blocks:
        engine.step(1)
        free, _ = engine.do("free_blocks")


def test_kv_of_requests_that_run_at_a_reset_is_not_found(tmp_path: Path) -> None:
    """In an engine: nothing that they compute until they are preempted."""
    goes_on, preempted = (prompt_of(3 * PAGE, seed, VOCABULARY) for seed in (1, 2))
    with Engine() as engine:
        engine.open(
            connector(on_disk(tmp_path / "kv")),
            save(QWEN, tmp_path / "model"),
            skip_tokenizer_init=True,
            max_num_batched_tokens=PAGE // 2,
        )
        begin(engine, "a", goes_on)
        engine.do("reset", True)
        while "a" not in engine.step(1):
            pass
        engine.flush()
        assert engine.cached(goes_on) == [0]
        assert engine.cached(goes_on) == [2 * PAGE]
        begin(engine, "b", preempted)
        engine.do("reset", True)
        engine.do("preempt")
        while "b" not in engine.step(1):
            pass
        engine.flush()
        assert engine.cached(preempted) == [2 * PAGE]
