"""What the README and docs quote is what results/ holds, and what they show works."""

from __future__ import annotations

import ast
import importlib
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
import pages
import pytest
import yaml
from matplotlib import image
from pages import blocks, environment, on_page, run_page, run_shell
from pydantic import BaseModel
from servers import RedisServer, S3Server, free_ports, s3  # noqa: F401 - s3 is a fixture
from typer.main import get_command

import kvkit
from benchmarks.pictures import draw
from benchmarks.tables import MACHINE, PAGES, RESULTS, ROOT, render
from docs import reference
from kvkit.adapters.vllm.settings import Settings as ConnectorSettings
from kvkit.cache import Cache, SequencePages
from kvkit.cli import app
from kvkit.config import Config, PolicyConfig, ServerConfig, load_config, open_cache
from kvkit.format.layout import KVLayout, LayerGroup
from kvkit.handoff.settings import HandoffConfig
from kvkit.kernels.launch import Pages
from kvkit.observe import http, metrics
from kvkit.observe.http import DEFAULT_PORT
from kvkit.router import metrics as router_metrics
from kvkit.router.settings import read_router_config
from kvkit.tiers import health
from kvkit.tiers.registry import TierConfig

SITE = [page for page in pages.PAGES if page.startswith("docs/")]
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


def section(page: str, title: str) -> list[Settings]:
    """The TOML blocks below a heading."""
    text = (ROOT / page).read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]
    return [tomllib.loads(b) for b in re.findall(r"^```toml\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)]


def all_toml() -> Iterator[tuple[str, str]]:
    """Every configuration that a page shows; what packages a tier is none."""
    for page in ("README.md", *SITE):
        for block in blocks(page, "toml"):
            if "project" not in tomllib.loads(block.text):
                yield page, block.text


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


def opened(settings: Settings, **fields: Any) -> tuple[Cache, SequencePages]:
    """A cache of these settings, and a place in a small model's pages."""
    group = LayerGroup(layers=(0, 1), kv_heads=1, k_size=8, v_size=8, dtype="float32", block_tokens=16)
    layout = KVLayout((group,))
    config = load_config(**settings)
    cache = open_cache(config, layout, config.namespace(layout, model="m", dtype="float32", **fields))
    pages = Pages.of(group, group.pages(len(TOKENS) // 16 + 1, fill_byte=7))
    return cache, SequencePages(pages, blocks=np.arange(len(TOKENS) // 16))


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


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "docs").glob("*.png")))
def test_pictures_come_from_the_results(name: str, tmp_path: Path) -> None:
    """Drawn anew they are the same, but for what another version of matplotlib does to an edge."""
    draw(name, tmp_path / name)
    here, there = (image.imread(folder / name) for folder in (tmp_path, ROOT / "docs"))
    assert here.shape == there.shape, "run: python -m benchmarks.pictures"
    assert np.abs(here - there).mean() < 0.002, "run: python -m benchmarks.pictures"


def test_the_timeline_shows_what_its_page_says() -> None:
    assert "A record is verified by the thread that read it" in (ROOT / "docs/engine.md").read_text()
    events = json.loads((RESULTS / f"timeline-{MACHINE}.json").read_text())["events"]
    by_kind = {kind: {e["thread"] for e in events if e["kind"] == kind} for kind in ("verify", "unpack")}
    assert all(thread.startswith(("kvkit-disk-", "kvkit-s3-")) for thread in by_kind["verify"])
    assert by_kind["unpack"] == {"MainThread"}


@pytest.mark.parametrize("page", reference.PAGES)
def test_the_reference_comes_from_the_code(page: str) -> None:
    text = (ROOT / page).read_text()
    assert "<!-- reference:" in text
    assert reference.render(text) == text, "run: make docs"


def models() -> list[type[BaseModel]]:
    """Every model of settings in kvkit."""
    root = Path(kvkit.__file__).parent
    for folder in (root, root / "adapters" / "vllm"):
        for path in folder.rglob("*.py"):
            if "import BaseModel" in (text := path.read_text()) or ", BaseModel" in text:
                importlib.import_module(".".join(("kvkit", *path.relative_to(root).with_suffix("").parts)))

    def below(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
        for inner in model.__subclasses__():
            yield inner
            yield from below(inner)

    found = [model for model in below(BaseModel) if model.__module__.startswith("kvkit.")]
    return [model for model in found if not model.__name__.startswith("_")]


def test_every_setting_is_in_a_table() -> None:
    text = "".join((ROOT / page).read_text() for page in reference.PAGES)
    for marker in reference.SETTINGS:
        assert text.count(f"<!-- reference: {marker} -->") == 1, marker
    found = models()
    assert len(found) > len(reference.SETTINGS)
    for model in found:
        for name, field in model.model_fields.items():
            if reference.is_section(field):
                continue
            shown = [
                m for m in reference.SETTINGS.values() if issubclass(model, m) and name in m.model_fields
            ]
            assert shown, (
                f"{model.__module__}.{model.__qualname__}.{name} is in no table of docs/reference.py"
            )
            assert field.description, f"{model.__qualname__}.{name} has no description"


def imported(code: str) -> Iterator[str]:
    """The modules of kvkit that some Python imports, as `from MODULE import name` or `import MODULE`."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvkit"):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield (
                    whole if reference.source_of(whole.removeprefix("kvkit.")).exists() else str(node.module)
                )
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("kvkit."))


def test_what_pages_and_examples_import_is_listed_as_public() -> None:
    programs = [block.text for page in pages.PAGES for block in pages.blocks(page, "python")]
    programs += [path.read_text() for path in (ROOT / "examples").glob("*.py")]
    for path in (ROOT / "examples").glob("*.ipynb"):
        cells = json.loads(path.read_text())["cells"]
        programs += ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    found = {module.removeprefix("kvkit.") for code in programs for module in imported(code)}
    assert len(found) > 5
    assert found - set(reference.API) == set()


@pytest.mark.parametrize("module", reference.API)
def test_every_public_class_and_function_is_on_the_page_and_says_what_it_is(module: str) -> None:
    text = (ROOT / "docs/python.md").read_text().split(f"\n## `kvkit.{module}`\n")[1].split("\n## ")[0]
    for node in reference.public(ast.parse(reference.source_of(module).read_text())):
        assert f"\n| `{node.name}` | " in text, f"kvkit.{module}.{node.name}; run: make docs"
        assert ast.get_docstring(node), f"kvkit.{module}.{node.name} has no docstring"


def test_the_index_leads_to_every_page() -> None:
    text = (ROOT / "docs/index.md").read_text()
    assert {f"docs/{name}" for name in re.findall(r"\]\(([\w.-]+\.md)\)", text)} | {"docs/index.md"} == set(
        SITE
    )


PROMISES = re.compile(
    r"\b(?:yet|this version|will be|(?:is|are) planned|plan to|future|for now|coming soon|to come|todo)\b",
    re.I,
)
"""Words that promise or deny: what stands on a page so is forgotten there when it is made."""
TRUE = {
    ("README.md", "were measured yet"): "GPUs: test_no_gpu_was_measured",
    ("docs/kernels.md", "has not run on a GPU yet"): "the same",
    ("docs/pd.md", "the P that will be done first"): "of requests",
    ("docs/pd.md", "yet to compute"): "of requests",
    ("docs/pd.md", "has had no request for yet"): "of an engine",
    ("docs/recipes.md", "# a future; other work"): "of `concurrent.futures`",
    ("docs/recipes.md", "asks a future to stop"): "the same",
    ("docs/recipes.md", "will be asked for again"): "of a prompt",
}
"""(page, where such a word may stand): what it is about."""


def promises(page: str, text: str) -> list[str]:
    """Where a page promises or denies something that nobody said is true."""
    allowed = [fragment for where, fragment in TRUE if where == page]
    found = []
    for word in PROMISES.finditer(text):
        around = " ".join(text[max(0, word.start() - 60) : word.end() + 60].split())
        if not any(fragment in around for fragment in allowed):
            found.append(around)
    return found


@pytest.mark.parametrize("page", pages.PAGES)
def test_no_page_promises_or_denies_what_may_exist(page: str) -> None:
    assert promises(page, (ROOT / page).read_text()) == []


@pytest.mark.parametrize(
    "text",
    [
        "This version has none: engines meet",
        "| none yet | no handoff |",
        "loads by layer are\nnot yet written back",
    ],
)
def test_a_promise_is_found(text: str) -> None:
    assert promises("docs/concepts.md", text)


def test_what_may_be_said_is_still_said() -> None:
    for page, fragment in TRUE:
        assert fragment in " ".join((ROOT / page).read_text().split()), (page, fragment)


def test_no_gpu_was_measured() -> None:
    """README and docs/kernels.md say so; where a result of a GPU comes in, they have to change."""
    for path in (ROOT / "benchmarks/results").glob("*.json"):
        machine = json.loads(path.read_text()).get("machine") or {}
        assert machine.get("gpu") is None, f"{path.name} is of a GPU"


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


@pytest.mark.parametrize("page", pages.PAGES)
def test_files_that_are_named_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    named = re.findall(r"\]\(([^)#:]+)\)", text) + re.findall(
        r"`((?:kvkit|tests|benchmarks|examples|docs)/[\w./-]+)`", text
    )
    for path in named:
        assert (ROOT / path).exists() or (ROOT / page).parent.joinpath(path).exists(), path


@pytest.mark.parametrize("page", pages.PAGES)
def test_commands_that_are_named_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    shells = [block.text for block in blocks(page, "sh")]
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
    assert all(f" {path} " in (http.__doc__ or "") for path in paths)
    rules = [yaml.safe_load(block.text) for block in blocks("docs/operations.md", "yaml")]
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
    tables: dict[str, type[BaseModel]] = {"tiers": TierConfig, "policy": PolicyConfig, "server": ServerConfig}
    tables["handoff"] = HandoffConfig
    of_connector = re.findall(r"`(\w+)` of the connector", "".join(rows))
    assert of_connector
    assert set(of_connector) <= set(ConnectorSettings.model_fields)
    for name in names:
        table, *path = name.split(".")
        if name in of_connector:
            continue
        if not path or (table == "tiers" and len(path) == 1):
            assert table in Config.model_fields, name
        else:
            assert path[-1] in tables[table].model_fields, name


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


def configure(page: str, folder: Path, extra: str = "") -> None:
    """Write a page's first configuration, made small, to `folder`, with its tiers below it."""
    text = blocks(page, "toml")[0].text.replace("file:///", f"file://{folder}/").replace("16GiB", "16MiB")
    (folder / "kvkit.toml").write_text('staging = "16MiB"\n' + text + extra)


def test_recipes_run_and_print_what_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configure("docs/recipes.md", tmp_path)
    monkeypatch.chdir(tmp_path)
    run_page("docs/recipes.md")


def test_the_example_of_blending_runs_and_prints_what_it_says() -> None:
    done = run_page("docs/blend.md")
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
    with run_page("docs/operations.md", {str(DEFAULT_PORT): str(port)})["cache"]:
        lines = on_page("docs/operations.md", "token=")
        shell = run_shell(lines, tmp_path, {str(DEFAULT_PORT): str(port)})
    answers = shell.stdout.split("\n---\n")
    assert "kvkit_lookups_total 0.0" in answers.pop(1)
    health, tiers, lookup, pin, clear = map(json.loads, filter(None, answers))
    assert health == {"status": "ok", "tiers": {"disk": "ok"}}
    assert [tier["name"] for tier in tiers] == ["disk"]
    assert lookup.pop("engine")["hit_tokens"] is None
    assert lookup == {"tokens": 3, "hit_tokens": 0, "by_tier": {}}
    assert (pin, clear) == ({"pinned_tokens": 0}, {"removed_records": 0})


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
    (source / "sqlite_tier.py").write_text(on_page("docs/tiers.md", '"""sqlite_tier.py'))
    (source / "test_sqlite_tier.py").write_text(on_page("docs/tiers.md", '"""test_sqlite_tier.py'))
    (source / "pyproject.toml").write_text(blocks("docs/tiers.md", "toml")[0].text)
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
    code = on_page("README.md", "import torch")
    assert len(code.splitlines()) <= 20
    here = environment(tmp_path)  # a home of its own for the store; the model is where it was
    runs = [
        subprocess.run([sys.executable, "-c", code], env=here, capture_output=True, text=True, check=False)
        for _ in range(2)
    ]
    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr + runs[1].stderr
    assert runs[0].stdout.startswith("{} ")
    assert runs[1].stdout.startswith("{'disk': ")
    assert stat.S_IMODE((tmp_path / ".cache" / "kvkit" / "store").stat().st_mode) == 0o700


def test_each_promise_of_security_names_a_test_that_is_there() -> None:
    text = (ROOT / "docs/security.md").read_text().split("\n## ", 2)[2]
    promises = re.findall(r"^- \*\*.*?(?=^- |^## |\Z)", text, re.DOTALL | re.MULTILINE)
    assert len(promises) > 15
    for promise in promises:
        named = re.findall(r"`(tests/\w+\.py)::(\w+)`", promise)
        assert named, f"no test behind: {promise}"
        for file, test in named:
            assert f"\ndef {test}(" in (ROOT / file).read_text(), f"{file}::{test}"
