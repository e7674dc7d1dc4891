"""Blends are scheduled in vLLM beside exact requests, aborts and preemptions (made-up workers)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

pytest.importorskip("vllm")

from blend_scheduler_life import CHUNK, Life
from run_sizes import examples

SYSTEM = list(range(1, 11))
DOCUMENTS = [list(range(100 * i, 100 * i + size)) for i, size in ((1, 17), (2, 24), (3, 12), (4, 20), (5, 9))]


def prompt(order: list[int], question: int) -> tuple[list[int], list[list[int]]]:
    """The system prompt, documents in this order, and a question; and where the documents stand."""
    tokens, spans = list(SYSTEM), []
    for i in order:
        spans.append([len(tokens), len(tokens) + len(DOCUMENTS[i])])
        tokens += DOCUMENTS[i]
    return [*tokens, *range(900 + 10 * question, 905 + 10 * question)], spans


def precompute(life: Life) -> None:
    """Have every document stored, alone and behind the system prompt."""
    for document in DOCUMENTS:
        life.add([*SYSTEM, *document, 7], 1)
        life.add([*document, 7], 1)
    life.drain()


def blend(spans: list[list[int]], prefix: int = len(SYSTEM)) -> dict[str, Any]:
    return {"documents": spans, "prefix": prefix}


def four(life: Life, most: int = 25) -> list[str]:
    """Four requests with documents in orders of their own, at once; their names."""
    precompute(life)
    orders = ([1, 0, 2], [2, 1, 0], [0, 2, 1], [1, 2, 0])
    asked = [prompt(order, i) for i, order in enumerate(orders)]
    return [life.add(tokens, most, blend(spans)) for tokens, spans in asked]


class BlendMachine(RuleBasedStateMachine):
    """A random life: the same texts blended and exactly, too few blocks, loads that fail, aborts, resets."""

    @initialize(
        blocks=st.integers(28, 50),
        windows=st.booleans(),
        lag=st.integers(0, 1),
        ranks=st.integers(1, 2),
        seed=st.integers(0, 2**16),
        most=st.integers(1, 40),
    )
    def open(self, blocks: int, windows: bool, lag: int, ranks: int, seed: int, most: int) -> None:
        self.life = Life(blocks + windows * blocks * 2 // 3, windows, lag, ranks, seed)
        self.prompts = [list(self.life.seen[name].prompt_token_ids or ()) for name in four(self.life, most)]

    @rule(
        order=st.permutations(range(len(DOCUMENTS))),
        count=st.integers(1, 3),
        most=st.integers(1, 40),
        prefix=st.sampled_from([0, len(SYSTEM), len(SYSTEM)]),
    )
    def blend(self, order: list[int], count: int, most: int, prefix: int) -> None:
        tokens, spans = prompt(order[:count], len(self.prompts))
        self.prompts.append(tokens)
        self.life.add(tokens, most, blend(spans, prefix))

    @rule(which=st.integers(0, 20), most=st.integers(1, 40), cut=st.integers(1, 5))
    def ask(self, which: int, most: int, cut: int) -> None:
        self.life.add(self.prompts[which % len(self.prompts)][:-cut], most)

    @rule(steps=st.integers(1, 40), loads=st.booleans())
    def step(self, steps: int, loads: bool) -> None:
        for _ in range(steps):
            self.life.step()
            if loads:
                self.life.finish_load()

    @rule(fails=st.integers(0, 5))
    def load(self, fails: int) -> None:
        self.life.finish_load(fails == 0)

    @rule(which=st.integers(0, 20), what=st.sampled_from(["abort", "reset", "evict"]))
    def disturb(self, which: int, what: str) -> None:
        alive = [name for name, request in self.life.vllm.requests.items() if not request.is_finished()]
        if what == "abort" and alive:
            self.life.abort(alive[which % len(alive)])
        elif what == "reset":
            self.life.vllm.reset_prefix_cache(reset_connector=True)
        elif self.life.tiers:
            self.life.tiers.discard(sorted(self.life.tiers)[which % len(self.life.tiers)])

    def teardown(self) -> None:
        self.life.drain()


TestBlendMachine = BlendMachine.TestCase
TestBlendMachine.settings = settings(max_examples=examples(25), stateful_step_count=25, deadline=None)


@pytest.mark.parametrize("windows", [False, True])
def test_the_answer_and_the_usage_tell_exact_reused_and_computed_tokens(windows: bool) -> None:
    life = Life(blocks=300, windows=windows)
    names = four(life)
    life.drain()
    for name in names:
        told = life.answers[name]["blend"]
        assert sum(told.values()) == life.seen[name].num_prompt_tokens
        assert told["blended"] > 0
        assert life.cached[name] == told["exact"] + told["blended"]


@pytest.mark.parametrize("blocks", [34, 37])
@pytest.mark.parametrize("lag", [0, 1])
def test_what_is_preempted_is_blended_again_as_it_was(blocks: int, lag: int) -> None:
    """The made-up workers compare."""
    life = Life(blocks, lag=lag)
    four(life)
    life.drain()
    assert any(len(done) > 1 for done in life.done.values())


@pytest.mark.parametrize(("size", "fails"), [(88, False), (37, True)])
def test_loads_side_by_side_do_not_wait_for_blocks_of_each_other(size: int, fails: bool) -> None:
    """vLLM reckons with too few blocks for what follows a load in a window's group, and if loads fail."""
    life = Life(blocks=52 if fails else 51, windows=True, lag=int(fails))
    for tokens in (list(range(93)), list(range(200, 200 + size))):
        life.tiers.update(tuple(tokens[:end]) for end in range(CHUNK, len(tokens), CHUNK))
        life.add(tokens, 1)
    while fails and len(life.loading) < 2:
        life.step()
    for task in life.loading[:]:
        life.end_load(task, fails=True)
    life.drain()


def test_a_request_that_has_grown_too_long_to_be_blended_again_is_computed_and_stored() -> None:
    life = Life(blocks=46, windows=True)
    precompute(life)
    tokens, spans = prompt([1, 0, 2], 0)
    name = life.add(tokens, 22, blend(spans))
    while life.seen[name].num_tokens < 89:
        life.step()
        life.finish_load()
    assert name in life.done
    life.vllm.reset_prefix_cache(reset_running_requests=True)
    life.drain()
    assert len(life.done[name]) == 1
    assert any(found[: len(tokens)] == tuple(tokens) for found in life.tiers)


@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_all_blocks_come_back_from_a_request_that_is_aborted_at_any_step(windows: bool, ranks: int) -> None:
    life = Life(blocks=100, windows=windows, ranks=ranks)
    precompute(life)
    stages = set()
    for steps in range(16):
        tokens, spans = prompt([1, 0, 2], steps)
        name = life.add(tokens, 5, blend(spans))
        for _ in range(steps):
            life.step()
            life.finish_load()
        stages.add((life.seen[name].status.name, name in life.done))
        life.abort(name)
        life.drain()
    assert {("WAITING", False), ("WAITING_FOR_REMOTE_KVS", False), ("RUNNING", True)} <= stages


def test_a_blend_that_fails_is_computed_and_counts_as_such() -> None:
    life = Life(blocks=100)
    precompute(life)
    tokens, spans = prompt([1, 0, 2], 0)
    name = life.add(tokens, 5, blend(spans))
    while not life.blending:
        life.step()
    life.finish_load()
    life.finish_load(fails=True)
    life.drain()
    assert name not in life.done
    assert name not in life.answers
    assert life.cached[name] == len(SYSTEM) // CHUNK * CHUNK + len(DOCUMENTS[1]) // CHUNK * CHUNK


def test_a_document_behind_its_own_prefix_is_stored_although_one_behind_it_is_blended() -> None:
    life = Life(blocks=100)
    life.add([*SYSTEM, *DOCUMENTS[0], 7], 1)
    life.drain()
    tokens, spans = prompt([1, 0], 0)
    name = life.add(tokens, 5, blend(spans))
    life.drain()
    assert name in life.done
    stop = spans[0][1] // CHUNK * CHUNK
    assert tuple(tokens[:stop]) in life.tiers
    assert tuple(tokens[: stop + CHUNK]) not in life.tiers


def test_what_windows_leave_no_room_for_is_computed() -> None:
    """All blocks of the prompt in both groups are more than there are."""
    life = Life(blocks=33, windows=True)
    precompute(life)
    tokens, spans = prompt([1, 0, 2], 0)
    name = life.add(tokens, 5, blend(spans))
    life.drain()
    assert life.seen[name].num_output_tokens == 5
    assert not life.done


def test_a_request_that_began_in_full_is_not_blended_later() -> None:
    """Nothing was known of its documents when it was admitted; they are when it comes back."""
    life = Life(blocks=30)
    tokens, spans = prompt([1, 0], 0)
    first, second = life.add(tokens, 25, blend(spans)), life.add(prompt([3, 1], 1)[0], 25)
    while not life.seen[first].num_output_tokens:
        life.step()
    for document in DOCUMENTS:
        ids = tuple(SYSTEM + document)
        life.tiers.update(ids[:end] for end in range(CHUNK, len(ids) + 1, CHUNK))
    life.drain()
    assert life.seen[first].num_preemptions + life.seen[second].num_preemptions
    assert not life.done


def test_marked_documents_are_blended_although_the_request_says_nothing() -> None:
    """And stored on first use: the one that stands right behind what all of the prompts begin with."""
    life = Life(blocks=100, marks=("<|im_start|>", "<|im_end|>"))
    before, after = 1, 2  # SmolLM2's ids
    first, other = ([before, *ids, after] for ids in DOCUMENTS[1:3])
    names = [life.add([70, 71, *first, *other, 72, 73], 3)]
    life.drain()
    names += [life.add(tokens, 3) for tokens in ([70, 71, *other, *first, 74], [70, *DOCUMENTS[1], 71, 74])]
    life.drain()
    assert list(life.done) == [names[1]]
    found = (3 + len(DOCUMENTS[1])) // CHUNK * CHUNK - 3
    assert life.done[names[1]][0].reused == found


def test_a_document_was_computed_behind_its_joint() -> None:
    life = Life(blocks=100)
    life.add([*SYSTEM, 77, *DOCUMENTS[1], 7], 1)
    life.drain()
    names = []
    for other, joints in ((2, {"joints": [[], [77]]}), (3, {})):
        tokens, spans = prompt([other, 1], 0)
        names.append(life.add(tokens, 3, blend(spans) | joints))
    life.drain()
    assert list(life.done) == names[:1]
    found = (len(SYSTEM) + 1 + len(DOCUMENTS[1])) // CHUNK * CHUNK - len(SYSTEM) - 1
    assert life.done[names[0]][0].reused == found


def test_the_documents_of_queued_requests_are_brought_near() -> None:
    life = Life(blocks=100)
    tokens, spans = prompt([2, 1], 0)
    scheduler = life.kvkit.scheduler
    names = [life.add(tokens, 3, asked) for asked in (blend(spans) | {"joints": [[77], []]}, None)]
    told = [
        (task.request_id, task.sequence.tokens.tolist(), task.computed)
        for task in scheduler.plan({}, lambda _: None).prefetches
    ]
    whole = tokens[: len(tokens) // CHUNK * CHUNK]
    assert told == [
        (names[0], whole, 0),
        (names[0], [*SYSTEM, 77, *DOCUMENTS[2]], len(SYSTEM)),
        (names[0], [*SYSTEM, *DOCUMENTS[1]], len(SYSTEM)),
        (names[1], whole, 0),
    ]
