"""The zarr.json that describes a layer group's records to Zarr readers, made and read by zarr-python.

It is written once per array, in the background. Loads never read it.
"""

from __future__ import annotations

from typing import Any

from kvkit.format.layout import Precision
from kvkit.format.names import HIGH_BITS, LOW_BITS, METADATA
from kvkit.format.quantised import quantised_shape
from kvkit.format.record import CODEC_LEVEL, RecordFormat

MAX_METADATA_BYTES = 1 << 20
"""Maximum bytes of a zarr.json that is read."""

_STORED_DTYPE = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}


class MetadataError(ValueError):
    """Bytes that are no zarr.json of an array."""


def metadata(
    record_format: RecordFormat, codec: str = "none", tier_precision: Precision | None = None
) -> bytes:
    """Build the zarr.json of the array of records of one format and codec.

    With a `tier_precision`, it describes the records that a tier quantises.

    bfloat16 is stored as uint16 and float8 as uint8; the attributes name the real dtype, and the namespace.
    Quantised rows are uint8: K's codes, V's codes, and their scales; the attributes name the precision.
    """
    import zarr
    from zarr.codecs import BloscCodec, ZstdCodec

    group, stored_group = record_format.group, record_format.group.stored
    precision = tier_precision or group.precision
    k_size = 0 if group.opaque else group.k_size
    stored = (
        "uint8"
        if group.opaque or tier_precision
        else _STORED_DTYPE.get(stored_group.dtype, stored_group.dtype)
    )
    width = 1 if stored == "uint8" else stored_group.item_bytes  # bytes of the elements with shuffled bits
    shape = record_format.shape
    if tier_precision:
        shape = quantised_shape(shape, k_size, group.dtype)
    compressors: dict[str, Any] = {
        "none": None,
        "zstd": ZstdCodec(level=CODEC_LEVEL, checksum=False),
        "bitshuffle-zstd": BloscCodec(cname="zstd", clevel=CODEC_LEVEL, shuffle="bitshuffle", typesize=width),
    }
    store: dict[str, Any] = {}
    layers, heads, *rest = shape
    zarr.create_array(
        store,
        shape=(2**HIGH_BITS, 2**LOW_BITS, layers * group.layer_shards, heads * group.head_shards, *rest),
        shards=(1, 1, *shape),
        chunks=(1, 1, 1, heads, *rest),
        dtype=stored,
        filters=None,
        compressors=compressors[codec],
        fill_value=0,
        chunk_key_encoding={"name": "default", "separator": "."},
        dimension_names=("key_high", "key_low", "layer", "head", "token", "channel"),
        attributes={
            "kvkit": {
                "dtype": group.dtype,
                "k_size": k_size,
                "layers": list(group.all_layers),
                "opaque": group.opaque,
                **({"precision": precision} if precision else {}),
                **({"state": group.state} if group.state else {}),
                "codec": codec,
                "digest": record_format.digest.hex(),
                "namespace": record_format.namespace.public(),
            }
        },
    )
    return bytes(store[METADATA].to_bytes())


def read(raw: bytes) -> dict[str, Any]:
    """Return the fields of a zarr.json as zarr-python reads them, with defaults filled in.

    Raises:
        MetadataError: it is longer than MAX_METADATA_BYTES, or describes no array.
    """
    import zarr
    from zarr.buffer.cpu import Buffer

    if len(raw) > MAX_METADATA_BYTES:
        raise MetadataError(f"{len(raw)} bytes, want {MAX_METADATA_BYTES} at most")
    try:
        array = zarr.open_array({METADATA: Buffer.from_bytes(raw)}, mode="r", zarr_format=3)
        return dict(array.metadata.to_dict())
    except Exception as error:  # zarr-python does not document what it raises for foreign content
        raise MetadataError(f"{type(error).__name__}: {error}") from error


def differences(found: bytes, wanted: bytes) -> list[str]:
    """Return the fields that differ between two zarr.json; of the attributes, compare only kvkit's.

    Raises:
        MetadataError: one of them describes no array.
    """
    found_fields, wanted_fields = read(found), read(wanted)
    for fields in (found_fields, wanted_fields):
        fields["attributes"] = fields.get("attributes", {}).get("kvkit")
    names = found_fields | wanted_fields
    return sorted(name for name in names if found_fields.get(name) != wanted_fields.get(name))
