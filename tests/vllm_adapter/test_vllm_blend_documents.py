"""Documents are stored on first use, separated by salts, pinned and evicted like other records."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("vllm")

from document_prompts import DocumentPrompt, blended, precompute
from small_models import QWEN, VOCABULARY, save
from vllm_engine import Engine, Settings, connector, prompt

CHUNK = 32
PREFIX, *DOCUMENTS = (prompt(tokens, seed=tokens, vocabulary=VOCABULARY) for tokens in (64, 96, 128, 160))
QUESTION = prompt(20, seed=1, vocabulary=VOCABULARY)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = save(QWEN, tmp_path_factory.mktemp("qwen"))
    with Engine() as engine:
        options: Settings = {"block_size": CHUNK, "max_model_len": 1024, "skip_tokenizer_init": True}
        memory = {"tiers": {"memory": {"capacity": "3MiB"}}}
        transfer = connector({"chunk_tokens": CHUNK} | memory, blend={"unchecked": True})
        yield engine.open(transfer, model=folder, enable_prefix_caching=True, **options)


@pytest.fixture(autouse=True)
def forget(engine: Engine) -> None:
    engine.do("reset", True)


def of(*order: int) -> DocumentPrompt:
    return DocumentPrompt.of(PREFIX, [DOCUMENTS[i] for i in order], QUESTION)


def told(engine: Engine, asked: DocumentPrompt, **sampling: Settings) -> dict[str, int]:
    """How many tokens of each kind a request had; none where it was not blended."""
    (answer,) = blended(engine, [asked], 1, 0.15, **sampling)
    engine.do("reset", False)
    return (answer["handoff"] or {"blend": {"blended": 0, "recomputed": 0}})["blend"]


def reused(counts: dict[str, int]) -> int:
    return counts["blended"] + counts["recomputed"]


def test_a_document_right_behind_its_prefix_is_stored_on_first_use(engine: Engine) -> None:
    assert reused(told(engine, of(1, 0))) == 0, "nobody has computed either"
    assert reused(told(engine, of(0, 1))) == len(DOCUMENTS[1]), "it was the first one"
    # document 0 was computed right behind the prefix there, in a prompt of which the rest was blended
    assert reused(told(engine, of(2, 0))) == len(DOCUMENTS[0])


def test_what_stood_behind_blended_tokens_is_not_stored(engine: Engine) -> None:
    precompute(engine, [of(0)])
    assert reused(told(engine, of(1, 0, 2))) == len(DOCUMENTS[0])
    assert reused(told(engine, of(0, 2))) == 0, "2 was computed behind approximate KV alone"
    assert reused(told(engine, of(0, 1))) == len(DOCUMENTS[1]), "1 behind exact KV"


def test_documents_of_another_salt_are_not_found(engine: Engine) -> None:
    precompute(engine, [of(0, 1)], cache_salt="one")
    assert reused(told(engine, of(1, 0), cache_salt="two")) == 0
    assert reused(told(engine, of(1, 0))) == 0
    assert reused(told(engine, of(1, 0), cache_salt="one")) == len(DOCUMENTS[0])


def test_a_pinned_document_outlives_others(engine: Engine) -> None:
    precompute(engine, [of(0, 1)])
    assert engine.do("pin", of(0).alone()[0], 60.0) == len(PREFIX) + len(DOCUMENTS[0])
    for seed in range(8):
        engine.generate([prompt(800, seed=100 + seed, vocabulary=VOCABULARY)], tokens=1)
    assert reused(told(engine, of(2, 1))) == 0, "it was evicted"
    assert reused(told(engine, of(2, 0))) == len(DOCUMENTS[0])
