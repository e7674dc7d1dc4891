"""Folders keep whole records through restarts, kills, full disks and other processes."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from page_cache import pages_in_memory

from kvkit.format.record import ALIGN
from kvkit.staging import Staging
from kvkit.tiers import folder as files
from kvkit.tiers.base import TierError
from kvkit.tiers.folder import ASIDE, TEMPORARY, Access, Folder
from kvkit.tiers.objects import ObjectTier
from kvkit.tiers.settings import TierConfig
from kvkit.tiers.testing.contract import SLOT_BYTES, SLOTS, get, put, record_bytes, record_names

NAMES = record_names(4)
ARRAY = os.path.dirname(NAMES[0])
LEFT = f"{TEMPORARY}0123456789abcdef"


@pytest.fixture
def staging() -> Iterator[Staging]:
    staging = Staging(SLOT_BYTES, SLOTS)
    yield staging
    staging.check_integrity()
    assert staging.free == SLOTS
    staging.close()


def files_below(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def python(program: str, *arguments: object) -> subprocess.Popen[str]:
    """A Python process running `program`, whose stdin and stdout are pipes."""
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def await_line(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"


def test_a_restart_finds_what_was_written(tmp_path: Path, staging: Staging) -> None:
    tier = ObjectTier(str(tmp_path))
    for size, name in enumerate(NAMES, 100):
        put(tier, staging, [name], size)
    tier.describe(ARRAY, b"{}")
    tier.close()
    assert files_below(tmp_path) == sorted([*NAMES, f"{ARRAY}/zarr.json"])
    reopened = ObjectTier(f"file://{tmp_path}")
    assert list(reopened.scan()) == list(zip(NAMES, range(100, 104), strict=True))
    for name in NAMES:
        (tmp_path / name).unlink()
    assert reopened.match_prefix(NAMES) == 4, "what the scan found is known without another look at the disk"
    assert all(isinstance(found, FileNotFoundError) for found in get(reopened, staging, NAMES))
    assert reopened.match_prefix(NAMES) == 0
    reopened.close()


def test_a_listing_forgets_what_others_deleted(tmp_path: Path, staging: Staging) -> None:
    """So does a clear, which deletes what is listed: a lookup after it would find what is gone."""
    ours, theirs = (ObjectTier(TierConfig(url=str(tmp_path), capacity=4 * SLOT_BYTES)) for _ in range(2))
    gone: set[str] = set()
    put(ours, staging, NAMES)
    theirs.match_prefix(NAMES)
    theirs.delete(NAMES[:2])
    assert ours.match_prefix(NAMES) == 4
    ours.subscribe(lambda names, held: None if held else gone.update(names))
    assert {name for name, _ in ours.scan()} == {*NAMES[2:]}
    assert gone == {*NAMES[:2]}
    assert ours.match_prefix(NAMES) == 0
    assert ours.match_prefix(NAMES[2:]) == 2
    put(ours, staging, [name.replace("c.", "c.9") for name in NAMES[:2]])
    assert ours.evicted == 0, "what is gone takes no room"
    ours.close()
    theirs.close()


def test_a_restart_lets_the_oldest_go_first(tmp_path: Path, staging: Staging) -> None:
    tier = ObjectTier(str(tmp_path))
    put(tier, staging, NAMES[:3])
    tier.close()
    for age, name in zip([1, 3, 2], NAMES, strict=False):
        os.utime(tmp_path / name, ns=(0, 10**18 - age * 10**9))
    tier = ObjectTier(TierConfig(url=str(tmp_path), capacity=3 * SLOT_BYTES))
    put(tier, staging, NAMES[3:])
    assert [tier.size(name) is not None for name in NAMES] == [True, False, True, True]
    tier.close()


def test_foreign_files_are_left_alone(tmp_path: Path, staging: Staging) -> None:
    foreign = [
        "README",
        f"{ARRAY}/notes.txt",
        f"{ARRAY}/c.1.2",
        f"{ARRAY}/xc.1.2.0.0.0.0",
        "not hex/0/c.1.2.0.0.0.0",
        "abc/group/c.1.2.0.0.0.0",
        "abc/c.1.2.0.0.0.0",
        f"not hex/0/{LEFT}",
        f"abc/{LEFT}",
        f"{ARRAY}/{TEMPORARY}notes",
        f"{ARRAY}/deeper/{LEFT}",
    ]
    for name in foreign:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("keep me")
    (tmp_path / ARRAY / "c.7.7.0.0.0.0").mkdir()
    tier = ObjectTier(TierConfig(url=str(tmp_path), capacity=SLOT_BYTES))
    assert list(tier.scan()) == []
    assert put(tier, staging, NAMES[:1]) == put(tier, staging, NAMES[1:2]) == [None]
    assert files_below(tmp_path) == sorted([*foreign, NAMES[1]])
    (in_the_way,) = put(tier, staging, [f"{ARRAY}/c.7.7.0.0.0.0"])
    assert in_the_way is None, "an empty folder in a record's place is in the way"
    assert tier.match_prefix([f"{ARRAY}/c.7.7.0.0.0.0"]) == 1
    assert files_below(tmp_path) == sorted([*foreign, f"{ARRAY}/c.7.7.0.0.0.0"])
    tier.close()


def test_a_folder_that_lies_in_a_records_place_and_is_not_empty_is_kept(
    tmp_path: Path, staging: Staging
) -> None:
    for name in NAMES[:2]:
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "c.7.7.0.0.0.0").write_text("keep me")
    tier = ObjectTier(str(tmp_path))
    assert put(tier, staging, NAMES[:1]) == [None]
    tier.delete(NAMES[1:2])
    aside = [path.relative_to(tmp_path / ARRAY).parts for path in tmp_path.rglob("c.7.*")]
    assert [parts[0].startswith(ASIDE) for parts in aside] == [True, True]
    assert [name for name, _ in tier.scan()] == NAMES[:1]
    assert tier.match_prefix(NAMES) == 1
    tier.close()


def test_a_scan_passes_over_what_is_no_file(tmp_path: Path, staging: Staging) -> None:
    tier = ObjectTier(str(tmp_path))
    put(tier, staging, NAMES[:1])
    tier.close()
    (tmp_path / NAMES[1]).symlink_to(NAMES[1].rpartition("/")[2])
    os.mkfifo(tmp_path / NAMES[2])
    (tmp_path / "ab").symlink_to("ab")
    (tmp_path / "cd").symlink_to(NAMES[0].partition("/")[0])
    (tmp_path / ARRAY / f"{TEMPORARY}0123456789abcdef").symlink_to("nowhere")
    tier = ObjectTier(str(tmp_path))
    assert [name for name, _ in tier.scan()] == [NAMES[0], NAMES[0].replace("0123456789abcdef", "cd")]
    tier.close()


def test_the_file_of_a_killed_writer_is_removed(tmp_path: Path) -> None:
    program = """
import os, sys
from kvkit.tiers.folder import Folder
file, path = Folder(os.path.dirname(sys.argv[1]))._create_temporary(sys.argv[1])
os.write(file, b"half a record")
print("ready", flush=True)
sys.stdin.read()
"""
    writer = python(program, tmp_path / ARRAY)
    await_line(writer)
    (left,) = files_below(tmp_path)
    assert os.path.basename(left).startswith(TEMPORARY)
    folder = Folder(str(tmp_path))
    folder.clean()
    assert files_below(tmp_path) == [left], "its writer lives"
    assert list(folder.scan()) == []
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    ObjectTier(str(tmp_path)).close()
    assert files_below(tmp_path) == []


def test_the_file_of_a_writer_behind_an_nfs_server_stays(tmp_path: Path) -> None:
    """The server holds its clients' locks as record locks, whatever the clients called."""
    program = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX)
print("ready", flush=True)
sys.stdin.read()
"""
    (tmp_path / ARRAY).mkdir(parents=True)
    path = tmp_path / ARRAY / LEFT
    server = python(program, path)
    await_line(server)
    folder = Folder(str(tmp_path))
    folder.clean()
    assert path.exists()
    server.communicate()
    folder.clean()
    assert not path.exists()


@pytest.mark.parametrize("step", ["_lock", "_write_all"])
def test_a_write_starts_over_when_its_file_is_taken(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taken by a cleaner before it is locked, or after a lock that a server lost when it restarted."""
    real, turns = getattr(files, step), [True, True, False]

    def taken(*arguments: object) -> None:
        for path in (tmp_path / ARRAY).glob(f"{TEMPORARY}*") if turns.pop(0) else ():
            path.unlink()
        real(*arguments)

    monkeypatch.setattr(files, step, taken)
    folder = Folder(str(tmp_path))
    folder.write(NAMES[0], memoryview(b"whole"))
    assert (tmp_path / NAMES[0]).read_bytes() == b"whole"
    assert turns == []
    turns += [True] * 100
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError, match=TEMPORARY):
        folder.write(NAMES[1], memoryview(b"never"))
    assert files_below(tmp_path) == NAMES[:1]
    assert len(os.listdir("/proc/self/fd")) == before
    assert len(turns) > 90, "it gives up soon"


def test_a_writer_outlives_cleaners(tmp_path: Path) -> None:
    """Two processes clean all the time while this one writes: no write fails, nothing is left over."""
    program = """
import select, sys
from kvkit.tiers.folder import Folder
folder = Folder(sys.argv[1])
print("ready", flush=True)
while not select.select([sys.stdin], [], [], 0)[0]:
    folder.clean()
"""
    cleaners = [python(program, tmp_path) for _ in range(2)]
    for cleaner in cleaners:
        await_line(cleaner)
    folder = Folder(str(tmp_path))
    names = record_names(300)
    for name in names:
        folder.write(name, memoryview(b"x" * 100))
    for cleaner in cleaners:
        cleaner.communicate("stop\n")
        assert cleaner.returncode == 0
    assert sorted(files_below(tmp_path)) == sorted(names)


def test_two_processes_write_the_same_names(tmp_path: Path, staging: Staging) -> None:
    program = """
import sys
from kvkit.format.record import ALIGN
from kvkit.staging import Staging
from kvkit.tiers.testing.contract import SLOT_BYTES, SLOTS, put, record_names
from kvkit.tiers.objects import ObjectTier
staging = Staging(SLOT_BYTES, SLOTS)
tier = ObjectTier(sys.argv[1])
names = record_names(200)
print("ready", flush=True)
sys.stdin.readline()
for first in range(0, 200, 8):
    assert put(tier, staging, names[first : first + 8]) == [None] * 8
tier.close()
"""
    writers = [python(program, tmp_path) for _ in range(2)]
    for writer in writers:
        await_line(writer)
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    for writer in writers:
        writer.communicate()
        assert writer.returncode == 0
    names = record_names(200)
    assert files_below(tmp_path) == sorted(names)
    tier = ObjectTier(str(tmp_path))
    for name in names[::17]:
        (found,) = get(tier, staging, [name])
        assert isinstance(found, np.ndarray)
        assert np.array_equal(found, record_bytes(name))
    tier.close()


def test_a_killed_process_leaves_whole_records(tmp_path: Path, staging: Staging) -> None:
    program = """
import sys
from kvkit.tiers.testing.contract import record_bytes, record_names
from kvkit.tiers.folder import Folder
folder = Folder(sys.argv[1])
for i, name in enumerate(record_names(10**6)):
    folder.write(name, memoryview(record_bytes(name)))
    if i == 20:
        print("ready", flush=True)
"""
    writer = python(program, tmp_path)
    await_line(writer)
    writer.kill()
    writer.communicate()
    tier = ObjectTier(str(tmp_path))
    found = dict(tier.scan())
    assert len(found) > 20
    assert set(found.values()) == {SLOT_BYTES}
    assert set(files_below(tmp_path)) == set(found), "a temporary file is left"
    (last,) = get(tier, staging, [list(found)[-1]])
    assert isinstance(last, np.ndarray)
    assert np.array_equal(last, record_bytes(list(found)[-1]))
    tier.close()


def test_a_full_disk(small_disk: Path, staging: Staging) -> None:
    tier = ObjectTier(str(small_disk))
    names = record_names(100)
    errors = [put(tier, staging, [name])[0] for name in names]
    written = [name for name, error in zip(names, errors, strict=True) if error is None]
    assert 20 < len(written) < 100
    assert {error.errno for error in errors if error is not None} == {errno.ENOSPC}
    assert sorted(files_below(small_disk)) == sorted(written), "a failed write left something"
    assert tier.match_prefix(names) == len(written)
    tier.delete(written[:1])
    assert put(tier, staging, names[-1:]) == [None], "room that comes free is used again"
    (found,) = get(tier, staging, names[-1:])
    assert isinstance(found, np.ndarray)
    assert np.array_equal(found, record_bytes(names[-1]))
    tier.close()


def test_a_write_that_breaks_off(tmp_path: Path) -> None:
    """The kernel refuses the second half of a file, as a full disk would; this needs no mount."""
    program = """
import resource, sys
from kvkit.tiers.folder import Folder
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
name = "ab/0/c.1.2.0.0.0.0"
try:
    Folder(sys.argv[1]).write(name, memoryview(bytes(8192)))
except OSError as error:
    print(error.errno)
"""
    writer = python(program, tmp_path)
    output, _ = writer.communicate()
    assert output == f"{errno.EFBIG}\n"
    assert files_below(tmp_path) == []


@pytest.mark.parametrize("kind", ["direct", "tmpfs"])
@pytest.mark.parametrize("shift", [0, 1, 512])
def test_any_length_and_address(kind: str, shift: int, tmp_path: Path, small_disk: Path) -> None:
    folder = Folder(str(tmp_path / "store" if kind == "direct" else small_disk))
    memory = memoryview(mmap.mmap(-1, 5 * ALIGN))
    memory[:] = os.urandom(len(memory))
    sizes = [0, 1, ALIGN - 1, ALIGN, ALIGN + 1, 3 * ALIGN, 4 * ALIGN - 512]
    for name, size in zip(record_names(len(sizes)), sizes, strict=True):
        folder.write(name, memory[shift : shift + size])
        found = bytearray(size + 1)
        assert folder.read(name, memoryview(found)) == size
        assert found[:size] == memory[shift : shift + size]


def test_records_leave_the_page_cache_to_others(tmp_path: Path) -> None:
    if files.file_system(str(tmp_path)) in ("tmpfs", "ramfs"):
        pytest.skip(f"the file system of {tmp_path} keeps files in memory")
    (tmp_path / "probe").touch()
    try:
        os.close(os.open(tmp_path / "probe", os.O_RDONLY | os.O_DIRECT))
    except OSError as error:
        pytest.skip(f"the file system of {tmp_path} has no O_DIRECT: {error}")
    Folder(str(tmp_path)).write(NAMES[0], memoryview(mmap.mmap(-1, 16 * ALIGN)))
    assert pages_in_memory(tmp_path / NAMES[0]) == 0
    (tmp_path / NAMES[0]).read_bytes()
    assert pages_in_memory(tmp_path / NAMES[0]) == 16 * ALIGN // mmap.PAGESIZE


def test_a_read_only_store_serves(small_disk: Path, staging: Staging) -> None:
    tier = ObjectTier(str(small_disk))
    put(tier, staging, NAMES[:2])
    tier.close()
    (small_disk / ARRAY / LEFT).write_text("left over")
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    tier = ObjectTier(str(small_disk))
    assert tier.match_prefix(NAMES) == 2
    for name, found in zip(NAMES[:2], get(tier, staging, NAMES[:2]), strict=True):
        assert isinstance(found, np.ndarray)
        assert np.array_equal(found, record_bytes(name))
    assert put(tier, staging, NAMES[:1]) == [None], "it is there already"
    (error,) = put(tier, staging, NAMES[2:3])
    assert error is not None
    assert error.errno == errno.EROFS
    with pytest.raises(OSError, match="Read-only"):
        tier.describe(ARRAY, b"{}")
    with pytest.raises(OSError, match="Read-only"):
        tier.delete(NAMES[:1])
    assert tier.match_prefix(NAMES) == 2
    tier.close()
    full = ObjectTier(TierConfig(url=str(small_disk), capacity=2 * SLOT_BYTES))
    for name in NAMES[2:]:
        (error,) = put(full, staging, [name])
        assert error is not None
        assert error.errno == errno.EROFS, "what makes no room does not lose any either"
    assert full.match_prefix(NAMES) == 2
    full.close()


def test_the_kind_of_file_system(tmp_path: Path, small_disk: Path) -> None:
    (tmp_path / "link").symlink_to(small_disk)
    blank = tmp_path / "a blank"
    blank.mkdir()
    subprocess.run(["mount", "-t", "ramfs", "ramfs", blank], check=True)
    try:
        for root, kind in ((small_disk, "tmpfs"), (tmp_path / "link", "tmpfs"), (blank, "ramfs")):
            assert files.file_system(str(root)) == kind
            assert files.file_system(str(root / "not" / "yet")) == kind
        assert files.file_system(f"{blank}er") == files.file_system(str(tmp_path)) != "ramfs"
        assert files.file_system("/proc/self") == "proc"
    finally:
        subprocess.run(["umount", "-l", blank], check=True)


def test_a_local_folder_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What tests/nfs proves of network folders costs the others nothing."""
    looks: list[str] = []
    monkeypatch.setattr(files, "_renew_nfs_cache", looks.append)
    folder = Folder(str(tmp_path))
    assert folder.size(NAMES[0]) is None
    with pytest.raises(FileNotFoundError):
        folder.read(NAMES[0], memoryview(bytearray(8)))
    folder.delete(NAMES[0])
    assert looks == []


def test_errors_name_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(str(tmp_path))
    folder.write(NAMES[0], memoryview(b"x" * 100))

    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "preadv", fail)
    monkeypatch.setattr(os, "write", fail)
    number = errno.EIO
    with pytest.raises(OSError, match=f"Input/output error: '{NAMES[0]}'"):
        folder.read(NAMES[0], memoryview(bytearray(100)))
    with pytest.raises(OSError, match=f"Input/output error: '{NAMES[1]}'"):
        folder.write(NAMES[1], memoryview(b"x"))
    number = errno.ESTALE  # another NFS client removed it
    with pytest.raises(FileNotFoundError, match=NAMES[0]):
        folder.read_ranges(NAMES[0], [(0, 10)], [memoryview(bytearray(10))])
    assert files_below(tmp_path) == NAMES[:1]


def test_a_root_that_is_not_there_yet(tmp_path: Path, staging: Staging) -> None:
    root = tmp_path / "a" / "b"
    tier = ObjectTier(str(root))
    assert tier.match_prefix(NAMES) == 0
    assert not root.exists(), "asking makes nothing"
    assert put(tier, staging, NAMES) == [None] * 4
    assert tier.match_prefix(NAMES) == 4
    tier.close()


def test_short_files(tmp_path: Path, staging: Staging) -> None:
    """What is read is reported; `kvkit.format.record.verify` finds that it is too little."""
    tier = ObjectTier(str(tmp_path))
    put(tier, staging, NAMES[:2])
    os.truncate(tmp_path / NAMES[0], 0)
    os.truncate(tmp_path / NAMES[1], 5001)
    empty, short = get(tier, staging, NAMES[:2])
    assert isinstance(empty, np.ndarray)
    assert isinstance(short, np.ndarray)
    assert len(empty) == 0
    assert np.array_equal(short, record_bytes(NAMES[1])[:5001])
    tier.close()


def test_a_long_file_is_an_error(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    folder.write(NAMES[0], memoryview(bytes(4097)))
    buffer = bytearray(b"\xa5" * 4096)
    with pytest.raises(TierError, match=r"4097 bytes do not fit.*4096"):
        folder.read(NAMES[0], memoryview(buffer))
    assert buffer == b"\xa5" * 4096


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
@pytest.mark.parametrize(
    ("access", "file_mode", "folder_mode"),
    [("user", 0o600, 0o700), ("group", 0o660, 0o2770), ("all", 0o666, 0o777)],
)
def test_a_store_is_for_whom_it_says_whatever_the_umask(
    access: Access, file_mode: int, folder_mode: int, umask: int, tmp_path: Path, staging: Staging
) -> None:
    root = tmp_path / "store"
    old = os.umask(umask)
    try:
        tier = ObjectTier(TierConfig(url=str(root), access=access))
        assert put(tier, staging, NAMES[:1]) == [None]
        tier.describe(ARRAY, b"{}")
        tier.close()
        file, _ = Folder(str(root), access=access)._create_temporary(
            str(root / ARRAY)
        )  # as it is being written
        os.close(file)
    finally:
        os.umask(old)
    paths = [root, *root.rglob("*")]
    assert {mode_of(path) for path in paths if path.is_dir()} == {folder_mode}
    assert [mode_of(path) for path in paths if path.is_file()] == [file_mode] * 3


def test_folders_above_a_store_obey_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        Folder(str(tmp_path / "a" / "b" / "store")).write(NAMES[0], memoryview(b"x"))
    finally:
        os.umask(old)
    assert [mode_of(tmp_path / path) for path in ("a", "a/b", "a/b/store")] == [0o755, 0o755, 0o700]


def test_an_open_store_is_told_of_and_left_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = tmp_path / "store"
    Folder(str(root), access="all").write(NAMES[0], memoryview(b"x"))
    ObjectTier(TierConfig(url=str(root), access="all")).close()
    assert not caplog.records
    ObjectTier(TierConfig(url=str(root), access="group")).close()
    assert f"chmod -R o= {root}" in caplog.text
    caplog.clear()
    ObjectTier(str(root)).close()
    assert f"chmod -R go= {root}" in caplog.text
    assert mode_of(root) == 0o777
    subprocess.run(["chmod", "-R", "go=", root], check=True)
    caplog.clear()
    ObjectTier(str(root)).close()
    assert not caplog.records
    root.chmod(0o755)  # as an administrator may make it: what is in it is for its owner all the same
    ObjectTier(str(root)).close()
    assert not caplog.records


def test_a_folder_made_by_others_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    Folder(str(tmp_path)).write(NAMES[0], memoryview(b"x"))
    assert [mode_of(tmp_path), mode_of(tmp_path / ARRAY)] == [0o755, 0o700]


def test_cleaning_stays_in_the_store(tmp_path: Path) -> None:
    """Neither a folder nor a file behind a symbolic link is touched, and no pipe is waited for."""
    root, outside = tmp_path / "store", tmp_path / "outside"
    (outside / "0").mkdir(parents=True)
    kept = [outside / LEFT, outside / "0" / LEFT]
    for path in kept:
        path.write_text("another's")
    (root / "abc").mkdir(parents=True)
    (root / "def").symlink_to(outside)
    (root / "abc" / "0").symlink_to(outside)
    (root / ARRAY).mkdir(parents=True)
    (root / ARRAY / LEFT).symlink_to(kept[0])
    os.mkfifo(root / ARRAY / f"{TEMPORARY}{'f' * 16}")
    dead = root / ARRAY / f"{TEMPORARY}{'d' * 16}"
    dead.write_text("half a record")
    (tmp_path / "link").symlink_to(root)
    ObjectTier(str(tmp_path / "link")).close()
    assert not dead.exists(), "a store may be a link itself"
    assert [path.read_text() for path in kept] == ["another's"] * 2
    assert (root / ARRAY / LEFT).is_symlink()


@pytest.mark.parametrize("fsync", [False, True])
def test_no_descriptor_is_left_open(fsync: bool, tmp_path: Path, small_disk: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for root in (tmp_path / "roomy", small_disk):
        folder = Folder(str(root), fsync=fsync)
        for name in record_names(3):
            try:
                folder.write(name, memoryview(bytes(700_000)))
                folder.read(name, memoryview(bytearray(700_000)))
                folder.read(name, memoryview(bytearray(7)))
            except OSError:
                pass
        folder.clean()
    assert len(os.listdir("/proc/self/fd")) == before
