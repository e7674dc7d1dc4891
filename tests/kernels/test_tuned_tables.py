"""A problem gets its configuration from the right tuned table, and a broken file does no harm."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkit.environment import host_name, slug_of
from kvkit.kernels.tuning import tables
from kvkit.kernels.tuning.configs import HostLaunch, KernelConfig, ProblemBucket, host_config
from kvkit.kernels.tuning.tables import (
    Build,
    TableError,
    Tuned,
    TunedKey,
    build_of,
    forget_tables,
    load_table,
    merged,
    ranked,
    read_table,
    tuned_folder,
    write_table,
)

GPU = "NVIDIA H200"
FILE = "nvidia-h200.json"
DEFAULT, SMALL, LARGE = (KernelConfig((("TILE", size),)) for size in (128, 64, 256))
SPACE = (DEFAULT, SMALL, LARGE)


def kernel(x: int) -> int:
    """What is tuned."""
    return x


HERE = build_of(kernel, False)
OTHER_SOURCE = Build("0", HERE.compiler, HERE.driver)


def best(bucket: ProblemBucket, default: KernelConfig, space: tuple[KernelConfig, ...]) -> KernelConfig:
    return tables.best(bucket, default, space, kernel)


def tuned(config: KernelConfig) -> Tuned:
    return Tuned(config, 1.5, 2.0)


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Path]]:
    """Tables of the package and of the user in folders of the test's own; the GPU here is an H200."""
    found = {"shipped": tmp_path / "shipped", "user": tmp_path / "user"}
    monkeypatch.setattr(tables, "SHIPPED", found["shipped"])
    monkeypatch.setenv("KVKIT_TUNED", str(found["user"]))
    monkeypatch.setattr(tables, "gpu_name", lambda: GPU)
    forget_tables()
    yield found
    forget_tables()


def write(folder: Path, table: dict[ProblemBucket, Tuned], build: Build = HERE) -> Path:
    write_table(folder / FILE, GPU, {TunedKey(bucket, build): tuned for bucket, tuned in table.items()})
    return folder / FILE


def test_an_exact_bucket(folders: dict[str, Path]) -> None:
    bucket = ProblemBucket("op", "bf16", (64, 8))
    write(folders["user"], {bucket: tuned(LARGE), ProblemBucket("op", "bf16", (64, 16)): tuned(SMALL)})
    assert best(bucket, DEFAULT, SPACE) == LARGE


def test_the_nearest_sizes(folders: dict[str, Path]) -> None:
    write(
        folders["user"],
        {
            ProblemBucket("op", "bf16", (64, 8)): tuned(SMALL),
            ProblemBucket("op", "bf16", (1024, 8)): tuned(LARGE),
        },
    )
    assert best(ProblemBucket("op", "bf16", (128, 16)), DEFAULT, SPACE) == SMALL
    assert best(ProblemBucket("op", "bf16", (4096, 2)), DEFAULT, SPACE) == LARGE


@pytest.mark.parametrize(
    "other",
    [
        ProblemBucket("other", "bf16", (64,)),
        ProblemBucket("op", "fp32", (64,)),
        ProblemBucket("op", "bf16", (64, 1)),
    ],
)
def test_another_op_form_or_number_of_sizes_is_no_neighbour(
    folders: dict[str, Path], other: ProblemBucket
) -> None:
    write(folders["user"], {other: tuned(LARGE)})
    assert best(ProblemBucket("op", "bf16", (64,)), DEFAULT, SPACE) == DEFAULT


FORM = "bf16 PAGE=16 SIZE=128 GROUP=4 VALUES=True"
FOUR = (*SPACE, KernelConfig((("TILE", 512),)))


def attending(form: str, *sizes: int) -> ProblemBucket:
    return ProblemBucket("op", form, sizes or (64,))


def test_other_pages_and_groups_come_after_all_sizes_of_the_form(folders: dict[str, Path]) -> None:
    same_form, other_page = attending(FORM, 4096), attending(FORM.replace("PAGE=16", "PAGE=32"))
    far_page = attending(FORM.replace("PAGE=16", "PAGE=128"))
    write(folders["user"], {far_page: tuned(SMALL), other_page: tuned(LARGE)})
    assert best(attending(FORM), DEFAULT, SPACE) == LARGE
    assert best(attending(FORM.replace("GROUP=4", "GROUP=7")), DEFAULT, SPACE) == LARGE
    write(folders["user"], {same_form: tuned(SMALL), other_page: tuned(LARGE)})
    assert best(attending(FORM), DEFAULT, SPACE) == SMALL


@pytest.mark.parametrize(
    "other",
    [
        FORM.replace("PAGE=16", "PAGE=0"),
        FORM.replace("SIZE=128", "SIZE=64"),
        FORM.replace("VALUES=True", "VALUES=False"),
        FORM.replace("bf16", "fp16"),
        FORM.replace(" GROUP=4", ""),
    ],
)
def test_one_block_and_other_code_are_not_alike(folders: dict[str, Path], other: str) -> None:
    write(folders["user"], {attending(other): tuned(LARGE)})
    assert best(attending(FORM), DEFAULT, SPACE) == DEFAULT
    write(folders["user"], {attending(FORM): tuned(LARGE)})
    assert best(attending(other), DEFAULT, SPACE) == DEFAULT


@pytest.mark.parametrize(("untried", "wanted"), [(0, LARGE), (1, LARGE), (2, DEFAULT)])
def test_short_searches_count_for_their_own_form_and_device_alone(
    folders: dict[str, Path], untried: int, wanted: KernelConfig
) -> None:
    """A quarter of four configurations may have been left out."""
    result = Tuned(LARGE, 1.5, 2.0, untried)
    write(folders["user"], {attending(FORM): result})
    assert best(attending(FORM, 128), DEFAULT, FOUR) == LARGE
    assert best(attending(FORM.replace("PAGE=16", "PAGE=64")), DEFAULT, FOUR) == wanted
    (folders["user"] / FILE).unlink()
    h100 = "NVIDIA H100 80GB HBM3"
    write_table(folders["shipped"] / f"{slug_of(h100)}.json", h100, {TunedKey(attending(FORM), HERE): result})
    assert best(attending(FORM), DEFAULT, FOUR) == wanted


def test_results_of_related_devices(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """An H100's count on an H200 after its own of the same form and sizes, and nowhere else."""
    h100 = "NVIDIA H100 PCIe"
    write_table(
        folders["shipped"] / f"{slug_of(h100)}.json", h100, {TunedKey(attending(FORM), HERE): tuned(SMALL)}
    )
    write(folders["user"], {attending(FORM, 4096): tuned(LARGE)})
    assert best(attending(FORM), DEFAULT, SPACE) == SMALL
    write(folders["user"], {attending(FORM): tuned(LARGE)})
    assert best(attending(FORM), DEFAULT, SPACE) == LARGE
    monkeypatch.setattr(tables, "gpu_name", lambda: "NVIDIA A100-SXM4-80GB")
    forget_tables()
    assert best(attending(FORM), DEFAULT, SPACE) == DEFAULT


def test_what_the_kernel_does_not_have_is_passed_over(folders: dict[str, Path]) -> None:
    near, far = ProblemBucket("op", "bf16", (64,)), ProblemBucket("op", "bf16", (512,))
    write(folders["user"], {near: tuned(KernelConfig((("TILE", 999),))), far: tuned(LARGE)})
    assert best(near, DEFAULT, SPACE) == LARGE
    assert best(near, DEFAULT, (DEFAULT, SMALL)) == DEFAULT


def test_the_user_comes_before_the_package(folders: dict[str, Path]) -> None:
    one, two = ProblemBucket("op", "bf16", (64,)), ProblemBucket("op", "fp32", (64,))
    write(folders["shipped"], {one: tuned(SMALL), two: tuned(SMALL)})
    write(folders["user"], {one: tuned(LARGE)})
    assert best(one, DEFAULT, SPACE) == LARGE
    assert best(two, DEFAULT, SPACE) == SMALL


def test_without_a_gpu_and_without_a_table(monkeypatch: pytest.MonkeyPatch, folders: dict[str, Path]) -> None:
    bucket = ProblemBucket("op", "bf16", (64,))
    assert best(bucket, DEFAULT, SPACE) == DEFAULT
    write(folders["user"], {bucket: tuned(LARGE)})
    monkeypatch.setattr(tables, "gpu_name", lambda: None)
    forget_tables()
    assert best(bucket, DEFAULT, SPACE) == DEFAULT


def test_tables_are_read_once(folders: dict[str, Path]) -> None:
    bucket = ProblemBucket("op", "bf16", (64,))
    path = write(folders["user"], {bucket: tuned(LARGE)})
    assert best(bucket, DEFAULT, SPACE) == LARGE
    path.unlink()
    assert best(bucket, DEFAULT, SPACE) == LARGE
    assert tables._known.cache_info().hits == 1


def test_only_the_present_source_counts(folders: dict[str, Path]) -> None:
    """However near the sizes of another source's are."""
    near, far = ProblemBucket("op", "bf16", (64,)), ProblemBucket("op", "bf16", (512,))
    old, new = tuned(SMALL), tuned(LARGE)
    path = write(folders["user"], {near: old}, OTHER_SOURCE)
    assert best(near, DEFAULT, SPACE) == DEFAULT
    write_table(path, GPU, {TunedKey(near, OTHER_SOURCE): old, TunedKey(far, HERE): new})
    assert best(near, DEFAULT, SPACE) == LARGE


def test_other_compilers_and_drivers_stand_in() -> None:
    """Own results first, then the compiler's, the driver's, the fastest; nearer sizes before all."""
    bucket, build = ProblemBucket("op", "bf16", (64,)), Build("5", "triton 3.6", "580")
    builds = [
        build,
        Build("5", "triton 3.6", "570"),
        Build("5", "triton 3.9", "580"),
        Build("5", "triton 3.5", "1"),
        Build("5", "triton 3.4", "2"),
    ]
    table = {
        TunedKey(bucket, one): Tuned(KernelConfig((("A", i),)), us, None)
        for i, (one, us) in enumerate(zip(builds, (5.0, 4.0, 3.0, 1.0, 2.0), strict=True))
    }
    far = TunedKey(ProblemBucket("op", "bf16", (128,)), build)
    for i in range(len(builds)):
        found = ranked(table | {far: tuned(LARGE)}, bucket, build)
        assert found == (*(KernelConfig((("A", n),)) for n in range(i, len(builds))), LARGE)
        del table[TunedKey(bucket, builds[i])]


def test_the_host_has_a_table_of_its_own(folders: dict[str, Path]) -> None:
    bucket, few, many = ProblemBucket("op", "bf16", (64,)), host_config(threads=1), host_config(threads=8)
    path = folders["user"] / f"{slug_of(host_name())}.json"
    write_table(path, host_name(), {TunedKey(bucket, build_of(kernel, True)): tuned(many)})
    assert tables.best(bucket, few, (few, many), kernel, host=True) == many
    assert tables.best(bucket, few, (few, many), kernel) == few
    assert str(many) == "threads=8"


def test_a_host_launch_has_its_tiles_as_arguments() -> None:
    calls: list[dict[str, int]] = []
    HostLaunch(lambda **given: calls.append(given), {"a": 1}, host_config(threads=2, tile=3)).run()
    assert calls == [{"a": 1, "threads": 2, "tile": 3}]


def test_a_kernel_without_source_has_its_default(folders: dict[str, Path]) -> None:
    bucket = ProblemBucket("op", "bf16", (64,))
    write(folders["user"], {bucket: tuned(LARGE)})
    assert tables.best(bucket, DEFAULT, SPACE, len) == DEFAULT


def test_merged_tables_keep_what_gains_more_over_the_default() -> None:
    """A machine that is faster throughout does not win by that."""
    key, other = (TunedKey(ProblemBucket("op", "bf16", (n,)), HERE) for n in (1, 2))
    slow, fast = Tuned(SMALL, 10.0, 20.0), Tuned(LARGE, 8.0, 9.0)
    for order in ([slow, fast], [fast, slow]):
        assert merged([{key: one} for one in order]) == {key: slow}
    broken = Tuned(LARGE, 8.0, None)
    for order in ([slow, broken], [broken, slow]):
        assert merged([{key: one} for one in order]) == {key: broken}
    assert merged([{key: slow}, {other: fast}]) == {key: slow, other: fast}


def test_what_was_tuned_in_this_process_is_used(folders: dict[str, Path]) -> None:
    bucket = ProblemBucket("op", "bf16", (64,))
    for config in SPACE:
        write(folders["user"], {bucket: tuned(config)})
        assert best(bucket, DEFAULT, SPACE) == config


ENTRY = {
    "op": "op",
    "form": "",
    "sizes": [1],
    "source": "5",
    "compiler": "triton 3",
    "driver": "580",
    "tiles": {"A": 1},
    "warps": 4,
    "stages": 1,
    "us": 1.0,
    "default_us": None,
    "untried": 0,
}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        "null",
        "\xff",
        json.dumps({"device": 3, "entries": []}),
        json.dumps({"device": GPU}),
        json.dumps({"device": GPU, "entries": [[]]}),
        json.dumps({"device": "NVIDIA A100", "entries": []}),
        *(json.dumps({"device": GPU, "entries": [ENTRY | wrong]}) for wrong in (
            {"sizes": 3},
            {"sizes": ["1"]},
            {"tiles": [1]},
            {"tiles": {"A": 1.5}},
            {"warps": -4},
            {"warps": "4"},
            {"us": "fast"},
            {"op": 1},
        )),
        *(
            json.dumps({"device": GPU, "entries": [{k: ENTRY[k] for k in ENTRY if k != lost}]})
            for lost in ENTRY
        ),
    ],
)  # fmt: skip
def test_a_broken_table_is_a_warning(
    folders: dict[str, Path], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    bucket = ProblemBucket("op", "bf16", (64,))
    write(folders["shipped"], {bucket: tuned(LARGE)})
    folders["user"].mkdir()
    (folders["user"] / FILE).write_text(text, encoding="latin-1")
    with caplog.at_level(logging.WARNING):
        assert best(bucket, DEFAULT, SPACE) == LARGE
        assert best(bucket, DEFAULT, SPACE) == LARGE
    (record,) = caplog.records
    assert str(folders["user"] / FILE) in record.getMessage()
    with pytest.raises(TableError, match=FILE):
        read_table(folders["user"] / FILE, "nvidia-h200")


def test_an_unreadable_table_is_a_warning(folders: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    (folders["user"] / FILE).mkdir(parents=True)
    assert best(ProblemBucket("op", "", (1,)), DEFAULT, SPACE) == DEFAULT
    assert FILE in caplog.text


def test_a_good_entry_is_read(folders: dict[str, Path]) -> None:
    folders["user"].mkdir()
    (folders["user"] / FILE).write_text(json.dumps({"device": GPU, "entries": [ENTRY]}))
    expected = Tuned(KernelConfig((("A", 1),), 4, 1), 1.0, None)
    key = TunedKey(ProblemBucket("op", "", (1,)), Build("5", "triton 3", "580"))
    assert dict(load_table("nvidia-h200")) == {key: expected}


def test_where_the_users_tables_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("KVKIT_TUNED", str(tmp_path / "own"))
    assert tuned_folder() == tmp_path / "own"
    monkeypatch.delenv("KVKIT_TUNED")
    assert tuned_folder() == tmp_path / "kvkit" / "tuned"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert tuned_folder() == Path.home() / ".cache" / "kvkit" / "tuned"


words = st.text("abc=_ ", min_size=1, max_size=9)
some_configs = st.builds(
    KernelConfig,
    st.dictionaries(words, st.integers(0, 1 << 12), max_size=3).map(lambda d: tuple(d.items())),
    st.sampled_from((1, 4, 8)),
    st.integers(1, 5),
)
buckets = st.builds(
    ProblemBucket, words, words, st.lists(st.integers(0, 20).map(lambda n: 1 << n), max_size=3).map(tuple)
)
times = st.floats(0.1, 1e6)
keys = st.builds(TunedKey, buckets, st.builds(Build, words, words, words))
results = st.builds(Tuned, some_configs, times, st.none() | times, st.integers(0, 9))
some_tables = st.dictionaries(keys, results, max_size=6)


@given(some_tables)
def test_a_table_comes_back_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, table: dict[TunedKey, Tuned]
) -> None:
    folder = tmp_path_factory.mktemp("tables")
    path = folder / FILE
    write_table(path, GPU, table)
    assert read_table(path, "nvidia-h200") == table
    assert [file.name for file in folder.iterdir()] == [FILE]


@given(
    st.sets(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=8),
    st.tuples(*[st.integers(0, 20)] * 2),
)
def test_the_nearest_comes_first(known: set[tuple[int, int]], wanted: tuple[int, int]) -> None:
    def bucket(sizes: tuple[int, int]) -> ProblemBucket:
        return ProblemBucket("op", "", (1 << sizes[0], 1 << sizes[1]))

    table = {
        TunedKey(bucket(sizes), HERE): tuned(KernelConfig((("A", sizes[0]), ("B", sizes[1]))))
        for sizes in known
    }
    found = [tuple(size for _, size in config.tiles) for config in ranked(table, bucket(wanted), HERE)]
    assert sorted(found) == sorted(known)
    distances = [abs(a - wanted[0]) + abs(b - wanted[1]) for a, b in found]
    assert distances == sorted(distances)


def test_a_failed_write_leaves_the_old_table(folders: dict[str, Path]) -> None:
    bucket = ProblemBucket("op", "bf16", (64,))
    path = write(folders["user"], {bucket: tuned(LARGE)})
    before = path.read_bytes()
    with pytest.raises(TypeError):
        write_table(path, GPU, {TunedKey(bucket, HERE): Tuned(SMALL, object(), 2.0)})  # type: ignore[arg-type]
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == [FILE]


def test_importing_it_leaves_triton_alone() -> None:
    script = (
        "import sys; from kvkit.kernels.tuning import compiling, devices, problems, search, tables;"
        "print('triton' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
