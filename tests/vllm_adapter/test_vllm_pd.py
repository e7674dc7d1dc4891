"""Prefill and decode on two real vLLM engines give one engine's tokens, and compute nothing twice."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from handoff_nodes import IDENTITY, Speaker
from small_models import QWEN, VOCABULARY, save
from vllm_engine import BLOCK, Engine, Settings, connector, on_disk
from vllm_engine import prompt as prompt_of

from kvkit.adapters.vllm.checks import check_arrangement
from kvkit.adapters.vllm.settings import read_settings
from kvkit.handoff.protocol.messages import VERSION, Error
from kvkit.lab.testbed.waiting import wait_for
from kvkit.settings import ConfigError

CHUNK = 2 * BLOCK
SEND = {"do_remote_decode": True, "do_remote_prefill": False}


def prompt(tokens: int, seed: int = 0) -> list[int]:
    return prompt_of(tokens, seed, VOCABULARY)


LONG, SHORT, TAIL, EVEN = (prompt(tokens, tokens) for tokens in (700, 90, 900, 2 * CHUNK + 1))


class Pair:
    """A prefill and a decode engine with the same small model."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = f"unix://{folder}/decode/socket"
        self.model = save(QWEN, folder / "model")
        self.prefill, self.decode = Engine(), Engine()

    def open(self, engine: Engine, settings: Settings | None, **more: Any) -> Engine:
        """Open `engine` with these settings of kvkit, and `more` of the connector."""
        config = None
        if settings is not None:
            config = connector({"chunk_tokens": CHUNK} | settings, **more)
        options = {"skip_tokenizer_init": True, "max_num_batched_tokens": 256}
        return engine.open(config, self.model, kv_cache_memory_bytes=64 << 20, **options)

    def ask_both(self, prompt: list[int], tokens: int = 8, handoff: str | None = None) -> tuple[Any, Any]:
        """The answers of prefill and decode, as a router asks them."""
        asked = SEND | {"handoff": handoff or self.address}
        (first,) = self.prefill.generate([prompt], 1, extra_args={"kv_transfer_params": asked})
        passed = {"kv_transfer_params": first["handoff"]}
        (second,) = self.decode.generate([prompt], tokens, extra_args=passed)
        return first, second


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(tmp_path_factory.mktemp("pd"))
    yield pair
    pair.prefill.close()
    pair.decode.close()


@pytest.fixture(scope="module")
def expected(engines: Pair) -> dict[int, list[int]]:
    """The answers of an engine without kvkit, by the length of the prompt."""
    engine = engines.open(engines.decode, None)
    return {len(given): engine.text(given)[0] for given in (LONG, SHORT, TAIL, EVEN)}


@pytest.fixture(scope="module")
def pair(engines: Pair, expected: dict[int, list[int]]) -> Pair:
    """Prefill sends, decode receives; neither has another tier."""
    receives = {"role": "decode", "listen": [engines.address], "buffer": "16MiB", "max_prefill_tokens": 1500}
    engines.open(engines.prefill, {"handoff": {"role": "prefill"}}, role="kv_producer")
    engines.open(engines.decode, {"handoff": receives}, role="kv_consumer")
    return engines


HANDED = "vllm:kvkit_loaded_tokens_total{tier=handoff}"


def in_blocks(tokens: int) -> int:
    """The tokens of the blocks that a prompt comes in; decode computes its last token in any case."""
    return -(-(tokens - 1) // BLOCK) * BLOCK


def grown(engine: Engine, before: dict[str, float], *names: str) -> list[float]:
    after = engine.metrics()
    return [after.get(name, 0.0) - before.get(name, 0.0) for name in names]


@pytest.mark.parametrize(
    "given",
    [LONG, SHORT, TAIL, EVEN],
    ids=["chunks and blocks", "part of a block", "a few tokens more", "the last token alone"],
)
def test_decode_computes_nothing_that_prefill_sent(
    pair: Pair, expected: dict[int, list[int]], given: list[int]
) -> None:
    before = pair.decode.metrics()
    first, second = pair.ask_both(given)
    assert first["tokens"] == expected[len(given)][:1]
    assert first["handoff"]["do_remote_prefill"] is True
    assert first["handoff"]["remote_num_tokens"] == len(given) - (given is EVEN)
    assert second["tokens"] == expected[len(given)]
    p2p = "vllm:prompt_tokens_cached_by_source_total{source=p2p}"
    came = [in_blocks(len(given)), len(given) - 1, 0]
    assert grown(pair.decode, before, HANDED, p2p, "vllm:kvkit_load_errors_total{}") == came
    assert pair.decode.do("transfers") == {}, "its slots are free again"


def test_what_has_come_takes_no_step_to_be_looked_up(pair: Pair, expected: dict[int, list[int]]) -> None:
    asked = {"kv_transfer_params": SEND | {"handoff": pair.address}}
    (first,) = pair.prefill.generate([TAIL], 1, extra_args=asked)
    passed = {"kv_transfer_params": first["handoff"]}
    wait_for(lambda: pair.decode.do("transfers") == {first["handoff"]["transfer_id"]: "committed"})
    before, lookups = pair.decode.metrics(), pair.decode.do("lookups")
    assert pair.decode.text(TAIL, extra_args=passed) == [expected[len(TAIL)]]
    assert pair.decode.do("lookups") == lookups
    assert grown(pair.decode, before, HANDED) == [in_blocks(len(TAIL))]
    assert pair.decode.text(TAIL) == [expected[len(TAIL)]]
    assert pair.decode.do("lookups") > lookups, "what else is asked goes with a step"


def test_many_requests_pass_through_a_buffer_that_holds_two_at_a_time(pair: Pair) -> None:
    prompts = [prompt(700, 30 + i) for i in range(5)]
    asked = SEND | {"handoff": pair.address}
    answers = pair.prefill.generate(prompts, 1, extra_args={"kv_transfer_params": asked})
    before = pair.decode.metrics()
    for given, answer in zip(prompts, answers, strict=True):
        passed = {"kv_transfer_params": answer["handoff"]}
        (found,) = pair.decode.generate([given], 2, extra_args=passed)
        assert found["tokens"][:1] == answer["tokens"]
    assert grown(pair.decode, before, HANDED) == [5 * in_blocks(700)]
    assert pair.decode.do("transfers") == {}


def test_parameters_that_make_no_sense_cost_the_handoff_alone(
    pair: Pair, expected: dict[int, list[int]]
) -> None:
    wrong = {"kv_transfer_params": SEND | {"handoff": "nowhere"}}
    (answer,) = pair.prefill.generate([SHORT], extra_args=wrong)
    assert answer["tokens"] == expected[len(SHORT)]
    assert "transfer_id" not in (answer["handoff"] or {})


SENT = "vllm:kvkit_stored_bytes_total{tier=handoff}"


def loaded_from(tier: str) -> str:
    return f"vllm:kvkit_loaded_tokens_total{{tier={tier}}}"


def two_turns(pair: Pair, tier: str) -> None:
    """Prefill and decode answer two turns; the second one's prefill finds the first in `tier`.

    Each is asked once more, so that all is told that was counted before.
    """
    given = prompt(700, 40)
    chunk, block = (pair.prefill.do("record_bytes", tokens) for tokens in (CHUNK, BLOCK))
    start, decode_start = pair.prefill.metrics(), pair.decode.metrics()
    _, first = pair.ask_both(given, tokens=150)
    pair.decode.flush()
    following = [*given, *first["tokens"], *prompt(60, 41)]
    stored = (700 + 150 - 1) // CHUNK * CHUNK
    answer, second = pair.ask_both(following)
    pair.prefill.text(prompt(20, 42))
    pair.decode.text(prompt(20, 42))
    assert grown(pair.prefill, start, loaded_from(tier)) == [stored]
    new = in_blocks(len(following)) - stored
    assert grown(pair.decode, decode_start, HANDED) == [in_blocks(700) + new]
    sent = 2 * chunk + (in_blocks(700) - 2 * CHUNK + new) // BLOCK * block
    assert grown(pair.prefill, start, SENT) == [sent], "no two hops"
    assert second["tokens"][0] == answer["tokens"][0]
    pair.open(pair.prefill, None)
    assert pair.prefill.text(following) == [second["tokens"]]


def test_the_next_turn_finds_in_the_pool_what_decode_stored(pair: Pair, tmp_path: Path) -> None:
    """Asymmetric: prefill stores nothing, decode stores prompt and answer, both read the pool."""
    tiers = {"pool": on_disk(tmp_path)["tiers"]["disk"] | {"scope": "shared"}}
    sends = {"retrieve_from": ["pool"], "store_to": ["handoff"], "write_back_to": []}
    stores = {"retrieve_from": ["handoff", "pool"], "store_to": ["pool"], "write_back_to": []}
    receives = {"role": "decode", "listen": [pair.address], "buffer": "16MiB"}
    pair.open(pair.prefill, {"tiers": tiers, "handoff": {"role": "prefill"}, "policy": sends}, send="sync")
    pair.open(pair.decode, {"tiers": tiers, "handoff": receives, "policy": stores})
    two_turns(pair, "pool")


def test_a_prefill_engine_that_waits_answers_when_everything_is_there(
    pair: Pair, expected: dict[int, list[int]]
) -> None:
    """The engines of the test before: prefill sends synchronously, decode takes it as from any other."""
    pair.open(pair.prefill, {"handoff": {"role": "prefill"}}, send="sync")
    asked = SEND | {"handoff": pair.address}
    (first,) = pair.prefill.generate([LONG], 1, extra_args={"kv_transfer_params": asked})
    assert pair.decode.do("transfers") == {first["handoff"]["transfer_id"]: "committed"}
    before = pair.decode.metrics()
    passed = {"kv_transfer_params": first["handoff"]}
    (second,) = pair.decode.generate([LONG], 8, extra_args=passed)
    assert second["tokens"] == expected[len(LONG)]
    assert grown(pair.decode, before, HANDED) == [in_blocks(len(LONG))]


def test_the_next_turn_pulls_from_decode_what_it_keeps_in_memory(pair: Pair) -> None:
    """Bidirectional: prefill asks decode what it has, pulls that, and sends no more than what is new."""
    memory = {"memory": {"capacity": "32MiB"}}
    receives = {"role": "decode", "listen": [pair.address], "buffer": "16MiB"}
    pair.open(pair.prefill, {"handoff": {"role": "prefill", "peers": {"decode": pair.address}}})
    pair.open(pair.decode, {"tiers": memory, "handoff": receives})
    two_turns(pair, "decode")


def test_what_never_comes_is_computed(pair: Pair, expected: dict[int, list[int]]) -> None:
    """Nobody listens where prefill sends; decode waits as long as it is told, and then computes."""
    receives = {"role": "decode", "listen": [pair.address], "buffer": "16MiB"}
    pair.open(pair.prefill, {"handoff": {"role": "prefill"}})
    pair.open(pair.decode, {"handoff": receives}, handoff_timeout_s=0.5)
    before = pair.decode.metrics()
    _, second = pair.ask_both(SHORT, handoff=f"unix://{pair.folder}/nobody")
    assert second["tokens"] == expected[len(SHORT)]
    assert grown(pair.decode, before, HANDED) == [0]


@pytest.mark.parametrize(
    "other",
    [{"handoff": {"role": "prefill", "secret": "not the same one"}}, {"chunk_tokens": BLOCK}],
    ids=["another secret", "another namespace"],
)
def test_strangers_hand_nothing_off(pair: Pair, expected: dict[int, list[int]], other: Settings) -> None:
    """Prefill serves on, decode computes."""
    secret = {"secret": "of the two engines"}
    receives = {"role": "decode", "listen": [pair.address], "buffer": "16MiB"} | secret
    pair.open(pair.prefill, {"handoff": {"role": "prefill"} | secret} | other)
    pair.open(pair.decode, {"handoff": receives}, handoff_timeout_s=0.5)
    before = pair.decode.metrics()
    first, second = pair.ask_both(SHORT)
    assert first["tokens"] == expected[len(SHORT)][:1]
    assert second["tokens"] == expected[len(SHORT)]
    assert grown(pair.decode, before, HANDED) == [0]


def test_garbage_and_another_version_are_put_out_at_the_door(
    pair: Pair, expected: dict[int, list[int]]
) -> None:
    receives = {"role": "decode", "listen": [pair.address], "buffer": "16MiB"}
    pair.open(pair.prefill, {"handoff": {"role": "prefill"}})
    pair.open(pair.decode, {"handoff": receives})
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(pair.address.removeprefix("unix://"))
        stranger.sendall(np.random.default_rng(0).bytes(4096))
        with suppress(ConnectionError):
            while stranger.recv(4096):
                pass
    newer = Speaker(pair.address)
    answer = newer.hello(replace(IDENTITY, secret=b""), version=VERSION + 1)
    newer.close()
    assert isinstance(answer, Error)
    assert f"'here' has {VERSION + 1}, " in answer.message
    before = pair.decode.metrics()
    _, second = pair.ask_both(SHORT)
    assert second["tokens"] == expected[len(SHORT)]
    assert grown(pair.decode, before, HANDED) == [in_blocks(len(SHORT))]


def handed_off_in_part(pair: Pair) -> Settings:
    """Have prefill send a prompt, but not that this was all; the parameters for decode, which waits."""
    receives = {"role": "decode", "listen": [pair.address], "buffer": "16MiB"}
    pair.open(pair.decode, {"handoff": receives}, handoff_timeout_s=100.0)
    pair.open(pair.prefill, {"handoff": {"role": "prefill"}})
    pair.prefill.do("keep_last_word")
    asked = {"kv_transfer_params": SEND | {"handoff": pair.address}}
    (answer,) = pair.prefill.generate([LONG], 1, extra_args=asked)
    wait_for(lambda: pair.decode.do("transfers") == {answer["handoff"]["transfer_id"]: "receiving"})
    return {"kv_transfer_params": answer["handoff"]}


def test_decode_is_killed_in_mid_transfer(pair: Pair, expected: dict[int, list[int]]) -> None:
    """Prefill goes on, and hands off to the engine that takes decode's place."""
    handed_off_in_part(pair)
    pair.decode.kill()
    pair.decode = Engine()
    assert pair.prefill.text(LONG) == [expected[len(LONG)]]
    receives = {"role": "decode", "listen": [pair.address], "buffer": "16MiB"}
    pair.open(pair.decode, {"handoff": receives})
    before = pair.decode.metrics()
    _, answer = pair.ask_both(LONG)
    assert answer["tokens"] == expected[len(LONG)]
    assert grown(pair.decode, before, HANDED) == [in_blocks(len(LONG))]
    pair.prefill.flush()


def test_prefill_is_killed_in_mid_transfer(pair: Pair, expected: dict[int, list[int]]) -> None:
    """Decode has its slots back at once, and computes what did not come whole."""
    passed = handed_off_in_part(pair)
    before = pair.decode.metrics()
    pair.prefill.kill()
    wait_for(lambda: pair.decode.do("transfers") == {})
    (answer,) = pair.decode.generate([LONG], extra_args=passed)
    assert answer["tokens"] == expected[len(LONG)]
    assert grown(pair.decode, before, HANDED) == [0]


def check(role: str, load: str = "async", on_failure: str = "fail", **kvkit: Any) -> None:
    """Have the connector check an engine whose steps overlap."""
    settings, config = read_settings({"load": load, "kvkit": kvkit})
    engine = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_role=role, kv_load_failure_policy=on_failure),
        parallel_config=SimpleNamespace(world_size=1),
        model_config=SimpleNamespace(multimodal_config=None),
        max_concurrent_batches=2,
    )
    check_arrangement(settings, config, engine, 1)


@pytest.mark.parametrize(
    ("role", "handoff", "load", "word"),
    [
        ("kv_producer", {"role": "decode"}, "async", "handoff.role = 'decode': kv_role is 'kv_producer'"),
        ("kv_consumer", {"role": "prefill"}, "async", "want 'decode' or 'both'"),
        ("kv_both", {"role": "decode"}, "sync", "load = 'sync'"),
    ],
)
def test_roles_that_contradict_each_other_are_refused(
    role: str, handoff: Settings, load: str, word: str
) -> None:
    receives = {"listen": ["unix:///d"], "buffer": "1MiB"} if handoff["role"] == "decode" else {}
    with pytest.raises(ConfigError, match=re.escape(word)):
        check(role, load, handoff=handoff | receives)
    check("kv_both", handoff=handoff | receives)
    check(role, load, tiers={"pool": {"url": "file:///kv"}}, policy={"retrieve_from": []})


@pytest.mark.parametrize("load", ["sync", "layerwise"])
def test_a_step_that_vllm_cannot_take_back_is_not_waited_for(load: str) -> None:
    """The step after it is scheduled already: the engine ended at a damaged record."""
    tiers = {"disk": {"url": "file:///disk"}}
    with pytest.raises(
        ConfigError, match=rf"load = '{load}': with asynchronous scheduling.*want load = 'async'"
    ):
        check("kv_both", load, "recompute", tiers=tiers)
    check("kv_both", load, "fail", tiers=tiers)
    check("kv_both", "async", "recompute", tiers=tiers)


def test_an_engine_whose_blocks_vllm_does_not_keep_apart_does_not_load() -> None:
    tiers = {"pool": {"url": "file:///kv"}, "disk": {"url": "file:///disk"}}
    with pytest.raises(
        ConfigError, match=r"'kv_producer': this engine loads from pool, disk.*want 'kv_both'"
    ):
        check("kv_producer", tiers=tiers)
    check("kv_producer", tiers=tiers, policy={"retrieve_from": []})
    check("kv_producer", "sync", tiers=tiers)
    check("kv_consumer", tiers=tiers)
    check("kv_both", tiers=tiers)
