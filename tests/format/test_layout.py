"""Layouts count bytes exactly, describe pages as they lie, and share a fingerprint if records are equal."""

from __future__ import annotations

import itertools
import math
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvkit.format.layout import (
    ITEM_BYTES,
    ORDERS,
    KVLayout,
    LayerGroup,
    LayoutError,
    Namespace,
    canonical_json,
)

GQA = LayerGroup(tuple(range(30)), 3, 64, 64, "float32")
MHA = LayerGroup(tuple(range(12)), 12, 64, 64, "float16")
MLA = LayerGroup(tuple(range(61)), 1, 576, 0, "bfloat16")
INDEXER = LayerGroup(tuple(range(61)), 1, 132, 0, "uint8")
OPAQUE = LayerGroup((0, 1), 3, 64, 64, "float32", 128, page_bytes=3 * 128 * 128 * 4)
ODD = LayerGroup((1, 4, 6), 5, 3, 7, "int8", 3)


@pytest.mark.parametrize(
    ("group", "chunk_tokens", "shape", "layer_bytes"),
    [
        (GQA, 256, (30, 3, 256, 128), 393_216),
        (MHA, 256, (12, 12, 256, 128), 786_432),
        (MLA, 64, (61, 1, 64, 576), 73_728),
        (INDEXER, 64, (61, 1, 64, 132), 8_448),
        (OPAQUE, 256, (2, 1, 2, 196_608), 393_216),
        (ODD, 9, (3, 5, 9, 10), 450),
    ],
    ids=["gqa", "mha", "mla", "132-uint8", "opaque", "odd"],
)
def test_bytes_of_a_chunk(
    group: LayerGroup, chunk_tokens: int, shape: tuple[int, ...], layer_bytes: int
) -> None:
    assert group.record_shape(chunk_tokens) == shape
    assert group.layer_bytes(chunk_tokens) == layer_bytes
    assert group.chunk_bytes(chunk_tokens) == shape[0] * layer_bytes
    assert KVLayout((group,)).chunk_bytes(chunk_tokens) == shape[0] * layer_bytes
    assert group.block_bytes * (chunk_tokens // group.block_tokens) == layer_bytes


def test_bytes_and_layers_add_up_over_groups() -> None:
    layout = KVLayout((replace(ODD, layers=(0, 2)), replace(ODD, layers=(1,), kv_heads=1)))
    assert layout.layers == 3
    assert layout.chunk_bytes(6) == 2 * 300 + 60


@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_item_bytes_are_those_of_torch(dtype: str) -> None:
    assert ITEM_BYTES[dtype] == getattr(torch, dtype).itemsize


groups = st.builds(
    LayerGroup,
    layers=st.integers(1, 3).map(lambda n: tuple(range(n))),
    kv_heads=st.integers(1, 4),
    k_size=st.integers(1, 5),
    v_size=st.integers(0, 5),
    dtype=st.sampled_from(sorted(ITEM_BYTES)),
    block_tokens=st.integers(1, 4),
    order=st.sampled_from(ORDERS),
)


@given(groups, st.integers(1, 4))
def test_pages_lie_as_a_dense_tensor_in_the_group_s_order(group: LayerGroup, blocks: int) -> None:
    sizes = {"L": len(group.layers), "B": blocks, "H": group.kv_heads}
    sizes |= {"N": group.block_tokens, "C": group.channels}
    dense = torch.arange(math.prod(sizes.values())).reshape([sizes[axis] for axis in group.order])
    expected = dense.permute([group.order.index(axis) for axis in "LBHNC"])

    pages = group.pages(blocks, fill_byte=0x5A)
    width = group.item_bytes
    for layer, page in enumerate(pages):
        assert page.shape == expected[layer].shape
        assert page.stride() == expected[layer].stride()
        assert page.storage_offset() == expected[layer].storage_offset()
        assert page.dtype == getattr(torch, group.dtype)
    pool = torch.empty(0, dtype=torch.uint8).set_(pages[0].untyped_storage())
    assert pool.numel() == dense.numel() * width
    assert bool((pool == 0x5A).all())


def test_every_order_is_covered() -> None:
    """An order is any arrangement with C innermost in which a layer's pages make sense to an engine."""
    assert set(ORDERS) <= {"".join(p) + "C" for p in itertools.permutations("LBHN")}
    assert len(set(ORDERS)) == len(ORDERS)


@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_records_of_fewer_bits_have_codes_and_scales(precision: Any) -> None:
    """A row of K and V has two scales, a latent one; pages stay as they are, and nobody else's KV is this."""
    gqa, mla = replace(GQA, precision=precision), replace(MLA, precision=precision)
    assert gqa.record_shape(256) == (30, 3, 256, 64 + 64 + 8)
    assert mla.record_shape(64) == (61, 1, 64, 576 + 4)
    assert (gqa.layer_bytes(256), gqa.chunk_bytes(256)) == (3 * 256 * 136, 30 * 3 * 256 * 136)
    assert (gqa.block_bytes, gqa.pages(1)[0].dtype) == (GQA.block_bytes, torch.float32)
    others = {KVLayout((replace(GQA, precision=p),)).fingerprint() for p in (None, "fp8", "int8")}
    assert len(others) == 3


def test_opaque_pages_are_bytes() -> None:
    pages = replace(OPAQUE, page_bytes=40).pages(5, fill_byte=7)
    assert len(pages) == 2
    for page in pages:
        assert page.shape == (5, 1, 1, 40)
        assert page.dtype == torch.uint8
        assert bool((page == 7).all())
    assert pages[0].data_ptr() != pages[1].data_ptr()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": ()}, r"layers=\(\)"),
        ({"layers": (1, 0)}, r"layers=\(1, 0\)"),
        ({"layers": (0, 0)}, r"layers=\(0, 0\)"),
        ({"layers": (-1, 0)}, r"layers=\(-1, 0\)"),
        ({"kv_heads": 0}, "kv_heads=0"),
        ({"k_size": 0}, "k_size=0"),
        ({"v_size": -1}, "v_size=-1"),
        ({"block_tokens": 0}, "block_tokens=0"),
        ({"dtype": "float64"}, "dtype='float64'.*float32.*bfloat16"),
        ({"order": "LBHCN"}, "order='LBHCN'.*LBHNC.*BHLNC"),
        ({"window": 0}, "window=0"),
        ({"page_bytes": 0}, "page_bytes=0"),
        ({"precision": "int4"}, "precision='int4': want None or one of fp8, int8"),
        ({"precision": "fp8", "dtype": "uint8"}, "precision='fp8': layers 0-29 hold uint8; want float32"),
        ({"precision": "int8", "page_bytes": 8}, "precision='int8': layers 0-29 hold opaque pages; want"),
    ],
)
def test_impossible_groups_name_field_and_value(change: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        replace(GQA, **change)


@pytest.mark.parametrize("chunk_tokens", [0, -16, 8, 255])
def test_a_chunk_is_whole_blocks(chunk_tokens: int) -> None:
    with pytest.raises(LayoutError, match=rf"chunk_tokens={chunk_tokens}:.*block_tokens=16"):
        GQA.record_shape(chunk_tokens)


def test_impossible_layouts_name_the_layers() -> None:
    with pytest.raises(LayoutError, match=r"groups=\(\)"):
        KVLayout(())
    with pytest.raises(LayoutError, match=r"\[1, 2, 2, 3\].*one group"):
        KVLayout((replace(ODD, layers=(1, 2)), replace(ODD, layers=(2, 3))))


def config(name: str, **settings: Any) -> Any:
    return getattr(pytest.importorskip("transformers"), name)(**settings)


def described(layout: KVLayout) -> list[tuple[Any, ...]]:
    return [(g.layers, g.kv_heads, g.k_size, g.v_size, g.window) for g in layout.groups]


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        (
            "LlamaConfig",
            {"num_hidden_layers": 3, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576},
            [((0, 1, 2), 3, 64, 64, None)],
        ),
        (
            "MistralConfig",
            {"num_hidden_layers": 2, "head_dim": 128, "sliding_window": 4096},
            [((0, 1), 8, 128, 128, 4096)],
        ),
        (
            "MistralConfig",
            {"num_hidden_layers": 2, "head_dim": 128, "sliding_window": None},
            [((0, 1), 8, 128, 128, None)],
        ),
        (
            "Gemma3TextConfig",
            {"num_hidden_layers": 7, "sliding_window": 512},
            [((0, 1, 2, 3, 4, 6), 4, 256, 256, 512), ((5,), 4, 256, 256, None)],
        ),
        (
            "Gemma3Config",  # of a multimodal model: the decoder's part counts
            {"text_config": {"num_hidden_layers": 6, "sliding_window": 512}},
            [((0, 1, 2, 3, 4), 4, 256, 256, 512), ((5,), 4, 256, 256, None)],
        ),
        (
            "Qwen3Config",  # head_dim is not hidden_size // heads
            {
                "num_hidden_layers": 2,
                "hidden_size": 1024,
                "num_attention_heads": 16,
                "num_key_value_heads": 8,
            },
            [((0, 1), 8, 128, 128, None)],
        ),
        (
            "Qwen2Config",  # a window that is not used
            {"num_hidden_layers": 2, "sliding_window": 4096, "use_sliding_window": False},
            [((0, 1), 32, 128, 128, None)],
        ),
        ("DeepseekV3Config", {"num_hidden_layers": 4}, [((0, 1, 2, 3), 1, 576, 0, None)]),
        (
            "GPT2Config",  # names of its own, through attribute_map
            {"n_layer": 2, "n_head": 4, "n_embd": 256},
            [((0, 1), 4, 64, 64, None)],
        ),
        (
            "OPTConfig",
            {"num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 512},
            [((0, 1), 8, 64, 64, None)],
        ),
        ("GPTBigCodeConfig", {"n_layer": 1, "n_head": 4, "n_embd": 256}, [((0,), 1, 64, 64, None)]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_from_config(name: str, settings: dict[str, Any], expected: list[tuple[Any, ...]]) -> None:
    layout = KVLayout.from_config(config(name, **settings), dtype="bfloat16", block_tokens=32, order="BLNHC")
    assert described(layout) == expected
    assert all((g.dtype, g.block_tokens, g.order) == ("bfloat16", 32, "BLNHC") for g in layout.groups)


@pytest.mark.parametrize(("used", "window"), [({}, 64), ({"use_sliding_window": False}, None)])
def test_a_config_without_layer_types_has_one_window(used: dict[str, bool], window: int | None) -> None:
    fields = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "sliding_window": 64}
    layout = KVLayout.from_config(SimpleNamespace(**fields, **used), dtype="float32")
    assert described(layout) == [((0, 1), 4, 8, 8, window)]


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("Qwen3NextConfig", {"num_hidden_layers": 4}, "linear_attention"),
        ("Gemma3nTextConfig", {"num_kv_shared_layers": 15}, "num_kv_shared_layers=15"),
        ("FalconConfig", {"num_hidden_layers": 2}, "num_kv_heads"),
        ("ResNetConfig", {}, "ResNetConfig.*num_hidden_layers"),
    ],
)
def test_a_config_whose_kv_is_of_another_kind_is_refused(
    name: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        KVLayout.from_config(config(name, **settings), dtype="bfloat16")


@given(groups, st.integers(2, 4))
def test_from_tensors_finds_what_pages_were_made_from(group: LayerGroup, blocks: int) -> None:
    pages = group.pages(blocks)
    layout = KVLayout.from_tensors(pages, v_size=group.v_size)
    (found,) = layout.groups
    assert found == replace(group, strides=pages[0].stride(), order=found.order)
    assert layout.fingerprint() == KVLayout((group,)).fingerprint()
    if group.kv_heads > 1 and group.block_tokens > 1:
        assert (found.order == "LBNHC") == (group.order.index("N") < group.order.index("H"))


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((4, 3, 128, 128), (49152, 16384, 128, 1)),  # vLLM on CPU
        ((4, 3, 16, 128), (6144, 128, 384, 1)),  # FlashAttention, LBNHC
        ((4, 3, 16, 128), (2 * 6144, 2048, 128, 1)),  # two layers, BLHNC
    ],
)
def test_from_tensors_takes_an_engine_s_strides(
    shape: tuple[int, int, int, int], strides: tuple[int, int, int, int]
) -> None:
    page = torch.zeros(4 * strides[0], dtype=torch.bfloat16).as_strided(shape, strides)
    (group,) = KVLayout.from_tensors([page, page]).groups
    assert group == LayerGroup(
        layers=(0, 1),
        kv_heads=3,
        k_size=64,
        v_size=64,
        dtype="bfloat16",
        block_tokens=shape[2],
        order="LBNHC" if strides[1] < strides[2] else "LBHNC",
        strides=strides,
    )


def test_from_tensors_takes_k_and_v_apart() -> None:
    k, v = torch.zeros(4, 2, 16, 8), torch.zeros(4, 2, 16, 4)
    layout = KVLayout.from_tensors([(k, v), (k, v)])
    assert layout == KVLayout((LayerGroup((0, 1), 2, 8, 4, "float32", 16),))
    for wrong in (v[:3], v[:, :1], v[:, :, :8], v.half()):
        with pytest.raises(LayoutError, match=r"pages\[1\]: K .* and V .* do not match"):
            KVLayout.from_tensors([(k, v), (k, wrong)])
    for wrong in (v[..., 0], torch.zeros(4, 2, 4, 16).transpose(2, 3)):
        with pytest.raises(LayoutError, match=r"pages\[0\]: (shape|stride)"):
            KVLayout.from_tensors([(k, wrong)])


def test_from_tensors_groups_layers_by_form() -> None:
    full, other = torch.zeros(4, 2, 16, 8), torch.zeros(4, 1, 16, 8)
    layout = KVLayout.from_tensors([full, other, full, full], windows=[64, None, None, 64])
    assert described(layout) == [((0, 3), 2, 4, 4, 64), ((1,), 1, 4, 4, None), ((2,), 2, 4, 4, None)]


def test_from_tensors_opaque() -> None:
    dense = torch.zeros(4, 3, 16, 8, dtype=torch.bfloat16)
    assert KVLayout.from_tensors([dense], opaque=True).groups[0].page_bytes == 3 * 16 * 8 * 2
    tokens_first = torch.zeros(4, 16, 3, 8).transpose(1, 2)  # contiguous bytes in another order
    assert KVLayout.from_tensors([tokens_first], opaque=True).groups[0].page_bytes == 3 * 16 * 8 * 4
    with pytest.raises(LayoutError, match=r"pages\[1\]: stride .*contiguous"):
        KVLayout.from_tensors([dense, dense[:, :2, :8]], opaque=True)


@pytest.mark.parametrize(
    ("pages", "settings", "message"),
    [
        ([torch.zeros(2, 3, 4)], {}, r"pages\[0\]: shape \(2, 3, 4\)"),
        ([torch.zeros(2, 3, 8, 4).transpose(2, 3)], {}, r"pages\[0\]: stride .*C innermost"),
        ([torch.zeros(2, 3, 4, 8)], {"v_size": 8}, "v_size=8.*C=8"),
        ([torch.zeros(2, 3, 4, 8)], {"v_size": -1}, "v_size=-1"),
        ([torch.zeros(2, 3, 4, 8)], {"windows": [None, 4]}, "windows has 2 entries for 1 layers"),
        ([torch.zeros(2, 3, 4, 8, dtype=torch.float64)], {}, "dtype='float64'"),
        ([], {}, r"groups=\(\)"),
    ],
)
def test_impossible_tensors_name_field_and_value(
    pages: list[torch.Tensor], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        KVLayout.from_tensors(pages, **settings)


@given(groups, st.sampled_from(ORDERS), st.integers(1, 9), st.integers(1, 9))
def test_engines_that_differ_in_form_alone_share_a_fingerprint(
    group: LayerGroup, order: str, block_tokens: int, stride: int
) -> None:
    other = replace(group, order=order, block_tokens=block_tokens, strides=(stride,) * 4)
    assert KVLayout((group,)).fingerprint() == KVLayout((other,)).fingerprint()


def record_of(group: LayerGroup) -> tuple[Any, ...]:
    """All that decides a record's bytes."""
    own = (group.layers, group.kv_heads, group.k_size, group.v_size, group.dtype, group.page_bytes)
    return (*own, group.block_tokens, group.order) if group.opaque else own


maybe_opaque = st.builds(replace, groups, page_bytes=st.none() | st.integers(1, 3))


@given(maybe_opaque, maybe_opaque)
def test_a_fingerprint_tells_records_apart(a: LayerGroup, b: LayerGroup) -> None:
    same = record_of(a) == record_of(b)
    assert (KVLayout((a,)).fingerprint() == KVLayout((b,)).fingerprint()) is same


@given(
    groups,
    st.sampled_from(
        ["layers", "kv_heads", "k_size", "v_size", "dtype", "page_bytes", "block_tokens", "order"]
    ),
    st.booleans(),
)
def test_every_field_of_the_record_is_in_the_fingerprint(group: LayerGroup, field: str, opaque: bool) -> None:
    if opaque or field in ("block_tokens", "order"):
        group = replace(group, page_bytes=8)
    old = getattr(group, field)
    new: Any
    if field == "layers":
        new = (*old, 9)
    elif field == "dtype":
        new = next(name for name in ITEM_BYTES if name != old)
    elif field == "order":
        new = next(name for name in ORDERS if name != old)
    else:
        new = (old or 0) + 1
    assert KVLayout((group,)).fingerprint() != KVLayout((replace(group, **{field: new}),)).fingerprint()


def test_the_order_of_groups_is_in_the_fingerprint() -> None:
    a, b = replace(ODD, layers=(0,)), replace(ODD, layers=(1,))
    assert KVLayout((a, b)).fingerprint() != KVLayout((b, a)).fingerprint()


@pytest.mark.parametrize(
    ("group", "digest"),
    [
        (GQA, "1fa955b9bd9f8ef046acea6e33346850"),
        (MLA, "5e1b2d44b68911fe2cc3cb8d55580f8a"),
        (OPAQUE, "504d4efa4b02e6ca0ad623b4dce5a6db"),
    ],
    ids=["gqa", "mla", "opaque"],
)
def test_fingerprints_stay_what_they_were(group: LayerGroup, digest: str) -> None:
    """A change here makes every stored record a miss."""
    assert KVLayout((group,)).fingerprint() == digest


def test_groups_of_heads_share_a_fingerprint_whoever_has_them() -> None:
    """An engine that has others of the model's heads shares the array, another model does not."""
    group = LayerGroup((0, 1), 2, 8, 8, "bfloat16", model_heads=8)
    layouts = [
        KVLayout(tuple(replace(group, first_head=head, strides=strides) for head in heads))
        for heads, strides in (((0, 2, 4, 6), None), ((4, 6), (64, 32, 16, 1)), ((6,), None))
    ]
    assert len({layout.fingerprint() for layout in layouts}) == 1
    assert [layout.layers for layout in layouts] == [2, 2, 2]
    assert [part.head_shard for part in layouts[1].groups] == [2, 3]
    whole = replace(group, model_heads=None)
    assert layouts[0].fingerprint() != KVLayout((whole,)).fingerprint()
    assert layouts[0].fingerprint() != KVLayout((replace(group, model_heads=16),)).fingerprint()
    assert KVLayout((replace(group, model_heads=2),)).fingerprint() == KVLayout((whole,)).fingerprint()


@pytest.mark.parametrize(
    "fields", [{"first_head": 1}, {"first_head": 8}, {"model_heads": 7}, {"first_head": -2}]
)
def test_a_group_of_heads_is_one_of_several_alike(fields: dict[str, int]) -> None:
    with pytest.raises(LayoutError, match="want multiples of kv_heads=2, and first_head < model_heads"):
        LayerGroup((0,), 2, 8, 8, "bfloat16", **{"model_heads": 8} | fields)


def test_heads_are_in_one_group() -> None:
    group = LayerGroup((0,), 2, 8, 8, "bfloat16", model_heads=4)
    for other in (group, replace(group, kv_heads=1)):
        with pytest.raises(LayoutError, match=r"layers \[0.*\]: a layer's heads belong to one group only"):
            KVLayout((group, other))


NAMESPACE = Namespace(
    model="HuggingFaceTB/SmolLM2-135M",
    layout="0123456789abcdef0123456789abcdef",
    dtype="float32",
    revision="main",
    salt="tenant ä",
)


def test_namespace_bytes_stay_what_they_were() -> None:
    assert NAMESPACE.to_bytes() == (
        b'{"chunk_tokens":256,"dtype":"float32","format":1,"hash":"xxh3_128","isa":"",'
        b'"layout":"0123456789abcdef0123456789abcdef","lora":"","model":"HuggingFaceTB/SmolLM2-135M",'
        b'"rank":0,"revision":"main","salt":"tenant \\u00e4","world":1}'
    )


@pytest.mark.parametrize("field", [field.name for field in fields(Namespace)])
def test_every_field_of_a_namespace_changes_its_bytes(field: str) -> None:
    base = replace(NAMESPACE, world=4)
    value = getattr(base, field)
    new: Any = value + 1 if isinstance(value, int) else value + "x"
    changed = replace(base, **{field: new})
    assert changed.to_bytes() != base.to_bytes()


@given(st.text(min_size=3).filter(lambda s: s not in "tenant main true false"))
def test_the_salt_is_not_public(salt: str) -> None:
    """Two tenants' stores look alike from outside."""
    base = Namespace(model="m", layout="l", dtype="d")
    public = replace(base, salt=salt).public()
    assert public == base.public() | {"salt": True}
    assert base.public()["salt"] is False
    assert public == replace(base, salt=salt + "x").public()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 2, "world": 2}, "rank=2, world=2"),
        ({"rank": -1}, "rank=-1, world=1"),
        ({"world": 0}, "rank=0, world=0"),
        ({"chunk_tokens": 0}, "chunk_tokens=0"),
    ],
)
def test_impossible_namespaces_name_field_and_value(change: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        replace(NAMESPACE, **change)


def test_canonical_json() -> None:
    assert canonical_json({"b": (1, None), "a": "é"}) == b'{"a":"\\u00e9","b":[1,null]}'
