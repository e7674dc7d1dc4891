"""A folder of records is a valid Zarr v3 array, which zarr-python and zarrs read byte for byte."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import zarr
from record_corpus import check

from kvkit.format import arrays, codecs
from kvkit.format import record as records
from kvkit.format.keys import chunk_keys
from kvkit.format.layout import KVLayout, LayerGroup, Namespace
from kvkit.format.names import coordinates
from kvkit.format.record import CODECS, Damage, RecordError, RecordFormat
from kvkit.tiers.objects import ObjectTier

PIPELINES = {"zarr-python": "zarr.core.codec_pipeline.BatchedCodecPipeline"}
try:
    import zarrs  # noqa: F401 - importing it registers the pipeline
except ImportError:
    pass
else:
    PIPELINES["zarrs"] = "zarrs.ZarrsCodecPipeline"

CHUNKS = 3
TOKENS = 16
DTYPES = ("float32", "float16", "bfloat16", "uint8", "int8", "float8_e4m3fn", "float8_e5m2")
AS_BYTES = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}
GROUPS = {dtype: LayerGroup((0, 2, 4), 3, 8, 8, dtype, 4) for dtype in DTYPES}
GROUPS["mla"] = LayerGroup((0, 1), 1, 576, 0, "bfloat16", 16)
GROUPS["132"] = LayerGroup((0, 1), 1, 132, 0, "uint8", 16)
GROUPS["fp8"] = LayerGroup((0, 1), 3, 8, 8, "bfloat16", 4, precision="fp8")
GROUPS["int8"] = LayerGroup((0, 1), 1, 32, 0, "float32", 4, precision="int8")
GROUPS["opaque"] = LayerGroup((0, 1), 3, 8, 8, "float32", 8, page_bytes=3 * 8 * 16 * 4)


@pytest.fixture(params=PIPELINES)
def pipeline(request: pytest.FixtureRequest) -> Iterator[str]:
    # strict: without it zarrs hands what it cannot do to zarr-python
    with zarr.config.set({"codec_pipeline.path": PIPELINES[request.param], "codec_pipeline.strict": True}):
        yield request.param


def format_of(group: LayerGroup) -> RecordFormat:
    layout = KVLayout((group,))
    namespace = Namespace("m", layout.fingerprint(), group.dtype, salt="secret salt", chunk_tokens=TOKENS)
    return RecordFormat.of(layout, 0, namespace)


def stored_dtype(group: LayerGroup) -> np.dtype[Any]:
    dtype = group.stored.dtype
    return np.dtype("uint8" if group.opaque else AS_BYTES.get(dtype, dtype))


def write_store(root: Path, form: RecordFormat, codec: str) -> dict[bytes, npt.NDArray[Any]]:
    """Put `CHUNKS` records where a file tier would; what they hold, by key: [L, H, T, C]."""
    random = np.random.default_rng(0)
    array = root / form.array
    array.mkdir(parents=True)
    (array / "zarr.json").write_bytes(arrays.metadata(form, codec))
    tokens = np.arange(CHUNKS * TOKENS, dtype=np.int32)
    parent = form.digest
    held = {}
    for i, key in enumerate(chunk_keys(tokens, TOKENS, form.digest)):
        record = np.full(form.record_bytes, 0xA5, np.uint8)
        size = form.layers_end - form.header_bytes
        # small integers: no NaN in any float, so that equal means equal
        values = random.integers(0, 50, size // stored_dtype(form.group).itemsize)
        values = values.astype(stored_dtype(form.group))
        records.payload(form, record)[:] = values.view(np.uint8)
        records.seal(form, record, parent, key, tokens[i * TOKENS : (i + 1) * TOKENS])
        if codec != "none":
            packed = np.zeros(2 * form.record_bytes, np.uint8)
            record = packed[: codecs.compress(record, codec, packed)]
        (root / form.name(key)).write_bytes(record.tobytes())
        held[key] = values.reshape(form.shape)
        parent = key
    return held


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)
def test_zarr_reads_a_folder_of_records(tmp_path: Path, pipeline: str, group: LayerGroup, codec: str) -> None:
    form = format_of(group)
    held = write_store(tmp_path, form, codec)
    z = zarr.open_array(tmp_path / form.array, mode="r")
    assert z.shape == (2**16, 2**46, *form.shape)
    assert z.dtype == stored_dtype(group)
    assert (z.shards, z.chunks) == ((1, 1, *form.shape), (1, 1, 1, *form.shape[1:]))
    attributes = z.attrs["kvkit"]
    assert (attributes["dtype"], attributes["codec"]) == (group.dtype, codec)
    assert attributes["layers"] == list(group.layers)
    assert attributes["opaque"] is group.opaque
    assert attributes.get("precision") == group.precision

    for key, values in held.items():
        high, low = coordinates(key)
        assert (z[high, low] == values).all()
        for layer in range(form.shape[0]):
            assert (z[high, low, layer] == values[layer]).all()
        assert (z[high, low, -1, 1:] == values[-1, 1:]).all()
        assert (z[high, low, 0, :, 1:2, 2:7] == values[0, :, 1:2, 2:7]).all()
        missing = z[high ^ 1, low]
        assert missing.shape == form.shape
        assert not missing.any()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)
def test_zarr_json_is_strict_v3(group: LayerGroup, codec: str) -> None:
    from zarr.core.metadata import ArrayV3Metadata

    form = format_of(group)
    raw = arrays.metadata(form, codec)
    document = json.loads(raw)
    assert set(document) == {
        *("zarr_format", "node_type", "shape", "data_type", "chunk_grid", "chunk_key_encoding"),
        *("fill_value", "codecs", "attributes", "dimension_names", "storage_transformers"),
    }
    assert len(document["dimension_names"]) == len(document["shape"]) == 6
    parsed = ArrayV3Metadata.from_dict(document)
    written = parsed.to_dict()
    assert ArrayV3Metadata.from_dict(written) == parsed
    again = json.loads(json.dumps(written))
    (shards,) = again["codecs"]
    inner = shards["configuration"]["codecs"]
    assert with_defaults(inner) == with_defaults(document["codecs"][0]["configuration"]["codecs"])
    for field in sorted(set(document) - {"codecs"}):
        assert again[field] == json.loads(raw)[field], field
    if codec == "bitshuffle-zstd":  # blosc shuffles items of this width
        assert inner[-1]["configuration"]["typesize"] == stored_dtype(group).itemsize


def with_defaults(codecs: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """zarr-python leaves out or adds an empty configuration."""
    return [(codec["name"], codec.get("configuration", {})) for codec in codecs]


def test_the_salt_is_not_in_the_store(tmp_path: Path) -> None:
    form = format_of(GROUPS["uint8"])
    write_store(tmp_path, form, "none")
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert b"secret salt" not in path.read_bytes()


@pytest.mark.parametrize("codec", CODECS)
def test_a_chunk_that_zarr_wrote_is_no_record(tmp_path: Path, pipeline: str, codec: str) -> None:
    """It lacks the header: a miss, never an error, and never its KV."""
    form = format_of(GROUPS["float32"])
    held = write_store(tmp_path, form, codec)
    key, values = next(iter(held.items()))
    z = zarr.open_array(tmp_path / form.array, mode="r+")
    high, low = coordinates(key)
    z[high, low] = values + 1
    assert (z[high, low] == values + 1).all()

    data = (tmp_path / form.name(key)).read_bytes()
    tokens = np.arange(TOKENS, dtype=np.int32)
    padded = data.ljust(form.record_bytes, b"\0")[: form.record_bytes]
    for record in (data, padded):
        damage = records.verify(form, record, form.digest, key, tokens)
        assert damage == (Damage.TRUNCATED if len(record) < form.header_bytes else Damage.HEADER)
        for read in (records.read_header, check):
            with pytest.raises(RecordError, match="not a kvkit record"):
                read(record)
        out = np.zeros(form.record_bytes, np.uint8)
        assert codecs.decompress(record, out) == Damage.HEADER


def test_zarr_finds_a_damaged_index(tmp_path: Path) -> None:
    """The trailer's crc32c is the one of the specification."""
    form = format_of(GROUPS["float32"])
    key = next(iter(write_store(tmp_path, form, "none")))
    path = tmp_path / form.name(key)
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    z = zarr.open_array(tmp_path / form.array, mode="r")
    with pytest.raises(ValueError, match="checksum"):
        z[coordinates(key)]


def test_groups_of_layers_are_arrays_side_by_side(tmp_path: Path, pipeline: str) -> None:
    first = GROUPS["float32"]
    second = replace(first, layers=(1, 3), kv_heads=1, dtype="float16")
    layout = KVLayout((first, second))
    namespace = Namespace("m", layout.fingerprint(), "float32", chunk_tokens=TOKENS)
    forms = [RecordFormat.of(layout, i, namespace) for i in (0, 1)]
    assert [form.array.rsplit("/")[-1] for form in forms] == ["0", "1"]
    for form in forms:
        for key, values in write_store(tmp_path, form, "none").items():
            z = zarr.open_array(tmp_path / form.array, mode="r")
            assert (z[coordinates(key)] == values).all()


@pytest.mark.parametrize("name", ["bfloat16", "opaque"])
def test_groups_of_heads_are_places_on_one_axis(tmp_path: Path, pipeline: str, name: str) -> None:
    """Whoever wrote them: one array has the model's heads, and says nothing of who has which."""
    group = GROUPS[name]
    page = group.page_bytes and group.page_bytes // 3
    parts = [replace(group, kv_heads=1, page_bytes=page, first_head=h, model_heads=3) for h in range(3)]
    forms = [format_of(part) for part in parts]
    assert len({form.array for form in forms}) == len({arrays.metadata(form) for form in forms}) == 1
    held = {}
    for form in forms:
        shutil.rmtree(tmp_path / "one", ignore_errors=True)
        held[form.group.head_shard] = write_store(tmp_path / "one", form, "none")
        shutil.copytree(tmp_path / "one", tmp_path / "all", dirs_exist_ok=True)
    z = zarr.open_array(tmp_path / "all" / forms[0].array, mode="r")
    assert z.shape[2:] == (forms[0].shape[0], 3, *forms[0].shape[2:])
    for key in held[0]:
        high, low = coordinates(key)
        found = z[high : high + 1, low : low + 1]  # zarrs has no other selection over several shards
        assert (found == np.concatenate([held[h][key] for h in range(3)], 1)).all()


def test_metadata_is_what_earlier_versions_wrote_by_hand() -> None:
    """Semantically: their arrays need no rewriting, and are not said to differ."""
    form = format_of(GROUPS["bfloat16"])
    old = json.loads(arrays.metadata(form))
    del old["storage_transformers"]
    assert arrays.differences(json.dumps(old).encode(), arrays.metadata(form)) == []


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda d: d["shape"].__setitem__(2, 9), ["shape"]),
        (lambda d: d.update(data_type="int16"), ["data_type"]),
        (lambda d: d["attributes"]["kvkit"].update(codec="zstd"), ["attributes"]),
        (lambda d: d["chunk_key_encoding"]["configuration"].update(separator="/"), ["chunk_key_encoding"]),
        (lambda d: d["codecs"][0]["configuration"].update(index_location="start"), ["codecs"]),
        (lambda d: d["attributes"].update(mine="a note"), []),
    ],
)
def test_differences_name_the_fields(change: Callable[[dict[str, Any]], object], named: list[str]) -> None:
    wanted = arrays.metadata(format_of(GROUPS["bfloat16"]))
    document = json.loads(wanted)
    change(document)
    assert arrays.differences(json.dumps(document).encode(), wanted) == named


DEEP = b"[" * 100_000
HOSTILE = (b"", b"{", b"[]", b"{}", b"\xff\xfe", DEEP, b'{"zarr_format": 3}', b" " * (1 + (1 << 20)))


@pytest.mark.parametrize("raw", HOSTILE, ids=range(len(HOSTILE)))
def test_what_is_no_metadata_is_refused(raw: bytes) -> None:
    with pytest.raises(arrays.MetadataError):
        arrays.read(raw)


@pytest.mark.parametrize("raw", HOSTILE, ids=range(len(HOSTILE)))
def test_damaged_metadata_of_a_store_is_written_anew(
    raw: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    form = format_of(GROUPS["float32"])
    path = tmp_path / form.array / "zarr.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(raw)
    with closing(ObjectTier(f"file://{tmp_path}")) as tier:
        tier.describe(form.array, arrays.metadata(form))
    assert path.read_bytes() == arrays.metadata(form)
    assert "is damaged, replacing it" in caplog.text


def test_metadata_of_other_settings_stays_and_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    form = format_of(GROUPS["float32"])
    with closing(ObjectTier(f"file://{tmp_path}")) as tier:
        tier.describe(form.array, arrays.metadata(form, "zstd"))
        assert not caplog.text
        tier.describe(form.array, arrays.metadata(form))
    assert (tmp_path / form.array / "zarr.json").read_bytes() == arrays.metadata(form, "zstd")
    assert (
        "differs in attributes, codecs from the metadata of the records that this cache stores" in caplog.text
    )
