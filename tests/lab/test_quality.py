"""The quality harness makes the samples that it states, computes known figures, and resumes."""

from __future__ import annotations

import itertools
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from byte_tokens import decode, encode
from page_blocks import changed, check_printed, on_page, words_of
from random_models import random_model, save_with_bytes
from typer.testing import CliRunner

from kvkit import cli
from kvkit.adapters.huggingface.blended import BlendedModel
from kvkit.adapters.huggingface.fingerprint import model_fingerprint
from kvkit.blend import gate
from kvkit.blend.plan import BlendError, Selection, Span, plan_blend
from kvkit.config import load_config
from kvkit.environment import verdict_path
from kvkit.lab.files import BenchError, load_model
from kvkit.lab.quality import comparison as quality
from kvkit.lab.quality import precision as measuring
from kvkit.lab.quality.judge import Judge, Measures, _BlockMask, _bottom_right
from kvkit.lab.quality.methods import METHODS, Method, method_named
from kvkit.lab.quality.precision import PrecisionJudge
from kvkit.lab.quality.statistics import bootstrap
from kvkit.lab.quality.tasks.registry import SETS, samples
from kvkit.lab.quality.tasks.sample import CONTINUATION_TOKENS, DOCUMENT_TOKENS, Sample, corpus
from kvkit.lab.quality.verdicts import served_names
from kvkit.settings import ConfigError
from kvkit.transfer import precision


@pytest.mark.parametrize("kind", SETS)
def test_documents_fill_the_prompt_up_to_the_question(kind: str) -> None:
    for sample in samples(kind, encode, 3, 600):
        starts, stops = zip(*sample.documents, strict=True)
        assert starts == (0, *stops[:-1])
        assert all(b - a == DOCUMENT_TOKENS for a, b in sample.documents)
        assert stops[-1] < len(sample.prompt)
        assert len(sample.continuation) == CONTINUATION_TOKENS


@pytest.mark.parametrize("kind", SETS)
def test_samples_are_always_the_same_and_differ(kind: str) -> None:
    one, again = samples(kind, encode, 3, 600), samples(kind, encode, 3, 600)
    assert [s.prompt.tolist() for s in one] == [s.prompt.tolist() for s in again]
    assert len({s.prompt.tobytes() for s in one}) == 3


def test_contiguous_samples_are_running_text() -> None:
    everything = "".join(text for _, text in corpus())
    for sample in samples("contiguous", encode, 3, 600):
        text = decode(np.concatenate([sample.prompt, sample.continuation]))
        assert text.strip("�") in everything


def test_the_request_to_continue_is_followed_by_the_document() -> None:
    texts = [text for _, text in corpus()]
    for sample in samples("documents", encode, 3, 600):
        asked = decode(sample.prompt[sample.documents[-1][1] :])
        title, given = asked.split(", continued from where the text above ends\n\n")
        follows = given + decode(sample.continuation)
        assert any(follows in text for text in texts)
        assert title.strip() in decode(sample.prompt[: sample.documents[-1][1]])


def test_codes_are_cut_from_their_names() -> None:
    for sample in samples("retrieval", encode, 3, 600):
        documents = [decode(sample.prompt[a:b]) for a, b in sample.documents]
        found = {}
        for left, right in itertools.pairwise(documents):
            head, name = left.rsplit("The access code for ", 1)
            assert head
            assert name.endswith(" is")
            found[name.removesuffix(" is")] = right[: right.index(".")]
        question = decode(sample.prompt[sample.documents[-1][1] :])
        asked = question.rsplit("The access code for ", 1)[1].removesuffix(" is")
        assert decode(sample.continuation[: sample.answer]) == found[asked]


def test_impossible_samples_are_errors() -> None:
    with pytest.raises(ValueError, match="kind='prose': want one of contiguous, documents, retrieval"):
        samples("prose", encode, 1, 600)
    with pytest.raises(ValueError, match="is too long"):
        samples("contiguous", encode, 1, 10**7)


@pytest.fixture(scope="module")
def judge() -> Judge:
    return Judge(random_model("deep"))


@pytest.fixture(scope="module")
def measured(judge: Judge) -> dict[str, Measures]:
    everything = {"everything": Method(Selection(ratio=1.0))}
    return judge.measure(samples("retrieval", encode, 1, 512)[0], {**METHODS, **everything})


def test_full_recompute_is_the_measure(measured: dict[str, Measures]) -> None:
    full, everything = measured["full"], measured["everything"]
    assert full["kl"] == 0
    assert full["top1"] == full["rows"] == 1
    assert abs(everything["kl"]) < 1e-4
    assert everything["top1"] == 1
    assert everything["nll"] == pytest.approx(full["nll"], abs=1e-3)
    assert measured["naive"]["kl"] > 10 * abs(everything["kl"])
    assert everything["f1"] == full["f1"]


def test_methods_of_a_ratio_compute_about_as_much(measured: dict[str, Measures]) -> None:
    assert set(measured) == {"full", "everything", *METHODS}
    chosen = [rows["rows"] for name, rows in measured.items() if " .15" in name and "deviation" not in name]
    assert max(chosen) - min(chosen) < 0.15  # the question looks in 3 of 4 layers
    assert measured["naive"]["rows"] < min(chosen)
    assert measured["default .05"]["rows"] < measured["default .15"]["rows"] < measured["default .30"]["rows"]


def test_masks_of_other_systems_change_the_answer(measured: dict[str, Measures]) -> None:
    kl = [measured[f"k_deviation .15{mask}"]["kl"] for mask in ("", ", bottom-right mask", ", block mask")]
    assert len(set(kl)) == 3


def test_the_bottom_right_mask_lets_early_rows_see_too_much() -> None:
    sees = _bottom_right(100)
    assert sees(np.array([10, 50, 99], np.int32)).tolist() == [97, 98, 99]
    assert sees(np.arange(100, dtype=np.int32)).tolist() == list(range(100))


def test_the_block_mask_leaves_out_the_last_block(judge: Judge) -> None:
    plan = plan_blend(200, 0, [Span(0, 190)])
    mask = _BlockMask(judge.decoder, plan)
    selected = np.arange(0, 120, 3)  # 40 rows: one block of 32 and eight that are left over
    rows = np.concatenate([selected, plan.computed]).astype(np.int32)
    seen = mask.last_keys(rows)
    assert set(seen[:32].tolist()) == {93 // 32 * 32 - 1}
    assert mask.zeros.tolist() == list(range(32, 40))
    assert seen[40:].tolist() == plan.computed.tolist()
    everything = np.arange(200, dtype=np.int32)  # layer 0 is dense
    assert np.array_equal(mask.last_keys(everything), everything)
    assert not len(mask.zeros)


FEW = {name: METHODS[name] for name in ("naive", "default .15", "k_deviation .15")}
FEWER = "default .15, covering .10"


def test_a_name_says_what_is_selected() -> None:
    assert method_named("prophetkv .15, first 8").selection == Selection("prophetkv", first_n=8, drift=0.0)
    assert method_named("prophetkv .15, first 8, drift .5").selection == Selection("prophetkv", first_n=8)
    masked = method_named("k_deviation .15, block mask, alone, layers 4, fade 0, drift .5")
    expected = Selection("k_deviation", first_n=0, layers=4, fade=0, drift=0.5)
    assert masked == Method(expected, "block mask", "alone")
    assert method_named("fewer documents .25").imitates == "fewer documents"
    both = Selection(ratio=0.4, coverage=0.65, first_n=4)
    assert method_named("default .40, covering .65, first 4").selection == both
    assert method_named("default .15, alone") == Method(Selection(), context="alone")
    assert method_named("infoflow .20, related, first 2").context == "related"
    assert method_named("naive, alone") == replace(METHODS["naive"], context="alone")
    for wrong in (
        "default .15, beside",
        "default .15, last 8",
        "default .15, first .5",
        "default .15, first",
        "default .15, first -1",
    ):
        with pytest.raises(BenchError, match=re.escape(repr(wrong))):
            method_named(wrong)


def test_a_method_without_a_share_has_that_of_the_default() -> None:
    assert method_named("infoflow").selection == Selection("infoflow", first_n=0, drift=0.0)
    assert method_named("default, first 4").selection == Selection(first_n=4)


def test_a_method_of_ones_own_that_is_not_found_is_said_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that lies in the current folder is found."""
    command = ["bench", "blend", "--methods", "mine:METHOD", "--model", str(tmp_path / "none")]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    said = CliRunner().invoke(cli.app, command).output
    assert "methods: 'mine:METHOD'" in said
    assert "No module named 'mine'" in said
    assert "naive" not in said
    (tmp_path / "mine.py").write_text(
        "from kvkit.blend.methods.registry import METHODS\nMETHOD = METHODS['infoflow']\n"
    )
    said = CliRunner().invoke(cli.app, command).output
    assert "methods" not in said
    assert "none" in said


def test_a_run_goes_on_where_it_was_stopped(tmp_path: Path, judge: Judge) -> None:
    path = tmp_path / "work.jsonl"
    work = quality.run(judge, encode, path, count=2, tokens=512, methods=FEW)
    first = [next(work), next(work)]
    assert len(path.read_text().splitlines()) == 2
    entries = list(quality.run(judge, encode, path, count=2, tokens=512, methods=FEW))
    assert len(path.read_text().splitlines()) == 6
    # seconds of another measurement would differ
    assert [entry["measured"] for entry in entries[:2]] == [entry["measured"] for entry in first]
    more = FEW | {"first_n .15": METHODS["first_n .15"]}
    (again,) = list(quality.run(judge, encode, path, count=1, tokens=512, methods=more, sets=["contiguous"]))
    assert list(json.loads(path.read_text().splitlines()[6])["by_settings"]) == [
        "full",
        '["first_n", 0.15, 0, {}]',
    ]
    assert {name: again["measured"][name]["kl"] for name in FEW} == {
        name: first[0]["measured"][name]["kl"] for name in FEW
    }
    # another machine's seconds are told in this one's
    seconds = [one["measured"]["full"]["seconds"] for one in (again, first[0])]
    assert seconds[0] == pytest.approx(seconds[1], rel=1e-3)
    other = Judge(random_model("gqa", 1))
    next(quality.run(other, encode, path, count=2, tokens=512, methods=FEW))
    assert len(path.read_text().splitlines()) == 8  # other weights: measured anew


def entry(kind: str, **kl: float) -> dict[str, Any]:
    rest = {"top1": 0.5, "nll": 1.0, "rows": 0.2, "seconds": 2.0}
    full = {"full": {"kl": 0.0, **rest, "seconds": 8.0}}
    return {"set": kind, "measured": full | {name: {"kl": value, **rest} for name, value in kl.items()}}


def test_summary_of_known_figures() -> None:
    entries = [entry("a", **{"default .15": x, "naive": 1.0}) for x in (1.0, 3.0)]
    found = quality.summarise([*entries, entry("b", naive=0.5)])
    assert list(found) == ["a", "b"]
    ours = found["a"]["default .15"]
    assert (ours["kl"], ours["samples"], ours["speedup"]) == (2.0, 2, 4.0)
    assert ours["perplexity"] == pytest.approx(np.e)
    assert "exact" not in ours  # nothing was asked for
    assert found["a"]["naive"]["kl_interval"] == [1.0, 1.0]


def test_how_far_ahead_of_the_default_a_method_is_over_the_same_samples() -> None:
    """Samples differ a lot, methods little: what the two have in common cancels out."""
    entries = [entry("a", **{"default .15": 1.0, "naive": 2.0}) for _ in range(8)]
    for hardness, one in zip(np.linspace(0, 0.8, 8), entries, strict=True):
        for name, more in (("full", 0.0), ("default .15", 0.0), ("naive", 0.1)):
            one["measured"][name] |= {"f1": hardness + more}
    found = quality.overall(entries)["naive"]
    assert found["f1_ahead"] == pytest.approx(0.1)
    assert found["f1_ahead_interval"] == pytest.approx([0.1, 0.1])
    assert np.ptp(found["f1_interval"]) > 0.2


def test_bootstrap_of_known_cases() -> None:
    assert bootstrap(np.full(5, 3.0)) == (3.0, 3.0)
    values = np.random.default_rng(0).normal(10, 2, 400)
    low, high = bootstrap(values)
    error = values.std() / 20  # of the mean
    assert low == pytest.approx(values.mean() - 1.96 * error, abs=0.3 * error)
    assert high == pytest.approx(values.mean() + 1.96 * error, abs=0.3 * error)
    assert bootstrap(values) == (low, high)
    assert bootstrap(values, seed=1) != (low, high)
    assert bootstrap(values, 4 * values) == pytest.approx((0.25, 0.25))  # paired: the noise cancels
    with pytest.raises(ValueError, match="values: 0"):
        bootstrap(np.zeros(0))
    with pytest.raises(ValueError, match="over: 3"):
        bootstrap(np.zeros(2), np.zeros(3))


@pytest.mark.parametrize(
    ("kl", "of_naive", "passes"), [(1e9, 1e9, True), (0.0, 1e9, False), (1e9, 0.0, False)]
)
def test_the_gate_decides_by_both_limits(
    kl: float, of_naive: float, passes: bool, judge: Judge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(gate, "MAX_KL", kl)
    monkeypatch.setattr(gate, "MAX_OF_NAIVE", of_naive)
    monkeypatch.setattr(judge, "system", np.array([7, 8, 9], np.int32))
    said: list[str] = []
    found = quality.measure_gate(judge, encode, [judge.weights], said.append, tokens=512, count=1)
    assert found["kl"] < found["other_kl"]
    assert said[-1] == f"samples: {len(SETS)} of {len(SETS)}"
    assert found["passed"] is passes
    assert found["kl_interval"][0] <= found["kl"] <= found["kl_interval"][1]
    assert all(Path(path).is_relative_to(tmp_path) for path in found["paths"])
    config = load_config(chunk_tokens=8, staging="8MiB", tiers={"memory": {"capacity": "4MiB"}})
    if passes:
        assert gate.check(model_fingerprint(judge.model), Selection(), "unchecked") == found["context"]
        BlendedModel.open(judge.model, config).close()
    else:
        with pytest.raises(BlendError, match="too much"):
            BlendedModel.open(judge.model, config)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_bytes("gqa", tmp_path_factory.mktemp("model"))


def run(*arguments: object) -> Any:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments], env={"COLUMNS": "80"})


@pytest.mark.nightly
def test_bench_blend(folder: Path, tmp_path: Path) -> None:
    """Every method of `METHODS` on every set, and a picture."""
    figures, picture = tmp_path / "b.json", tmp_path / "b.png"
    sizes = ["--samples", 1, "--tokens", 512]
    done = run("bench", "blend", "--model", folder, *sizes, "--json", figures, "--png", picture)
    assert done.exit_code == 0, done.output
    found = json.loads(figures.read_text())
    assert found["command"] == "kvkit bench blend"
    assert set(found["sets"]) == set(SETS)
    assert set(found["sets"]["documents"]) == {*METHODS, "full"}
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_bench_blend_asks_what_it_is_told_to(folder: Path, tmp_path: Path) -> None:
    """Two samples of a task, one of a file."""
    lines = tmp_path / "own.jsonl"
    lines.write_text(json.dumps({"input": "Who?", "context": "Ada wrote. " * 40, "answers": ["Ada"]}))
    sizes = ["--samples", 2, "--tokens", 512, "--methods", f"naive; default .15; {FEWER}"]
    done = run(
        "bench", "blend", "--model", folder, *sizes, "--tasks", f"qa; {lines}", "--json", tmp_path / "b.json"
    )
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "b.json").read_text())
    assert {kind: methods["full"]["samples"] for kind, methods in found["sets"].items()} == {
        "qa": 2,
        str(lines): 1,
    }
    qa, own = found["sets"].values()
    for name in ("naive", "default .15", FEWER, "full"):
        assert found["overall"][name]["f1"] == pytest.approx((qa[name]["f1"] + own[name]["f1"]) / 2)
        assert 0 <= qa[name]["exact"] <= qa[name]["f1"] <= 1
    assert 0 < qa["default .15"]["kl_p"] <= 1, "against the first method"
    assert found["overall"][FEWER]["rows"] < found["overall"]["default .15"]["rows"]
    assert found["seed"] == 0


def test_own_methods_are_measured(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As docs/research/own-method.md has it, with a sample of a few tokens and a small model."""
    page = "docs/research/own-method.md"
    (tmp_path / "nearby.py").write_text(on_page("docs/research/own-method.md", '"""nearby.py'))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    small = {"--samples 4": f"--samples 1 --tokens 512 --model {folder}"}
    command = changed(on_page("docs/research/own-method.md", "kvkit bench blend --samples 4"), small)
    done = run(*words_of(command)[1:])
    assert done.exit_code == 0, done.output
    check_printed(page, "kvkit bench blend --samples 4", done.output)
    found = json.loads((tmp_path / "mine.json").read_text())
    assert found["overall"]["nearby:METHOD .15"]["rows"] <= found["overall"]["default .15"]["rows"]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--tasks", "riddles"], "tasks: 'riddles'"),
        (["--methods", "magic"], "methods: 'magic'"),
        (["--json", "/nowhere/blend.json"], "there is no folder"),
        (["--model", "/nowhere"], "nowhere"),
    ],
)
def test_bench_blend_refuses(options: list[str], word: str) -> None:
    result = run("bench", "blend", *options)
    assert result.exit_code == 1
    assert word in result.output
    assert "Traceback" not in result.output


def test_doctor_says_whether_a_model_may_be_blended(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(quality, "GATE_SAMPLES", 1)
    monkeypatch.setattr(gate, "MAX_KL", 1e9)
    monkeypatch.setattr(gate, "MAX_OF_NAIVE", 1e9)
    *_, command = on_page("docs/serve/documents.md", "MODEL=").splitlines()
    result = run(*words_of(command.replace("$MODEL", str(folder)))[1:])
    assert result.exit_code == 0, result.output
    check_printed("docs/serve/documents.md", "MODEL=", result.output)
    for name in served_names(str(folder), None):  # what vLLM's engines look for
        gate.check(name, Selection(), "unchecked")
    monkeypatch.setattr(gate, "MAX_KL", 0.0)
    result = run("doctor", "--blend", folder)
    assert result.exit_code == 1
    assert "must not be blended" in result.output


def test_doctor_says_whether_kv_may_be_held_in_fewer_bits(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measuring, "GATE_SAMPLES", 1)
    monkeypatch.setattr(precision, "MIN_TOP1", 0.5)
    *_, command = on_page("docs/serve/precision.md", "MODEL=").splitlines()
    result = run(*words_of(command.replace("$MODEL", str(folder)).replace("fp8", "int8"))[1:])
    assert result.exit_code == 0, result.output
    check_printed("docs/serve/precision.md", "MODEL=", result.output.replace("int8", "fp8"))
    assert f"{len(SETS)} samples" in result.output
    names = [*served_names(str(folder), None), model_fingerprint(load_model(str(folder))[1])]
    for name in names:  # what vLLM's engines look for, and what transformers' models do
        precision.check(name, "int8", "unchecked")
        with pytest.raises(ConfigError, match=r"'fp8' has not been measured.*--precision fp8 MODEL`, or"):
            precision.check(name, "fp8", "unchecked")
    monkeypatch.setattr(precision, "MAX_KL", -1.0)
    result = run("doctor", "--precision", "int8", folder)
    assert (result.exit_code, "must not be held in int8" in result.output) == (1, True)
    with pytest.raises(ConfigError, match="'int8' changes too much"):
        precision.check(names[0], "int8", "unchecked")
    result = run("doctor", "--precision", "int4", folder)
    assert (result.exit_code, "precision = 'int4': want one of fp8, int8" in result.output) == (1, True)


def test_fewer_bits_change_what_is_said_as_much_as_they_lose(judge: Judge) -> None:
    """The prompt's KV is what is quantised: fp8 has 3 bits of each number, int8 7 of the largest."""
    [sample] = samples("retrieval", encode, 1, 512)
    found = PrecisionJudge(judge.model).measure(sample)
    assert found["full"]["kl"] == 0 < found["int8"]["kl"] < found["fp8"]["kl"] < 0.1
    assert found["full"]["top1"] == 1 >= found["fp8"]["top1"] > 0.5


def test_prompts_begin_with_what_the_tokenizer_leads_with(judge: Judge) -> None:
    """`<bos>`, often: without it some models answer nonsense."""
    [sample] = samples("retrieval", encode, 1, 128)
    plain, leading = PrecisionJudge(judge.model), PrecisionJudge(judge.model)
    leading.lead = np.array([5, 6], np.int32)
    led = sample.behind(leading.lead)
    assert led.prompt.tolist() == [5, 6, *sample.prompt]
    for (start, stop), (first, last) in zip(led.documents, sample.documents, strict=True):
        assert led.prompt[start:stop].tolist() == sample.prompt[first:last].tolist()
    told = [
        of.measure(given)["fp8"]["kl"] for of, given in ((leading, sample), (plain, led), (plain, sample))
    ]
    assert told[0] == told[1] != told[2]


def test_documents_stand_behind_what_the_tokenizer_leads_with() -> None:
    """So the first one is where it was computed: reusing it changes nothing, and reusing another does."""
    judge = Judge(random_model("gqa"))
    prompt, answer = np.arange(1, 61, dtype=np.int32), np.arange(8, dtype=np.int32)
    one, two = (Sample(prompt, documents, answer) for documents in (((0, 40),), ((0, 20), (20, 40))))
    judge.lead = np.array([5, 6], np.int32)
    found = [judge.measure(sample, {"naive": METHODS["naive"]})["naive"] for sample in (one, two)]
    assert abs(found[0]["kl"]) < 1e-6 < 1e-3 < found[1]["kl"]
    chosen = judge.measure(one, {"default .15": METHODS["default .15"]})["default .15"]
    assert found[0]["rows"] == chosen["rows"] == 20 / 62  # nothing is left to choose
    led, nll = one.behind(judge.lead), judge.measure(one, {})["full"]["nll"]
    judge.lead = judge.lead[:0]
    assert judge.measure(led, {})["full"]["nll"] == nll != judge.measure(one, {})["full"]["nll"]


@pytest.mark.parametrize(
    ("kl", "top1", "passes"), [(0.02, 0.95, True), (0.021, 1.0, False), (0.0, 0.949, False)]
)
def test_fewer_bits_pass_by_both_limits(kl: float, top1: float, passes: bool) -> None:
    assert precision.decide(kl, top1)["passed"] is passes
    assert precision.is_sure((kl, kl), (top1, top1))


@pytest.mark.parametrize(
    ("kls", "count", "sure"),
    [([0.01], 12, True), ([0.01, 0.029], 48, False), ([0.02] * 12 + [0.01], 12, True)],
)
def test_more_samples_are_measured_while_a_few_do_not_say_for_sure(
    kls: list[float], count: int, sure: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A judge that finds these divergences in turn."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    given = itertools.cycle(kls)

    def measure(*_: object) -> dict[str, dict[str, float]]:
        return {"full": {"exact": 1.0}, "int8": {"kl": next(given), "top1": 1.0, "exact": 1.0}}

    judge: Any = SimpleNamespace(measure=measure)
    said: list[str] = []
    found = measuring.measure_gate(judge, encode, ["weights"], "int8", said.append, tokens=128)
    assert said[-1].startswith("samples, round ")
    assert (found["samples"], found["sure"], found["passed"]) == (count, sure, True)
    assert json.loads(verdict_path("precision/int8", "weights").read_text())["samples"] == count


@pytest.mark.parametrize(
    ("kl", "top1", "sure"),
    [
        ((0.01, 0.02), (0.95, 1.0), True),
        ((0.01, 0.021), (0.95, 1.0), False),
        ((0.01, 0.02), (0.949, 1.0), False),
        ((0.021, 0.03), (0.9, 1.0), True),
        ((0.0, 0.1), (0.9, 0.94), True),
    ],
)
def test_a_verdict_is_sure_where_no_limit_lies_within_an_interval(
    kl: tuple[float, float], top1: tuple[float, float], sure: bool
) -> None:
    assert precision.is_sure(kl, top1) is sure


def test_a_sample_without_an_answer_has_no_exact_answers(judge: Judge) -> None:
    sample = Sample(np.arange(60, dtype=np.int32), ((0, 20), (20, 50)), np.arange(8, dtype=np.int32))
    assert "exact" not in judge.measure(sample, {})["full"]
