"""What a load does when: reads of two tiers, checks, unpacking and write-back on one axis of time.

python -m benchmarks.serving.timeline writes docs/pictures/timeline.png and results/timeline-<machine>.json.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.folders import RESULTS, ROOT
from benchmarks.timing import forget
from benchmarks.two_tiers import TwoTiers, by_turns
from kvkit.environment import slug
from kvkit.lab.files import about
from kvkit.lab.testbed.servers import S3Server
from kvkit.tiers.objects import ObjectTier
from kvkit.transfer import load, sequence

COLORS = {
    "read disk": "#2e4057",
    "read s3": "#66a182",
    "verify": "#edae49",
    "unpack": "#d1495b",
    "write back to disk": "#8d96a3",
}


@dataclass(frozen=True, slots=True)
class Event:
    """What one thread did from `begin_s` to `end_s`, in seconds since the load began."""

    kind: str
    thread: str
    begin_s: float
    end_s: float


class Recorder:
    """Collects events. Thread-safe."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._events: list[Event] = []

    def start(self) -> None:
        """Forget what was recorded; times count from now."""
        self._events.clear()
        self._began = time.perf_counter()

    def events(self) -> list[Event]:
        """In the order in which they began."""
        return sorted(self._events, key=lambda event: event.begin_s)

    @contextmanager
    def span(self, kind: str) -> Iterator[None]:
        """Record what is done inside as one event of this thread."""
        began = time.perf_counter() - self._began
        yield
        ended = time.perf_counter() - self._began
        self._events.append(Event(kind, threading.current_thread().name, began, ended))

    def wrap(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, with each call recorded."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with self.span(kind):
                return function(*args, **kwargs)

        return call


class RecordedTier(ObjectTier):
    """An object tier that records when its threads read and write, not how long that waited for a thread."""

    def __init__(self, recorder: Recorder, *where: Any, **settings: Any) -> None:
        super().__init__(*where, **settings)
        self._recorder = recorder

    def read(self, name: str, buffer: memoryview) -> int:
        with self._recorder.span(f"read {self.name}"):
            return super().read(name, buffer)

    def write(self, name: str, record: memoryview) -> None:
        with self._recorder.span(f"write back to {self.name}"):
            super().write(name, record)


def record_load(
    folder: Path, server: S3Server, *, chunks: int, length: int, slots: int, large: bool
) -> list[Event]:
    """One load from a cold disk and S3, `length` chunks by turns; what came from S3 is written back to disk.

    One load before it, not recorded, opens connections.
    """
    recorder = Recorder()
    case = TwoTiers(
        folder,
        server,
        "timeline",
        chunks=chunks,
        slots=slots,
        write_back_to=("disk",),
        large=large,
        open_tier=partial(RecordedTier, recorder),
    )
    case.load(case.store(1, chunks, by_turns(length, length)))
    tokens = case.store(0, chunks, by_turns(length, length))
    case.cache.flush()
    forget(case.files())
    with ExitStack() as patched:
        for module, function, kind in (
            (load.record, "verify", "verify"),
            (sequence, "unpack", "unpack"),
        ):
            recorded = recorder.wrap(kind, getattr(module, function))
            patched.enter_context(mock.patch.object(module, function, recorded))
        recorder.start()
        case.load(tokens)
        case.cache.flush()
    case.close()
    return recorder.events()


def busy_s(events: Sequence[Event], *kinds: str) -> float:
    """Seconds in which all of `kinds` were under way at the same time."""
    edges = sorted(
        (moment, step, event.kind)
        for event in events
        for moment, step in ((event.begin_s, 1), (event.end_s, -1))
    )
    in_flight = dict.fromkeys(kinds, 0)
    total = last = 0.0
    for moment, step, kind in edges:
        if all(in_flight.values()):
            total += moment - last
        if kind in in_flight:
            in_flight[kind] += step
        last = moment
    return total


def draw(events: Sequence[Event], path: Path) -> None:
    """Draw a row per thread, as a PNG."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    threads = sorted({event.thread for event in events}, key=_row)
    figure, axes = plt.subplots(figsize=(10, 1 + 0.17 * len(threads)), constrained_layout=True)
    for kind, color in COLORS.items():
        for row, thread in enumerate(threads):
            spans = [
                (event.begin_s * 1e3, (event.end_s - event.begin_s) * 1e3)
                for event in events
                if (event.kind, event.thread) == (kind, thread)
            ]
            axes.broken_barh(spans, (row - 0.4, 0.8), color=color, edgecolor="white", linewidth=0.3)
        axes.plot([], [], color=color, linewidth=6, label=kind)
    names = ["load" if thread == threading.current_thread().name else thread[6:] for thread in threads]
    axes.set_yticks(range(len(threads)), names, fontsize=7)
    axes.invert_yaxis()
    axes.set(xlabel="milliseconds since the load began", xlim=(0, None))
    axes.legend(fontsize=8, ncols=len(COLORS), loc="lower center", bbox_to_anchor=(0.5, 1))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _row(thread: str) -> tuple[bool, str, int]:
    """The load's own thread first, then the tiers' by number."""
    tier, _, number = thread.rpartition("-")
    return thread != threading.current_thread().name, tier, int(number) if number.isdigit() else 0


def main() -> None:
    """Record 64 chunks of 8 MiB through 32 slots."""
    settings = {"chunks": 64, "length": 8, "slots": 32}
    (ROOT / ".benchmarks").mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=ROOT / ".benchmarks") as folder,
        tempfile.TemporaryDirectory(dir="/dev/shm") as objects,
        S3Server(Path(objects)) as server,
    ):
        events = record_load(Path(folder), server, large=True, **settings)
    busy = {kind: busy_s(events, kind) for kind in COLORS}
    document = about("python -m benchmarks.serving.timeline", seed=0) | {
        "settings": settings,
        "busy_s": busy | {"both tiers' reads": busy_s(events, "read disk", "read s3")},
        "events": [asdict(event) for event in events],
    }
    path = RESULTS / f"timeline-{slug()}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    draw(events, ROOT / "docs/pictures/timeline.png")
    for what, seconds in document["busy_s"].items():
        print(f"{what}: {seconds:.3f} s")


if __name__ == "__main__":
    main()
