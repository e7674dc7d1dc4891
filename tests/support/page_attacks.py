"""Attacks on another engine's pages in a folder: damage to any byte, kills, a full disk, two versions.

A subclass of `Attacks` names a module of tests/support. Its `attacked(folder, **disk)` is an engine over a
tier with the settings `disk`, and its `keys(count, seed)` name pages. `compute(keys)` stores pages,
`forget()` empties the engine's own memory, and `found(keys)` loads pages and counts leading ones, whose bytes
it checks.

    python page_attacks.py kills MODULE FOLDER KILLS SEED
    python page_attacks.py work MODULE FOLDER TURNS SEED
"""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from product_copy import copy_product
from repository import ROOT, SUPPORT
from run_sizes import NIGHTLY

from kvkit.format.record import HEADER

PAGES, FIT, AT_ONCE = 96, 64, 4
"""Pages of a seed, those that a capacity is for, and those that are stored together."""


def files(folder: Path) -> list[Path]:
    """Those of the records in a folder."""
    return sorted(file for file in folder.rglob("c.*") if file.is_file())


def damages(data: bytes, other: bytes, every_byte: bool, rng: random.Random) -> Iterator[tuple[str, bytes]]:
    """What may have become of a record: one bit changed, cut, longer, or another page's record.

    Args:
        every_byte: change every byte of the header and of what follows the page; else some.
    """
    (header,) = np.frombuffer(data, HEADER, 1)
    page, end = int(header["header_bytes"]), int(header["layers_end"])
    around = [*range(page), *range(end, len(data))]
    fields = [offset for _, offset in (HEADER.fields or {}).values()]
    bits = around if every_byte else [*fields, *rng.sample(around, 30)]
    for at in [*bits, page, end - 1, *rng.sample(range(page, end), 30)]:
        changed = bytearray(data)
        changed[at] ^= 1 << rng.randrange(8)
        yield f"a bit of byte {at}", bytes(changed)
    for size in (0, 1, 191, page, end, len(data) - 1):
        yield f"{size} bytes", data[:size]
    yield "a block more", data + bytes(4096)
    yield "zeros", bytes(len(data))
    yield "another page's", other
    yield "another page's behind its own header", data[:page] + other[page:]


def damage(module: str, folder: Path, every_byte: bool) -> int:
    """Do to a page's record what `damages` says: it is missing, and can be stored anew. Returns how many."""
    there: Any = importlib.import_module(module)
    engine, (key, other) = there.attacked(folder), there.keys(2, seed=1)
    engine.compute([other])
    (file,) = files(folder)
    others = file.read_bytes()
    engine.compute([key])
    (file,) = set(files(folder)) - {file}
    count = 0
    for what, changed in damages(file.read_bytes(), others, every_byte, random.Random(2)):
        file.write_bytes(changed)
        engine.forget()
        assert engine.found([key]) == 0, what
        engine.compute([key])
        engine.forget()
        assert engine.found([key, other]) == 2, what
        count += 1
    engine.shutdown()
    return count


def full_disk(module: str, disk: Path) -> None:
    """Stores fail, what was stored before is found, and room that comes free is used."""
    there: Any = importlib.import_module(module)
    engine, keys = there.attacked(disk / "kv"), there.keys(6, seed=1)
    engine.compute(keys[:2])
    filler = disk / "filler"
    filler.write_bytes(bytes(os.statvfs(disk).f_bavail * os.statvfs(disk).f_bsize - 4096))
    engine.compute(keys[2:])
    engine.forget()
    assert engine.found(keys) == 2
    assert len(files(disk / "kv")) == 2
    filler.unlink()
    engine.compute(keys[2:])
    engine.forget()
    assert engine.found(keys) == 6
    engine.shutdown()


def kills(module: str, folder: Path, count: int) -> None:
    """Kill engines while they store: what is found afterwards is right, within the capacity."""
    said = json.loads(_run("kills", module, folder, count, 1).splitlines()[-1])
    assert len(said["found"]) == count
    assert min(said["found"]) > 0
    assert max(said["bytes"]) <= said["capacity"] + 65536


def two_versions(module: str, copy: Path, folder: Path) -> None:
    """Store and load beside another version of kvkit, in one folder; none finds what the other has stored.

    Args:
        copy: folder of a copy of kvkit, whose version of the record format is raised.
    """
    layout = copy / "kvkit" / "format" / "layout.py"
    text = layout.read_text()
    assert "FORMAT_VERSION = 1\n" in text
    layout.write_text(text.replace("FORMAT_VERSION = 1\n", "FORMAT_VERSION = 2\n"))
    arguments = ["work", module, folder, 4, 1]
    with _started(*arguments, product=copy) as newer, _started(*arguments) as older:
        for each in (newer, older):
            said, _ = each.communicate()
            assert each.returncode == 0, said
            assert json.loads(said.splitlines()[-1]) == {"before": 0, "found": 4 * PAGES // 4}, said
    names = {file.parent for file in files(folder)}
    assert len(names) == 2


class Attacks:
    """All attacks on one engine's pages, whose names are those of the module `engine`."""

    engine: str

    @pytest.mark.timeout(900)  # every byte, in the night
    def test_damage(self, tmp_path: Path) -> None:
        assert damage(self.engine, tmp_path, NIGHTLY) > 90

    @pytest.mark.timeout(900)
    def test_kills(self, tmp_path: Path) -> None:
        kills(self.engine, tmp_path, 20 if NIGHTLY else 1)

    def test_a_full_disk(self, small_disk: Path) -> None:
        full_disk(self.engine, small_disk)

    @pytest.mark.nightly
    def test_two_versions_of_kvkit(self, tmp_path: Path) -> None:
        two_versions(self.engine, copy_product(tmp_path / "copy"), tmp_path / "kv")


def _run(*arguments: object) -> str:
    with _started(*arguments) as process:
        printed, _ = process.communicate()
    assert process.returncode == 0, printed[-3000:]
    return printed


def _started(*arguments: object, product: Path = ROOT) -> subprocess.Popen[str]:
    path = [str(product), str(SUPPORT), os.environ.get("PYTHONPATH", "")]
    return subprocess.Popen(
        [sys.executable, __file__, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
        cwd=product,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _in_a_fork(work: Callable[[], None]) -> int:
    """Start `work` in a fork; it ends with status 1 if it raises. Return its process id."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _written(folder: Path) -> dict[str, int]:
    """When each file was written."""
    found = {}
    for file in files(folder):
        try:
            found[file.name] = file.stat().st_mtime_ns
        except FileNotFoundError:  # evicted meanwhile
            continue
    return found


def _kill(module: Any, folder: Path, count: int, seed: int) -> dict[str, Any]:
    """Each turn forks a process that stores until it is killed, and one that loads all pages of all turns."""
    rng, found, held = random.Random(seed), [], []

    def measure() -> None:
        engine = module.attacked(folder / "one")
        engine.compute(module.keys(1, seed=0))
        engine.shutdown()

    os.waitpid(_in_a_fork(measure), 0)
    (one,) = files(folder / "one")
    capacity = FIT * one.stat().st_size
    one.unlink()
    folder /= "all"
    for turn in range(count):
        keys = module.keys(PAGES, seed=turn % 3)  # some of them are there from earlier turns

        def store(keys: list[Any] = keys) -> None:
            engine = module.attacked(folder, capacity=capacity)
            while True:
                for first in range(0, len(keys), AT_ONCE):
                    engine.compute(keys[first : first + AT_ONCE])
                    engine.forget()

        before, goal = _written(folder).items(), rng.randint(1, 30)
        pid = _in_a_fork(store)
        while len(_written(folder).items() - before) < goal:
            assert os.waitpid(pid, os.WNOHANG) == (0, 0), "the process ended by itself"
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        reader, writer = os.pipe()

        def check(writer: int = writer) -> None:
            engine = module.attacked(folder, capacity=capacity)
            here = sum(engine.found([key]) for space in range(3) for key in module.keys(PAGES, seed=space))
            engine.shutdown()
            os.write(writer, str(here).encode())

        _, status = os.waitpid(_in_a_fork(check), 0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            found.append(int(pipe.read() or -1))
        assert status == 0, f"turn {turn}"
        held.append(sum(file.stat().st_size for file in files(folder)))
    return {"found": found, "bytes": held, "capacity": capacity}


def _work(module: Any, folder: Path, turns: int, seed: int) -> dict[str, int]:
    """Store pages and load them again, turn by turn."""
    engine, keys = module.attacked(folder), module.keys(PAGES, seed=seed)
    before, found = engine.found(keys), 0
    for turn in range(turns):
        some = keys[turn * PAGES // 4 : (turn + 1) * PAGES // 4]
        engine.compute(some)
        engine.forget()
        found += engine.found(some)
    engine.shutdown()
    return {"before": before, "found": found}


if __name__ == "__main__":
    _attack = {"kills": _kill, "work": _work}[sys.argv[1]]
    _module = importlib.import_module(sys.argv[2])
    print(json.dumps(_attack(_module, Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))))
