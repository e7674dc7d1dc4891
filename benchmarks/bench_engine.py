"""How the engine moves records: tiers side by side, write-back beside a load, memory that stays flat."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks import resident, timeline
from benchmarks.two_tiers import TwoTiers, by_turns
from tests.servers import S3Server, data_folder
from timing import forget, interleaved, processor_s, ratio

ROUNDS = 15


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with data_folder(tmp_path_factory, "bench-engine") as folder, S3Server(folder) as server:
        yield server


@pytest.fixture
def folder(pytestconfig: pytest.Config) -> Iterator[Path]:
    """A folder on the disk of the repository: where temporary files go may be memory."""
    root = pytestconfig.rootpath / ".benchmarks"
    root.mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="engine-", dir=root))
    yield folder
    shutil.rmtree(folder)


def test_prefetch_from_disk_and_s3(benchmark: Any, server: S3Server, folder: Path) -> None:
    """Ranges of 8 chunks by turns on disk, cold, and on S3; against equal parts of one, then the other.

    `bound` is what the ratio would be if the slower half took all of the time. `cores` are those that this
    process and the server kept busy meanwhile: near the machine's, they are what sets the time, and not the
    tiers' waiting.
    """
    large = benchmark.enabled
    half, length = (32, 8) if large else (4, 2)
    case = TwoTiers(
        folder,
        server,
        "prefetch",
        chunks=2 * half,
        memory=2 * half,
        slots=16,
        write_back_to=("memory",),
        large=large,
    )
    mixed = case.store(0, 2 * half, by_turns(length))
    halves = {"disk": case.store(1, half, lambda _: "disk"), "s3": case.store(2, half, lambda _: "s3")}
    files = case.files()

    def before() -> None:
        case.cache.clear("memory")
        forget(files)

    spent: list[float] = []

    def both() -> None:
        began = processor_s()
        case.prefetch(mixed)
        spent.append(processor_s() - began)

    rounds = ROUNDS if large else 1
    benchmark.pedantic(case.prefetch, (mixed,), setup=before, rounds=rounds)
    calls = {tier: partial(case.prefetch, tokens) for tier, tokens in halves.items()}
    times = interleaved({"both": both, **calls}, rounds, before=before)
    disk, s3 = times["disk"], times["s3"]
    times["in turn"] = [a + b for a, b in zip(disk, s3, strict=True)]
    times["slower"] = [max(a, b) for a, b in zip(disk, s3, strict=True)]
    found, bound = ratio(times, "both", "in turn"), ratio(times, "slower", "in turn")
    cores = sum(spent[-rounds:]) / sum(times["both"])
    benchmark.extra_info.update(
        ratio_min=found["min"],
        ratio_median=found["median"],
        against="the half on disk, then the half on S3 (0.59 is 1.7 times as fast)",
        bound_min=bound["min"],
        bound_median=bound["median"],
        cores=cores,
    )
    case.close()


@pytest.mark.parametrize("target", ["memory", "disk"])
def test_write_back(benchmark: Any, server: S3Server, folder: Path, target: str) -> None:
    """A load from S3 that writes back to another tier, emptied each time, against one that does not."""
    large = benchmark.enabled
    chunks = 32 if large else 4
    cases = {
        name: TwoTiers(
            folder,
            server,
            f"write-back-{target}",
            chunks=chunks,
            memory=chunks,
            slots=2 * chunks,
            write_back_to=targets,
            large=large,
        )
        for name, targets in (("on", (target,)), ("off", ()))
    }
    tokens = cases["off"].store(0, chunks, lambda _: "s3")

    def before() -> None:
        cases["on"].cache.flush()
        cases["on"].cache.clear(target)

    rounds = ROUNDS if large else 1
    benchmark.pedantic(cases["on"].load, (tokens,), setup=before, rounds=rounds)
    calls = {name: partial(case.load, tokens) for name, case in cases.items()}
    times = interleaved(calls, rounds, before=before)
    found = ratio(times, "on", "off")
    cases["on"].cache.flush()
    written = cases["on"].cache.counts().written_back_records[target]
    assert written == chunks * (2 * rounds + 3)  # each time all of them: pedantic's, then 3 to warm up
    benchmark.extra_info.update(
        ratio_min=found["min"], ratio_median=found["median"], against="the same load, nothing written back"
    )
    for case in cases.values():
        case.close()


def test_resident_memory(benchmark: Any, folder: Path) -> None:
    """Stored and loaded with `staging_only`, through slots that hold a fraction of it."""
    sequences = 32 if benchmark.enabled else 4
    run = benchmark.pedantic(partial(resident.measure, folder, sequences))
    assert run.growth_bytes < run.stored_bytes / 10
    benchmark.extra_info.update(
        stored_mb=run.stored_bytes / 1e6,
        staging_mb=run.staging_bytes / 1e6,
        resident_mb=run.samples[0].resident_bytes / 1e6,
        growth_mb=run.growth_bytes / 1e6,
    )


def test_timeline(server: S3Server, folder: Path, tmp_path: Path) -> None:
    """Every read, check and write-back of a load is on the picture, once."""
    events = timeline.record_load(folder, server, chunks=8, length=2, slots=8, large=False)
    kinds = [event.kind for event in events]
    assert {kind: kinds.count(kind) for kind in ("read disk", "read s3", "verify", "write back to disk")} == {
        "read disk": 4,
        "read s3": 4,
        "verify": 8,
        "write back to disk": 4,
    }
    assert 1 <= kinds.count("unpack") <= 8
    assert all(0 <= event.begin_s <= event.end_s for event in events)
    timeline.draw(events, tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_overlap() -> None:
    def event(kind: str, begin_s: float, end_s: float) -> timeline.Event:
        return timeline.Event(kind, "thread", begin_s, end_s)

    events = [event("a", 0, 2), event("a", 1, 4), event("b", 3, 6), event("a", 5, 7), event("b", 8, 9)]
    assert timeline.busy_s(events, "a") == 6
    assert timeline.busy_s(events, "b") == 4
    assert timeline.busy_s(events, "a", "b") == 2
