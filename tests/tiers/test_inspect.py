"""A listing of a store names records, damage and foreign files, and changes nothing."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
import redis
from memory_limits import Measured
from record_corpus import changed
from s3_fixture import s3  # noqa: F401 - a fixture
from store_listing import CHUNK, fill, form_of, listings, only, records

from kvkit.format.layout import KVLayout
from kvkit.format.record import Damage, RecordFormat
from kvkit.lab.testbed.engine_stub import small_layout
from kvkit.lab.testbed.servers import RedisServer, S3Server
from kvkit.observe.inspect import list_store, list_tier
from kvkit.tiers.settings import TierConfig


def test_a_store_of_several_namespaces_and_groups(tmp_path: Path) -> None:
    one = fill(str(tmp_path), 3, groups=2)
    two = fill(str(tmp_path), 2, salt="secret", revision="v2")
    found = listings(str(tmp_path))
    assert set(found) == {form_of(one, 0).array, form_of(one, 1).array, form_of(two).array}
    for engine, group, chunks in ((one, 0, 3), (one, 1, 3), (two, 0, 2)):
        form = form_of(engine, group)
        listing = found[form.array]
        assert (listing.chunks, listing.tokens, listing.chunk_tokens) == (chunks, chunks * CHUNK, CHUNK)
        assert listing.bytes == chunks * form.record_bytes
        assert listing.damaged == []
        assert listing.namespace == json.loads(json.dumps(engine.namespace.public()))
    assert "secret" not in str(found), "the salt is not shown"


def test_groups_of_heads_are_one_chunk(tmp_path: Path) -> None:
    (group,) = small_layout().groups
    layout = KVLayout(tuple(replace(group, kv_heads=1, model_heads=2, first_head=head) for head in (0, 1)))
    engine = fill(str(tmp_path), layout=layout)
    listing = only(str(tmp_path))
    assert (listing.chunks, listing.tokens, listing.damaged) == (3, 3 * CHUNK, [])
    assert listing.bytes == 6 * form_of(engine).record_bytes
    for file in sorted(tmp_path.rglob("c.*"))[:2]:
        file.write_bytes(b"")
    listing = only(str(tmp_path))
    assert (listing.chunks, listing.tokens, len(listing.damaged)) == (3, 2 * CHUNK, 2)


@pytest.mark.parametrize("codec", ["zstd", "bitshuffle-zstd"])
def test_compressed_records(tmp_path: Path, codec: str) -> None:
    fill(str(tmp_path), 3, codec=codec)
    listing = only(str(tmp_path))
    assert (listing.chunks, listing.tokens, listing.damaged) == (3, 24, [])
    assert listing.bytes == sum(path.stat().st_size for path in records(tmp_path))
    data = bytearray(records(tmp_path)[1].read_bytes())
    data[len(data) // 2] ^= 1
    records(tmp_path)[1].write_bytes(data)
    assert len(only(str(tmp_path)).damaged) == 1


def flip(position: Callable[[RecordFormat], int]) -> Callable[[bytes, RecordFormat], bytes]:
    def damage(data: bytes, form: RecordFormat) -> bytes:
        changed = bytearray(data)
        changed[position(form)] ^= 4
        return bytes(changed)

    return damage


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data, form: b"", "not a kvkit record"),
        (lambda data, form: b"something else" * 1000, "not a kvkit record"),
        (lambda data, form: data[:100], "not a kvkit record"),
        (lambda data, form: data[: form.header_bytes - 1], "header cut short"),
        (lambda data, form: data[:-1], Damage.TRUNCATED),
        (lambda data, form: data + b"\0", Damage.TRUNCATED),
        (flip(lambda form: 8), "version"),
        (flip(lambda form: 70), "header checksum differs"),  # of the namespace digest
        (flip(lambda form: 150), "header checksum differs"),  # of the key
        (flip(lambda form: form.header_bytes - 1), "header checksum differs"),  # of the padding
        (flip(lambda form: form.header_bytes), Damage.LAYER),
        (flip(lambda form: form.layers_end - 1), Damage.LAYER),
        (flip(lambda form: form.layers_end), Damage.TRAILER),
        (flip(lambda form: form.record_bytes - 1), Damage.TRAILER),
    ],
)
def test_a_damaged_record_is_listed_with_its_damage(
    tmp_path: Path, damage: Callable[[bytes, RecordFormat], bytes], reason: str
) -> None:
    form = form_of(fill(str(tmp_path)))
    victim = records(tmp_path)[1]
    victim.write_bytes(damage(victim.read_bytes(), form))
    listing = only(str(tmp_path))
    ((name, told),) = listing.damaged
    assert name == str(victim.relative_to(tmp_path))
    assert reason in told
    assert (listing.chunks, listing.tokens) == (3, 2 * CHUNK)
    assert listing.bytes == sum(path.stat().st_size for path in records(tmp_path))


def test_a_record_under_the_name_of_another(tmp_path: Path) -> None:
    fill(str(tmp_path))
    one, two, _ = records(tmp_path)
    two.write_bytes(one.read_bytes())
    assert only(str(tmp_path)).damaged == [(str(two.relative_to(tmp_path)), Damage.KEY)]


@pytest.mark.parametrize("other", ["namespace", "group"])
def test_a_record_in_the_array_of_another(tmp_path: Path, other: str) -> None:
    if other == "group":
        engine = fill(str(tmp_path), 1, groups=2)
        target = tmp_path / form_of(engine, 1).array
    else:
        engine = fill(str(tmp_path), 1)
        target = tmp_path / form_of(fill(str(tmp_path), 1, revision="v2")).array
    (record,) = records(tmp_path / form_of(engine).array)
    (target / record.name).write_bytes(record.read_bytes())
    listing = listings(str(tmp_path))[str(target.relative_to(tmp_path))]
    assert listing.damaged == [(str((target / record.name).relative_to(tmp_path)), Damage.NAMESPACE)]


def test_what_is_not_a_record_is_passed_over(tmp_path: Path) -> None:
    form = form_of(fill(str(tmp_path)))
    array = tmp_path / form.array
    for name in (".tmp-0123", "c.txt", "c.1.2.0.0.0", "c.1.2.0.0.0.0.bak", "c.-1.2.0.0.0.0", "notes"):
        (array / name).write_bytes(b"x" * 100)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "c.h").write_bytes(b"x")
    listing = only(str(tmp_path))
    assert (listing.array, listing.chunks, listing.bytes) == (form.array, 3, 3 * form.record_bytes)


@pytest.mark.parametrize("text", [None, "", "{broken", "[]", '{"attributes": {"kvkit": {"namespace": [1]}}}'])
def test_a_store_without_a_usable_zarr_json(tmp_path: Path, text: str | None) -> None:
    array = tmp_path / form_of(fill(str(tmp_path))).array
    (array / "zarr.json").unlink()
    if text is not None:
        (array / "zarr.json").write_text(text)
    listing = only(str(tmp_path))
    assert listing.namespace == {}
    assert (listing.chunks, listing.tokens, listing.damaged) == (3, 24, [])


def test_any_fsspec_url_and_any_way_to_write_it(tmp_path: Path) -> None:
    bucket = f"memory://{uuid.uuid4().hex}"
    engine = fill(bucket)
    fill(str(tmp_path))
    for url in (bucket, f"{bucket}/", str(tmp_path), f"{tmp_path}/", f"file://{tmp_path}"):
        assert (only(url).array, only(url).tokens) == (form_of(engine).array, 24)


@pytest.mark.parametrize("spread", ["by_key", "stripe", "by_rank"])
def test_a_tier_of_several_paths(spread: str, tmp_path: Path) -> None:
    urls = [str(tmp_path / path) for path in "ab"]
    engine = fill(urls, 5, spread=spread, codec="zstd")
    tier = TierConfig.model_validate({"url": urls, "spread": spread})
    for path in urls:
        Path(path).mkdir(exist_ok=True)
    (listing,) = (listing for listing, done in list_tier("disk", tier) if done)
    assert (listing.array, listing.chunks, listing.damaged) == (form_of(engine).array, 5, [])
    assert listing.namespace["model"] == "test"


def test_a_redis_server(tmp_path: Path) -> None:
    with RedisServer(tmp_path, "valkey") as server:
        engine = fill(server.url)
        redis.Redis("127.0.0.1", server.port).lpush(f"kvkit:{form_of(engine).array}/c.1.2.0.0.0.0", "a list")
        assert (only(server.url).array, only(server.url).tokens) == (form_of(engine).array, 24)
    with pytest.raises(OSError, match="cannot be listed"):
        only(server.url)


def test_a_bucket_with_settings_of_its_own(s3: S3Server) -> None:  # noqa: F811
    url = f"s3://{s3.BUCKET}/{uuid.uuid4().hex}"
    engine = fill(url, options=s3.options)
    tier = TierConfig.model_validate({"url": url, "options": s3.options})
    (listing,) = (listing for listing, done in list_tier("bucket", tier) if done)
    assert (listing.array, listing.tokens, listing.damaged) == (form_of(engine).array, 24, [])
    assert listing.namespace["model"] == "test"


def sparse(path: Path) -> None:
    os.truncate(path, 3 << 30)


def grown(path: Path) -> None:
    """A header that is right in every checksum, of a record that is 3 GiB long."""
    data = changed(path.read_bytes(), 96, "QQ", 3 << 30, (3 << 30) - 4096)
    path.write_bytes(changed(data, 10, "B", 1))
    os.truncate(path, 3 << 30)


def long_header(path: Path) -> None:
    path.write_bytes(changed(path.read_bytes(), 12, "I", 2**32 - 4096))
    os.truncate(path, 3 << 30)


def list_all(folder: str) -> None:
    only(folder)


def test_a_listing_takes_little_memory_and_never_waits(tmp_path: Path) -> None:
    form = form_of(fill(str(tmp_path), 8))
    fill(str(tmp_path.with_name("sound")), 2)
    found = records(tmp_path)
    for harm, path in zip((sparse, grown, long_header), found, strict=False):
        harm(path)
    found[3].unlink()
    os.mkfifo(found[3])
    found[4].unlink()
    found[4].symlink_to("/dev/zero")
    found[5].unlink()
    found[5].mkdir()
    for metadata in ("fifo", "sparse", "deep", "huge number"):
        file = tmp_path / form.array / "zarr.json"
        file.unlink()
        if metadata == "fifo":
            os.mkfifo(file)
        elif metadata == "sparse":
            file.touch()
            sparse(file)
        elif metadata == "deep":
            file.write_text("[" * 200_000 + "]" * 200_000)
        else:
            file.write_text("1" * 100_000)
        listing = only(str(tmp_path))
        assert listing.namespace == {}
        assert listing.chunks == 5
        assert [name for name, _ in listing.damaged] == [
            str(path.relative_to(tmp_path)) for path in found[:3]
        ]
    with Measured() as process:
        process.peak_bytes(list_all, str(tmp_path.with_name("sound")))
        peak = process.peak_bytes(list_all, str(tmp_path))
    assert peak < 64 << 20


def test_progress_is_told_record_by_record(tmp_path: Path) -> None:
    fill(str(tmp_path), 2)
    fill(str(tmp_path), 1, revision="v2")
    steps = [(listing.chunks, done) for listing, done in list_store(str(tmp_path))]
    assert sorted(steps) == sorted([(1, False), (2, False), (2, True), (1, False), (1, True)])


def test_a_record_that_goes_away_meanwhile_is_not_damage(tmp_path: Path) -> None:
    fill(str(tmp_path))
    steps = list_store(str(tmp_path))
    next(steps)
    records(tmp_path)[1].unlink()
    (listing,) = (listing for listing, done in steps if done)
    assert (listing.chunks, listing.damaged) == (2, [])


def test_nothing_there(tmp_path: Path) -> None:
    assert listings(str(tmp_path)) == {}
    with pytest.raises(FileNotFoundError, match="absent: no such store"):
        listings(str(tmp_path / "absent"))
    assert listings(f"memory://{uuid.uuid4().hex}") == {}
    with pytest.raises(ValueError, match="nowhere"):
        listings("nowhere://x")


def test_listing_changes_nothing(tmp_path: Path) -> None:
    engine = fill(str(tmp_path))
    victim = records(tmp_path)[0]
    victim.write_bytes(victim.read_bytes()[:-1])
    (tmp_path / form_of(engine).array / ".tmp-left").write_bytes(b"x")

    def state() -> dict[str, tuple[int, bytes | None]]:
        paths = [tmp_path, *tmp_path.rglob("*")]
        return {
            str(p): (os.stat(p).st_mtime_ns, p.read_bytes() if p.is_file() else None) for p in sorted(paths)
        }

    before = state()
    assert only(str(tmp_path)).damaged
    assert state() == before


def test_a_listing_of_memory_leaves_the_bucket_alone() -> None:
    bucket = uuid.uuid4().hex
    fill(f"memory://{bucket}")
    files = fsspec.filesystem("memory")
    before = {path: files.cat_file(path) for path in files.find(f"/{bucket}")}
    assert only(f"memory://{bucket}").chunks == 3
    assert {path: files.cat_file(path) for path in files.find(f"/{bucket}")} == before
