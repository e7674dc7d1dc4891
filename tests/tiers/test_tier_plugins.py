"""A tier of another package is built, installed, found by its kind, and fulfils the contract."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from repository import ROOT, SUPPORT

from kvkit.config import load_config
from kvkit.settings import ConfigError
from kvkit.tiers.plugins import check_kind, kinds

FILES = {
    "pyproject.toml": """
        [build-system]
        requires = ["setuptools>=77"]
        build-backend = "setuptools.build_meta"

        [project]
        name = "kvkit-shelf"
        version = "1.0"

        [project.entry-points."kvkit.tiers"]
        shelf = "shelf:open_tier"
        liar = "shelf:open_another"
        gone = "shelf:no_such_function"

        [tool.setuptools]
        py-modules = ["shelf"]
    """,
    "shelf.py": '''
        """Records as values of a dict."""

        import threading

        from kvkit.format.record import Damage
        from kvkit.tiers.base import DamagedObject, ThreadedTier, TierFull


        class Shelf(ThreadedTier):
            def __init__(self, name, capacity_bytes):
                super().__init__(name, threads=2)
                self._capacity_bytes = capacity_bytes
                self._lock = threading.Lock()
                self._records = {}

            def match_prefix(self, names):
                with self._lock:
                    held = [name in self._records for name in names]
                return held.index(False) if False in held else len(names)

            def read(self, name, buffer):
                with self._lock:
                    record = self._records.get(name)
                if record is None:
                    raise FileNotFoundError(name)
                if len(record) > len(buffer):
                    raise DamagedObject(name, Damage.OVERSIZE)
                buffer[: len(record)] = record
                return len(record)

            def write(self, name, record):
                with self._lock:
                    if sum(map(len, self._records.values())) + len(record) > self._capacity_bytes:
                        raise TierFull(name)
                    self._records.setdefault(name, bytes(record))

            def delete(self, names):
                with self._lock:
                    for name in names:
                        self._records.pop(name, None)

            def size(self, name):
                with self._lock:
                    return len(self._records[name]) if name in self._records else None

            def scan(self):
                with self._lock:
                    found = {name: len(record) for name, record in self._records.items()}
                yield from found.items()


        def open_tier(name, staging, settings):
            unknown = set(settings) - {"capacity", "colour"}
            if unknown:
                raise ValueError(f"{unknown.pop()}: the settings of a shelf are capacity, colour")
            assert staging.slots > 0
            tier = Shelf(name, settings["capacity"])
            tier.colour = settings.get("colour")
            return tier


        def open_another(name, staging, settings):
            return open_tier("another", staging, {"capacity": 1})
    ''',
    "test_shelf.py": '''
        import pytest
        from kvkit.config import load_config, open_cache
        from kvkit.staging import Staging
        from kvkit.tiers.testing.contract import RECORDS, SLOT_BYTES, SLOTS, TierContract
        from kvkit.tiers.plugins import open_plugin
        from kvkit.lab.testbed.engine_stub import small_layout


        @pytest.fixture
        def staging():
            return Staging(SLOT_BYTES, SLOTS)


        class TestShelf(TierContract):
            @pytest.fixture
            def tier(self, staging):
                return open_plugin("shelf", "here", staging, {"capacity": RECORDS * SLOT_BYTES})


        def test_in_a_cache(tmp_path):
            path = tmp_path / "kvkit.toml"
            path.write_text("""
                chunk_tokens = 8
                staging = "1MiB"
                [tiers.here]
                kind = "shelf"
                capacity = "1MiB"
                colour = ["red", 3]
            """)
            config = load_config(path)
            layout = small_layout()
            with open_cache(config, layout, config.namespace(layout, model="m", dtype="float32")) as cache:
                assert type(cache.tiers["here"]).__name__ == "Shelf"
                assert cache.tiers["here"].colour == ["red", 3]


        def test_from_the_environment(monkeypatch):
            monkeypatch.setenv("KVKIT_TIERS__HERE__KIND", "shelf")
            monkeypatch.setenv("KVKIT_TIERS__HERE__CAPACITY", "1MiB")
            monkeypatch.setenv("KVKIT_TIERS__HERE__COLOUR", "red")
            settings = load_config().tiers["here"].given_settings()
            assert settings == {"capacity": 1 << 20, "colour": "red"}


        @pytest.mark.parametrize(
            ("kind", "settings", "words"),
            [
                ("shelf", {"height": 3}, "tier 'here': kind='shelf': height: the settings of a shelf are"),
                ("liar", {}, "kind='liar': its factory made .*want a Tier of that name"),
                ("gone", {}, "kind='gone': .*no_such_function"),
                ("absent", {}, "kind='absent': .*the kinds are gone, liar, shelf"),
            ],
        )
        def test_errors_name_the_tier(kind, settings, words, staging):
            with pytest.raises(ValueError, match=words):
                open_plugin(kind, "here", staging, settings)
            staging.close()
    ''',
}


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The folder that the package was installed into."""
    source, target = tmp_path / "source", tmp_path / "installed"
    source.mkdir()
    for name, text in FILES.items():
        (source / name).write_text(textwrap.dedent(text).lstrip())
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*command, "--no-index", "--target", str(target), str(source)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return target


def test_a_package_brings_a_tier(tmp_path: Path, installed: Path) -> None:
    """In a process that has the package on its path: the contract, a cache with it, and its errors."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVKIT_")}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (installed, ROOT, SUPPORT)))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest", "test_shelf.py"],
        cwd=tmp_path / "source",
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout
    assert "skipped" not in done.stdout


def test_a_kind_that_no_package_has() -> None:
    assert kinds() == []
    with pytest.raises(ValueError, match=r"kind='shelf': no installed package has it.*the kinds are none"):
        check_kind("shelf")
    with pytest.raises(ConfigError, match=r"settings: tiers\.here: kind='shelf': .*the kinds are none"):
        load_config(tiers={"here": {"kind": "shelf", "colour": "red"}})


@pytest.mark.parametrize("options", [3, "hush", [1], True])
def test_options_that_are_no_table_are_named_whatever_the_kind(options: object) -> None:
    for more in ({"kind": "shelf", "colour": "red"}, {"url": "file:///x"}):
        with pytest.raises(ConfigError, match=r"settings: tiers\.here\.options: .*dictionary") as caught:
            load_config(tiers={"here": {"options": options} | more})
        assert "hush" not in str(caught.value)


def test_settings_of_their_own_take_a_kind() -> None:
    with pytest.raises(ConfigError, match=r"tiers\.here\.colour: unknown setting"):
        load_config(tiers={"here": {"url": "/x", "colour": "red"}})
