"""Exact and blended requests in random order are correct in a real vLLM engine with few blocks.

Whatever happens before and beside it, a request that asks for no blending has the answer of plain vLLM, and
in the end every block is free.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

pytest.importorskip("vllm")

from document_prompts import DocumentPrompt, blended, blending, precompute
from small_models import QWEN, VOCABULARY, save
from vllm_engine import Engine, Settings, prompt

BLOCK, BLOCKS, ANSWER, TOLERANCE = 32, 40, 12, 1e-3
LONG = 64
"""Tokens of answers that need more blocks than there are."""
PREFIX, *DOCUMENTS = (prompt(tokens, seed=tokens, vocabulary=VOCABULARY) for tokens in (BLOCK, 100, 128, 130))
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
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Answers]]:
    """An engine that blends, with few blocks, and what it must answer."""
    model = save(QWEN, tmp_path_factory.mktemp("model"))
    options = {
        "model": model,
        "skip_tokenizer_init": True,
        "block_size": BLOCK,
        "max_model_len": 640,
        "max_num_batched_tokens": 256,
        "max_num_seqs": 4,
        "enable_prefix_caching": True,
    }
    with Engine() as engine:
        engine.open(None, **options)
        texts = [one.tokens for one in PROMPTS]
        expected = Answers(engine, texts)
        later = Answers(engine, [turn(expected.known[tuple(text)]["tokens"], text) for text in texts])
        expected.known |= later.known
        folder = tmp_path_factory.mktemp("kv")
        engine.open(blending(folder, BLOCK), num_gpu_blocks_override=BLOCKS, **options)
        yield engine, expected


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
