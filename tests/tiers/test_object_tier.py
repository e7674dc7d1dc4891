"""A tier of objects counts correctly when its store refuses, and during concurrent calls."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from kvkit.staging import Staging
from kvkit.tiers.base import TierFull
from kvkit.tiers.folder import Folder
from kvkit.tiers.objects import ObjectTier
from kvkit.tiers.settings import TierConfig
from kvkit.tiers.testing.contract import (
    DEADLINE_S,
    SLOT_BYTES,
    Completions,
    TierContract,
    put,
    record_bytes,
    record_names,
)


class Immovable(MemoryFileSystem):  # type: ignore[misc] # fsspec is untyped
    """A store whose renames fail."""

    protocol = "immovable"

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        raise PermissionError(path2)


def test_a_failed_move_leaves_nothing(staging: Staging) -> None:
    fsspec.register_implementation("immovable", Immovable, clobber=True)
    root = uuid.uuid4().hex
    tier = ObjectTier(f"immovable://{root}")
    (error,) = put(tier, staging, record_names(1))
    assert isinstance(error, PermissionError)
    assert [path for path in MemoryFileSystem.store if root in path] == []
    assert tier.match_prefix(record_names(1)) == 0
    tier.close()
    staging.close()


class Stuck(MemoryFileSystem):  # type: ignore[misc] # fsspec is untyped
    """A store that removes no object of these names."""

    protocol = ("stuck", "memory")
    kept: ClassVar[set[str]] = set()

    def rm_file(self, path: str) -> None:
        if any(path.endswith(name) for name in self.kept):
            raise PermissionError(path)
        super().rm_file(path)


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectTier]:
    """A tier with room for four records, whose second cannot be removed."""
    names = record_names(4)
    monkeypatch.setattr(Stuck, "kept", {names[1]})
    fsspec.register_implementation("stuck", Stuck, clobber=True)
    with closing(
        ObjectTier(TierConfig(url=f"stuck://{uuid.uuid4().hex}", threads=1, capacity=4 * SLOT_BYTES))
    ) as tier:
        yield tier


def test_an_object_that_cannot_be_deleted_does_not_keep_the_others(
    stuck: ObjectTier, staging: Staging
) -> None:
    names = record_names(4)
    assert put(stuck, staging, names) == [None] * 4
    with pytest.raises(PermissionError):
        stuck.delete(names)
    assert [name for name, _ in stuck.scan()] == [names[1]]
    staging.close()


def test_a_victim_that_cannot_be_deleted_stays_in_the_index_and_the_others_go(
    stuck: ObjectTier, staging: Staging
) -> None:
    """Three victims for one record."""
    names, large = record_names(4), record_names(5)[4]
    assert put(stuck, staging, names) == [None] * 4
    with closing(Staging(3 * SLOT_BYTES, 1)) as wide:
        assert isinstance(put(stuck, wide, [large], 3 * SLOT_BYTES)[0], PermissionError)
    assert {name for name, _ in stuck.scan()} == {names[1], names[3]}, "what the index let go stays"
    assert stuck.evicted == 2
    assert put(stuck, staging, [names[0], names[2]]) == [None] * 2
    assert {name for name, _ in stuck.scan()} == set(names), "the record that stayed has no room"
    assert stuck.evicted == 2
    staging.close()


class Held(MemoryFileSystem):  # type: ignore[misc] # fsspec is untyped
    """A store whose writes wait for `go`."""

    protocol = ("held", "memory")
    writing = threading.Event()
    go = threading.Event()

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        self.writing.set()
        assert self.go.wait(DEADLINE_S)
        super().pipe_file(path, value, mode, **kwargs)


def test_a_put_under_way_is_no_hit_and_keeps_its_room(staging: Staging) -> None:
    fsspec.register_implementation("held", Held, clobber=True)
    tier = ObjectTier(TierConfig(url=f"held://{uuid.uuid4().hex}", capacity=SLOT_BYTES))
    names = record_names(2)
    (lease,) = staging.acquire(1, DEADLINE_S)
    lease.array[:] = record_bytes(names[0])
    lease.used = SLOT_BYTES
    done = Completions()
    tier.put(names[:1], [lease], done)
    lease.release()
    assert Held.writing.wait(DEADLINE_S)
    assert tier.match_prefix(names) == 0
    assert isinstance(put(tier, staging, names[1:])[0], TierFull)
    Held.go.set()
    assert done.wait(1) == [(names[0], None)]
    assert tier.match_prefix(names) == 1
    assert put(tier, staging, names[1:]) == [None]
    assert tier.match_prefix(names) == 0, "the first was let go for the second"
    TierContract().finish(tier, staging)


@pytest.mark.parametrize("forgets", ["delete", "read", "get_ranges"])
def test_what_is_put_while_it_is_forgotten_stays_counted(
    forgets: str, tmp_path: Path, staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the simulation found (docs/evidence/verification.md): its room was given to others."""
    names, held = record_names(2), dict[str, bool]()
    with closing(ObjectTier(TierConfig(url=str(tmp_path), capacity=SLOT_BYTES, threads=2))) as tier:
        tier.subscribe(lambda names, now: held.update(dict.fromkeys(names, now)))
        put(tier, staging, names[:1])
        (tmp_path / names[0]).unlink()

        stored = {"get_ranges": "read_ranges"}.get(forgets, forgets)
        call = getattr(Folder, stored)

        def after(folder: Folder, *arguments: Any) -> Any:
            try:
                return call(folder, *arguments)
            finally:
                monkeypatch.undo()
                assert put(tier, staging, names[:1]) == [None]

        monkeypatch.setattr(Folder, stored, after)
        buffer = memoryview(bytearray(SLOT_BYTES))
        if forgets == "delete":
            tier.delete(names[:1])
        else:
            with pytest.raises(FileNotFoundError):
                tier.read(names[0], buffer) if forgets == "read" else tier.get_ranges(
                    names[0], [(0, SLOT_BYTES)], [buffer]
                )
        assert held == {names[0]: True}
        assert put(tier, staging, names[1:]) == [None]
        assert [name for name, _ in tier.scan()] == names[1:], "the first still lies there, uncounted"
    staging.close()


@pytest.mark.parametrize("meanwhile", ["deleted", "written by another"])
def test_what_is_forgotten_while_it_is_written_keeps_its_room(
    meanwhile: str, tmp_path: Path, staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the simulation found: the tier would hold more than its capacity."""
    config = TierConfig(url=str(tmp_path), capacity=2 * SLOT_BYTES)
    names = record_names(4)
    with closing(ObjectTier(config)) as tier:
        write, others = Folder.write, [names[0]]

        def meddle(folder: Folder, name: str, data: memoryview) -> None:
            if name not in others:
                write(folder, name, data)
                return
            others.remove(name)
            if meanwhile == "deleted":
                tier.delete([name])
                write(folder, name, data)
            else:
                tier.write(name, data)
                raise OSError("the second of two writers")

        monkeypatch.setattr(Folder, "write", meddle)
        put(tier, staging, names[:1])
        for name in names[1:]:
            assert put(tier, staging, [name]) == [None]
        assert sum(size for _, size in tier.scan()) <= 2 * SLOT_BYTES
