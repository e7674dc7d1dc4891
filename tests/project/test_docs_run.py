"""Configurations, recipes and programs in README and docs work."""

from __future__ import annotations

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
import page_blocks
import pytest
from page_blocks import blocks, changed, check_printed, environment, on_page, run_page, run_shell
from run_sizes import nightly
from s3_fixture import s3  # noqa: F401 - a fixture
from small_models import save_with_tokenizer

from benchmarks.report.tables import ROOT
from benchmarks.research.fleet import fleet
from kvkit import Cache, SequencePages, load_config, open_cache
from kvkit.format.layout import KVLayout, LayerGroup
from kvkit.kernels.pages.api import Pages
from kvkit.lab.simulate.config import SimulationConfig
from kvkit.lab.testbed.servers import RedisServer, S3Server, free_ports
from kvkit.observe.access import DEFAULT_PORT
from kvkit.router.settings import read_router_config
from kvkit.settings import read_toml
from kvkit.tiers.shm.file import pool_path

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
    for page in page_blocks.PAGES:
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
    config = load_config(**settings)
    layout = config.layout(KVLayout((group,)))
    cache = open_cache(config, layout, config.namespace(layout, model="m", dtype="float32", **fields))
    pages = Pages.of(layout.groups[0], group.pages(len(TOKENS) // 16 + 1, fill_byte=7))
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


@pytest.mark.parametrize(("page", "text"), list(all_toml()))
def test_configurations_are_accepted(
    page: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if 'kind = "sqlite"' in text:
        install_the_tier(tmp_path, monkeypatch)
    if "reused:Reused" in text:
        code = on_page("docs/research/own-policy.md", "from kvkit.tiers.eviction.policies")
        (tmp_path / "reused.py").write_text(code)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "reused", raising=False)
    path = tmp_path / "kvkit.toml"
    path.write_text(text)
    if "[nodes]" in text:
        assert SimulationConfig.model_validate(read_toml(path)).model_fields_set
        return
    if "[model]" in text:
        assert fleet(8, ("pool", "store"), read_toml(path)).model_fields_set
        return
    read = read_router_config if "[decode." in text else load_config
    assert read(path).model_fields_set


def configure(page: str, folder: Path, extra: str = "") -> None:
    """Write a page's first configuration, made small, to `folder`, with its tiers below it."""
    text = blocks(page, "toml")[0].text.replace("file:///", f"file://{folder}/").replace("16GiB", "16MiB")
    (folder / "kvkit.toml").write_text('staging = "16MiB"\n' + text + extra)


def test_keys_and_records_are_of_use_without_a_cache() -> None:
    run_page("docs/reference/glossary.md")


def test_recipes_run_and_print_what_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configure("docs/serve/recipes.md", tmp_path)
    monkeypatch.chdir(tmp_path)
    run_page("docs/serve/recipes.md")


def test_the_file_of_tiers_is_checked_and_its_disk_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipes' programs store in it, as an engine does."""
    page = "docs/serve/tiers.md"
    configure(page, tmp_path)
    check_printed(
        page, "kvkit doctor", run_shell(on_page("docs/serve/tiers.md", "kvkit doctor"), tmp_path).stdout
    )
    monkeypatch.chdir(tmp_path)
    run_page("docs/serve/recipes.md")
    listed = run_shell(on_page("docs/serve/tiers.md", "kvkit inspect"), tmp_path)
    check_printed(page, "kvkit inspect", listed.stdout)


def test_the_file_in_place_of_lmcaches_is_checked(tmp_path: Path) -> None:
    page = "docs/serve/from-lmcache.md"
    configure(page, tmp_path)
    path = tmp_path / "kvkit.toml"
    with RedisServer(tmp_path, "valkey") as running:
        path.write_text(changed(path.read_text(), {"redis://cache:6379/0": running.url}))
        doctor = run_shell(on_page("docs/serve/from-lmcache.md", "kvkit doctor"), tmp_path)
    check_printed(page, "kvkit doctor", doctor.stdout)


def test_the_file_for_sglang_is_checked(tmp_path: Path) -> None:
    page = "docs/serve/sglang.md"
    configure(page, tmp_path)
    printed = run_shell(on_page("docs/serve/sglang.md", "kvkit doctor"), tmp_path).stdout
    check_printed(page, "kvkit doctor", printed)


def test_the_file_for_lmcaches_l2_is_checked(tmp_path: Path) -> None:
    page = "docs/serve/lmcache.md"
    configure(page, tmp_path)
    printed = run_shell(on_page("docs/serve/lmcache.md", "kvkit doctor"), tmp_path).stdout
    check_printed(page, "kvkit doctor", printed)


def test_the_example_of_fewer_bits_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configure("docs/serve/precision.md", tmp_path)
    monkeypatch.chdir(tmp_path)
    run_page("docs/serve/precision.md")


@pytest.mark.nightly
def test_the_example_of_an_own_method_runs_and_prints_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nearby.py").write_text(on_page("docs/research/own-method.md", '"""nearby.py'))
    monkeypatch.syspath_prepend(tmp_path)
    assert len(run_page("docs/research/own-method.md")["new"]) == 16


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is missing")
def test_the_endpoint_of_operations_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's own shell lines, with curl told to fail where the answer is an error."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_STATE_HOME")
    (tmp_path / ".curlrc").write_text("silent\nfail\n")
    (port,) = free_ports(1)
    configure("docs/serve/operate.md", tmp_path, f"port = {port}\n")
    starts = "auth=", 'curl -H "$auth" http://127.0.0.1:9477/lookup'
    first = on_page("docs/serve/operate.md", "auth=")
    second = on_page("docs/serve/operate.md", 'curl -H "$auth" http://127.0.0.1:9477/lookup')
    with opened(read_toml(tmp_path / "kvkit.toml"))[0]:
        text = f"{first}echo ---\n{second}".replace(f":{DEFAULT_PORT}", f":{port}")
        shell = run_shell(text, tmp_path)
    for start, printed in zip(starts, shell.stdout.split("---\n"), strict=True):
        check_printed("docs/serve/operate.md", start, printed)


def test_stores_and_tokens_are_as_private_as_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the umask; the endpoint makes the token."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_STATE_HOME")
    configure("docs/serve/operate.md", tmp_path, "port = 0\n")
    with opened(read_toml(tmp_path / "kvkit.toml"))[0]:
        pass
    lines = on_page("docs/serve/security.md", "kvkit doctor kvkit.toml")
    text = f"umask 0\n{lines}".replace("/var/", f"{tmp_path}/var/")
    printed = run_shell(text, tmp_path).stdout.replace(f"{tmp_path}/var/", "/var/")
    check_printed("docs/serve/security.md", "kvkit doctor kvkit.toml", printed)


def test_the_first_command_of_troubleshooting_shows_what_fails(tmp_path: Path) -> None:
    """With a server that is not there."""
    (port,) = free_ports(1)
    text = blocks("docs/serve/troubleshooting.md", "toml")[0].text.replace(":6379", f":{port}")
    (tmp_path / "kvkit.toml").write_text(text.replace("file:///", f"file://{tmp_path}/"))
    lines = on_page("docs/serve/troubleshooting.md", "kvkit doctor kvkit.toml")
    printed = run_shell(f"{lines.strip()} && exit 1 || test $? = 1", tmp_path).stdout
    check_printed("docs/serve/troubleshooting.md", "kvkit doctor kvkit.toml", printed)


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
    for number, recipe in enumerate(section("docs/serve/recipes.md", title)):
        settings = tiny(recipe, tmp_path / str(number))
        assert stored(settings) == WHOLE
        assert loaded(settings, 2) == RECIPES[title], recipe


def test_the_recipe_of_one_host(tmp_path: Path) -> None:
    (recipe,) = section("docs/serve/recipes.md", "One host, eight engines")
    settings = tiny(recipe, tmp_path)
    settings["tiers"]["pool"]["url"] = url = f"shm://recipe-{os.getpid()}"
    try:
        assert stored(settings) == WHOLE
        assert loaded(settings, 2) == [{"pool": WHOLE}] * 2
    finally:
        os.unlink(pool_path(url))


def test_the_recipe_of_half_the_bytes(tmp_path: Path) -> None:
    """The memory and disk of the first recipe, with records that are less than half as large."""
    (recipe,) = section("docs/serve/recipes.md", "Half the bytes")
    plain = {name: value for name, value in recipe.items() if name != "precision"}
    sizes = []
    for number, settings in enumerate((recipe, plain)):
        folder = tmp_path / str(number)
        assert stored(tiny(settings, folder)) == WHOLE
        assert loaded(tiny(settings, folder), 2) == RECIPES["Memory and disk"]
        sizes.append(sum(path.stat().st_size for path in folder.rglob("c.*")))
    assert sizes[0] < sizes[1] * 0.6


def test_the_memory_of_staging_only_keeps_nothing(tmp_path: Path) -> None:
    (recipe,) = section("docs/serve/recipes.md", "Disk only (staging-only)")
    settings = tiny(recipe | {"tiers": {"memory": {"capacity": "1GiB"}, **recipe["tiers"]}}, tmp_path)
    stored(settings)
    cache, place = opened(settings)
    with cache:
        assert cache.load(cache.lookup(TOKENS), place).by_tier == {"disk": WHOLE}
        cache.flush()
        assert cache.staging.free == cache.staging.slots


def test_what_one_node_stored_is_written_back_on_another(tmp_path: Path) -> None:
    (recipe,) = section("docs/serve/recipes.md", "Write back after validation")
    here = tiny(recipe, tmp_path)
    there = here | {"tiers": {"shared": here["tiers"]["shared"]}, "policy": {}}
    assert stored(there) == WHOLE
    assert loaded(here, 2) == [{"shared": WHOLE}, {"memory": WHOLE}]
    assert loaded(here) == [{"disk": WHOLE}]


def test_prefill_finds_what_decode_stored_and_the_other_way_round(tmp_path: Path) -> None:
    prefill, decode = (
        tiny(role, tmp_path) for role in section("docs/serve/recipes.md", "Store here, retrieve there")
    )
    assert stored(decode) == WHOLE
    assert stored(prefill) == 0
    assert loaded(prefill, 2) == [{"shared": WHOLE}, {"memory": WHOLE}]
    assert stored(prefill, salt="another tenant") == WHOLE
    assert loaded(decode, 2, salt="another tenant") == [{"shared": WHOLE}] * 2


def test_pools_of_two_sizes_share_a_store(tmp_path: Path) -> None:
    prefill, decode = (
        tiny(role, tmp_path)
        for role in section("docs/serve/recipes.md", "Two pools of different tensor parallelism")
    )
    (address,) = decode["handoff"]["listen"]
    assert "{rank}" in address
    decode["handoff"] |= {"listen": [f"unix://{tmp_path}/sockets/{{rank}}"], "buffer": "1MiB"}
    assert stored(prefill) == WHOLE
    assert loaded(decode) == [{"pool": WHOLE}]


def test_ranks_have_disks_of_their_own(tmp_path: Path) -> None:
    recipe = next(
        r
        for r in section("docs/serve/recipes.md", "Several disks")
        if r["tiers"]["disk"]["spread"] == "by_rank"
    )
    settings = tiny(recipe, tmp_path)
    for rank in (0, 1):
        assert stored(settings, rank=rank, world=2) == WHOLE
        assert len(list((tmp_path / f"mnt/nvme{rank}").rglob("c.*"))) == 2


def test_a_quota_holds_for_one_tenant(tmp_path: Path) -> None:
    (recipe,) = section("docs/serve/recipes.md", "Quotas, eviction, pins")
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
    (recipe,) = section("docs/serve/recipes.md", "S3")
    settings = tiny(recipe, tmp_path)
    settings["tiers"]["bucket"]["options"] |= s3.options
    settings["tiers"]["bucket"]["url"] = f"s3://{s3.BUCKET}/{tmp_path.name}"
    assert stored(settings) == WHOLE
    assert loaded(settings, 2) == [{"bucket": WHOLE}, {"memory": WHOLE}]


def test_the_recipe_for_redis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the rights that the recipe names, and the password in the environment."""
    (recipe,) = section("docs/serve/recipes.md", "Redis, Valkey")
    (rights,) = re.findall(r"`(~kvkit:\* .*?)`", (ROOT / "docs/serve/recipes.md").read_text())
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
        assert variable in (ROOT / "docs/reference/configuration.md").read_text()
        name, _, value = variable.partition("=")
        monkeypatch.setenv(name, value.strip("'"))
    config = load_config()
    assert (config.chunk_tokens, config.policy.store_to) == (128, ("disk",))


def test_what_wins_over_what(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the page says: settings over the environment's, whole tables over the file's."""
    path = tmp_path / "kvkit.toml"
    path.write_text("[server]\nenabled = true\nport = 1\n")
    monkeypatch.setenv("KVKIT_SERVER__PORT", "2")
    monkeypatch.setenv("KVKIT_SERVER__HOST", "127.0.0.2")
    merged = load_config(path).server
    assert (merged.enabled, merged.port, merged.host) == (True, 1, "127.0.0.2")
    replaced = load_config(path, server={"enabled": True}).server
    assert (replaced.enabled, replaced.port, replaced.host) == (True, 2, "127.0.0.2")


def install_the_tier(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install own-tier.md's package below `folder` and put it on the path; returns its sources."""
    source, site = folder / "kvkit-sqlite", folder / "site"
    source.mkdir()
    (source / "sqlite_tier.py").write_text(on_page("docs/research/own-tier.md", '"""sqlite_tier.py'))
    (source / "test_sqlite_tier.py").write_text(
        on_page("docs/research/own-tier.md", '"""test_sqlite_tier.py')
    )
    (source / "pyproject.toml").write_text(blocks("docs/research/own-tier.md", "toml")[0].text)
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--target", str(site)]
    done = subprocess.run([*pip, str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    monkeypatch.syspath_prepend(str(site))
    return source


@pytest.mark.nightly
def test_the_tier_that_is_shown_keeps_the_contract(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = install_the_tier(tmp_path, monkeypatch)
    passed = run_shell(on_page("docs/research/own-tier.md", "python -m pytest"), source)
    check_printed("docs/research/own-tier.md", "python -m pytest", passed.stdout)
    settings = {
        "tiers": {"rows": {"kind": "sqlite", "path": str(tmp_path / "records.db")}},
        "staging": "4MiB",
    }
    assert stored(settings) == WHOLE
    assert loaded(settings) == [{"rows": WHOLE}]
    assert stat.S_IMODE((tmp_path / "records.db").stat().st_mode) == 0o600
    text = blocks("docs/research/own-tier.md", "toml")[1].text
    (source / "kvkit.toml").write_text(changed(text, {"/var/cache": str(tmp_path)}))
    command = on_page("docs/research/own-tier.md", "kvkit doctor")
    doctor = run_shell(command, source, PYTHONPATH=f"{ROOT}:{tmp_path / 'site'}")
    check_printed("docs/research/own-tier.md", "kvkit doctor", doctor.stdout)
    monkeypatch.delitem(sys.modules, "sqlite_tier")


TWICE = """
import os, sys
import torch, transformers  # once, for that takes longer than the rest

for said in ("", "the second process\\n"):
    print(said, end="", flush=True)
    child = os.fork()
    if not child:
        exec(sys.argv[1])
        sys.exit()
    if os.waitpid(child, 0)[1]:
        sys.exit(1)
"""
"""A program that runs another twice, in a process each."""


@pytest.mark.parametrize("size", ["small", *nightly("whole")])
def test_the_readme_example_reuses_what_it_stored(size: str, tmp_path: Path) -> None:
    code = on_page("README.md", "import torch")
    assert len(code.splitlines()) <= 20
    if size == "small":  # another model alone
        model = save_with_tokenizer(tmp_path / "model")
        code = changed(code, {"smollm2.fetch()": repr(str(model))})
    here = environment(tmp_path)  # a home of its own for the store; the model is where it was
    command = [sys.executable, "-c", TWICE, code]
    run = subprocess.run(command, env=here, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    first, second = run.stdout.split("the second process\n")
    assert first.startswith("{} ")
    assert second.startswith("{'disk': ")
    assert stat.S_IMODE((tmp_path / ".cache" / "kvkit" / "store").stat().st_mode) == 0o700


@pytest.mark.nightly
def test_the_programs_of_the_page_on_hugging_face(tmp_path: Path) -> None:
    page = "docs/research/huggingface.md"
    first = on_page("docs/research/huggingface.md", "import numpy as np")
    second = on_page("docs/research/huggingface.md", "with CachedModel.open")
    here = environment(tmp_path)
    run = subprocess.run(
        [sys.executable, "-c", first + second], env=here, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    check_printed(page, "import numpy as np", run.stdout)
    check_printed(page, "with CachedModel.open", run.stdout)


def test_the_program_of_the_page_on_jax(tmp_path: Path) -> None:
    code = on_page("docs/research/jax.md", '"""engine.py')
    (tmp_path / "engine.py").write_text(changed(code, {"/tmp/kvkit-jax": str(tmp_path / "store")}))
    done = run_shell(on_page("docs/research/jax.md", "python engine.py"), tmp_path)
    check_printed("docs/research/jax.md", "python engine.py", done.stdout)


def test_the_first_program_of_the_research_pages(tmp_path: Path) -> None:
    page = "docs/research/quick-start.md"
    (tmp_path / "first.py").write_text(on_page("docs/research/quick-start.md", '"""first.py'))
    done = run_shell(on_page("docs/research/quick-start.md", "python first.py"), tmp_path)
    check_printed(page, "python first.py", done.stdout)
    done = run_shell(on_page("docs/research/quick-start.md", "kvkit inspect"), tmp_path)
    check_printed(page, "kvkit inspect", done.stdout)
