"""Tables of commands are whole in a terminal of 80 columns and through a pipe."""

from __future__ import annotations

import math
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.markup import escape
from rich.table import Column, Table
from store_listing import fill, form_of
from terminals import COLUMNS, assert_whole, in_terminal, piped, printed

from kvkit.environment import host_name, slug_of
from kvkit.kernels.tuning.assembly import Compiled
from kvkit.kernels.tuning.compiling import CompileReport
from kvkit.kernels.tuning.configs import KernelConfig, ProblemBucket
from kvkit.kernels.tuning.tables import Build, Tuned, TunedKey, write_table
from kvkit.lab.compiling.report import shown as compiled
from kvkit.lab.demo import conversation as demo
from kvkit.lab.demo import pd, rag
from kvkit.lab.prove.report import shown as proofs
from kvkit.lab.prove.verdict import ScenarioVerdict
from kvkit.lab.quality import comparison as quality
from kvkit.lab.serve.client import Completion
from kvkit.lab.serve.report import Measured, tables
from kvkit.lab.serve.workloads import CONTROL
from kvkit.lab.simulate.config import SimulationConfig
from kvkit.lab.simulate.report import compare
from kvkit.lab.simulate.report import table as simulations
from kvkit.lab.simulate.traces import mixed
from kvkit.observe.terminal import print_json

WORDS = st.text("abc[]1", min_size=1, max_size=12)
TEXTS = st.lists(WORDS, min_size=1, max_size=4).map(" ".join)


@st.composite
def filled(draw: st.DrawFn) -> tuple[Table, list[str]]:
    """A table, and the texts of its headings and cells."""
    numeric = draw(st.lists(st.booleans(), min_size=1, max_size=6))
    heads = [draw(TEXTS) for _ in numeric]
    columns = zip(heads, numeric, strict=True)
    box: dict[str, Any] = draw(st.sampled_from([{}, {"box": None, "padding": (0, 2, 0, 0)}]))
    table = Table(*(Column(escape(head), justify="right" if n else "left") for head, n in columns), **box)
    texts = list(heads)
    for _ in range(draw(st.integers(1, 5))):
        row = [draw(TEXTS) for _ in numeric]
        table.add_row(*map(escape, row))
        texts += row
    return table, texts


@given(filled(), st.integers(13, 120))
def test_no_cell_is_cut_at_any_width(made: tuple[Table, list[str]], width: int) -> None:
    """Every word is there, in lines within the width; as long as they need to be where there is none."""
    table, texts = made
    lines = printed(table, width).splitlines()
    assert max(map(len, lines), default=0) <= width
    shown = "\n".join(lines)
    assert "…" not in shown
    assert all(word in shown for text in texts for word in text.split())
    endless = printed(table, width, endless=True)
    assert all(text in endless for text in texts)
    assert len(endless.splitlines()) <= 4 + table.row_count


def test_forms_by_width() -> None:
    numbers = (Column(head, justify="right") for head in ("rate", "read", "more"))
    table = Table("policy", *numbers, title="a [b]t[/b]")
    table.add_row("lru", "12.3 %", "123,456 MB", "123,456 MB")
    table.add_row("s3fifo", "45.6 %", "7 MB", "")
    for width, rows in (
        (45, ["lru|12.3 %|123,456 MB|123,456 MB", "s3fifo|45.6 %|7 MB|"]),
        (32, ["rate|12.3 %|45.6 %", "read|123,456 MB|7 MB", "more|123,456 MB|"]),
    ):
        title, *lines = printed(table, width).splitlines()
        cells = [line[1:-1].split("│") for line in lines if line.startswith("│")]
        assert title.strip() == "a t"
        assert ["|".join(cell.strip() for cell in row) for row in cells] == rows
    bare = ["policy  rate  read  more", "lru  12.3 %  123,456 MB  123,456 MB", "s3fifo  45.6 %  7 MB"]
    _, *lines = printed(table, 40).splitlines()
    assert [re.sub(" {2,}", "  ", line.strip()) for line in lines] == bare
    lines = printed(table, 31).splitlines()
    first = ["policy: lru", "rate: 12.3 %", "read: 123,456 MB", "more: 123,456 MB", ""]
    assert lines == ["a t", *first, "policy: s3fifo", "rate: 45.6 %", "read: 7 MB", "more: ", ""]


def measured(system: str, workload: str) -> Measured:
    answers = tuple(Completion(True, "x", 1.25, prompt_tokens=99_999, exact=True) for _ in range(3))
    return Measured(system, workload, answers, 12.5, 123_456)


def figures(rows: float) -> dict[str, Any]:
    names = ("kl", "top1", "exact", "f1", "kl_of_k_deviation")
    intervals = {f"{name}_interval": [0.1111, 0.2222] for name in names}
    return (
        dict.fromkeys(names, 0.1234)
        | intervals
        | {"rows": rows, "perplexity": 12.34, "speedup": 12.3, "samples": 40}
    )


@cache
def every_table() -> dict[str, tuple[Table, list[str]]]:
    """A table of each kind that commands print, with words that must be there."""
    config = SimulationConfig()
    runs = compare(mixed(20), config, ["lru", "s3fifo"], ("memory", [2**33, 2**34]))
    quality_of = {"default .15": figures(0.15), "mine.package:method .30": figures(0.3)}
    numbers = dict.fromkeys(Compiled.__dataclass_fields__, 123) | {"digest": "", "hazard": ""}
    report = CompileReport(
        "problem of Llama-3.1-8B", "a_kernel", KernelConfig((("BLOCK", 256),)), "sm_90", None
    )
    reports = [report, CompileReport("p", "k", report.config, "sm_90", Compiled(**numbers))]
    turn = rag.BlendTurn(2097, 512, 1224, 216, 145, 2.0, 19.0, 0.0123, "a", "b", True, False)
    control = [measured("plain", CONTROL), measured("kvkit", CONTROL)]
    serve, overhead = tables(control)
    return {
        "simulate": (simulations(runs, config, "memory", False), ["8.0GiB", "hit", "memory"]),
        "simulate wide": (simulations(runs, config, "memory", True), ["16.0GiB", "s3fifo", "wait p99"]),
        "blend": (
            quality.table("qa", quality_of),
            ["mine.package:method", "0.1234 (0.1111–0.2222)", "0.123", "12.3×"],
        ),
        "blend wide": (quality.table("qa", quality_of, True), ["0.12", "(0.11–0.22)", "(0.111–0.222)"]),
        "demo": (
            demo.table([demo.Turn(4000, {"memory": 64, "disk": 3264}, 72, 0.5, 10.5, True)]),
            ["memory 64, disk 3264", "10.50 s", "21.0×", "✓"],
        ),
        "pd": (
            pd.table([pd.PdTurn(900, {}, {"shared": 768, "memory": 1}, 0.5, 1.25, True)]),
            ["768", "shared,", "900 tokens", "1.25 s"],
        ),
        "rag": (rag.table([turn]), ["2097", "1224", "19.00 s", "0.012", "no/yes"]),
        "serve": (serve, ["123,456 of 299,997", "1.250 s", "plain", "kvkit", "3 of 3"]),
        "overhead": (overhead, ["1.000 – 1.000"]),
        "prove": (
            proofs(
                [ScenarioVerdict("a-long-scenario", "not proven", "because of a reason", 12345, 0.25, 678)]
            ),
            ["a-long-scenario", "not", "proven", "12345", "0.2", "678", "reason"],
        ),
        "compile": (compiled(reports), ["BLOCK=256", "123", "a_kernel"]),
        "compile wide": (compiled(reports, wide=True), ["BLOCK=256", "123/123", "sm_90"]),
    }


@pytest.mark.parametrize("name", every_table())
def test_every_table_is_whole_at_80_columns(name: str) -> None:
    assert_whole(*every_table()[name])


def test_json_has_no_number_that_json_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": math.nan, "b": [math.inf, -math.inf, 1.5], "c": "é\ud800"})
    assert capsys.readouterr().out == '{"a": null, "b": [null, null, 1.5], "c": "\\u00e9\\ud800"}\n'


def test_commands_in_a_terminal_and_through_a_pipe(tmp_path: Path) -> None:
    """Names and numbers are whole; through a pipe there are no colours, and each row is a line."""
    digest = form_of(fill(str(tmp_path / "store"), 3)).array.split("/")[0]
    tuned = Tuned(KernelConfig((("THREADS", 16), ("STREAM", 1))), 12345.6, 23456.7)
    key = TunedKey(ProblemBucket("pack", "bfloat16 hnd", (1048576, 4096)), Build("abcdef", "numba 0.65", ""))
    write_table(tmp_path / f"{slug_of(host_name())}.json", host_name(), {key: tuned})
    config = tmp_path / "sim.toml"
    config.write_text('tiers.memory.capacity = "1GiB"\ntiers.pool.scope = "shared"\n')
    simulate = ("simulate", "chat", "--requests", "30", "--compare", "lru,s3fifo", "--config", config)
    store = tmp_path / "store"
    tune = ("tune", "--show", "--device", "host")
    for arguments, words, row in (
        ((*simulate, "--sweep", "memory=1GiB"), ("lru", "s3fifo", "1.0GiB", "optimum"), ""),
        (
            (*simulate, "--wide"),
            ("lru", "s3fifo", "GB written memory", "wait p99"),
            r"│ s3fifo .* │ +[\d.]+ s │",
        ),
        (("inspect", store), (digest, "test", "float32", "24"), rf"│ {digest} │ 0 .* │ +24 │ .*0 │"),
        (tune, ("THREADS=16", "STREAM=1", "12345.6", "23456.7", "1048576 x", "4096"), ""),
    ):
        variables = {"KVKIT_TUNED": str(tmp_path)}
        shown = in_terminal(*arguments, **variables)
        assert max(map(len, shown)) <= COLUMNS
        through = piped(*arguments, **variables) if row else []
        assert sum(bool(re.fullmatch(row, line)) for line in through) == bool(row)
        for lines in (shown, through)[: 1 + bool(row)]:
            text = "\n".join(lines)
            assert "…" not in text
            assert [word for word in words if word not in text] == []
        assert not any("\x1b" in line for line in through)
