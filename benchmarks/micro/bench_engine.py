"""How the engine moves records: tiers side by side, write-back beside a load, memory that stays flat."""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest

from benchmarks.link import NoLink, link
from benchmarks.serving import resident, timeline
from benchmarks.timing import forget, interleaved, processor_s, ratio
from benchmarks.two_tiers import Tokens, TwoTiers, by_turns
from kvkit.lab.testbed.servers import S3Server, data_folder
from kvkit.tiers.objects import ObjectTier

ROUNDS = 15
LINK_MBITS = 2000


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with data_folder("bench-engine") as folder, S3Server(folder) as server:
        yield server


@pytest.fixture(scope="module")
def far_server() -> Iterator[S3Server]:
    """A server behind a link of `LINK_MBITS`."""
    with ExitStack() as open_:
        folder = open_.enter_context(data_folder("bench-engine-far"))
        try:
            there = open_.enter_context(link(LINK_MBITS))
        except NoLink as why:
            pytest.skip(str(why))
        yield open_.enter_context(S3Server(folder, there.address, there.within))


@pytest.fixture
def folder(pytestconfig: pytest.Config) -> Iterator[Path]:
    """A folder on the disk of the repository: where temporary files go may be memory."""
    root = pytestconfig.rootpath / ".benchmarks"
    root.mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="engine-", dir=root))
    yield folder
    shutil.rmtree(folder)


class WaitingTier(ObjectTier):
    """An object tier whose reads last as long as those of 8 MiB would, and cost next to no processor time.

    That is 420 MB/s for each of 4 threads of the disk, 105 MB/s for each of 16 connections to S3.
    """

    READ_S: ClassVar = {"disk": 0.02, "s3": 0.08}

    def read(self, name: str, buffer: memoryview) -> int:
        time.sleep(self.READ_S[self.name])
        return super().read(name, buffer)


def compare_with_turns(
    benchmark: Any, case: TwoTiers, move: Callable[[Tokens], None], chunks: int, disk: int, s3: int
) -> None:
    """`move` of `chunks`, `disk` of them on disk, cold, and `s3` in the bucket by turns.

    Against as many that all lie on disk, and then as many that all lie in the bucket.

    `bound` is what the ratio would be if the slower part took all of the time. `cores` are those that this
    process and the server kept busy meanwhile: where they are the machine's, they set the time, not waiting.
    """
    rounds = ROUNDS if benchmark.enabled else 1
    home = by_turns(disk, s3)
    mixed = case.store(0, chunks, home)
    counts = Counter(home(i) for i in range(chunks))
    parts = {
        "disk": case.store(1, counts["disk"], lambda _: "disk"),
        "s3": case.store(2, counts["s3"], lambda _: "s3"),
    }
    files = case.files()
    spent: list[float] = []

    def before() -> None:
        if "memory" in case.cache.tiers:
            case.cache.clear("memory")
        forget(files)

    def both() -> None:
        began = processor_s()
        move(mixed)
        spent.append(processor_s() - began)

    benchmark.pedantic(move, (mixed,), setup=before, rounds=rounds)
    calls = {tier: partial(move, tokens) for tier, tokens in parts.items()}
    times = interleaved({"both": both, **calls}, rounds, before=before)
    pairs = list(zip(times["disk"], times["s3"], strict=True))
    times |= {"in turn": [a + b for a, b in pairs], "slower": [max(pair) for pair in pairs]}
    found, bound = ratio(times, "both", "in turn"), ratio(times, "slower", "in turn")
    benchmark.extra_info.update(
        ratio_min=found["min"],
        ratio_median=found["median"],
        against="the part on disk, then the part on S3 (0.59 is 1.7 times as fast)",
        bound_min=bound["min"],
        bound_median=bound["median"],
        cores=sum(spent[-rounds:]) / sum(times["both"]),
        disk_s=statistics.median(times["disk"]),
        s3_s=statistics.median(times["s3"]),
    )
    case.close()


def test_prefetch_from_disk_and_s3(benchmark: Any, server: S3Server, folder: Path) -> None:
    """64 chunks of 8 MiB, ranges of 8."""
    chunks, length = (64, 8) if benchmark.enabled else (8, 2)
    case = prefetching(folder, server, "prefetch", chunks, large=benchmark.enabled)
    compare_with_turns(benchmark, case, case.prefetch, chunks, length, length)


def test_prefetch_from_disk_and_s3_behind_a_link(benchmark: Any, far_server: S3Server, folder: Path) -> None:
    """64 chunks of 8 MiB: as many in the bucket as come over the link while the disk reads the rest."""
    chunks, disk, s3 = (64, 27, 5) if benchmark.enabled else (8, 3, 1)
    case = prefetching(folder, far_server, "prefetch-link", chunks, large=benchmark.enabled)
    compare_with_turns(benchmark, case, case.prefetch, chunks, disk, s3)


def prefetching(folder: Path, server: S3Server, prefix: str, chunks: int, large: bool) -> TwoTiers:
    """Tiers whose records a prefetch brings into a memory tier that holds them all."""
    return TwoTiers(
        folder,
        server,
        prefix,
        chunks=chunks,
        memory=chunks,
        slots=16,
        write_back_to=("memory",),
        large=large,
    )


@pytest.mark.parametrize("way", ["prefetch", "load-16-slots", "load-64-slots"])
def test_overlap_of_waiting_tiers(benchmark: Any, server: S3Server, folder: Path, way: str) -> None:
    """As many chunks, but only the waiting counts: how far the engine keeps both tiers at work."""
    prefetch = way == "prefetch"
    chunks, length = (64, 8) if benchmark.enabled else (8, 2)
    case = TwoTiers(
        folder,
        server,
        f"waiting-{way}",
        chunks=chunks,
        memory=chunks if prefetch else 0,
        slots=64 if way == "load-64-slots" else 16,
        write_back_to=("memory",) if prefetch else (),
        large=False,
        open_tier=WaitingTier,
    )
    compare_with_turns(benchmark, case, case.prefetch if prefetch else case.load, chunks, length, length)


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
