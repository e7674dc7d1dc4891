"""A folder whose files NIXL's storage plug-in moves keeps the contract, and shares records with any other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvkit.staging import Staging
from kvkit.tiers.base import Tier
from kvkit.tiers.nixl import NixlFolder
from kvkit.tiers.objects import ObjectTier
from kvkit.tiers.settings import TierConfig
from kvkit.tiers.testing.contract import TierContract, get, put, record_bytes, record_names

pytest.importorskip("nixl_cu12", reason="needs NIXL: pip install 'kvkit-llm[nixl]'")


def config(folder: Path, **settings: Any) -> TierConfig:
    return TierConfig(url=f"nixl+file://{folder}", **settings)


class TestNixlFolder(TierContract):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> Tier:
        return ObjectTier(config(tmp_path / "store"))


class TestNixlFolderByAio(TierContract):
    """With the plug-in's other kind of I/O, named in the settings."""

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Tier:
        options = {"plugin": "POSIX", "use_posix_aio": True}
        return ObjectTier(config(tmp_path / "store", options=options, fsync=True))


def test_records_are_those_of_a_plain_folder(tmp_path: Path, staging: Staging) -> None:
    names = record_names(3)
    plain, nixl = ObjectTier(f"file://{tmp_path}"), ObjectTier(config(tmp_path))
    assert put(plain, staging, names[:2]) == [None, None]
    assert put(nixl, staging, names[2:]) == [None]
    for tier in (plain, nixl):
        assert tier.match_prefix(names) == 3
        for name, found in zip(names, get(tier, staging, names), strict=True):
            np.testing.assert_array_equal(found, record_bytes(name))
        tier.close()
    staging.close()


def test_ranges_and_ends_of_a_file(tmp_path: Path) -> None:
    folder, (name,) = NixlFolder(str(tmp_path), {}, False, "user"), record_names(1)
    folder.write(name, memoryview(bytes(range(200)) * 50))
    found = [memoryview(bytearray(b"\xa5" * 64)) for _ in range(3)]
    folder.read_ranges(name, [(0, 7), (4093, 64), (9999, 1)], found)
    assert [bytes(buffer[:7]) for buffer in found] == [
        bytes(range(7)),
        bytes((4093 + i) % 200 for i in range(7)),
        bytes([199]) + b"\xa5" * 6,
    ]
    with pytest.raises(OSError, match="has only 1 of 2 bytes at offset 9999"):
        folder.read_ranges(name, [(9999, 2)], found)
    with pytest.raises(OSError, match="10000 bytes do not fit the slot's 9999"):
        folder.read(name, memoryview(bytearray(9999)))


def test_what_the_plug_in_cannot_write_is_an_error_that_names_it(tmp_path: Path) -> None:
    folder = NixlFolder(str(tmp_path), {}, False, "user")
    (tmp_path / "file").write_bytes(b"kept")
    file = os.open(tmp_path / "file", os.O_RDONLY)
    with pytest.raises(OSError, match="NIXL"):
        folder._write_bytes(file, memoryview(bytes(1 << 20)))
    os.close(file)
    assert (tmp_path / "file").read_bytes() == b"kept"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"plugin": "posix"}, "options.plugin='posix': want a plug-in of NIXL that .*POSIX"),
        ({"plugin": "OBJ"}, "options.plugin='OBJ': want a plug-in of NIXL that .*POSIX"),
        ({"use_io": "1", "ring": 2}, "options: use_io, ring: the plug-in POSIX has only plugin, .*use_uring"),
    ],
)
def test_options_that_do_not_exist_are_refused(tmp_path: Path, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"tier 'disk': {message}"):
        ObjectTier(config(tmp_path, options=options))


def test_a_url_without_a_folder_is_refused() -> None:
    with pytest.raises(ValueError, match="it names nothing"):
        TierConfig(url="nixl+file://")
    with pytest.raises(ValueError, match="are one location; want two"):
        TierConfig(url=("nixl+file:///tmp/a", "/tmp/a"))
    with pytest.raises(ValueError, match=r"keep_s = 3\.0: only a tier in memory has one"):
        TierConfig(url="nixl+file:///tmp/a", keep_s=3)


def test_without_the_package_the_error_says_what_installs_it(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['nixl_cu12'] = sys.modules['nixl_cu13'] = None\n"
        "from kvkit.tiers.objects import ObjectTier\n"
        f"ObjectTier('nixl+file://{tmp_path}')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "ValueError: tier 'disk': NIXL is missing: pip install 'kvkit-llm[nixl]'" in done.stderr


def test_a_killed_writer_leaves_whole_records(tmp_path: Path, staging: Staging) -> None:
    program = f"""
import itertools
from pathlib import Path
from kvkit.tiers.nixl import NixlFolder
from kvkit.tiers.testing.contract import record_bytes, record_names
folder = NixlFolder({str(tmp_path)!r}, {{}}, False, "user")
names = record_names(2000)
print("writes", flush=True)
for name in itertools.cycle(names):
    folder.write(name, memoryview(record_bytes(name)))
    folder.delete(names[names.index(name) - 20])
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        while len(list(tmp_path.rglob("c.*"))) < 10:
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
    tier = ObjectTier(config(tmp_path))
    assert not list(tmp_path.rglob(".tmp-*"))
    found = {path.name: path for path in tmp_path.rglob("c.*")}
    names = [name for name in record_names(2000) if name.rpartition("/")[2] in found]
    assert names
    for name in names:
        (data,) = get(tier, staging, [name])
        np.testing.assert_array_equal(data, record_bytes(name))
    tier.close()
    staging.close()
