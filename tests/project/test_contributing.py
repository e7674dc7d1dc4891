"""The examples of CONTRIBUTING.md work on a copy of the code."""

from __future__ import annotations

from pathlib import Path
from textwrap import indent

import pytest
from page_blocks import on_page
from product_copy import copy_product, run_with


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A folder with a copy of kvkit."""
    return copy_product(tmp_path)


def insert(path: Path, before: str, text: str) -> None:
    """Put `text` before the one line of a file that begins with `before`."""
    head, line, tail = path.read_text().partition(f"\n{before}")
    assert line
    assert f"\n{before}" not in tail
    path.write_text(f"{head}\n{text}{line}{tail}")


def test_a_new_tier_is_a_class_and_a_row(copy: Path) -> None:
    opening = indent(on_page("CONTRIBUTING.md", "@classmethod"), "    ")
    tier = on_page("docs/research/own-tier.md", '"""sqlite_tier.py').partition("\n\n\ndef open_tier")[0]
    (copy / "kvkit/tiers/sqlite_tier.py").write_text(f"{tier}\n\n{opening}")
    row = indent(on_page("CONTRIBUTING.md", '"sqlite"'), "    ")
    insert(copy / "kvkit/tiers/registry.py", '    "memory": TierKind(', row.rstrip())
    (copy / "test_row.py").write_text(
        """
import pytest
from kvkit.config import load_config
from kvkit.settings import ConfigError
from kvkit.staging import Staging
from kvkit.tiers.settings import open_tier
from kvkit.tiers.testing.contract import SLOT_BYTES, SLOTS, TierContract


class TestRow(TierContract):
    @pytest.fixture
    def staging(self):
        return Staging(SLOT_BYTES, SLOTS)

    @pytest.fixture
    def tier(self, staging, tmp_path):
        config = load_config(tiers={"rows": {"url": f"sqlite://{tmp_path}/records.db"}})
        return open_tier("rows", config.tiers["rows"], staging)


def test_settings():
    with pytest.raises(ConfigError, match="codec = 'zstd': no tier in SQLite has one"):
        load_config(tiers={"rows": {"url": "sqlite:///x", "codec": "zstd"}})
"""
    )
    assert "passed" in run_with(copy, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_row.py")


def test_a_new_eviction_policy_is_a_class(copy: Path) -> None:
    policy = on_page("CONTRIBUTING.md", "class Largest")
    insert(copy / "kvkit/tiers/eviction/policies.py", "PLAIN: ", f"{policy}\n")
    command = ("simulate", "chat", "--requests", "50", "--compare", "lru,largest")
    assert "largest" in run_with(copy, "-c", "from kvkit.cli import main; main()", *command)
    (copy / "kvkit.toml").write_text('[tiers.memory]\ncapacity = "1MiB"\neviction = "largest"\n')
    run_with(copy, "-c", "from kvkit.config import load_config; load_config('kvkit.toml')")
    (copy / "evict.py").write_text(
        """
from kvkit.tiers.eviction.state import EvictionState, add_run
state = EvictionState(6, "largest")
sizes = {"a": 2, "b": 3, "c": 1, "d": 2}
assert [add_run(state, (name,), size)[1] for name, size in sizes.items()] == [[], [], [], ["b"]]
"""
    )
    run_with(copy, "evict.py")
