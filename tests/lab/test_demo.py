"""The demo runs from end to end over two processes, with a tiny model."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from matplotlib import image
from rich.console import Console
from typer.testing import CliRunner

from kvkit import cli
from kvkit.adapters.huggingface import smollm2
from kvkit.lab.demo import conversation as demo
from kvkit.lab.demo.conversation import Turn
from kvkit.lab.files import BenchError, about


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder: two small layers of random weights, SmolLM2's tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2.fetch())
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():  # far from degenerate, so that wrong KV shows in the text
            parameter.mul_(3.0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def console() -> Console:
    return Console(file=io.StringIO(), width=120)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_second_process_finds_the_conversation_on_disk(tiny: Path, tmp_path: Path) -> None:
    terminal = console()
    turns = demo.run(str(tiny), tmp_path / "demo.json", tmp_path / "demo.png", terminal)
    assert len(turns) == len(demo.QUESTIONS)
    for turn in turns:
        assert turn.prompt_tokens > demo.DOCUMENT_TOKENS
        assert turn.identical is True
        assert set(turn.hit_tokens) == {"disk"}
        assert turn.hit_tokens["disk"] >= 0.95 * turn.prompt_tokens
        assert turn.hit_tokens["disk"] + turn.computed_tokens == turn.prompt_tokens
        assert turn.ttft_s > 0
        assert turn.ttft_cold_s is not None
        assert turn.ttft_cold_s > 0
    assert turns == sorted(turns, key=lambda turn: turn.prompt_tokens), "the history grows"

    written = json.loads((tmp_path / "demo.json").read_text())
    assert set(written) == {*about("x"), "model", "turns", "first_process"}
    assert written["model"] == str(tiny)
    fields = {"prompt_tokens", "hit_tokens", "computed_tokens", "ttft_s", "ttft_cold_s", "identical"}
    assert all(set(turn) == fields for turn in written["turns"] + written["first_process"])
    assert [Turn(**turn) for turn in written["turns"]] == turns
    first = [Turn(**turn) for turn in written["first_process"]]
    assert first[0].hit_tokens == {}, "the store was empty"
    assert [turn.prompt_tokens for turn in first] == [turn.prompt_tokens for turn in turns]
    assert all(set(turn.hit_tokens) == {"memory"} for turn in first[1:])

    height, width, _ = image.imread(tmp_path / "demo.png").shape
    assert height > 200
    assert width > 600

    text = printed(terminal)
    assert "time to first token without kvkit (cold) and with it" in text
    assert text.count("✓") == len(turns)
    for question in demo.QUESTIONS:
        assert text.count(question) == 2, "once per process"


def test_the_table_and_the_picture_of_turns_that_missed(tmp_path: Path) -> None:
    missed = [Turn(100, {}, 100, 0.5, 0.5, False), Turn(200, {"memory": 64, "disk": 64}, 72, 0.1)]
    terminal = console()
    terminal.print(demo.table(missed))
    assert "none" in printed(terminal)
    assert "memory 64, disk 64" in printed(terminal)
    assert printed(terminal).count("✗") == 2
    demo.picture(missed, missed).savefig(tmp_path / "demo.png")
    assert (tmp_path / "demo.png").stat().st_size > 1000


def test_no_legend_hides_a_bar() -> None:
    turns = [Turn(3000, {"disk": 2000, "memory": 900}, 100, 0.5, 7.0, True)] * 4
    figure = demo.picture(turns, turns)
    figure.savefig(io.BytesIO(), dpi=110)
    for axes in figure.axes:
        legend = axes.get_legend()
        assert legend is not None
        assert not legend.get_window_extent().overlaps(axes.bbox)


def test_a_failing_process_is_an_error_with_what_it_said() -> None:
    with pytest.raises(BenchError, match="ValueError: not enough values") as caught:
        list(demo._events(["no store"]))
    assert str(caught.value).startswith("a process of the demo failed:\nTraceback")


def test_a_model_that_does_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = str(tmp_path / "[no] such model")
    arguments = ["demo", "--model", model, "--json", str(tmp_path / "a"), "--png", str(tmp_path / "b")]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: a process of the demo failed")
    assert f"model {model!r} cannot be loaded" in result.stderr
    assert "Traceback" not in result.output
    assert not (tmp_path / "a").exists()


def test_text_that_differs_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def events(arguments: list[str]) -> Any:
        answer = "[/bold] as it is"
        turn = {"prompt_tokens": 9, "hit_tokens": {"disk": 8}, "computed_tokens": 1, "ttft_s": 0.1}
        turn |= {"ttft_cold_s": 0.2, "identical": False}
        yield {"status": "turn 1"}
        yield {"turn": turn, "question": "why?", "answer": answer}

    monkeypatch.setattr(demo, "_events", events)
    terminal = console()
    with pytest.raises(BenchError, match="differs"):
        demo.run("any", tmp_path / "demo.json", tmp_path / "demo.png", terminal)
    assert "[/bold] as it is" in printed(terminal), "what the model says is not markup"
    assert json.loads((tmp_path / "demo.json").read_text())["turns"][0]["identical"] is False


def test_nowhere_to_write(tmp_path: Path) -> None:
    for places in (("absent/a.json", "b.png"), ("a.json", "absent/b.png")):
        json_path, png_path = (tmp_path / place for place in places)
        with pytest.raises(BenchError, match="absent"):
            demo.run("any", json_path, png_path, console())


def test_a_prompt_without_a_chat_template() -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2.fetch())
    history = [{"role": "user", "content": "One?"}]
    assert tokenizer.decode(demo.render(tokenizer, history)).endswith("<|im_start|>assistant\n")
    tokenizer.chat_template = None
    assert tokenizer.decode(demo.render(tokenizer, history)) == "user: One?\nassistant:"
    longer = [*history, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Two?"}]
    short, long = demo.render(tokenizer, history), demo.render(tokenizer, longer)
    assert long[: len(short)] == short, "a turn goes on where the one before ended"
