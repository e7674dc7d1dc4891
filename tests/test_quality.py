"""The harness: its samples are what they claim, its figures are right where they are known, it goes on."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import transformers
from pages import on_page, run_shell
from test_blend_run import random_model
from typer.testing import CliRunner

from kvkit import cli
from kvkit.adapters.huggingface import smollm2
from kvkit.adapters.huggingface.blended import BlendedModel
from kvkit.adapters.huggingface.cached import model_fingerprint
from kvkit.bench import quality
from kvkit.bench.quality import METHODS, SETS, Judge, Method, Sample, bootstrap, samples
from kvkit.blend import gate
from kvkit.blend.plan import BlendError, Selection, Span, plan_blend
from kvkit.config import load_config


def encode(text: str) -> list[int]:
    """A token per byte."""
    return list(text.encode())


def decode(tokens: Any) -> str:
    return bytes(np.asarray(tokens, np.uint8)).decode(errors="replace")


@pytest.mark.parametrize("kind", SETS)
def test_documents_fill_the_prompt_up_to_the_question(kind: str) -> None:
    for sample in samples(kind, encode, 3, 600):
        starts, stops = zip(*sample.documents, strict=True)
        assert starts == (0, *stops[:-1])
        assert all(b - a == quality.DOCUMENT_TOKENS for a, b in sample.documents)
        assert stops[-1] < len(sample.prompt)
        assert len(sample.continuation) == quality.CONTINUATION_TOKENS


@pytest.mark.parametrize("kind", SETS)
def test_samples_are_always_the_same_and_differ(kind: str) -> None:
    one, again = samples(kind, encode, 3, 600), samples(kind, encode, 3, 600)
    assert [s.prompt.tolist() for s in one] == [s.prompt.tolist() for s in again]
    assert len({s.prompt.tobytes() for s in one}) == 3


def test_contiguous_samples_are_running_text() -> None:
    corpus = "".join(text for _, text in quality._corpus())
    for sample in samples("contiguous", encode, 3, 600):
        text = decode(np.concatenate([sample.prompt, sample.continuation]))
        assert text.strip("�") in corpus


def test_the_request_to_continue_is_followed_by_the_document() -> None:
    corpus = [text for _, text in quality._corpus()]
    for sample in samples("documents", encode, 3, 600):
        asked = decode(sample.prompt[sample.documents[-1][1] :])
        title, given = asked.split(", continued from where the text above ends\n\n")
        follows = given + decode(sample.continuation)
        assert any(follows in text for text in corpus)
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
def measured(judge: Judge) -> dict[str, quality.Measures]:
    everything = {"everything": Method(Selection(ratio=1.0))}
    return judge.measure(samples("retrieval", encode, 1, 512)[0], {**METHODS, **everything})


def test_full_recompute_is_the_measure(measured: dict[str, quality.Measures]) -> None:
    full, everything = measured["full"], measured["everything"]
    assert full["kl"] == 0
    assert full["top1"] == full["rows"] == 1
    assert abs(everything["kl"]) < 1e-4
    assert everything["top1"] == 1
    assert everything["nll"] == pytest.approx(full["nll"], abs=1e-3)
    assert measured["naive"]["kl"] > 10 * abs(everything["kl"])


def test_methods_of_a_ratio_compute_about_as_much(measured: dict[str, quality.Measures]) -> None:
    assert set(measured) == {"full", "everything", *METHODS}
    chosen = [rows["rows"] for name, rows in measured.items() if " .15" in name and "deviation" not in name]
    assert max(chosen) - min(chosen) < 0.15  # the question looks in 3 of 4 layers
    assert measured["naive"]["rows"] < min(chosen)
    assert measured["default .05"]["rows"] < measured["default .15"]["rows"] < measured["default .30"]["rows"]


def test_masks_of_other_systems_change_the_answer(measured: dict[str, quality.Measures]) -> None:
    kl = [measured[f"k deviation .15{mask}"]["kl"] for mask in ("", ", bottom-right mask", ", block mask")]
    assert len(set(kl)) == 3


def test_the_bottom_right_mask_lets_early_rows_see_too_much() -> None:
    sees = quality._bottom_right(100)
    assert sees(np.array([10, 50, 99], np.int32)).tolist() == [97, 98, 99]
    assert sees(np.arange(100, dtype=np.int32)).tolist() == list(range(100))


def test_the_block_mask_leaves_out_the_last_block(judge: Judge) -> None:
    plan = plan_blend(200, 0, [Span(0, 190)])
    mask = quality._BlockMask(judge.decoder, plan)
    selected = np.arange(0, 120, 3)  # 40 rows: one block of 32 and eight that are left over
    rows = np.concatenate([selected, plan.computed]).astype(np.int32)
    seen = mask.sees(rows)
    assert set(seen[:32].tolist()) == {93 // 32 * 32 - 1}
    assert mask.zeros.tolist() == list(range(32, 40))
    assert seen[40:].tolist() == plan.computed.tolist()
    everything = np.arange(200, dtype=np.int32)  # layer 0 is dense
    assert np.array_equal(mask.sees(everything), everything)
    assert not len(mask.zeros)


FEW = {name: METHODS[name] for name in ("naive", "default .15", "k deviation .15")}


def test_a_run_goes_on_where_it_was_stopped(tmp_path: Path, judge: Judge) -> None:
    path = tmp_path / "work.jsonl"
    work = quality.run(judge, encode, path, count=2, tokens=512, methods=FEW)
    first = [next(work), next(work)]
    assert len(path.read_text().splitlines()) == 2
    entries = list(quality.run(judge, encode, path, count=2, tokens=512, methods=FEW))
    assert len(path.read_text().splitlines()) == 6
    # seconds of another measurement would differ
    assert [entry["measured"] for entry in entries[:2]] == [entry["measured"] for entry in first]
    more = FEW | {"first n .15": METHODS["first n .15"]}
    (again,) = list(quality.run(judge, encode, path, count=1, tokens=512, methods=more, sets=["contiguous"]))
    assert list(json.loads(path.read_text().splitlines()[6])["by_settings"]) == [
        "full",
        json.dumps(asdict(METHODS["first n .15"])),
    ]
    assert {name: again["measured"][name]["kl"] for name in FEW} == {
        name: first[0]["measured"][name]["kl"] for name in FEW
    }
    other = Judge(random_model("gqa", 1))
    next(quality.run(other, encode, path, count=2, tokens=512, methods=FEW))
    assert len(path.read_text().splitlines()) == 8  # other weights: measured anew


def entry(kind: str, **kl: float) -> dict[str, Any]:
    rest = {"top1": 0.5, "nll": 1.0, "rows": 0.2, "seconds": 2.0}
    full = {"full": {"kl": 0.0, **rest, "seconds": 8.0}}
    return {"set": kind, "measured": full | {name: {"kl": value, **rest} for name, value in kl.items()}}


def test_summary_of_known_figures() -> None:
    entries = [entry("a", **{"default .15": x, "k deviation .15": 2 * x, "naive": 1.0}) for x in (1.0, 3.0)]
    found = quality.summarise([*entries, entry("b", naive=0.5)])
    assert list(found) == ["a", "b"]
    ours = found["a"]["default .15"]
    assert (ours["kl"], ours["samples"], ours["speedup"]) == (2.0, 2, 4.0)
    assert ours["kl_of_k_deviation"] == 0.5
    assert ours["kl_of_k_deviation_interval"] == pytest.approx([0.5, 0.5])
    assert ours["perplexity"] == pytest.approx(np.e)
    assert "exact" not in ours  # nothing was asked for
    assert found["a"]["naive"]["kl_interval"] == [1.0, 1.0]
    assert "kl_of_k_deviation" not in found["a"]["naive"]


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
    found = quality.measure_gate(judge, encode, tokens=512, count=1)
    assert found["passed"] is passes
    assert found["kl_interval"][0] <= found["kl"] <= found["kl_interval"][1]
    assert Path(found["path"]).is_relative_to(tmp_path)
    config = load_config(chunk_tokens=8, staging="8MiB", tiers={"memory": {"capacity": "4MiB"}})
    if passes:
        gate.check(model_fingerprint(judge.model), Selection())
        BlendedModel.open(judge.model, config).close()
    else:
        with pytest.raises(BlendError, match="too much"):
            BlendedModel.open(judge.model, config)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model with a tokenizer of bytes."""
    path = tmp_path_factory.mktemp("model")
    random_model("gqa").save_pretrained(path)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
    return path


def run(*arguments: object) -> Any:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})


def test_bench_blend(folder: Path, tmp_path: Path) -> None:
    """As docs/blend.md has it, with one sample of few tokens, and a small model in the place of SmolLM2's."""
    place = tmp_path / "kvkit" / "models" / smollm2.NAME
    place.parent.mkdir(parents=True)
    place.symlink_to(folder)
    sizes = {"--samples 40": "--samples 1", "--samples 10": "--samples 1"}
    sizes |= {"--tokens 1024": "--tokens 512", "--tokens 4096": "--tokens 512"}
    command = on_page("docs/blend.md", "kvkit bench blend")
    done = run_shell(command, tmp_path, sizes, XDG_CACHE_HOME=str(tmp_path))
    assert done.stdout.count("retrieval, 1 samples") == 2
    found = json.loads((tmp_path / "blend-1k.json").read_text())
    assert found["command"] == "kvkit bench blend"
    assert set(found["sets"]) == set(SETS)
    assert "kl_of_k_deviation" in found["sets"]["documents"]["default .15"]
    assert set(found["sets"]["documents"]) == {*METHODS, "full"}
    few = json.loads((tmp_path / "blend-4k.json").read_text())
    assert set(few["sets"]["documents"]) < set(found["sets"]["documents"])
    assert (tmp_path / "blend-1k.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("options", "word"),
    [
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
    result = run("doctor", "--blend", folder)
    assert result.exit_code == 0, result.output
    assert "this model may be blended" in result.output
    monkeypatch.setattr(gate, "MAX_KL", 0.0)
    result = run("doctor", "--blend", folder)
    assert result.exit_code == 1
    assert "must not be blended" in result.output


def test_a_sample_without_an_answer_has_no_exact_answers(judge: Judge) -> None:
    sample = Sample(np.arange(60, dtype=np.int32), ((0, 20), (20, 50)), np.arange(8, dtype=np.int32))
    assert "exact" not in judge.measure(sample, {})["full"]
