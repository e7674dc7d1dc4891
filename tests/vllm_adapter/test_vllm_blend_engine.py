"""A real vLLM engine that blends, with few blocks or little memory, answers right and stores documents well.

Whatever happens before and beside it, a request that asks for no blending has the answer of plain vLLM, and
in the end every block is free.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

pytest.importorskip("vllm")

from document_prompts import DocumentPrompt, blended, blending, precompute
from small_models import QWEN, VOCABULARY, save
from vllm_engine import Engine, Settings, connector, prompt

BLOCK, BLOCKS, ANSWER, TOLERANCE = 32, 40, 12, 1e-3
LONG = 64
"""Tokens of answers that need more blocks than there are."""
PREFIX, *DOCUMENTS = (prompt(tokens, seed=tokens, vocabulary=VOCABULARY) for tokens in (BLOCK, 100, 128, 130))
ALIGNED_PREFIX, *ALIGNED = (
    prompt(tokens, seed=tokens, vocabulary=VOCABULARY) for tokens in (64, 96, 128, 160)
)
"""Of whole chunks, so that every token of a document can be reused."""
QUESTIONS = [prompt(16, seed=i, vocabulary=VOCABULARY) for i in range(2)]
PROMPTS = [
    DocumentPrompt.of(PREFIX, [DOCUMENTS[i] for i in order], question)
    for order in [(0, 1, 2), (2, 1, 0), (1, 2)]
    for question in QUESTIONS
]
ALONE = PROMPTS[0].alone()
"""What is asked to compute a document."""
ONE = st.sampled_from(range(len(PROMPTS)))
RATIOS = st.sampled_from([0.0, 0.15, 0.5, 1.0])


def turn(answer: list[int], text: list[int]) -> list[int]:
    """What is asked after an answer."""
    return [*text, *answer, *prompt(20, seed=99, vocabulary=VOCABULARY)]


class Answers:
    """What plain vLLM answers, by prompt."""

    def __init__(self, engine: Engine, prompts: list[list[int]]) -> None:
        found = engine.generate(prompts, tokens=ANSWER)
        self.known = {tuple(text): one for text, one in zip(prompts, found, strict=True)}

    def check(self, text: list[int], found: Settings) -> None:
        expected = self.known[tuple(text)]
        assert found["tokens"] == expected["tokens"]
        assert found["logprobs"] == pytest.approx(expected["logprobs"], abs=TOLERANCE)


@pytest.fixture(scope="module")
def process() -> Iterator[Engine]:
    with Engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(QWEN, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def served(process: Engine, model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, Answers]:
    """An engine that blends, with few blocks, and what it must answer."""
    options = {
        "model": model,
        "skip_tokenizer_init": True,
        "block_size": BLOCK,
        "max_model_len": 640,
        "max_num_batched_tokens": 256,
        "max_num_seqs": 4,
        "enable_prefix_caching": True,
    }
    process.open(None, **options)
    texts = [one.tokens for one in PROMPTS]
    expected = Answers(process, texts)
    later = Answers(process, [turn(expected.known[tuple(text)]["tokens"], text) for text in texts])
    expected.known |= later.known
    folder = tmp_path_factory.mktemp("kv")
    return process.open(blending(folder, BLOCK), num_gpu_blocks_override=BLOCKS, **options), expected


@pytest.fixture
def small_memory(process: Engine, model: Path) -> Engine:
    """An engine whose tier holds few documents, and none yet."""
    transfer = connector(
        {"chunk_tokens": BLOCK, "tiers": {"memory": {"capacity": "3MiB"}}}, blend={"unchecked": True}
    )
    options: Settings = {"block_size": BLOCK, "max_model_len": 1024, "skip_tokenizer_init": True}
    return process.open(transfer, model=model, enable_prefix_caching=True, **options)


class BlendMachine(RuleBasedStateMachine):
    """`asked` is the model: the requests under way, and of each the prompt whose exact answer it has."""

    def __init__(self, engine: Engine, expected: Answers) -> None:
        super().__init__()
        self.engine = engine
        self.expected = expected
        self.asked: dict[str, list[int] | None] = {}
        self.count = 0

    @initialize(known=st.sets(st.sampled_from(range(len(ALONE)))))
    def open(self, known: set[int]) -> None:
        """Some documents are in the tiers; vLLM has nothing."""
        for which in sorted(known):
            self._submit(ALONE[which], None, tokens=1)
        self._come_to_rest()
        assert self.engine.do("reset", False)

    @rule(which=ONE)
    def ask(self, which: int) -> None:
        text = PROMPTS[which].tokens
        self._submit(text, text)

    @rule(which=ONE, ratio=RATIOS)
    def blend(self, which: int, ratio: float) -> None:
        """The answer is known where everything is computed again."""
        asked = PROMPTS[which]
        self._submit(asked.tokens, asked.tokens if ratio == 1.0 else None, asked.blend(ratio))

    @rule(which=ONE)
    def ask_the_next_turn(self, which: int) -> None:
        """After an exact answer."""
        text = PROMPTS[which].tokens
        later = turn(self.expected.known[tuple(text)]["tokens"], text)
        self._submit(later, later)

    @rule(which=st.sampled_from(range(len(ALONE))))
    def compute_a_document(self, which: int) -> None:
        self._submit(ALONE[which], None, tokens=1)

    @rule(steps=st.integers(1, 16))
    def step(self, steps: int) -> None:
        for name, answer in self.engine.step(steps).items():
            text = self.asked.pop(name)
            if text is not None:
                self.expected.check(text, answer)

    @rule(which=st.integers(0, 7))
    def abort(self, which: int) -> None:
        if self.asked:
            name = list(self.asked)[which % len(self.asked)]
            self.engine.do("abort", name)
            del self.asked[name]

    @rule()
    def clear_the_tiers(self) -> None:
        self.engine.do("clear", "disk")

    @rule()
    def forget(self) -> None:
        """What vLLM's own prefix cache holds, if nothing runs."""
        self.engine.do("reset", False)

    def teardown(self) -> None:
        self._come_to_rest()
        free, blocks = self.engine.do("free_blocks")
        assert free == blocks
        self.engine.flush()
        self.engine.do("clear", "disk")
        assert self.engine.do("reset", False)

    def _submit(
        self, text: list[int], exact: list[int] | None, blend: Settings | None = None, tokens: int = ANSWER
    ) -> None:
        self.count += 1
        self.engine.submit(f"r{self.count}", text, tokens, blend)
        self.asked[f"r{self.count}"] = exact

    def _come_to_rest(self) -> None:
        while self.engine.do("busy"):
            self.step(8)
        assert not self.asked, "no answer came"


def test_exact_answers_are_those_of_plain_vllm(served: tuple[Engine, Answers]) -> None:
    chosen = settings(max_examples=8, stateful_step_count=20, deadline=None)
    run_state_machine_as_test(lambda: BlendMachine(*served), settings=chosen)


def test_blended_answers_do_not_depend_on_blocks(served: tuple[Engine, Answers]) -> None:
    """Four at a time, which are preempted, and each alone."""
    engine, _ = served
    asked = PROMPTS[:4]
    precompute(engine, asked)
    alone = [blended(engine, [one], LONG, 0.15)[0] for one in asked]
    before = engine.metrics()["vllm:num_preemptions_total{}"]
    for _ in range(10):
        together = blended(engine, asked, LONG, 0.15)
        for found, expected in zip(together, alone, strict=True):
            assert found["tokens"] == expected["tokens"]
            assert found["handoff"]["blend"] == expected["handoff"]["blend"]
        if engine.metrics()["vllm:num_preemptions_total{}"] > before:
            break
    else:
        pytest.fail("documents come so slowly that requests never meet")
    free, blocks = engine.do("free_blocks")
    assert free == blocks


def of(*order: int) -> DocumentPrompt:
    return DocumentPrompt.of(ALIGNED_PREFIX, [ALIGNED[i] for i in order], QUESTIONS[0])


def told(engine: Engine, asked: DocumentPrompt, **sampling: Settings) -> dict[str, int]:
    """How many tokens of each kind a request had; none where it was not blended."""
    (answer,) = blended(engine, [asked], 1, 0.15, **sampling)
    engine.do("reset", False)
    return (answer["handoff"] or {"blend": {"blended": 0, "recomputed": 0}})["blend"]


def reused(counts: dict[str, int]) -> int:
    return counts["blended"] + counts["recomputed"]


def test_a_document_right_behind_its_prefix_is_stored_on_first_use(small_memory: Engine) -> None:
    assert reused(told(small_memory, of(1, 0))) == 0, "nobody has computed either"
    assert reused(told(small_memory, of(0, 1))) == len(ALIGNED[1]), "it was the first one"
    # document 0 was computed right behind the prefix there, in a prompt of which the rest was blended
    assert reused(told(small_memory, of(2, 0))) == len(ALIGNED[0])


def test_what_stood_behind_blended_tokens_is_not_stored(small_memory: Engine) -> None:
    precompute(small_memory, [of(0)])
    assert reused(told(small_memory, of(1, 0, 2))) == len(ALIGNED[0])
    assert reused(told(small_memory, of(0, 2))) == 0, "2 was computed behind approximate KV alone"
    assert reused(told(small_memory, of(0, 1))) == len(ALIGNED[1]), "1 behind exact KV"


def test_documents_of_another_salt_are_not_found(small_memory: Engine) -> None:
    precompute(small_memory, [of(0, 1)], cache_salt="one")
    assert reused(told(small_memory, of(1, 0), cache_salt="two")) == 0
    assert reused(told(small_memory, of(1, 0))) == 0
    assert reused(told(small_memory, of(1, 0), cache_salt="one")) == len(ALIGNED[0])


def test_a_pinned_document_outlives_others(small_memory: Engine) -> None:
    precompute(small_memory, [of(0, 1)])
    assert small_memory.do("pin", of(0).alone()[0], 60.0) == len(ALIGNED_PREFIX) + len(ALIGNED[0])
    for seed in range(8):
        small_memory.generate([prompt(800, seed=100 + seed, vocabulary=VOCABULARY)], tokens=1)
    assert reused(told(small_memory, of(2, 1))) == 0, "it was evicted"
    assert reused(told(small_memory, of(2, 0))) == len(ALIGNED[0])
