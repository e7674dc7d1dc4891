"""`kvkit report` shows a store and an endpoint, and treats all their content as text."""

from __future__ import annotations

import json
import os
from html.parser import HTMLParser
from pathlib import Path

import pytest
from command_line import failed, plain_terminal, run  # noqa: F401 - plain_terminal is a fixture
from store_listing import fill, form_of, listings, records
from stub_cache import ManagedCache, filled_counts

from kvkit.lab.watch.report import cache_section, page, settings_section, store_section
from kvkit.lab.watch.top import Snapshot, fetch
from kvkit.observe.http import Server
from kvkit.observe.inspect import tier_of
from kvkit.tiers.settings import TierConfig
from kvkit.tiers.testing.contract import DEADLINE_S

NOW = 1_800_000_000.0
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)>\"'&\x1b[31m"
TOKEN = "correct-horse-battery-staple"


class Read(HTMLParser):
    """The tags and attributes of a page, its tables' rows by heading, and all text outside its style."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.rows: list[list[str]] = []
        self.text = ""
        self._tag = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attributes}
        self._tag = tag
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self._tag in ("td", "th") and data.strip():
            self.rows[-1][-1] += data
        if self._tag != "style":
            self.text += data

    def row(self, first: str) -> list[str]:
        (found,) = (row for row in self.rows if row[:1] == [first])
        return found


def read(*sections: str) -> Read:
    """A page of these; it is well formed, and asks for nothing and runs nothing."""
    found = Read(page(sections, NOW))
    ours = "html meta title style h1 h2 h3 p ul li div table tr th td"
    assert found.tags <= set(ours.split())
    assert found.attributes <= {"lang", "charset", "name", "content", "http-equiv", "class", "style"}
    return found


def test_a_store_is_told_by_namespace_age_and_damage(tmp_path: Path) -> None:
    one, two = fill(str(tmp_path), 3, groups=2), fill(str(tmp_path), 2, salt="secret")
    paths = records(tmp_path)
    for number, path in enumerate(paths):
        os.utime(path, (NOW - 60, NOW - 60 * (number + 1)))
    raw = bytearray(paths[0].read_bytes())
    raw[-1] ^= 1
    paths[0].write_bytes(raw)
    os.utime(paths[0], (NOW, NOW - 86400))
    section, damaged = store_section(str(tmp_path), tier_of(str(tmp_path)), NOW)
    found, listed = read(section), listings(str(tmp_path))
    assert damaged == 1
    arrays = [row for row in found.rows if row[2:3] == ["test"]]
    assert {(row[0] + "/" + row[1], row[4], row[6], row[7]) for row in arrays} == {
        (array, str(listing.tokens), str(listing.chunks), str(len(listing.damaged)))
        for array, listing in listed.items()
    }
    assert {form_of(one, 0).array, form_of(one, 1).array, form_of(two).array} == set(listed)
    name = str(paths[0].relative_to(tmp_path))
    heads = [number for number, row in enumerate(found.rows) if row == ["record", "bytes", "written"]]
    assert found.rows[heads[1] + 1] == [name, "8.192 kB", "1.0 d ago"], "the oldest"
    assert found.rows[-1] == [name, "trailer"]
    held = sum(path.stat().st_size for path in paths)
    assert f"{held / 1000:.4g} kB in {len(paths)} records" in found.text
    assert "secret" not in found.text


def test_names_are_text_whatever_they_are(tmp_path: Path) -> None:
    folder = tmp_path / "<b>bold<b>"
    fill(str(folder))
    (metadata,) = folder.rglob("zarr.json")
    written = json.loads(metadata.read_text())
    written["attributes"]["kvkit"]["namespace"] |= {
        "model": HOSTILE,
        "dtype": [HOSTILE],
        "layout": "a" * 10_000,
    }
    metadata.write_text(json.dumps(written))
    tiers = [{"name": HOSTILE, "state": HOSTILE, "scope": HOSTILE, "codec": 7}]
    samples = {("kvkit_hit_tokens_total", frozenset({("tier", HOSTILE)})): 3.0}
    section, _ = store_section(str(folder), tier_of(str(folder)), NOW)
    found = read(
        section,
        cache_section(Snapshot(0.0, f"http://{HOSTILE}", tiers, samples)),
        settings_section(HOSTILE, {HOSTILE: {"a": HOSTILE}}),
    )
    assert "<b>bold<b>" in found.text
    assert found.text.count(HOSTILE.replace("\x1b", "\\x1b")[:40]) >= 7
    assert "\x1b" not in found.text
    assert max(len(cell) for row in found.rows for cell in row) < 200


def test_an_empty_store_has_a_page(tmp_path: Path) -> None:
    section, damaged = store_section("here", tier_of(str(tmp_path)), NOW)
    assert damaged == 0
    assert "0 B in 0 records" in read(section).text


def test_a_cache_is_told_by_tier() -> None:
    cache = ManagedCache()
    cache.kept = counts = filled_counts()
    counts.lookup_tokens = 4000
    counts.hit_tokens["near"] = 1000
    cache.break_tier("[far]")
    try:
        with Server(cache, token=TOKEN, port=0) as server:
            found = read(cache_section(fetch(server.url, TOKEN, DEADLINE_S)))
    finally:
        cache.close()
    hits, health = (row for row in found.rows if row[0] == "near")
    assert hits == ["near", "node", "none", "", "1 k", "25.0%"]
    assert health[1] == "ok"
    assert [row[1] for row in found.rows if row[0] == "[far]"] == ["node", "open"]
    assert found.row("kvkit_lookup_tokens_total") == ["kvkit_lookup_tokens_total", "", "4,000"]


def test_settings_keep_their_secrets() -> None:
    tier = TierConfig.model_validate({"url": "s3://bucket", "options": {"secret_access_key": "hush-hush"}})
    found = read(settings_section("a file", {"tiers": {"s3": tier.model_dump(mode="json")}}))
    assert found.row("tiers.s3.url")[1] == "s3://bucket"
    assert "hush" not in found.text


def test_the_command_writes_a_page_of_a_files_tiers(tmp_path: Path) -> None:
    fill(str(tmp_path / "store"))
    config, out = tmp_path / "kvkit.toml", tmp_path / "page.html"
    tiers = f'[tiers.near]\ncapacity = "1MiB"\n[tiers.disk]\nurl = "file://{tmp_path}/store"\n'
    config.write_text(f"chunk_tokens = 8\n{tiers}")
    result = run("report", "--config", config, "--html", out)
    assert result.exit_code == 0
    assert result.stdout == f"{out}: 2 sections, 0 damaged records\n"
    found = Read(out.read_text())
    assert found.row("chunk_tokens") == ["chunk_tokens", "8"]
    assert "3 records" in found.text
    failed(run("report", "far", "--config", config, "--html", out), "no tier 'far'", "near, disk")
    failed(run("report", "near", "--config", config, "--html", out), "memory of its process")


@pytest.mark.parametrize("source", ["http://user:hush@127.0.0.1:1", "http://127.0.0.1:1", "file:///nowhere"])
def test_what_is_not_there_is_said_without_secrets(source: str, tmp_path: Path) -> None:
    token, out = tmp_path / "token", tmp_path / "page.html"
    token.write_text(TOKEN)
    token.chmod(0o600)
    result = run("report", source, "--token-file", token, "--html", out)
    failed(result, "127.0.0.1:1" if "http" in source else "nowhere")
    assert "hush" not in result.output
    assert not out.exists()
