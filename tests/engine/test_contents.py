"""Digests of files change with any byte, and are cached while files do not change."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkit.adapters.engine import contents
from kvkit.adapters.engine.contents import REMEMBERED_BYTES, Stamp, digests
from kvkit.lab.testbed.waiting import wait_for

OTHER = "ab" * 32


def write(path: Path, size: int = REMEMBERED_BYTES + 1) -> Path:
    path.write_bytes(bytes(size))
    return path


def flip(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        (old,) = file.read(1)
        file.seek(at)
        file.write(bytes([old ^ 1]))


@pytest.fixture
def settled(tmp_path: Path) -> Path:
    """A file that is old enough to be remembered."""
    file = write(tmp_path / "weights")
    wait_for(lambda: Stamp.of(file).settled)
    return file


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "digests"


def entry_of(memory: Path) -> Path:
    (entry,) = memory.iterdir()
    return entry


def claim(entry: Path, digest: str) -> None:
    """Have an entry remember something else, rightly made."""
    stamp = Stamp(**json.loads(entry.read_text())["stamp"])
    entry.write_text(json.dumps(contents._entry(stamp, digest)))


@given(size=st.integers(0, 300), at=st.integers(0, 299), piece=st.integers(1, 100))
def test_any_byte_counts_and_the_length(
    tmp_path_factory: pytest.TempPathFactory, size: int, at: int, piece: int
) -> None:
    """Wherever pieces end."""
    file = write(tmp_path_factory.mktemp("f") / "f", size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contents, "PIECE_BYTES", piece)
        found = {digests([file], None)[0]}
        if at < size:
            flip(file, at)
            found |= set(digests([file], None))
            flip(file, at)
        write(file, size + 1)
        assert len(found | set(digests([file], None))) == 2 + (at < size)


def test_files_are_told_apart_in_their_order(tmp_path: Path) -> None:
    files = [write(tmp_path / str(size), size) for size in (3, 1, 2)]
    assert digests(files, None) == [digests([file], None)[0] for file in files]


def test_a_digest_is_remembered_until_the_file_changes(settled: Path, memory: Path) -> None:
    (digest,) = digests([settled], memory)
    claim(entry_of(memory), OTHER)
    assert digests([settled], memory) == [OTHER]
    link = settled.with_name("link")
    link.symlink_to(settled)
    assert digests([link], memory) == [OTHER]
    flip(settled, settled.stat().st_size // 2)
    os.utime(settled, ns=(0, 0))
    assert digests([settled], memory)[0] not in (digest, OTHER)


def test_a_change_that_bears_the_old_time_is_noticed(settled: Path, memory: Path) -> None:
    """Whoever restores the time of a file cannot restore when that was done."""
    before = settled.stat()
    (digest,) = digests([settled], memory)
    flip(settled, 4096)
    os.utime(settled, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert digests([settled], memory) != [digest]


def test_a_file_that_just_changed_is_not_remembered(tmp_path: Path, memory: Path) -> None:
    file = write(tmp_path / "new")
    digests([file], memory)
    assert not memory.exists()


def test_a_file_with_a_time_to_come_is_remembered(tmp_path: Path, memory: Path) -> None:
    """Anybody may set that; a change shows in the other time."""
    file = write(tmp_path / "f")
    os.utime(file, (2**33, 2**33))
    wait_for(lambda: Stamp.of(file).settled)
    digests([file], memory)
    claim(entry_of(memory), OTHER)
    assert digests([file], memory) == [OTHER]


@pytest.mark.parametrize(
    ("mtime_ns", "ctime_ns", "told_apart"),
    [(0, 0, False), (7 * 10**9, 7 * 10**9, False), (7 * 10**9, 7 * 10**9 + 1, True), (5, 5, True)],
)
def test_the_one_time_of_all_files_of_an_image_tells_nothing(
    mtime_ns: int, ctime_ns: int, told_apart: bool
) -> None:
    """As squashfs has it: the next image at its place has the same devices, inodes and times."""
    assert Stamp(1, 2, 3, mtime_ns, ctime_ns).settled is told_apart


@pytest.mark.parametrize("damage", ["empty", "half", "flipped", "other", "[]", "null", "link", "writable"])
def test_what_is_damaged_or_anybodys_is_not_believed(settled: Path, memory: Path, damage: str) -> None:
    expected = digests([settled], memory)
    entry = entry_of(memory)
    claim(entry, OTHER)
    whole = entry.read_bytes()
    if damage == "link":
        entry.rename(memory / "else")
        entry.symlink_to(memory / "else")
    elif damage == "writable":
        entry.chmod(0o666)
    else:
        flipped = whole.replace(b"ab", b"ac", 1)
        made = {"empty": b"", "half": whole[: len(whole) // 2], "flipped": flipped, "other": b"\xff" * 5000}
        entry.write_bytes(made.get(damage, damage.encode()))
    assert digests([settled], memory) == expected


def test_it_is_this_users_alone(settled: Path, memory: Path) -> None:
    digests([settled], memory)
    assert entry_of(memory).stat().st_mode & 0o777 == 0o600
    assert memory.stat().st_mode & 0o777 == 0o700


def test_where_nothing_can_be_remembered_the_files_are_read(settled: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert digests([settled], tmp_path / "file" / "below") == digests([settled], None)


def test_engines_that_start_at_once_spoil_no_entry(settled: Path, memory: Path) -> None:
    (expected,) = digests([settled], None)
    with ThreadPoolExecutor(8) as engines:
        assert set(engines.map(lambda _: digests([settled], memory)[0], range(16))) == {expected}
    claim(entry_of(memory), OTHER)
    assert digests([settled], memory) == [OTHER]


def test_a_file_that_is_written_to_meanwhile_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "f")
    piece = contents._digest_piece

    def write_and_read(*arguments: Any) -> bytes:
        write(file, 5)
        return piece(*arguments)

    monkeypatch.setattr(contents, "_digest_piece", write_and_read)
    with pytest.raises(OSError, match="written to while it was read"):
        digests([file], None)


@pytest.mark.parametrize("kind", ["folder", "pipe", "missing"])
def test_only_files_are_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "f"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    with pytest.raises(OSError, match=str(path)):
        digests([path], None)


def test_the_log_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(contents, "PROGRESS_S", -1.0)
    monkeypatch.setattr(contents, "PIECE_BYTES", 1 << 20)
    with caplog.at_level("INFO"):
        digests([write(tmp_path / name, 10 << 20) for name in "ab"], None)
    told = [float(record.getMessage().split()[2]) for record in caplog.records]
    assert len(told) == 20
    assert told == sorted(told)
    assert caplog.messages[-1] == "fingerprint: read 0.0 of 0.0 GB"
