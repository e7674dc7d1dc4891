"""`kvkit prove` makes scenarios, comparisons, verdicts and a page; no engine is needed here."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from safetensors.torch import load_file, save_file

from kvkit.lab.files import BenchError
from kvkit.lab.prove.engines import EngineLaunch, ProvedEngine, opening
from kvkit.lab.prove.models import ChangedWeights, linked, make_adapter
from kvkit.lab.prove.options import ProveOptions
from kvkit.lab.prove.page_probe import PageProbe, prompt_name
from kvkit.lab.prove.pages import compare_files, compare_pages
from kvkit.lab.prove.preparation import chosen, command_of, prepared, transfer_of
from kvkit.lab.prove.report import html
from kvkit.lab.prove.run import ToProve, prove_scenario, reference_prompts
from kvkit.lab.prove.scenarios import SCENARIOS, AskedPrompt, crowd_of, prompts_of
from kvkit.lab.prove.verdict import (
    Compared,
    Observed,
    Reply,
    ScenarioVerdict,
    compare,
    exit_status,
    judge,
)
from kvkit.lab.serve.client import Target
from kvkit.lab.serve.systems import free_port

WARM = next(one for one in SCENARIOS if one.name == "warm")
TENANTS = next(one for one in SCENARIOS if one.name == "tenants")
SHORT = AskedPrompt("short")
EXPECTED = Reply((5, 7), (-0.1, -0.2), ({5: -0.1, 6: -2.0}, {7: -0.2, 8: -0.2004}))
PAGES = {"0001 first": torch.randn(2, 3, 4, 8), "0002 second": torch.randn(2, 3, 4, 8)}


def seen(*loaded: int | None, wrong: str = "", page: str = "", loads: str = "some") -> list[Observed]:
    return [Observed((SHORT,), loads, (Compared(0.0, wrong),), n, 1, page) for n in loaded]  # type: ignore[arg-type]


@given(seed=st.integers(0, 2**32), chunk=st.integers(16, 512))
def test_prompts_come_from_the_seed_and_share_what_they_should(seed: int, chunk: int) -> None:
    found = prompts_of(seed, chunk)
    assert found == prompts_of(seed, chunk) != prompts_of(seed + 1, chunk)
    apart = [i for i, pair in enumerate(zip(found["short"], found["twin"], strict=True)) if len({*pair}) > 1]
    assert apart == [2 * chunk - 1]
    assert found["short"][: len(found["head"])] == found["head"]
    assert all(300 <= token < 1000 for prompt in found.values() for token in prompt)
    assert {one.name for scenario in SCENARIOS for one in scenario.all_prompts()} == set(found)


def test_the_reference_is_asked_all_that_is_compared() -> None:
    asked = {(one.name, one.adapter) for scenario in SCENARIOS for one in scenario.all_prompts()}
    assert asked == reference_prompts(SCENARIOS, changed=False)
    assert reference_prompts(SCENARIOS, changed=True) == {("short", False)}
    assert not reference_prompts(chosen("warm"), changed=True)


def test_no_scenario_is_asked_what_changed_weights_may_have_stored() -> None:
    after = [one.name for one in SCENARIOS].index("weights changed") + 1
    asked = {(one.name, one.adapter) for scenario in SCENARIOS[after:] for one in scenario.all_prompts()}
    assert not asked & reference_prompts(SCENARIOS, changed=True)


def test_a_crowd_fills_what_there_is() -> None:
    assert [len(prompt) for prompt in crowd_of(0, 1000, 300)] == [300, 300, 300, 100]


class _Opened:
    """What `opening` takes, and what it did with it."""

    def __init__(self, barrier: Barrier | None = None, error: BenchError | None = None) -> None:
        self.barrier, self.error, self.is_open = barrier, error, False

    def open(self) -> _Opened:
        if self.barrier is not None:
            self.barrier.wait(60)
        if self.error is not None:
            raise self.error
        self.is_open = True
        return self


def test_engines_start_at_once_where_they_may() -> None:
    barrier = Barrier(3)
    engines = [_Opened(barrier) for _ in range(3)]
    with opening(engines, concurrent=True) as openers:  # type: ignore[arg-type]
        assert [id(opened()) for opened in openers] == [*map(id, engines)]
    first, second = _Opened(), _Opened()
    with opening([first, second], concurrent=False) as openers:  # type: ignore[list-item]
        openers[1]()
        assert (first.is_open, second.is_open) == (False, True)


def test_an_engine_that_does_not_start_is_told_when_no_other_starts_any_more() -> None:
    barrier = Barrier(2)
    fails, other = _Opened(barrier, BenchError("no room")), _Opened(barrier)
    with (
        pytest.raises(BenchError, match="no room"),
        opening([fails, other], concurrent=True) as openers,  # type: ignore[list-item]
    ):
        openers[0]()
    assert other.is_open


def test_an_engine_that_is_gone_tells_nothing() -> None:
    engine = ProvedEngine("gone", "")
    engine.no_pages_reason, engine.target = (
        "",
        Target("gone", f"http://127.0.0.1:{free_port()}", "m", vllm=True),
    )
    for told in (engine.skipped_tokens, engine.read_counts, engine.capacity_tokens):
        with pytest.raises(BenchError, match=r"127\.0\.0\.1"):
            told()
    assert not engine.reset_prefix_cache()


def test_equal_answers_are_equal() -> None:
    assert compare(EXPECTED, EXPECTED, 1e-3) == Compared(0.0)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (replace(EXPECTED, logprobs=(-0.1, -0.21)), "token 1: log-probabilities 0.01 apart"),
        (replace(EXPECTED, tokens=(6, 7), logprobs=(-0.1, -0.2)), "token 0 is 6, want 5"),
        (replace(EXPECTED, tokens=(9, 7)), "token 0 is 9, want 5: it is not among the likeliest there"),
        (Reply((5,), (-0.1,), ({5: -0.1},)), "1 tokens, want 2"),
        (Reply(error="HTTP 500"), "no answer: HTTP 500"),
    ],
)
def test_what_differs_is_said(found: Reply, words: str) -> None:
    assert words in compare(EXPECTED, found, 1e-3).wrong


def test_tokens_that_were_equally_likely_may_be_exchanged() -> None:
    found = replace(EXPECTED, tokens=(5, 8), logprobs=(-0.1, -0.2004))
    assert not compare(EXPECTED, found, 1e-3).wrong
    assert compare(EXPECTED, found, 1e-4).wrong


def test_a_verdict_asks_for_a_transfer() -> None:
    assert judge(WARM, seen(256), None).outcome == "proven"
    assert judge(WARM, seen(0), None).outcome == "not proven"
    assert judge(WARM, seen(None), None).why == "the server does not report how many tokens were loaded"
    assert judge(WARM, seen(256, loads="fresh"), None).outcome == "not proven"
    assert judge(WARM, seen(0, loads="fresh"), None).outcome == "proven"
    assert judge(WARM, seen(0, loads="fresh"), None, handed_off=True).outcome == "not proven"


def test_a_verdict_names_what_differs() -> None:
    assert judge(WARM, seen(256, wrong="token 0"), None).why == "prompt 'short': token 0"
    assert judge(WARM, seen(256, page="rank0, layer a"), None).outcome == "differs"
    assert judge(TENANTS, seen(128, loads="none"), None).outcome == "differs"
    assert judge(TENANTS, seen(128, loads="none"), None, handed_off=True).outcome == "proven"
    blind = judge(WARM, seen(256), Compared(1e-5))
    assert (blind.outcome, "only 1e-05 apart" in blind.why) == ("not proven", True)
    assert judge(WARM, [*seen(256), Observed((), "any", (), 0, missing="gone")], None).why == "gone"


@pytest.mark.parametrize(
    ("outcomes", "status"),
    [
        (["proven", "not run"], 0),
        (["proven", "differs", "not proven"], 1),
        (["proven", "not proven"], 2),
        (["not run"], 2),
        ([], 2),
    ],
)
def test_the_exit_status(outcomes: list[str], status: int) -> None:
    verdicts = [ScenarioVerdict("warm", one, "") for one in outcomes]  # type: ignore[arg-type]
    assert exit_status(verdicts) == status


def changed(layer: str, block: int, head: int, value: float) -> dict[str, torch.Tensor]:
    found = {name: pages.clone() for name, pages in PAGES.items()}
    found[layer][block, head, 1, 2] = value
    return found


@pytest.mark.parametrize("value", [9.0, float("nan"), float("inf")])
def test_the_first_page_that_differs_is_named(value: float) -> None:
    compared, wrong = compare_pages(PAGES, changed("0002 second", 1, 2, value), 1e-4)
    assert compared == 12
    assert wrong.startswith("layer second, block 1, head 2 is the first of 1 pages that differ (of 12)")


def test_pages_that_are_not_there_are_not_compared() -> None:
    found = {name: pages.clone() for name, pages in PAGES.items()}
    found["0001 first"][0] = float("nan")
    assert compare_pages(PAGES, found, 1e-4) == (9, "")


def test_files_of_pages_are_found_by_prompt_and_rank_and_taken(tmp_path: Path) -> None:
    (expected := tmp_path / "expected").mkdir()
    (found := tmp_path / "found").mkdir()
    name = prompt_name([1, 2], None)
    assert name != prompt_name([1, 2], "adapter")
    save_file(PAGES, expected / f"{name}.0.rank0.safetensors")
    save_file(PAGES, found / f"{name}.0.rank0.safetensors")
    save_file(changed("0001 first", 0, 0, 9.0), found / f"{name}.1.rank0.safetensors")
    compared, wrong = compare_files(expected, found, name, 1e-4)
    assert compared == 24
    assert wrong.startswith("rank0, layer first, block 0, head 0")
    assert not list(found.iterdir())


def test_a_tensor_changes_under_the_same_name_and_back(tmp_path: Path) -> None:
    (model := tmp_path / "model").mkdir()
    tensors = {f"model.layers.0.self_attn.{name}_proj.weight": torch.ones(4, 6) for name in "kv"}
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    folder = linked(model, tmp_path / "linked")
    weights = ChangedWeights(folder)
    assert weights.tensor.endswith("v_proj.weight")
    weights.change()
    assert [bool((one == 1).all()) for one in load_file(folder / "model.safetensors").values()] == [
        True,
        False,
    ]
    weights.restore()
    assert bool((load_file(folder / "model.safetensors")[weights.tensor] == 1).all())
    assert bool((load_file(model / "model.safetensors")[weights.tensor] == 1).all())
    adapter = load_file(make_adapter(folder, tmp_path / "adapter") / "adapter_model.safetensors")
    shapes = {name.rpartition(".lora_")[2]: tuple(tensor.shape) for name, tensor in adapter.items()}
    assert shapes == {"A.weight": (8, 6), "B.weight": (4, 8)}


def test_a_model_that_cannot_be_changed_or_adapted_is_named(tmp_path: Path) -> None:
    save_file({"wte.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(BenchError, match=r"v_proj\.weight"):
        ChangedWeights(tmp_path)
    with pytest.raises(BenchError, match="--lora"):
        make_adapter(tmp_path, tmp_path / "adapter")


def test_a_connector_is_named_or_written_out(tmp_path: Path) -> None:
    (file := tmp_path / "transfer.json").write_text('{"kv_connector": "NixlConnector"}')
    assert transfer_of("NixlConnector", tmp_path, 256)["kv_connector"] == "NixlConnector"
    assert transfer_of(str(file), tmp_path, 256) == {"kv_connector": "NixlConnector"}
    kvkit = transfer_of("kvkit", tmp_path, 128)["kv_connector_extra_config"]["kvkit"]
    assert kvkit["chunk_tokens"] == 128
    for wrong in ("{", "{}", str(tmp_path / "none")):
        with pytest.raises(BenchError, match="kv_transfer_config"):
            transfer_of(wrong, tmp_path, 256)


def test_engines_are_started_alike_but_for_the_connector(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    tensors = {f"model.layers.0.self_attn.{name}_proj.weight": torch.ones(4, 6) for name in "kv"}
    save_file(tensors, tmp_path / "model.safetensors")
    options = ProveOptions(model=str(tmp_path), dtype="bfloat16", seed=3, vllm="--block-size 32")
    with prepared(options, Console(quiet=True)) as found:
        reference, engine = found.reference, found.engine._location
        assert isinstance(reference, EngineLaunch)
        assert isinstance(engine, EngineLaunch)
        assert set(found.missing) == {"store"}
        assert (reference.transfer, engine.transfer["kv_connector"]) == (None, "KVKitConnector")  # type: ignore[index]
        apart = set(reference.options) ^ set(engine.options)
        assert apart == {"--no-enable-prefix-caching", "--enable-prefix-caching"}
        told = dict(pairwise(engine.options))
        assert told["--num-gpu-blocks-override"] == str(12 * 128 // 32)
        assert told["--dtype"] == "bfloat16"
        assert Path(told["--lora-modules"].partition("=")[2], "adapter_config.json").exists()
        assert Path(engine.model, "model.safetensors").is_symlink()
        assert found.changed_reference is not None
        (changed,) = Path(found.changed_reference.model).iterdir()
        assert changed.name == "model.safetensors"
        assert not changed.is_symlink()
    assert not found.folder.exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (ProveOptions(dtype="int8"), "dtype = 'int8': want one of float32, float16, bfloat16"),
        (ProveOptions(url="http://127.0.0.1:1"), "--url and --reference"),
    ],
)
def test_options_that_cannot_be(options: ProveOptions, words: str) -> None:
    with pytest.raises(BenchError, match=words), prepared(options, Console(quiet=True)):
        pass


def test_scenarios_are_chosen_by_name_in_their_order() -> None:
    assert [one.name for one in chosen("warm, cold")] == ["cold", "warm"]
    assert chosen("") == list(SCENARIOS)
    with pytest.raises(BenchError, match=r"scenarios = 'hot': want some of cold, warm"):
        chosen("hot")


def test_the_command_does_the_same_again() -> None:
    options = ProveOptions(kv_transfer_config='{"kv_connector": "X"}', vllm="--seed 1")
    expected = (
        "kvkit prove --seed 7 --kv-transfer-config '{\"kv_connector\": \"X\"}' --scenarios 'one token' "
        "--chunk-tokens 128 --vllm '--seed 1'"
    )
    assert command_of(options, 7, "one token") == expected


def test_the_page_has_every_verdict_and_runs_nothing() -> None:
    verdicts = [ScenarioVerdict("warm", "differs", "<script>x</script>", 256, 0.5, 12)]
    made = html(verdicts, {"command": "kvkit prove"}, 0.0)
    assert "<script>" not in made
    assert "&lt;script&gt;x" in made
    assert "<h1>kvkit prove</h1>" in made
    assert "1 differs" in made


class _Runner:
    """What a model runner shows of itself: two layers of 6 blocks of 4 tokens, each two of a kernel's."""

    def __init__(self) -> None:
        self.pages = torch.arange(2 * 12 * 2 * 2 * 3).float().reshape(2, 12, 2, 2, 3)
        layers = {f"layer{i}": SimpleNamespace(kv_cache=self.pages[i]) for i in range(2)}
        compilation = SimpleNamespace(static_forward_context=layers)
        model = SimpleNamespace(dtype=torch.float32)
        self.vllm_config = SimpleNamespace(compilation_config=compilation, model_config=model)
        group = SimpleNamespace(layer_names=list(layers), kv_cache_spec=SimpleNamespace(block_size=4))
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[group], num_blocks=6)

    def execute_model(self, scheduled: object) -> str:
        return "computed"


def step(new: list[object] = [], again: dict[str, object] | None = None, **tokens: int) -> object:  # noqa: B006
    """A step of the scheduler that has so many `tokens` of requests computed."""
    cached = {"req_ids": [], "new_block_ids": [], "num_computed_tokens": [], "resumed_req_ids": set()}
    return SimpleNamespace(
        finished_req_ids=set(),
        scheduled_new_reqs=new,
        scheduled_cached_reqs=SimpleNamespace(**cached | (again or {})),
        num_scheduled_tokens=tokens,
    )


def test_the_probe_copies_a_prompts_blocks_when_it_is_complete(tmp_path: Path) -> None:
    worker, runner, prompt = PageProbe(), _Runner(), list(range(9))
    worker.model_runner = runner
    assert worker.prove_watch(str(tmp_path)) == {"dtype": "float32"}
    asked = {"lora_request": None, "prompt_token_ids": prompt, "req_id": "a"}
    new = SimpleNamespace(**asked, block_ids=([3],), num_computed_tokens=0)
    assert runner.execute_model(step([new], a=4)) == "computed"
    assert not list(tmp_path.iterdir())
    more = {"req_ids": ["a"], "new_block_ids": [([0, 2],)], "num_computed_tokens": [4]}
    runner.execute_model(step(again=more, a=5))
    (file,) = tmp_path.iterdir()
    assert file.name == f"{prompt_name(prompt, None)}.0.rank0.safetensors"
    found = load_file(file)
    assert list(found) == ["0001 layer0", "0002 layer1"]
    assert torch.equal(found["0002 layer1"][:2], runner.pages[1, 6:8])
    assert found["0002 layer1"][2:].isnan().all()  # no page is there
    back = more | {"new_block_ids": [([5, 4, 1],)], "num_computed_tokens": [8], "resumed_req_ids": {"a"}}
    runner.execute_model(step(again=back, a=1))
    assert worker.prove_skipped() == [8]
    again = load_file(tmp_path / file.name.replace(".0.", ".1."))
    assert torch.equal(again["0001 layer0"], runner.pages[0, [10, 11, 8, 9]])


def test_the_probe_takes_prompts_of_less_than_a_block(tmp_path: Path) -> None:
    worker, runner = PageProbe(), _Runner()
    worker.model_runner = runner
    worker.prove_watch(str(tmp_path))
    asked = {"lora_request": SimpleNamespace(lora_name="x"), "prompt_token_ids": [7], "req_id": "a"}
    new = SimpleNamespace(**asked, block_ids=([3],), num_computed_tokens=0)
    runner.execute_model(step([new], a=1))
    (file,) = tmp_path.iterdir()
    assert file.name.startswith(prompt_name([7], "x"))


SERVER = """
import http.server, json, os, sys

class Engine(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        told = {"data": [{"id": "m", "owned_by": "vllm"}]}
        body = json.dumps(told) if self.path == "/v1/models" else "vllm:num_requests_running 0.0\\n"
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body.encode())

    def do_POST(self):
        if self.path == "/v1/completions":
            print("RuntimeError: shape mismatch", file=sys.stderr, flush=True)
            os._exit(1)
        self.send_error(404)

if os.path.exists("once"):
    sys.exit("no memory is left")
open("once", "w").close()
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Engine).serve_forever()
"""
"""An engine that ends at the first prompt, and does not start again."""


def test_what_an_engine_that_is_gone_cannot_run_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "vllm/entrypoints/openai/api_server.py"
    module.parent.mkdir(parents=True)
    module.write_text(SERVER)
    for package in list(module.parents)[:3]:
        (package / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    launch = EngineLaunch("m", (), tmp_path, {"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin"}, {})
    (tmp_path / "found").mkdir()
    expected = {(one.name, False, False): EXPECTED for one in WARM.all_prompts()}
    with ProvedEngine("engine", launch) as engine:
        engine.watch(tmp_path / "found")
        proof = ToProve("", engine, (WARM, TENANTS), prompts_of(1, 16), 1, tmp_path, "float32")
        proof.expected = expected | {(one.name, False, False): EXPECTED for one in TENANTS.all_prompts()}
        verdicts = [prove_scenario(proof, scenario) for scenario in proof.scenarios]
    assert [one.outcome for one in verdicts] == ["differs", "not run"]
    assert verdicts[0].why.startswith("the engine does not answer")
    assert verdicts[0].log.endswith("RuntimeError: shape mismatch")
    assert verdicts[1].why.startswith("the engine is gone: engine ended with 1")
    assert verdicts[1].log.endswith("no memory is left")
    assert exit_status([ScenarioVerdict("cold", "proven", ""), *verdicts[1:]]) == 2
