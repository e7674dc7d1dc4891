"""After weights change in a running engine no old KV is found, and equal versions share KV."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("vllm")

from safetensors.torch import load_file, save_file
from small_models import QWEN, VOCABULARY, save
from vllm_engine import BLOCK as PAGE
from vllm_engine import Engine, connector, on_disk
from vllm_engine import prompt as prompt_of
from vllm_rank import IDS, OTHER, SAVE, TABLE, Rank

from kvkit.adapters.vllm.step import LoadTask, WorkerReport

PROMPT = prompt_of(3 * PAGE, 1, VOCABULARY)
HIT = 2 * PAGE


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two that differ in the weights of norms."""
    folder = tmp_path_factory.mktemp("models")
    one = save(QWEN, folder / "one")
    two = Path(shutil.copytree(one, folder / "two"))
    held = load_file(one / "model.safetensors")
    made = {name: tensor * (1.5 if "layernorm" in name else 1.0) for name, tensor in held.items()}
    save_file(made, two / "model.safetensors", {"format": "pt"})
    return one, two


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine() as made:
        yield made


def open_one(engine: Engine, folder: Path | None, model: Path) -> Engine:
    transfer = None if folder is None else connector(on_disk(folder))
    return engine.open(transfer, model, skip_tokenizer_init=True)


def answer(engine: Engine) -> tuple[int, list[int]]:
    """(tokens that were not computed, what is said)."""
    (found,) = engine.generate([PROMPT])
    return found["cached"], found["tokens"]


@pytest.mark.parametrize("how", ["vLLM", "the model"])
def test_new_weights_find_nothing_of_old_ones(
    engine: Engine, models: tuple[Path, Path], tmp_path: Path, how: str
) -> None:
    """Although nobody resets the cache; an engine that starts with the old ones finds its own."""
    old, new = models
    _, said = answer(open_one(engine, None, new))
    open_one(engine, tmp_path / "kv", old)
    assert answer(engine)[0] == 0
    cached, before = answer(engine)
    assert (cached, before != said) == (HIT, True)
    engine.do("reload", str(new), how)
    assert answer(engine) == (0, said)
    assert answer(engine) == (HIT, said)
    open_one(engine, tmp_path / "kv", old)
    assert answer(engine) == (HIT, before)


def test_engines_with_the_same_version_of_weights_share(
    engine: Engine, models: tuple[Path, Path], tmp_path: Path
) -> None:
    old, new = models
    _, said = answer(open_one(engine, None, new))
    for expected in (0, HIT):
        open_one(engine, tmp_path / "kv", old)
        engine.do("reload", str(new), "vLLM")
        engine.do("set_weight_version", "step 1")
        engine.do("reset", True)  # nothing was computed with these weights: it forgets nothing of theirs
        assert answer(engine) == (expected, said)
    engine.do("set_weight_version", "step 2")
    assert answer(engine) == (0, said)
    engine.do("reset", True)
    assert answer(engine) == (0, said)
    assert answer(engine) == (HIT, said)


def test_a_version_is_of_the_weights_that_were_there_when_it_was_given(
    engine: Engine, models: tuple[Path, Path], tmp_path: Path
) -> None:
    """Others that come before the next step are not stored under it."""
    old, new = models
    _, said = answer(open_one(engine, None, new))
    open_one(engine, tmp_path / "kv", old)
    engine.do("reload", str(new), "vLLM")
    engine.do("set_weight_version", "step 1")
    engine.do("reload", str(old), "vLLM")
    cached, before = answer(engine)
    assert (cached, before != said) == (0, True)
    open_one(engine, tmp_path / "kv", old)
    engine.do("reload", str(new), "vLLM")
    engine.do("set_weight_version", "step 1")
    assert answer(engine) == (0, said)


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    made = Rank(tmp_path / "kv", "async")
    yield made
    made.worker.close()


def test_until_another_epoch_begins_new_weights_neither_save_nor_load(rank: Rank) -> None:
    rank.fill(1.0)
    rank.save()
    assert rank.found() == len(IDS)
    rank.worker.weights_changed()
    assert not rank.load(LoadTask("a", 1, 0, len(IDS), (OTHER,)))
    assert rank.found() == 0
    before = rank.stored("disk")
    rank.save()
    assert rank.stored("disk") == before
    rank.save(epoch="later")
    assert rank.stored("disk") > before
    assert rank.found(epoch="later") == len(IDS)


def test_the_scheduler_hears_in_which_epoch_weights_changed(rank: Rank) -> None:
    """A reset that came meanwhile is enough."""
    rank.step(epoch="second")
    assert rank.worker.report() is None
    rank.worker.weights_changed()
    rank.worker.weights_changed()
    report = rank.worker.report()
    assert report is not None
    assert report.new_weights == "second"
    assert WorkerReport().aggregate(report).new_weights == "second"
    assert report.aggregate(WorkerReport()).new_weights == "second"
    assert rank.worker.report() is None


def test_pages_that_are_asleep_are_not_touched(rank: Rank) -> None:
    """What they hold when they wake up is no KV, until it is computed."""
    rank.fill(1.0)
    rank.step(saves=[SAVE])
    rank.worker.release_pages()
    rank.worker.release_pages()
    rank.fill(np.nan)
    rank.worker.cache.flush()
    saved = rank.stored("disk")
    assert rank.found() == 0
    rank.save()
    assert rank.stored("disk") == saved
    rank.worker.restore_pages()
    assert rank.found() == len(IDS), "as it was before"
    assert rank.load(LoadTask("a", 1, 0, len(IDS), (OTHER,)))
    for pages in rank.pages.values():
        assert (pages[OTHER] == 1.0).all()
        assert pages[TABLE[0]].isnan().all()


def test_a_load_ends_before_pages_fall_asleep(rank: Rank) -> None:
    rank.fill(1.0)
    rank.save()
    assert rank.found() == len(IDS)
    rank.fill(0.0)
    rank.step(loads=[LoadTask("a", 1, 0, len(IDS), (OTHER,))])
    rank.worker.release_pages()
    copies = {name: pages.clone() for name, pages in rank.pages.items()}
    received, _, _ = rank.step(idle=True)
    assert received == {"a"}
    for name, pages in rank.pages.items():
        assert (pages == copies[name]).all()
