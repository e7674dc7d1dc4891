"""An engine with asynchronous scheduling, as on a GPU, gives the same answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")

import async_scheduling
from small_models import QWEN, VOCABULARY, save
from vllm_engine import BLOCK, Engine, connector, on_disk
from vllm_engine import prompt as prompt_of


def prompt(tokens: int, seed: int = 0) -> list[int]:
    return prompt_of(tokens, seed, VOCABULARY)


PROMPTS = [prompt(tokens, seed) for seed, tokens in enumerate((600, 300, 700, 257), 1)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(QWEN, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    """What an engine says whose steps come in turn, without kvkit, to each prompt alone."""
    with Engine() as engine:
        engine.open(None, model, skip_tokenizer_init=True)
        return [engine.text(one, tokens=20)[0] for one in PROMPTS]


@pytest.fixture(scope="module")
def process() -> Iterator[Engine]:
    with Engine(**{async_scheduling.ASKED: "1"}) as engine:
        yield engine


def damage(folder: Path) -> None:
    """Flip a bit in the middle of every record."""
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_size > 8192:
            with open(path, "r+b") as file:
                file.seek(path.stat().st_size // 2)
                (byte,) = file.read(1)
                file.seek(-1, 1)
                file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize(
    ("load", "on_failure"), [("async", "recompute"), ("sync", "fail"), ("layerwise", "fail")]
)
def test_hits_and_damaged_records(
    process: Engine, model: Path, expected: list[list[int]], tmp_path: Path, load: str, on_failure: str
) -> None:
    transfer = connector(on_disk(tmp_path / "kv"), policy=on_failure, load=load)
    process.open(transfer, model, skip_tokenizer_init=True)
    assert process.do("overlaps")
    assert process.text(*PROMPTS, tokens=20) == expected
    assert process.cached(*PROMPTS, tokens=20) == [512, 256, 640, 256]
    assert process.text(*PROMPTS, tokens=20) == expected
    damage(tmp_path / "kv")
    found = process.generate(PROMPTS, tokens=20)
    if on_failure == "recompute":
        assert [one["tokens"] for one in found] == expected
        assert [one["cached"] for one in found] == [0] * len(PROMPTS)
    else:
        assert {one["reason"] for one in found} == {"error"}
    assert process.text(*PROMPTS, tokens=20) == expected, "what is damaged is gone"


@pytest.mark.parametrize("load", ["sync", "layerwise"])
def test_loads_that_cannot_be_taken_back_are_refused(
    process: Engine, model: Path, tmp_path: Path, load: str
) -> None:
    with pytest.raises(AssertionError, match=rf"ConfigError: load = '{load}': with asynchronous scheduling"):
        process.open(connector(on_disk(tmp_path / "kv"), load=load), model, skip_tokenizer_init=True)


def test_preemption_abort_and_a_reset(
    process: Engine, model: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    process.open(connector(on_disk(tmp_path / "kv")), model, skip_tokenizer_init=True)
    for name, one in zip("abcd", PROMPTS, strict=True):
        process.submit(name, one, tokens=20)
    process.step(6)
    process.do("preempt")
    process.do("abort", "b")
    found: dict[str, list[int]] = {}
    while len(found) < 3:
        found |= {name: one["tokens"] for name, one in process.step(1).items()}
    assert found == dict(zip("acd", (expected[i] for i in (0, 2, 3)), strict=True))
    process.flush()
    assert process.do("free_blocks")[0] == process.do("free_blocks")[1]
    assert process.cached(PROMPTS[0], tokens=20) == [512]
    assert process.do("reset", True)
    assert process.cached(PROMPTS[0], tokens=20) == [0]


def test_a_last_save_that_is_pending_at_a_reset_is_not_stored(
    process: Engine, model: Path, tmp_path: Path
) -> None:
    """The step that fills a chunk does not know its last token; the reset comes before the next one."""
    process.open(connector(on_disk(tmp_path / "kv")), model, skip_tokenizer_init=True)
    for tokens in range(BLOCK - 3, BLOCK + 1):
        asked = prompt(tokens, seed=tokens)
        process.submit("a", asked, tokens=BLOCK + 1 - tokens)
        found: list[int] = []
        while not found:
            found = process.step(1).get("a", {"tokens": []})["tokens"]
        process.do("reset", True)
        process.do("come_to_rest")
        process.flush()
        assert process.cached(asked + found, tokens=1) == [0], tokens
        assert process.cached(asked + found, tokens=1) == [BLOCK], tokens
