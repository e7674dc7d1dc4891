"""Blending works in vLLM engines with several ranks or pipeline stages, and with LoRA adapters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from document_prompts import ANSWER, DocumentPrompt, blended, blending, precompute
from small_models import QWEN, VOCABULARY, save
from test_vllm_loras import lora, write
from test_vllm_rows import PROMPTS as ROWS
from test_vllm_rows import ask, same_as_prefill
from vllm_engine import Engine, Settings, prompt

CHUNK, TOLERANCE = 32, 1e-3
PREFIX, *DOCUMENTS = (prompt(tokens, seed=tokens, vocabulary=VOCABULARY) for tokens in (CHUNK, 128, 129, 130))
PROMPTS = [
    DocumentPrompt.of(PREFIX, [DOCUMENTS[i] for i in (0, 2, 1)], prompt(20, seed=i, vocabulary=VOCABULARY))
    for i in range(3)
]
TEXTS = [one.tokens for one in PROMPTS]
OPTIONS: Settings = {
    "skip_tokenizer_init": True,
    "block_size": CHUNK,
    "max_model_len": 768,
    "max_num_batched_tokens": 256,
    "enable_prefix_caching": True,
    "kv_cache_memory_bytes": 64 << 20,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(QWEN, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """A connector whose records are of one of two ranks, and of one of two stages."""
    return blending(tmp_path_factory.mktemp("kv"), CHUNK, record_ranks=2, record_stages=2)


@pytest.fixture(scope="module")
def undivided(model: Path, shared: Settings) -> dict[float, list[Settings]]:
    """Answers of one process, whose records are of some heads and layers, by ratio; 1: of plain vLLM."""
    with Engine() as engine:
        engine.open(None, model, **OPTIONS)
        exact = engine.generate(TEXTS, tokens=ANSWER)
        engine.open(shared, model, **OPTIONS)
        precompute(engine, PROMPTS)
        return {1.0: exact} | {ratio: blended(engine, PROMPTS, ANSWER, ratio) for ratio in (0.15, 0.0)}


@pytest.fixture(scope="module")
def stages(model: Path, shared: Settings) -> Iterator[Engine]:
    """A pipeline of two stages, whose steps do not hang for long."""
    options = OPTIONS | {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
    with Engine(VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS="60") as engine:
        engine.open(shared, model, **options)
        ask(engine, "warm_up_stages")
        yield engine


def assert_alike(found: Sequence[Settings], expected: Sequence[Settings]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one["tokens"] == other["tokens"]
        assert one["logprobs"] == pytest.approx(other["logprobs"], abs=TOLERANCE)


def test_two_ranks(model: Path, undivided: dict[float, list[Settings]], tmp_path: Path) -> None:
    """Each has its share of the heads; both choose the same rows."""
    options = OPTIONS | {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with Engine() as engine:
        engine.open(blending(tmp_path / "kv", CHUNK), model, **options)
        precompute(engine, PROMPTS)
        for ratio, expected in undivided.items():
            found = blended(engine, PROMPTS, ANSWER, ratio)
            assert_alike(found, expected)
            assert {one["handoff"]["blend"]["computed"] for one in found} == {
                one["handoff"]["blend"]["computed"] for one in undivided[0.15]
            }


def test_rows_over_two_stages(stages: Engine) -> None:
    """Each runs its own layers, as far as they are wanted; the last has hidden states."""
    half = QWEN.num_hidden_layers // 2
    assert same_as_prefill(stages)["looks"] == [[256] * half, [44] * half]
    (first, _, looks), (last, _, later) = ask(stages, "stopped", ROWS[1][:256], half + 1)
    touched = 2 * half + 2
    changed = [change > 0.1 for change in (*first, *last)]
    assert changed == [True] * touched + [False] * (4 * half - touched)
    assert looks + later == [half, half, half, 1]
    assert [len(found) for found in ask(stages, "checked")] == [half, half]
    assert all("kv_sharing_fast_prefill" in said for said in ask(stages, "refused", "stage")), "one waits"
    assert stages.do("reset", False), "there are other tokens in its blocks now"


def test_two_stages(stages: Engine, undivided: dict[float, list[Settings]]) -> None:
    """Both choose the same rows, by attention in the layers of both; rows wait for nothing of other steps.

    vLLM hands a stage's rows to the next one after kvkit has run its own, and has two steps under way.
    """
    texts = PROMPTS[0].alone()
    found = stages.generate(texts, tokens=1)
    assert [one["cached"] for one in found] == [(len(text) - 1) // CHUNK * CHUNK for text in texts], (
        "what the process stored of them"
    )
    precompute(stages, PROMPTS)
    for ratio, expected in undivided.items():
        found = blended(stages, PROMPTS, ANSWER, ratio)
        assert_alike(found, expected)
        assert all(one["handoff"]["blend"]["computed"] > 0 for one in found)
    short = prompt(CHUNK - 1, seed=1, vocabulary=VOCABULARY)
    (alone,) = stages.generate([short], ANSWER)
    names = [str(i) for i in range(len(PROMPTS))]
    waiting = [*zip([*names, "aborted"], [*PROMPTS, PROMPTS[0]], strict=True)]
    answers: dict[str, Settings] = {}
    beside: list[str] = []
    while not answers.keys() >= {*names, *beside}:
        if len(set(beside) - answers.keys()) < 2 and not answers.keys() >= set(names):
            beside.append(f"beside {len(beside)}")  # two, by turns: each step of vLLM computes something
            stages.submit(beside[-1], short, ANSWER)
        elif waiting:
            name, one = waiting.pop()
            stages.submit(name, one.tokens, ANSWER, one.blend())
        else:
            stages.do("abort", "aborted")
        answers |= stages.step(1)
    assert_alike([answers[name] for name in names], undivided[0.15])
    assert_alike([answers[name] for name in beside], [alone] * len(beside))
    assert_alike(stages.generate(TEXTS, tokens=ANSWER), undivided[1.0])
    free, count = stages.do("free_blocks")
    assert free == count


def test_one_process_reads_what_two_stages_wrote(stages: Engine, model: Path, shared: Settings) -> None:
    texts = [prompt(tokens, seed=1000 + tokens, vocabulary=VOCABULARY) for tokens in (300, 77)]
    written = stages.generate(texts, ANSWER)
    assert [one["cached"] for one in written] == [0, 0]
    assert stages.do("reset", False)
    again = stages.generate(texts, ANSWER)  # when both stages have stored all
    with Engine() as engine:
        engine.open(shared, model, **OPTIONS)
        read = engine.generate(texts, ANSWER)
    for found in (again, read):
        assert [one["cached"] for one in found] == [(len(text) - 1) // CHUNK * CHUNK for text in texts]
        assert_alike(found, written)


def test_an_adapter(model: Path, tmp_path: Path) -> None:
    """Its documents are its own: without it they are found nowhere, so they are computed."""
    tuned = lora(write(tmp_path / "adapter", 1))
    options = OPTIONS | {"enable_lora": True, "max_loras": 1}
    with Engine() as engine:
        engine.open(None, model, **options)
        plain = engine.generate(TEXTS, tokens=ANSWER)
        changed = engine.generate(TEXTS, tokens=ANSWER, lora=tuned)
        assert changed[0]["logprobs"] != pytest.approx(plain[0]["logprobs"], abs=1e-2)
        engine.open(blending(tmp_path / "kv", CHUNK), model, **options)
        precompute(engine, PROMPTS, lora=tuned)
        assert_alike(blended(engine, PROMPTS, ANSWER, 1.0, lora=tuned), changed)
        some = blended(engine, PROMPTS, ANSWER, 0.15, lora=tuned)
        assert all(one["handoff"]["blend"]["blended"] > 0 for one in some)
        assert_alike(blended(engine, PROMPTS, ANSWER, 0.15), plain)
