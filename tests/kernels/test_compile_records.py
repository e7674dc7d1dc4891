"""Records of compiled kernels predict times, and name what became worse."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from kvkit.kernels.tuning.assembly import Compiled
from kvkit.kernels.tuning.cases import Work
from kvkit.lab.compiling.gate import known_of, regressions, write
from kvkit.lab.compiling.prediction import RATES, Rates, predict

COPY = Compiled(40, 0, 0, 8, 8, 8, 8, 0, 200, 0, 0, 8)
ATTEND = replace(COPY, mma=16, instructions=320)
RATE = Rates("a GPU", sms=10, clock_hz=1e9, issues=4, bytes_per_s=1e12, flops_per_s=1e14)  # 4e10 instructions


def test_instructions_by_lines_moved() -> None:
    found = predict(Work(1 << 20), COPY, 4, 64, RATE)
    assert found.per_line == 200 * 4 * 64 * 128 / (1 << 20)  # 6.25
    assert found.per_mma is None
    assert found.roof_us == pytest.approx((1 << 20) / 1e6)
    assert found.predicted_us == pytest.approx(200 * 4 * 64 / 4e10 * 1e6)  # more than the memory's 1.05


def test_instructions_by_products() -> None:
    work = Work(1000, 2 * 128 * 32 * 256 * 50, iterations=50)  # 512 products of m16n8k16 in each
    found = predict(work, ATTEND, 8, 3, RATE)
    assert found.per_mma == 320 * 8 / 512
    assert found.per_line is None
    assert found.roof_us == pytest.approx(work.flops / 1e14 * 1e6)
    assert found.predicted_us == pytest.approx(max(found.roof_us, 320 * 8 * 50 / 4e10 * 1e6))
    slow = replace(RATE, flops_per_s=1e12)
    assert predict(work, ATTEND, 8, 3, slow).predicted_us == pytest.approx(work.flops / 1e12 * 1e6)


@pytest.mark.parametrize(
    ("work", "compiled"),
    [(Work(1, 4096), ATTEND), (Work(1, 4096, 1), COPY), (Work(1), ATTEND)],
    ids=["iterations unknown", "products without matrix units", "matrix units without products"],
)
def test_what_is_not_known_is_not_predicted(work: Work, compiled: Compiled) -> None:
    found = predict(work, compiled, 4, 64, RATE)
    assert (found.per_line, found.per_mma) == (None, None)
    assert found.predicted_us == found.roof_us > 0


def test_rates_agree_with_what_a_multiprocessor_multiplies_a_clock() -> None:
    for target, products in {"sm_80": 1024, "sm_90": 2048, "sm_100": 4096, "gfx942": 1024}.items():
        rates = RATES[target]
        assert rates.flops_per_s == pytest.approx(2 * products * rates.sms * rates.clock_hz, rel=0.01)


ENTRY = {
    "problem": "pack",
    "kernel": "copy_rows",
    "target": "sm_90",
    "config": "TILE=1024",
    "registers": 80,
    "loads_16": 8,
    "stores_16": 8,
    "instructions": 500,
    "in_flight": 2,
    "blocks_per_sm": 6,
    "per_line": 10.0,
    "predicted_us": 20.0,
}


def document(*entries: dict[str, Any], triton: str = "3.9.0") -> dict[str, Any]:
    return {"triton": triton, "kernels": list(entries)}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"instructions": 900}, None),  # per line it is the same
        ({"per_line": 10.2, "registers": 90}, None),
        ({"per_line": 10.3}, "per_line is 10.3, was 10"),
        ({"predicted_us": 21.0}, "predicted_us is 21, was 20"),
        ({"blocks_per_sm": 5, "registers": 92}, "blocks_per_sm is 5, was 6 (92 registers, were 80)"),
        ({"in_flight": 1}, "in_flight is 1, was 2"),
        ({"loads_16": 7}, "loads_16 is 7, was 8"),
        ({"loads_16": 4, "stores_16": 4, "config": "TILE=512"}, None),
        ({"per_line": 12.0, "config": "TILE=512"}, "per_line is 12, was 10"),
        ({"per_line": 8.0, "predicted_us": 10.0, "blocks_per_sm": 8, "in_flight": 3, "loads_16": 9}, None),
    ],
)
def test_what_is_worse_is_named(changes: dict[str, Any], words: str | None) -> None:
    found = regressions(document(ENTRY | changes), document(ENTRY))
    assert found == ([f"pack, copy_rows, sm_90: {words}"] if words else [])
    assert regressions(document(ENTRY | changes, triton="3.6.0"), document(ENTRY)) == []


def test_instructions_count_where_nothing_relates_them_to_work() -> None:
    before = {name: value for name, value in ENTRY.items() if name not in ("per_line", "predicted_us")}
    assert regressions(document(before | {"instructions": 510}), document(before)) == []
    (worse,) = regressions(document(before | {"instructions": 511}), document(before))
    assert "instructions is 511, was 500" in worse
    assert regressions(document(before | {"instructions": 900, "config": "TILE=512"}), document(before)) == []


@pytest.mark.parametrize("triton", ["3.9.0", "3.6.0"])
def test_what_is_not_recorded_or_gone_is_named(triton: str) -> None:
    other = ENTRY | {"target": "sm_80"}
    found = document(other, triton=triton)
    new, gone = "pack, copy_rows, sm_80: not recorded", "pack, copy_rows, sm_90: recorded, but gone"
    assert regressions(found, document(ENTRY)) == [new, gone]
    assert regressions(found, document(ENTRY), complete=False) == [new]


def kernels_of(path: Path) -> dict[str, Any]:
    """What a file has besides what it is a record of."""
    return {name: value for name, value in json.loads(path.read_text()).items() if name in document()}


def test_some_of_a_file_is_recorded_anew(tmp_path: Path) -> None:
    path = tmp_path / "compile.json"
    other = ENTRY | {"target": "sm_80"}
    write(path, document(ENTRY, other))
    first = path.read_bytes()
    write(path, document(ENTRY, other))
    assert path.read_bytes() == first
    assert kernels_of(path) == document(ENTRY, other)
    assert json.loads(first).keys() > {"command", "seed", "commit", "machine", "versions"}
    write(path, document(ENTRY | {"per_line": 9.0}), complete=False)
    assert kernels_of(path) == document(ENTRY | {"per_line": 9.0}, other)
    write(path, document(other))
    assert kernels_of(path) == document(other)
    with pytest.raises(ValueError, match=r"of Triton 3\.9\.0, this is 3\.6\.0: record all"):
        write(path, document(ENTRY, triton="3.6.0"), complete=False)
    with pytest.raises(FileNotFoundError):
        write(tmp_path / "none.json", document(ENTRY), complete=False)


def test_what_is_known_is_what_compiled_and_has_no_hazard() -> None:
    made = {name: value for name, value in asdict(COPY).items() if value != ""}
    entry = {"problem": "pack", "kernel": "copy_rows", "target": "sm_90", "key": "a"} | made
    wrong = {"key": "b", "error": "refused"}
    recorded = document(entry, wrong, entry | {"key": "c", "hazard": "a register"}, ENTRY)
    assert known_of(recorded) == {"a": COPY}
