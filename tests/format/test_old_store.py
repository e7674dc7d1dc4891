"""A store that an earlier kvkit wrote is read, and today's kvkit writes the same (support/old_store.py)."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import zarr
from old_store import CASES, CHUNK, STORE, Case, write
from typer.testing import CliRunner

from kvkit import cli
from kvkit.format import arrays, codecs
from kvkit.format.names import coordinates
from kvkit.format.record import Damage, RecordFormat

each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def files(store: Path) -> dict[str, bytes]:
    return {str(path.relative_to(store)): path.read_bytes() for path in store.rglob("*") if path.is_file()}


def plain(record: bytes) -> bytes:
    """What was compressed: an encoder's next version may find a shorter way to say the same."""
    out = np.zeros(1 << 16, np.uint8)
    size = codecs.decompress(record, out)
    assert not isinstance(size, Damage), size
    return out[:size].tobytes()


@each_case
def test_the_cache_loads_the_kv_that_was_stored(tmp_path: Path, case: Case) -> None:
    store = Path(shutil.copytree(STORE, tmp_path / "store"))
    engine, tokens = case.engine(), case.tokens()
    table = engine.table(len(tokens))
    with case.cache(store, engine) as cache:
        hit = cache.lookup(tokens, engine.namespace)
        assert hit.by_tier == {"store": case.chunks * CHUNK}
        assert cache.load(hit, engine.places(table)).tokens == hit.tokens
        engine.assert_loaded(tokens, table, case.chunks)
    assert files(store) == files(STORE), "nothing was taken for damaged"


@each_case
def test_zarr_opens_the_arrays(case: Case) -> None:
    engine = case.engine()
    for group in range(case.groups):
        form = RecordFormat.of(engine.layout, group, engine.namespace)
        array = zarr.open_array(STORE / form.array, mode="r")
        for key in engine.keys(case.tokens()):
            kv = np.asarray(array[coordinates(key)])
            assert kv.shape == form.shape
            assert kv.tobytes() == engine.kv(key, group).tobytes()


def test_inspect_lists_it_without_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    result = CliRunner().invoke(cli.app, ["inspect", str(STORE)])
    assert result.exit_code == 0, result.output
    for case in CASES.values():
        engine = case.engine()
        for group in range(case.groups):
            digest, _, index = RecordFormat.of(engine.layout, group, engine.namespace).array.partition("/")
            rows = [line for line in result.stdout.splitlines() if digest in line]
            cells = [cell.strip() for cell in rows[group].strip("│").split("│")]
            assert (cells[1], cells[3], cells[-1]) == (index, str(case.chunks), "0")


def test_the_same_kv_is_stored_as_the_same_bytes(tmp_path: Path) -> None:
    write(tmp_path)
    now, then = files(tmp_path), files(STORE)
    assert set(now) == set(then)
    for name, data in now.items():
        if name.endswith("zarr.json"):
            assert arrays.differences(data, then[name]) == []
        else:
            assert plain(data) == plain(then[name]), name
