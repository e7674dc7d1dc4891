"""KV of a LoRA adapter is found by the adapter's content in vLLM's memory, not by its files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from safetensors.torch import save_file
from small_models import QWEN, VOCABULARY, save
from vllm_engine import BLOCK, Engine, Settings, connector, on_disk, prompt

from kvkit.adapters.engine.contents import Stamp, digests
from kvkit.adapters.engine.lookup_request import Lora
from kvkit.adapters.vllm.loras import Loras
from kvkit.lab.testbed.waiting import wait_for

PROMPT = prompt(300, seed=5, vocabulary=VOCABULARY)
HIT = (len(PROMPT) - 1) // BLOCK * BLOCK


def write(folder: Path, seed: int) -> Path:
    """An adapter that changes what a model says."""
    folder.mkdir(parents=True, exist_ok=True)
    made, tensors, size = torch.Generator().manual_seed(seed), {}, QWEN.hidden_size
    kv = QWEN.num_key_value_heads * size // QWEN.num_attention_heads
    for layer in range(QWEN.num_hidden_layers):
        for name, out in (("q_proj", size), ("k_proj", kv), ("v_proj", kv)):
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{at}.lora_A.weight"] = torch.randn(8, size, generator=made) * 0.3
            tensors[f"{at}.lora_B.weight"] = torch.randn(out, 8, generator=made) * 0.3
    save_file(tensors, folder / "adapter_model.safetensors")
    told = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj", "k_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(told))
    return folder


def lora(path: Path, name: str = "tuned", number: int = 1, **more: Any) -> Settings:
    return {"lora_name": name, "lora_int_id": number, "lora_path": str(path)} | more


class WithLora(Engine):
    """An engine of one small model that takes adapters."""

    def serve(self, transfer: Settings | None, model: Path, **more: Any) -> WithLora:
        options = {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 2} | more
        return self.open(transfer, model, skip_tokenizer_init=True, **options)

    def ask(self, adapter: Settings | None) -> tuple[int, list[float]]:
        """(tokens that were not computed, logprobs)."""
        (answer,) = self.generate([PROMPT], **({} if adapter is None else {"lora": adapter}))
        return answer["cached"], answer["logprobs"]


@pytest.fixture
def engine() -> Iterator[WithLora]:
    with WithLora() as made:
        yield made


def test_adapters_in_an_engine(engine: WithLora, tmp_path: Path) -> None:
    """Overwritten while vLLM has it in memory, before an engine starts, and reloaded in place."""
    model, transfer = save(QWEN, tmp_path / "model"), connector(on_disk(tmp_path / "kv"))
    one, two = write(tmp_path / "one", 1), write(tmp_path / "two", 2)
    at = tmp_path / "adapter"

    def overwrite(source: Path) -> None:
        shutil.copytree(source, at, dirs_exist_ok=True)

    engine.serve(None, model)
    _, base = engine.ask(None)
    _, first = engine.ask(lora(one))
    _, second = engine.ask(lora(two, "two", 2))
    assert first != pytest.approx(second, abs=1e-2)

    engine.serve(transfer, model)
    overwrite(one)
    engine.do("add_lora", lora(at))
    overwrite(two)  # vLLM has read the other one
    assert engine.ask(lora(at)) == (0, pytest.approx(first, abs=1e-4))
    assert engine.ask(lora(at)) == (HIT, pytest.approx(first, abs=1e-4))
    assert engine.ask(None) == (0, pytest.approx(base, abs=1e-4))
    assert engine.ask(lora(one, "other", 3)) == (HIT, pytest.approx(first, abs=1e-4))

    engine.serve(transfer, model)  # which reads the other one from the same path, under the same name
    assert engine.ask(lora(at)) == (0, pytest.approx(second, abs=1e-4))
    assert engine.ask(lora(at)) == (HIT, pytest.approx(second, abs=1e-4))
    overwrite(one)
    reloaded = lora(at, load_inplace=True)
    assert engine.ask(reloaded) == (0, pytest.approx(first, abs=1e-4))
    assert engine.ask(reloaded) == (0, pytest.approx(first, abs=1e-4)), (
        "vLLM's own blocks may be the old ones"
    )
    assert engine.ask(lora(one, "other", 3)) == (HIT, pytest.approx(first, abs=1e-4))
    assert engine.ask(lora(two, "two", 2)) == (HIT, pytest.approx(second, abs=1e-4))


def test_engines_that_apply_other_modules_of_an_adapter_do_not_share(
    engine: WithLora, tmp_path: Path
) -> None:
    """`lora_target_modules` has vLLM leave out the rest of it, which the files do not say."""
    model, transfer = save(QWEN, tmp_path / "model"), connector(on_disk(tmp_path / "kv"))
    adapter = lora(write(tmp_path / "one", 1))
    modules = {"lora_target_modules": ["o_proj"]}
    _, without = engine.serve(None, model, **modules).ask(adapter)
    engine.serve(transfer, model)
    assert engine.ask(adapter)[0] == 0
    assert engine.ask(adapter)[0] == HIT
    engine.serve(transfer, model, **modules)
    assert engine.ask(adapter) == (0, pytest.approx(without, abs=1e-4))
    assert engine.ask(adapter) == (HIT, pytest.approx(without, abs=1e-4))


@pytest.fixture
def loras() -> Loras:
    """Of a worker that has loaded nothing yet."""
    return Loras("bfloat16")


def test_an_adapter_is_what_it_holds(loras: Loras, tmp_path: Path) -> None:
    one, two = write(tmp_path / "one", 1), write(tmp_path / "two", 2)
    found = loras.identity(Lora(1, str(one)))
    assert found is not None
    assert loras.identity(Lora(2, str(shutil.copytree(one, tmp_path / "copy")))) == found
    others = {
        loras.identity(Lora(3, str(two))),
        loras.identity(Lora(1, str(one), fused_experts=True)),
        Loras("float32").identity(Lora(1, str(one))),
    }
    assert len(others | {found, None}) == 5


def test_an_adapter_that_changes_on_disk_is_not_reused_any_more(
    loras: Loras, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor when it changes back: nobody knows what vLLM computed in between."""
    at = write(tmp_path / "adapter", 1)
    assert loras.identity(Lora(1, str(at))) is not None
    write(at, 2)
    assert loras.identity(Lora(1, str(at))) is None
    write(at, 1)
    assert [loras.identity(Lora(number, str(at))) for number in (1, 2)] == [None, None]
    (message,) = caplog.messages
    assert str(at) in message
    assert "load changed weights from a new path" in message


@pytest.mark.parametrize(
    "path", ["org/adapter", "/nowhere", "/dev/null", "~nobody-of-that-name/adapter", "null\0byte"]
)
def test_an_adapter_that_cannot_be_read_here_is_not_reused_and_said_once(
    loras: Loras, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert [loras.identity(Lora(1, path)) for _ in range(3)] == [None] * 3
    (message,) = caplog.messages
    assert message.startswith(f"LoRA adapter {path}: nothing with it is reused: ")


def test_an_adapter_is_read_once_as_long_as_it_stays(
    loras: Loras, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []

    def read(files: Any, folder: Path | None) -> list[str]:
        reads.append(len(files))
        return digests(files, folder)

    monkeypatch.setattr("kvkit.adapters.engine.weights.digests", read)
    at = write(tmp_path / "adapter", 1)
    wait_for(lambda: all(Stamp.of(file).settled for file in at.iterdir()))
    found = {loras.identity(Lora(1, str(at))) for _ in range(5)}
    assert (len(found), reads) == (1, [2])
