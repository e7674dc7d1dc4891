"""Rows with gaps, run through vLLM's model in a real engine, equal a prefill or are refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from small_models import COMMON, QWEN, VOCABULARY, save
from test_vllm_loras import lora, write
from test_vllm_models import GEMMA
from transformers import Gemma4TextConfig
from vllm.v1.worker.worker_base import WorkerWrapperBase
from vllm_engine import Engine, prompt

from kvkit.adapters.vllm import compat
from kvkit.adapters.vllm.connector import register

PROMPTS = [prompt(n, seed=n, vocabulary=VOCABULARY) for n in (700, 300)]
GEMMA_4 = Gemma4TextConfig(
    **COMMON,
    num_key_value_heads=2,
    head_dim=32,
    global_head_dim=64,
    sliding_window=256,
    layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
    num_kv_shared_layers=0,
    vocab_size_per_layer_input=VOCABULARY,
    hidden_size_per_layer_input=32,
)
OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "max_num_batched_tokens": 320, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def process() -> Iterator[Engine]:
    with Engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def qwen(process: Engine, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return process.open(None, save(QWEN, tmp_path_factory.mktemp("qwen")), **OPTIONS)


def ask(engine: Engine, function: str, *arguments: Any) -> list[Any]:
    """What a function of vllm_rows.py returns, of each rank."""
    found: list[Any] = engine.do("call", "vllm_rows", function, *arguments)
    return found


def same_as_prefill(engine: Engine) -> dict[str, Any]:
    """Prompts longer than the window, and than vLLM's buffers take at a time, in the same runs."""
    expected = engine.generate(PROMPTS, tokens=1)
    ranks: list[dict[str, Any]] = ask(engine, "computed", PROMPTS, 0.3)
    for found in ranks:
        assert found["hidden"] < 1e-4
        assert found["kv"] < 1e-4
        assert found["dirty"] > 0.1, "it is no wonder that nothing differs"
    logprobs = max(found["logprobs"] for found in ranks)  # one rank has them
    assert logprobs == pytest.approx([answer["logprobs"][0] for answer in expected], abs=1e-4)
    return ranks[0]


def test_rows_are_what_a_prefill_computes(qwen: Engine) -> None:
    found = same_as_prefill(qwen)
    assert found["sizes"] == [[210, 90]], "a CPU has no limit of runs"
    assert found["looks"] == [[300] * QWEN.num_hidden_layers]


def test_parts(qwen: Engine) -> None:
    """A part takes so many rows, and later parts see earlier ones."""
    (found,) = ask(qwen, "computed", PROMPTS, 0.3, 128)
    assert found["sizes"] == [[128], [82, 46], [44]]
    assert found["kv"] < 1e-4


def check_kvkits_attention(engine: Engine, plain: bool = False) -> dict[str, Any]:
    """In the place of vLLM's it computes the same, in one run of the model; what is false is not taken."""
    ((fits, found),) = ask(engine, "by_kvkit", PROMPTS, 0.3, 1.0, plain)
    assert fits
    assert found["sizes"] == [[210, 90]], "two runs of rows would be vLLM's limit"
    assert found["hidden"] < 1e-4
    assert found["kv"] < 1e-4
    assert ask(engine, "by_kvkit", PROMPTS[1:], 0.3, 1.5, plain)[0][0] is False
    return found


@pytest.mark.parametrize("plain", [True, False], ids=["as on a GPU", "on a CPU"])
def test_rows_by_kvkits_attention(qwen: Engine, plain: bool) -> None:
    found = check_kvkits_attention(qwen, plain)
    assert found["looks"] == [[300] * QWEN.num_hidden_layers]


def test_what_attention_takes_on_this_cpu_is_measured(qwen: Engine) -> None:
    engine, own, copy = ask(qwen, "speeds")[0]
    assert len(engine) == 3
    assert min(engine) > 0
    assert own >= 0
    assert copy > 0


def test_a_run_that_stops(qwen: Engine) -> None:
    """Layers beyond those that are wanted are not touched; without hidden states all K and V still are."""
    layers = QWEN.num_hidden_layers
    ((stopped, back, looks),) = ask(qwen, "stopped", PROMPTS[1], 2)
    assert [change > 0.1 for change in stopped] == [True] * 4 + [False] * (2 * layers - 4)
    assert max(back) < 1e-5
    assert looks == [layers, 2]


def test_the_start_up_check(qwen: Engine) -> None:
    """It finds the rope of every layer, and refuses what is false."""
    head = QWEN.hidden_size // QWEN.num_attention_heads
    last = 10_000.0 ** -((head - 2) / head)
    for rope in ask(qwen, "checked")[0]:
        assert rope == pytest.approx([1.0, head, 0, 1.0, last], rel=1e-5)
    assert "rows with gaps differ" in ask(qwen, "refused", "rows")[0]
    assert "layer model.layers.0.self_attn.attn" in ask(qwen, "refused", "rope")[0]
    assert ask(qwen, "refused", "nothing") == [""]


def test_what_is_refused(qwen: Engine) -> None:
    """By name, and nothing else with it."""
    (said,) = ask(qwen, "refusals")
    for found, name in zip(
        said, ("enable_eplb", "kv_sharing_fast_prefill", "kv_cache_dtype", "'pooling'"), strict=True
    ):
        assert found.startswith("Qwen2ForCausalLM cannot be blended: ")
        assert name in found
        assert ";" not in found


def test_the_model_is_reached_through_one_method() -> None:
    """Wrapped once, however often plug-ins are loaded."""
    register()
    wrapped = WorkerWrapperBase.initialize_from_config
    register()
    assert WorkerWrapperBase.initialize_from_config is wrapped
    assert wrapped.__module__ == compat.__name__


def test_windows_and_two_ropes(process: Engine, tmp_path: Path) -> None:
    process.open(None, save(GEMMA, tmp_path), **OPTIONS)
    same_as_prefill(process)
    (ropes,) = ask(process, "checked")
    assert ropes[0] != ropes[-1]
    check_kvkits_attention(process)
    assert [rope == ropes[0] for rope in ropes] == [kind == "sliding_attention" for kind in GEMMA.layer_types]


def test_blocks_of_two_sizes(process: Engine, tmp_path: Path) -> None:
    """Layers with larger heads have fewer tokens in a block, and tables of their own."""
    process.open(None, save(GEMMA_4, tmp_path), **OPTIONS)
    sizes, (engine, own, copy) = ask(process, "speeds_by_group")[0]
    assert len(set(sizes)) == 2
    assert min(engine) > 0
    assert own >= 0
    assert copy > 0
    same_as_prefill(process)
    check_kvkits_attention(process)


def test_adapters(process: Engine, tmp_path: Path) -> None:
    """Rows have their request's adapter, one a run; a step that is under way keeps its own."""
    options = OPTIONS | {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1}
    process.open(None, save(QWEN, tmp_path / "model"), **options)
    loras = [lora(write(tmp_path / str(n), seed=n), name=str(n), number=n) for n in (1, 2)]
    for given in ([None, loras[0]], [loras[1], None]):
        asked = zip(PROMPTS, given, strict=True)
        expected = [process.generate([p], tokens=1, **({"lora": one} if one else {}))[0] for p, one in asked]
        (found,) = ask(process, "computed", PROMPTS, 0.3, None, given)
        assert found["logprobs"] == pytest.approx([answer["logprobs"][0] for answer in expected], abs=1e-4)
        assert found["kv"] < 1e-4
    kept, parts = ask(process, "adapters", loras, PROMPTS[1])[0]
    assert kept
    assert parts == [[0], [1], [2]]
