"""What the README and docs quote is what results/ holds, and what they show works."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from pydantic import BaseModel
from servers import RedisServer, S3Server, free_ports, s3  # noqa: F401 - s3 is a fixture
from typer.main import get_command

from benchmarks.tables import MACHINE, PAGES, ROOT, render
from docs import reference
from kvkit import metrics, server
from kvkit.adapters.vllm import router_metrics
from kvkit.adapters.vllm.router_settings import read_router_config
from kvkit.adapters.vllm.settings import Settings as ConnectorSettings
from kvkit.cache import Cache, Place
from kvkit.cli import app
from kvkit.config import Config, PolicyConfig, ServerConfig, TierConfig, load_config, open_cache
from kvkit.handoff.settings import HandoffConfig
from kvkit.kernels.launch import Pages
from kvkit.layout import KVLayout, LayerGroup
from kvkit.server import DEFAULT_PORT
from kvkit.tiers import health

SITE = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))
TOKENS = np.arange(600, dtype=np.int32)
WHOLE = 512
"""Those of TOKENS that are in whole chunks."""

Settings = dict[str, Any]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.upper().startswith(("KVKIT_", "AWS_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


def section(page: str, title: str) -> list[Settings]:
    """The TOML blocks below a heading."""
    text = (ROOT / page).read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]
    return [tomllib.loads(b) for b in re.findall(r"^```toml\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)]


def all_toml() -> Iterator[tuple[str, str]]:
    """Every configuration that a page shows; what packages a tier is none."""
    for page in ("README.md", *SITE):
        for text in blocks(page, "toml"):
            if "project" not in tomllib.loads(text):
                yield page, text


def tiny(settings: Settings, folder: Path) -> Settings:
    """The same, in memory and files of a few MiB: only sizes and folders change."""
    tiers = {}
    for name, tier in settings["tiers"].items():
        urls = tier.get("url")
        small = dict(tier)
        if isinstance(urls, list):
            small["url"] = [url.replace("file://", f"file://{folder}") for url in urls]
        elif urls is not None:
            small["url"] = urls.replace("file://", f"file://{folder}")
        if "capacity" in tier:
            many = isinstance(tier["capacity"], list)
            small["capacity"] = ["4MiB"] * len(tier["capacity"]) if many else "4MiB"
        if "quota" in tier:
            small["quota"] = "2MiB"
        tiers[name] = small
    return settings | {"staging": "4MiB", "tiers": tiers}


def opened(settings: Settings, **fields: Any) -> tuple[Cache, Place]:
    """A cache of these settings, and a place in a small model's pages."""
    group = LayerGroup(layers=(0, 1), kv_heads=1, k_size=8, v_size=8, dtype="float32", block_tokens=16)
    layout = KVLayout((group,))
    config = load_config(**settings)
    cache = open_cache(config, layout, config.namespace(layout, model="m", dtype="float32", **fields))
    pages = Pages.of(group, group.pages(len(TOKENS) // 16 + 1, fill_byte=7))
    return cache, Place(pages, blocks=np.arange(len(TOKENS) // 16))


def stored(settings: Settings, **fields: Any) -> int:
    """Tokens that a cache of these settings stored completely."""
    cache, place = opened(settings, **fields)
    with cache:
        tokens = cache.store(TOKENS, place).new_tokens
        cache.flush()
        counts = cache.counts()
        assert not counts.write_errors + counts.refused
    return tokens


def loaded(settings: Settings, times: int = 1, **fields: Any) -> list[dict[str, int]]:
    """Tokens by tier of so many loads, one after the other, by a new cache of these settings."""
    cache, place = opened(settings, **fields)
    found = []
    with cache:
        for _ in range(times):
            found.append(dict(cache.load(cache.lookup(TOKENS), place).by_tier))
            cache.flush()
    return found


@pytest.mark.parametrize("page", PAGES)
def test_tables_come_from_the_results(page: str) -> None:
    text = (ROOT / page).read_text()
    assert "<!-- table:" in text
    assert render(text) == text, "run: python -m benchmarks.tables"


@pytest.mark.parametrize("page", reference.PAGES)
def test_the_reference_comes_from_the_code(page: str) -> None:
    text = (ROOT / page).read_text()
    assert "<!-- reference:" in text
    assert reference.render(text) == text, "run: make docs"


def test_the_reference_leaves_no_setting_out() -> None:
    text = (ROOT / "docs/configuration.md").read_text()
    for model in (Config, TierConfig, PolicyConfig, ServerConfig, HandoffConfig):
        for name, field in model.model_fields.items():
            section = reference.is_section(field)
            assert section or name == "tiers" or f"\n| `{name}` |" in text, name
            assert section or field.description, f"{name} has no description"


def test_kernels_that_were_not_measured_are_left_out(tmp_path: Path) -> None:
    def table(name: str, results: list[dict[str, Any]]) -> list[str]:
        (tmp_path / f"{MACHINE}.json").write_text(json.dumps({"results": results}))
        (tmp_path / f"demo-{MACHINE}.json").write_text('{"turns": []}')
        return render(f"<!-- table: {name} -->\n<!-- end -->", tmp_path).splitlines()[1:-1]

    assert table("kernels", []) == table("blend_4k", []) == ["*Not measured yet.*"]
    prefill = {"name": "prefill::blended_prefill[4k]", "ratio_min": 0.2, "ratio_median": 0.25}
    speed = {"unpack rotated": {"of copy_": {"min": 0.5, "median": 0.4}}}
    *_, unpack, blended = table("kernels", [prefill, {"name": "pages::conversions[llama-bfloat16]"} | speed])
    assert unpack.startswith("| unpack rotated, Llama")
    assert unpack.endswith("| 2.00 | 2.50 |"), "time over time, where the benchmark gives speed over speed"
    assert blended.startswith("| blended prefill")
    assert blended.endswith("| 0.20 | 0.25 |")


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", *SITE])
def test_files_that_are_named_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    named = re.findall(r"\]\(([^)#:]+)\)", text) + re.findall(
        r"`((?:kvkit|tests|benchmarks|examples|docs)/[\w./-]+)`", text
    )
    for path in named:
        assert (ROOT / path).exists() or (ROOT / page).parent.joinpath(path).exists(), path


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", *SITE])
def test_commands_that_are_named_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    shells = re.findall(r"^```(?:sh)?\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    lines = [line for shell in shells for line in shell.splitlines() if line.startswith("kvkit ")]
    for line in lines + re.findall(r"`(kvkit [a-z].*?)`", text):
        command: Any = get_command(app)
        words = line.split("#")[0].split()[1:]
        while hasattr(command, "commands"):
            assert words[0] in command.commands, line
            command = command.commands[words.pop(0)]
        options = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= options, line


def test_metrics_and_paths_that_are_named_exist() -> None:
    text = "".join((ROOT / page).read_text() for page in SITE)
    listed = (metrics.__doc__, reference.vllm_metrics(), router_metrics.__doc__)
    known = set(re.findall(r"kvkit_\w+", "".join(text or "" for text in listed)))
    known |= set(ConnectorSettings.model_fields)
    named = {re.sub("_(bucket|sum|count)$", "", name) for name in re.findall(r"\bkvkit_[a-z_]+", text)}
    assert named
    assert named <= known
    paths = re.findall(r"127\.0\.0\.1:9477(/\w+)", text)
    assert paths
    assert all(f" {path} " in (server.__doc__ or "") for path in paths)
    rules = [yaml.safe_load(block) for block in blocks("docs/operations.md", "yaml")]
    assert {rule["expr"] for rule in rules[1]["groups"][0]["rules"]}
    assert rules[0]["scrape_configs"][0]["static_configs"][0]["targets"] == [f"127.0.0.1:{DEFAULT_PORT}"]


def test_operations_says_what_the_circuit_does() -> None:
    text = (ROOT / "docs/operations.md").read_text()
    first, *others = (f"{pause:.0f} s" for pause in health.PAUSES_S)
    assert f"For {first}, then {', '.join(others)} at most" in text
    assert f"{health.FAILURES_TO_PAUSE} failures in a row, or one timeout" in text
    assert f"the last {health.RECENT} reads took {health.SLOW_FACTOR:.0f} times as long" in text


def test_settings_that_take_the_place_of_lmcaches_exist() -> None:
    rows = re.findall(r"^\| `.*\| (.*?) \| .*\|$", (ROOT / "docs/lmcache.md").read_text(), re.MULTILINE)
    names = re.findall(r"`([\w.]+)`", "".join(rows))
    assert len(names) > 20
    models: dict[str, type[BaseModel]] = {"tiers": TierConfig, "policy": PolicyConfig, "server": ServerConfig}
    models["handoff"] = HandoffConfig
    for name in names:
        table, *path = name.split(".")
        if not path or (table == "tiers" and len(path) == 1):
            assert table in Config.model_fields, name
        else:
            assert path[-1] in models[table].model_fields, name


@pytest.mark.parametrize(("page", "text"), list(all_toml()))
def test_configurations_are_accepted(
    page: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if 'kind = "sqlite"' in text:
        install_the_tier(tmp_path, monkeypatch)
    path = tmp_path / "kvkit.toml"
    path.write_text(text)
    read = read_router_config if "[decode." in text else load_config
    assert read(path).model_fields_set


def run_examples(page: str, port: int = DEFAULT_PORT) -> dict[str, Any]:
    """Run a page's Python, one block after the other; returns the names that it defined.

    Raises:
        AssertionError: it prints something else than its comments promise.
    """
    names: dict[str, Any] = {}
    examples = blocks(page, "python")
    assert examples
    for code in examples:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, page, "exec"), names)
        comments = re.findall(r"print\(.*\)  # (.*)", code.replace(str(DEFAULT_PORT), str(port)))
        promised = [line for comment in comments for line in _lines(comment)]
        assert printed.getvalue().splitlines() == promised, code
    return names


def configure(page: str, folder: Path, extra: str = "") -> None:
    """Write a page's first configuration, made small, to `folder`, with its tiers below it."""
    text = blocks(page, "toml")[0].replace("file:///", f"file://{folder}/").replace("16GiB", "16MiB")
    (folder / "kvkit.toml").write_text('staging = "16MiB"\n' + text + extra)


def test_recipes_run_and_print_what_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configure("docs/recipes.md", tmp_path)
    monkeypatch.chdir(tmp_path)
    run_examples("docs/recipes.md")


def test_the_example_of_blending_runs_and_prints_what_it_says() -> None:
    done = run_examples("docs/blend.md")
    text = (ROOT / "docs/blend.md").read_text()
    assert f"Of {len(done['prompt'])} tokens {done['done'].reused_tokens} are reused" in text
    assert len(done["new"]) == 16


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is missing")
def test_the_endpoint_of_operations_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's own shell lines, with curl told to fail where the answer is an error."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_STATE_HOME")
    (tmp_path / ".curlrc").write_text('silent\nfail\nwrite-out = "\\n---\\n"\n')
    monkeypatch.chdir(tmp_path)
    (port,) = free_ports(1)
    configure("docs/operations.md", tmp_path, f"port = {port}\n")
    with run_examples("docs/operations.md", port)["cache"]:
        lines = blocks("docs/operations.md", "sh")[-1].replace(str(DEFAULT_PORT), str(port))
        shell = subprocess.run(["sh", "-e", "-c", lines], capture_output=True, text=True, check=True)
    answers = shell.stdout.split("\n---\n")
    assert "kvkit_lookups_total 0.0" in answers.pop(1)
    health, tiers, lookup, pin, clear = map(json.loads, filter(None, answers))
    assert health == {"status": "ok", "tiers": {"disk": "ok"}}
    assert [tier["name"] for tier in tiers] == ["disk"]
    assert lookup.pop("engine")["hit_tokens"] is None
    assert lookup == {"tokens": 3, "hit_tokens": 0, "by_tier": {}}
    assert (pin, clear) == ({"pinned_tokens": 0}, {"removed_records": 0})


def _lines(comment: str) -> list[str]:
    """What a comment says is printed: several lines have commas between them."""
    return [comment] if "{" in comment else comment.split(", ")


RECIPES = {
    "Memory and disk": [{"disk": WHOLE}, {"memory": WHOLE}],
    "Disk only (staging-only)": [{"disk": WHOLE}, {"disk": WHOLE}],
    "Write back after validation": [{"disk": WHOLE}, {"memory": WHOLE}],
    "Several disks": [{"disk": WHOLE}, {"disk": WHOLE}],
    "Quotas, eviction, pins": [{"disk": WHOLE}, {"memory": WHOLE}],
}
"""By recipe: what two loads of a new process find, and where."""


@pytest.mark.parametrize("title", RECIPES)
def test_recipes_of_files(title: str, tmp_path: Path) -> None:
    for number, recipe in enumerate(section("docs/recipes.md", title)):
        settings = tiny(recipe, tmp_path / str(number))
        assert stored(settings) == WHOLE
        assert loaded(settings, 2) == RECIPES[title], recipe


def test_the_memory_of_staging_only_keeps_nothing(tmp_path: Path) -> None:
    (recipe,) = section("docs/recipes.md", "Disk only (staging-only)")
    settings = tiny(recipe | {"tiers": {"memory": {"capacity": "1GiB"}, **recipe["tiers"]}}, tmp_path)
    stored(settings)
    cache, place = opened(settings)
    with cache:
        assert cache.load(cache.lookup(TOKENS), place).by_tier == {"disk": WHOLE}
        cache.flush()
        assert cache.staging.free == cache.staging.slots


def test_what_one_node_stored_is_written_back_on_another(tmp_path: Path) -> None:
    (recipe,) = section("docs/recipes.md", "Write back after validation")
    here = tiny(recipe, tmp_path)
    there = here | {"tiers": {"shared": here["tiers"]["shared"]}, "policy": {}}
    assert stored(there) == WHOLE
    assert loaded(here, 2) == [{"shared": WHOLE}, {"memory": WHOLE}]
    assert loaded(here) == [{"disk": WHOLE}]


def test_prefill_finds_what_decode_stored_and_the_other_way_round(tmp_path: Path) -> None:
    prefill, decode = (
        tiny(role, tmp_path) for role in section("docs/recipes.md", "Store here, retrieve there")
    )
    assert stored(decode) == WHOLE
    assert stored(prefill) == 0
    assert loaded(prefill, 2) == [{"shared": WHOLE}, {"memory": WHOLE}]
    assert stored(prefill, salt="another tenant") == WHOLE
    assert loaded(decode, 2, salt="another tenant") == [{"shared": WHOLE}] * 2


def test_ranks_have_disks_of_their_own(tmp_path: Path) -> None:
    recipe = next(
        r for r in section("docs/recipes.md", "Several disks") if r["tiers"]["disk"]["spread"] == "by_rank"
    )
    settings = tiny(recipe, tmp_path)
    for rank in (0, 1):
        assert stored(settings, rank=rank, world=2) == WHOLE
        assert len(list((tmp_path / f"mnt/nvme{rank}").rglob("c.*"))) == 2


def test_a_quota_holds_for_one_tenant(tmp_path: Path) -> None:
    (recipe,) = section("docs/recipes.md", "Quotas, eviction, pins")
    settings = tiny(recipe, tmp_path)
    settings["tiers"]["memory"]["quota"] = "60kB"  # one chunk of two
    cache, place = opened(settings)
    with cache:
        other = load_config(**settings).namespace(cache.layout, model="m", dtype="float32", salt="other")
        cache.store(TOKENS, place)
        cache.store(TOKENS, place, other)
        cache.flush()
        assert [cache.lookup(TOKENS, space).by_tier for space in (None, other)] == [
            {"memory": 256, "disk": 256}
        ] * 2


def test_the_recipe_for_s3(tmp_path: Path, s3: S3Server) -> None:  # noqa: F811
    (recipe,) = section("docs/recipes.md", "S3")
    settings = tiny(recipe, tmp_path)
    settings["tiers"]["bucket"]["options"] |= s3.options
    settings["tiers"]["bucket"]["url"] = f"s3://{s3.BUCKET}/{tmp_path.name}"
    assert stored(settings) == WHOLE
    assert loaded(settings, 2) == [{"bucket": WHOLE}, {"memory": WHOLE}]


def test_the_recipe_for_redis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the rights that the recipe names, and the password in the environment."""
    (recipe,) = section("docs/recipes.md", "Redis, Valkey")
    (rights,) = re.findall(r"`(~kvkit:\* .*?)`", (ROOT / "docs/recipes.md").read_text())
    settings = tiny(recipe, tmp_path)
    user = settings["tiers"]["redis"]["username"]
    with RedisServer(tmp_path, "valkey", f"user {user} on >a-long-password {rights}") as running:
        settings["tiers"]["redis"]["url"] = running.url
        del settings["tiers"]["redis"]["password"]
        monkeypatch.setenv("KVKIT_TIERS__REDIS__PASSWORD", "a-long-password")
        assert stored(settings) == WHOLE
        alone = settings | {"tiers": {"redis": settings["tiers"]["redis"]}}
        assert loaded(alone) == [{"redis": WHOLE}]


def test_a_list_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (
        "KVKIT_TIERS__DISK__URL=/var/cache/kvkit",
        "KVKIT_CHUNK_TOKENS=128",
        "KVKIT_POLICY__STORE_TO='[\"disk\"]'",
    ):
        assert variable in (ROOT / "docs/configuration.md").read_text()
        name, _, value = variable.partition("=")
        monkeypatch.setenv(name, value.strip("'"))
    config = load_config()
    assert (config.chunk_tokens, config.policy.store_to) == (128, ("disk",))


def test_what_wins_over_what(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As docs/configuration.md says: settings over the environment's, whole tables over the file's."""
    path = tmp_path / "kvkit.toml"
    path.write_text("[server]\nenabled = true\nport = 1\n")
    monkeypatch.setenv("KVKIT_SERVER__PORT", "2")
    monkeypatch.setenv("KVKIT_SERVER__HOST", "127.0.0.2")
    merged = load_config(path).server
    assert (merged.enabled, merged.port, merged.host) == (True, 1, "127.0.0.2")
    replaced = load_config(path, server={"enabled": True}).server
    assert (replaced.enabled, replaced.port, replaced.host) == (True, 2, "127.0.0.2")


def install_the_tier(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install the package of docs/tiers.md below `folder` and put it on the path; returns its sources."""
    source, site = folder / "kvkit-sqlite", folder / "site"
    source.mkdir()
    code, tests = blocks("docs/tiers.md", "python")
    (source / "sqlite_tier.py").write_text(code)
    (source / "test_sqlite_tier.py").write_text(tests)
    (source / "pyproject.toml").write_text(blocks("docs/tiers.md", "toml")[0])
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--target", str(site)]
    done = subprocess.run([*pip, str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    monkeypatch.syspath_prepend(str(site))
    return source


def test_the_tier_that_is_shown_keeps_the_contract(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = install_the_tier(tmp_path, monkeypatch)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--noconftest",
            "test_sqlite_tier.py",
        ],
        cwd=source,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    settings = {
        "tiers": {"rows": {"kind": "sqlite", "path": str(tmp_path / "records.db")}},
        "staging": "4MiB",
    }
    assert stored(settings) == WHOLE
    assert loaded(settings) == [{"rows": WHOLE}]
    assert stat.S_IMODE((tmp_path / "records.db").stat().st_mode) == 0o600
    monkeypatch.delitem(sys.modules, "sqlite_tier")


def test_the_readme_example_reuses_what_it_stored(tmp_path: Path) -> None:
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert code is not None
    assert len(code[1].splitlines()) <= 20
    # a home of its own for the store; the model is where it was
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    here = os.environ | {"HOME": str(tmp_path), "XDG_CACHE_HOME": cache}
    runs = [
        subprocess.run([sys.executable, "-c", code[1]], env=here, capture_output=True, text=True, check=False)
        for _ in range(2)
    ]
    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr + runs[1].stderr
    assert runs[0].stdout.startswith("{} ")
    assert runs[1].stdout.startswith("{'disk': ")
    assert stat.S_IMODE((tmp_path / ".cache" / "kvkit" / "store").stat().st_mode) == 0o700
