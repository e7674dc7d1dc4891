"""What sessions and an orchestrator's hints ask to keep is kept by a real vLLM engine, over sleep, too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from small_models import QWEN, VOCABULARY, save, save_with_tokenizer
from transformers import AutoTokenizer
from vllm_engine import BLOCK, Engine, connector
from vllm_engine import prompt as prompt_of

from kvkit.adapters.vllm.settings import read_settings
from kvkit.settings import ConfigError

TWO_CHUNKS = 2 * BLOCK + 40


def prompt(seed: int) -> list[int]:
    return prompt_of(TWO_CHUNKS, seed, VOCABULARY)


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Path]]:
    with Engine() as engine:
        yield engine, save(QWEN, tmp_path_factory.mktemp("model"))


def opened(process: tuple[Engine, Path], capacity: int, **settings: Any) -> Engine:
    """An engine whose one tier, memory, holds so many bytes."""
    engine, model = process
    memory = {"tiers": {"memory": {"capacity": capacity}}}
    return engine.open(connector(memory, **settings), model, skip_tokenizer_init=True)


def hint(*directives: dict[str, Any]) -> list[dict[str, Any]]:
    action = {"action_type": "kv.retain", "action_version": "1.0"}
    return [action | {"payload": {"scope": None, "directives": list(directives)}}]


def test_what_a_session_or_a_hint_asks_for_outlives_what_is_newer(process: tuple[Engine, Path]) -> None:
    engine = opened(process, 1 << 27)
    size = engine.do("record_bytes", BLOCK)
    engine = opened(process, 9 * size, sessions={"keep_s": 600}, requests={"max_priority": 80})
    plain, session, hinted, refused = (prompt(seed) for seed in range(4))
    engine.do("advised", plain, None, [])
    engine.do("advised", session, "chat-7", [])
    engine.do("advised", hinted, None, hint({"start": 0, "end": BLOCK, "priority": 60}))
    engine.do("advised", refused, None, hint({"priority": 50, "duration": 600}, {"priority": 500}))
    for seed in range(10, 16):
        engine.do("advised", prompt(seed), None, [])
    found = [engine.do("advised", one, None, []) for one in (session, hinted, refused, plain)]
    assert found == [2 * BLOCK, BLOCK, 0, 0]


def test_a_session_that_only_hits_keeps_what_it_hits(process: tuple[Engine, Path]) -> None:
    """Each turn renews the time for which its whole prefix is kept."""
    engine = opened(process, 1 << 27)
    engine = opened(process, 6 * engine.do("record_bytes", BLOCK), sessions={"priority": 70})
    shared, other = prompt(0), prompt(1)
    for one in (shared, other):
        engine.do("advised", one, None, [])
    assert engine.do("advised", shared, "chat-7", []) == 2 * BLOCK
    for seed in range(10, 14):
        engine.do("advised", prompt(seed), None, [])
    assert [engine.do("advised", one, None, []) for one in (shared, other)] == [2 * BLOCK, 0]


def test_a_request_that_asks_for_itself_has_not_the_sessions_policy(process: tuple[Engine, Path]) -> None:
    engine = opened(process, 1 << 27)
    size = engine.do("record_bytes", BLOCK)
    engine = opened(process, 6 * size, sessions={"keep_s": 600}, requests={"max_priority": 80})
    engine.do("advised", prompt(0), "chat-7", hint({"start": 0, "end": 1, "priority": 50}))
    for seed in range(10, 14):
        engine.do("advised", prompt(seed), None, [])
    assert engine.do("advised", prompt(0), None, []) == BLOCK


@pytest.mark.parametrize(
    ("keeps", "level", "cached"), [(True, 1, 2 * BLOCK), (True, 2, 0), (False, 1, 0)], ids=str
)
def test_tiers_are_kept_over_a_sleep_that_keeps_weights_if_the_operator_says_so(
    process: tuple[Engine, Path], keeps: bool, level: int, cached: int
) -> None:
    engine = opened(process, 1 << 27, keep_over_sleep=keeps)
    engine.do("advised", prompt(0), None, [])
    for _ in range(2):
        engine.do("sleep_and_wake", level)
    assert engine.do("advised", prompt(0), None, []) == cached
    engine.do("reset", True)
    assert engine.do("advised", prompt(0), None, []) == 0, "a reset forgets all, as ever"


def test_tiers_learn_which_answers_call_a_tool(process: tuple[Engine, Path], tmp_path: Path) -> None:
    """The first token of an answer is the mark; the same prompt with another answer has none."""
    engine, _ = process
    model = save_with_tokenizer(tmp_path)
    memory = {"tiers": {"memory": {"capacity": "8MiB", "eviction": "sessions"}}}
    engine.open(connector(memory), model)
    (answer,) = engine.generate([prompt(0)], tokens=2)
    mark = AutoTokenizer.from_pretrained(model).decode(answer["tokens"][:1])
    engine.open(connector(memory, tool_calls=[mark]), model)
    engine.generate([prompt(0)], tokens=2)
    engine.generate([prompt(1)], tokens=1)  # the step after an answer tells tiers of it
    assert engine.do("waits")[0] is True
    engine.open(connector(memory, tool_calls=["<tool_call>"]), model)
    engine.generate([prompt(0)], tokens=2)
    engine.generate([prompt(1)], tokens=1)
    assert engine.do("waits")[0] is False
    with pytest.raises(AssertionError, match=r"tool_calls = \(''.*want texts that have tokens"):
        engine.open(connector(memory, tool_calls=[""]), model)


@pytest.mark.parametrize(
    ("sessions", "told"),
    [
        ({"keep_s": -1}, r"sessions\.keep_s = -1: .*greater than or equal to 0"),
        ({"priority": 101}, r"sessions\.priority = 101: .*less than or equal to 100"),
        ({"ttl": 5}, r"sessions\.ttl: unknown setting"),
    ],
)
def test_a_setting_that_cannot_be_is_named(sessions: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read_settings({"kvkit": {"tiers": {"memory": {"capacity": "1MiB"}}}, "sessions": sessions})
