"""KV layouts and namespaces: the source of every size, stride and fingerprint in kvkit.

Axis letters, the same everywhere:
    L layers of a group    B blocks of the engine    H KV heads
    N tokens of a block    T tokens of a chunk       C channels, K head size + V head size
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    import torch

FORMAT_VERSION = 1
ITEM_BYTES: Mapping[str, int] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
Precision = Literal["fp8", "int8"]
"""Precisions of quantised records.

These hold 8-bit codes, and per token and head a float32 scale for K and one for V
(`kvkit.kernels.pages.reference.quantise`)."""
LARGEST: Mapping[Precision, float] = {"fp8": 448.0, "int8": 127.0}
"""Largest code of each precision: float8 e4m3fn (https://arxiv.org/abs/2209.05433), or int8."""
SMALLEST_AMAX = 1e-30
"""A head's K or V with a largest magnitude below this becomes zeros: its reciprocal would overflow."""
QUANTISABLE = ("float32", "float16", "bfloat16")
ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")


class LayoutError(ValueError):
    """An invalid layout, or tensors without a valid one. The message names the field and the value."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers with the same heads, head sizes, dtype, blocks and strides of KV.

    Args:
        layers: indices of the layers in the model, ascending.
        kv_heads: H. MLA: 1.
        k_size: K channels per head, in elements. MLA: the whole latent (576).
        v_size: V channels per head, in elements. MLA: 0.
        dtype: one of `ITEM_BYTES`.
        block_tokens: N, tokens per block of the engine.
        order: physical order of the axes, one of `ORDERS`; describes dense pages.
        strides: strides of a layer's pages [B, H, N, C], in elements; None: dense in `order`.
        window: sliding window in tokens; None: full attention.
        page_bytes: bytes of one block of one layer if pages are opaque (vLLM on CPU), else None. Opaque pages
            move whole; only one engine on one ISA can read them.
        first_head: index of the first of these heads in the model, a multiple of `kv_heads`.
        model_heads: heads of the model's layers, over all tensor-parallel ranks; None: `kv_heads`.
        model_layers: the model's layers of this kind over all pipeline stages, ascending; `layers` is one of
            their shards of equal size. None: `layers`.
        precision: precision of the KV in records; None: as the engine has it.
        state: kind, shapes and dtypes of the state that these layers keep instead of K and V (Mamba, linear
            attention, short convolutions), else None. Pages are then opaque; one page holds the state after
            all tokens up to the end of a chunk, and a chunk has `block_tokens` tokens.

    Raises:
        LayoutError: a field is out of range.
    """

    layers: tuple[int, ...]
    kv_heads: int
    k_size: int
    v_size: int
    dtype: str
    block_tokens: int = 16
    order: str = "LBHNC"
    strides: tuple[int, int, int, int] | None = None
    window: int | None = None
    page_bytes: int | None = None
    first_head: int = 0
    model_heads: int | None = None
    model_layers: tuple[int, ...] | None = None
    precision: Precision | None = None
    state: str | None = None

    @classmethod
    def of_states(cls, layers: Sequence[int], size: int, chunk_tokens: int, state: str) -> LayerGroup:
        """Describe layers that keep states of `size` bytes, and no K and V, in chunks of `chunk_tokens`.

        Raises:
            LayoutError: a field is out of range.
        """
        return cls(
            layers=tuple(layers),
            kv_heads=1,
            k_size=size,
            v_size=0,
            dtype="uint8",
            block_tokens=chunk_tokens,
            page_bytes=size,
            state=state,
        )

    def __post_init__(self) -> None:
        if not self.layers or list(self.layers) != sorted(set(self.layers)) or self.layers[0] < 0:
            raise LayoutError(f"layers={self.layers!r}: want ascending, distinct indices >= 0")
        all_layers, count = self.all_layers, len(self.layers)
        if len(all_layers) % count or self.layers not in [
            all_layers[i : i + count] for i in range(0, len(all_layers), count)
        ]:
            raise LayoutError(
                f"layers={self.layers!r}, model_layers={all_layers!r}: want one of the equal shards of "
                "model_layers"
            )
        for field in ("kv_heads", "k_size", "block_tokens", "window", "page_bytes"):
            value = getattr(self, field)
            if value is not None and value < 1:
                or_none = "None or " if field in ("window", "page_bytes") else ""
                raise LayoutError(f"{field}={value!r}: want {or_none}at least 1")
        if self.v_size < 0:
            raise LayoutError(f"v_size={self.v_size!r}: want 0 (MLA) or more")
        heads, first_heads = self.kv_heads, range(0, self.heads, self.kv_heads)
        if self.heads % heads or self.first_head not in first_heads:
            raise LayoutError(
                f"first_head={self.first_head!r}, model_heads={self.model_heads!r}: want multiples of "
                f"kv_heads={heads}, and first_head < model_heads"
            )
        if self.state is not None and not (self.state and self.page_bytes):
            raise LayoutError(f"state={self.state!r}: want a kind that is not empty, and page_bytes")
        for field, choices in (("dtype", ITEM_BYTES), ("order", ORDERS)):
            if getattr(self, field) not in choices:
                raise LayoutError(f"{field}={getattr(self, field)!r}: want one of {', '.join(choices)}")
        if self.precision not in (None, *get_args(Precision)):
            raise LayoutError(
                f"precision={self.precision!r}: want None or one of {', '.join(get_args(Precision))}"
            )
        if self.precision and (self.opaque or self.dtype not in QUANTISABLE):
            kind = "opaque pages" if self.opaque else self.dtype
            raise LayoutError(
                f"precision={self.precision!r}: layers {self.layers[0]}-{self.layers[-1]} hold {kind}; "
                f"want {', '.join(QUANTISABLE)}"
            )

    @property
    def heads(self) -> int:
        """Heads of the model's layers; the group holds some or all of them."""
        return self.model_heads or self.kv_heads

    @property
    def head_shard(self) -> int:
        """Number of the shard of the model's heads: the records' coordinate on the head axis."""
        return self.first_head // self.kv_heads

    @property
    def head_shards(self) -> int:
        """Number of shards, of one record each, that hold all of the model's heads."""
        return self.heads // self.kv_heads

    @property
    def all_layers(self) -> tuple[int, ...]:
        """The model's layers of this kind; the group holds some or all of them."""
        return self.model_layers or self.layers

    @property
    def layer_shard(self) -> int:
        """Number of the shard of the model's layers: the records' coordinate on the layer axis."""
        return self.all_layers.index(self.layers[0]) // len(self.layers)

    @property
    def layer_shards(self) -> int:
        """Number of shards, of one record each, that hold all of the model's layers."""
        return len(self.all_layers) // len(self.layers)

    @property
    def first_shard(self) -> LayerGroup:
        """The group of the first layers and heads: the same for all shards of an array."""
        return replace(self, first_head=0, layers=self.all_layers[: len(self.layers)])

    @property
    def channels(self) -> int:
        """C, elements of K and V per head and token."""
        return self.k_size + self.v_size

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return ITEM_BYTES[self.dtype]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row: one head of one token; opaque: one page."""
        return self.page_bytes or self.channels * self.item_bytes

    @property
    def opaque(self) -> bool:
        """True if pages can only be moved whole."""
        return self.page_bytes is not None

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer."""
        return self.row_bytes * (1 if self.opaque else self.kv_heads * self.block_tokens)

    @property
    def stored(self) -> LayerGroup:
        """The group of these layers as their records hold it.

        With a `precision`, a row [C] is C codes, a float32 scale for K and one for V: uint8 [C + 4 or 8].
        Records, keys and stores need only this group.
        """
        if self.precision is None:
            return self
        row = self.channels + 4 * (1 + (self.v_size > 0))
        return replace(self, k_size=row, v_size=0, dtype="uint8", strides=None, precision=None)

    def record_shape(self, chunk_tokens: int) -> tuple[int, int, int, int]:
        """Return the shape [L, H, T, C] of a chunk, C as in `stored`; opaque: [L, 1, pages, page_bytes].

        Raises:
            LayoutError: `chunk_tokens` is no multiple of `block_tokens` or, with a `state`, not equal to it.
        """
        fits = chunk_tokens == self.block_tokens if self.state else not chunk_tokens % self.block_tokens
        if chunk_tokens < 1 or not fits:
            want = "" if self.state else "a multiple of "
            raise LayoutError(f"chunk_tokens={chunk_tokens}: want {want}block_tokens={self.block_tokens}")
        if self.page_bytes is not None:
            return len(self.layers), 1, chunk_tokens // self.block_tokens, self.page_bytes
        return len(self.layers), self.kv_heads, chunk_tokens, self.stored.channels

    def layer_bytes(self, chunk_tokens: int) -> int:
        """Return the exact bytes of one layer of one chunk."""
        item_bytes = 1 if self.opaque else self.stored.item_bytes
        return math.prod(self.record_shape(chunk_tokens)[1:]) * item_bytes

    def chunk_bytes(self, chunk_tokens: int) -> int:
        """Return the exact bytes of one chunk over all layers of the group."""
        return len(self.layers) * self.layer_bytes(chunk_tokens)

    def pages(self, blocks: int, fill_byte: int = 0, device: str = "cpu") -> list[torch.Tensor]:
        """Allocate a pool of dense pages in `order`; return one [B, H, N, C] view of it per layer.

        Views of opaque groups are uint8 [B, 1, 1, page_bytes]. Every byte is `fill_byte`.
        """
        import torch

        sizes = {"L": len(self.layers), "B": blocks, "H": self.kv_heads, "N": self.block_tokens}
        order, dtype = self.order, getattr(torch, self.dtype)
        sizes["C"] = self.channels * self.item_bytes
        if self.page_bytes is not None:
            sizes |= {"H": 1, "N": 1, "C": self.page_bytes}
            order, dtype = "LBHNC", torch.uint8
        shape = [sizes[axis] for axis in order]
        pool = torch.full(shape, fill_byte, dtype=torch.uint8, device=device).view(dtype)
        return list(pool.permute([order.index(axis) for axis in "LBHNC"]).unbind(0))


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The layer groups of a model's KV cache, in a fixed order.

    Several groups may hold shards of the same heads or layers; these groups differ in nothing else. Groups of
    states come last.

    Args:
        copy, copies: number of this rank among the ranks of a host with equal KV, and the number of these
            ranks. They share the work of storing and reading it.

    Raises:
        LayoutError: there is no group of K and V, a group of states precedes one, or a layer's heads are in
            two groups.
    """

    groups: tuple[LayerGroup, ...]
    copy: int = 0
    copies: int = 1

    def __post_init__(self) -> None:
        layers = [layer for group in self.arrays for layer in group.all_layers]
        if not layers:
            raise LayoutError("groups=(): want at least one group of layers")
        if len(set(layers)) != len(layers) or len(set(self.groups)) != len(self.groups):
            raise LayoutError(f"layers {sorted(layers)}: a layer's heads belong to one group only")
        if any(group.state for group in self.groups[: self.token_groups]) or not self.token_groups:
            raise LayoutError("groups: want at least one group of K and V first, then the groups of states")

    @property
    def token_groups(self) -> int:
        """Number of groups that have records of every chunk; they come first, and groups of states follow."""
        return sum(group.state is None for group in self.groups)

    @property
    def arrays(self) -> list[LayerGroup]:
        """One group per array of records; shards of the same heads and layers share an array."""
        return list(dict.fromkeys(group.first_shard for group in self.groups))

    @property
    def layers(self) -> int:
        """Number of layers over all groups."""
        return len({layer for group in self.groups for layer in group.layers})

    def chunk_bytes(self, chunk_tokens: int) -> int:
        """Return the exact bytes of one chunk over all groups."""
        return sum(group.chunk_bytes(chunk_tokens) for group in self.groups)

    def fingerprint(self) -> str:
        """Return 32 hex digits (BLAKE2b-128) of all that determines a record's bytes, then its precisions.

        Records are canonical [L, H, T, C], so the fingerprint ignores an engine's order, strides and block
        size, and the heads and layers that it holds: engines that differ in these share a store. Opaque
        pages are an exception: their size, block size and order count. If a record holds only some heads or
        layers of the model, their number counts. Quantised KV, and KV that was computed with it, never has
        the fingerprint of full precision.
        """
        always = ("kv_heads", "k_size", "v_size", "dtype")
        described = []
        for group in self.arrays:
            opaque = ("page_bytes", "block_tokens", "order") if group.opaque else ()
            heads = ("heads",) if group.heads > group.kv_heads else ()
            precision = ("precision",) if group.precision else ()
            state = ("state",) if group.state else ()
            names = (*always, *opaque, *heads, *precision, *state)
            fields = {name: getattr(group, name) for name in names} | {"layers": group.all_layers}
            if group.layer_shards > 1:
                fields["layer_parts"] = group.layer_shards
            described.append(fields)
        digest = hashlib.blake2b(canonical_json(described), digest_size=16).hexdigest()
        return "-".join([digest, *sorted({group.precision for group in self.groups if group.precision})])

    @staticmethod
    def from_config(config: Any, *, dtype: str, block_tokens: int = 16, order: str = "LBHNC") -> KVLayout:
        """Return the layout of a Hugging Face decoder's `config`: MHA, GQA, MLA, sliding windows.

        Layers with and without a sliding window are separate groups; the group with the lowest layer comes
        first.

        Raises:
            LayoutError: the config names no layers or heads, or its KV is of another kind (linear attention,
                layers that share KV, heads under another name): use `from_tensors`.
        """
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        layers = getattr(text, "num_hidden_layers", None)
        heads = getattr(text, "num_attention_heads", None)
        kind = f"config {type(config).__name__}"
        if not layers or not heads:
            raise LayoutError(f"{kind}: num_hidden_layers={layers}, num_attention_heads={heads}")
        if shared := getattr(text, "num_kv_shared_layers", None):
            raise LayoutError(f"{kind}: num_kv_shared_layers={shared}, {_USE_TENSORS}")
        if latent := getattr(text, "kv_lora_rank", None):
            kv_heads, k_size, v_size = 1, latent + text.qk_rope_head_dim, 0
        else:
            kv_heads = getattr(text, "num_key_value_heads", None) or heads
            if not hasattr(text, "num_key_value_heads") and hasattr(text, "num_kv_heads"):  # Falcon
                raise LayoutError(f"{kind}: num_kv_heads, {_USE_TENSORS}")
            k_size = v_size = getattr(text, "head_dim", None) or text.hidden_size // heads
        windows = layer_windows(text, layers)
        groups = [
            LayerGroup(
                layers=tuple(i for i, w in enumerate(windows) if w == window),
                kv_heads=kv_heads,
                k_size=k_size,
                v_size=v_size,
                dtype=dtype,
                block_tokens=block_tokens,
                order=order,
                window=window,
            )
            for window in dict.fromkeys(windows)
        ]
        return KVLayout(tuple(groups))

    @staticmethod
    def from_tensors(
        pages: Sequence[torch.Tensor | tuple[torch.Tensor, torch.Tensor]],
        *,
        v_size: int | None = None,
        opaque: bool = False,
        windows: Sequence[int | None] | None = None,
    ) -> KVLayout:
        """Return the layout of an engine's pages, with one entry per layer in model order.

        Args:
            pages: per layer, a tensor [B, H, N, C] with K and V side by side in C, or K and V apart:
                (k [B, H, N, Dk], v [B, H, N, Dv]). Any strides with C innermost.
            v_size: V's part of C in tensors with K and V side by side; None: half of C; 0: MLA.
            opaque: True if pages can only be moved whole; each block must be contiguous bytes.
            windows: sliding window of each layer; None: full attention.

        Raises:
            LayoutError: a tensor is not 4-D, C is not innermost, or an opaque block has holes.
        """
        windows = windows if windows is not None else [None] * len(pages)
        if len(windows) != len(pages):
            raise LayoutError(f"windows has {len(windows)} entries for {len(pages)} layers")
        groups: dict[LayerGroup, list[int]] = {}
        for layer, (tensor, window) in enumerate(zip(pages, windows, strict=True)):
            group = _layer_group(layer, tensor, v_size, opaque, window)
            groups.setdefault(group, []).append(layer)
        return KVLayout(tuple(replace(group, layers=tuple(layers)) for group, layers in groups.items()))


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything except the tokens that determines KV bytes. Its digest starts every hash chain.

    Two caches share records if and only if their namespaces are equal; with `ranks_share`, rank and world
    may differ.

    Args:
        model: hub id, or another name of the weights.
        layout: `KVLayout.fingerprint()`.
        dtype: dtype in which the model computes.
        revision: revision of the weights.
        lora: identity of the adapter's contents; empty: no adapter.
        draft: identity of the draft model with KV beside the model's; empty: no draft.
        rank, world: rank of the process, and number of processes of its engine.
        ranks_share: True if the layout states which heads and layers a record holds; rank and world are
            then ignored.
        isa: instruction set that wrote opaque pages; empty: pages are not opaque.
        salt: cache salt, which keeps tenants apart. It changes the keys; records never carry the salt itself.
        chunk_tokens: tokens per chunk.
        hash: name of the key digest, see `kvkit.format.keys`.
        format: version of the record format.

    Raises:
        LayoutError: rank, world or chunk_tokens is out of range.
    """

    model: str
    layout: str
    dtype: str
    revision: str = ""
    lora: str = ""
    rank: int = 0
    world: int = 1
    isa: str = ""
    salt: str = ""
    chunk_tokens: int = 256
    hash: str = "xxh3_128"
    format: int = FORMAT_VERSION
    ranks_share: bool = False
    draft: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise LayoutError(f"rank={self.rank}, world={self.world}: want 0 <= rank < world")
        if self.chunk_tokens < 1:
            raise LayoutError(f"chunk_tokens={self.chunk_tokens}: want at least 1")

    def to_bytes(self) -> bytes:
        """Return the bytes to hash: JSON of all that decides KV, keys sorted, no spaces, ASCII escapes."""
        return canonical_json(self._key_fields())

    def public(self) -> dict[str, Any]:
        """Return the fields that a store may show: all that decides KV, and whether there is a salt."""
        return self._key_fields() | {"salt": bool(self.salt)}

    def _key_fields(self) -> dict[str, Any]:
        fields = {name: value for name, value in asdict(self).items() if value or name != "draft"}
        return fields | {"rank": 0, "world": 1} if fields.pop("ranks_share") else fields


def heads_of(heads: int, rank: int, ranks: int) -> range:
    """Return a layer's heads on a tensor-parallel rank; adjacent ranks share a head if heads are fewer."""
    first = rank * heads // ranks
    return range(first, first + max(1, heads // ranks))


def canonical_json(value: Any) -> bytes:
    """Serialise to JSON that any language can reproduce: sorted keys, no spaces, ASCII escapes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


_USE_TENSORS = "which does not determine the layout: use from_tensors on the engine's pages"
_KV_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")


def layer_windows(text: Any, layers: int) -> list[int | None]:
    """Return each layer's sliding window in a Hugging Face text config, in tokens; None: full attention."""
    window = getattr(text, "sliding_window", None)
    types = getattr(text, "layer_types", None)
    if not types:
        return [window if getattr(text, "use_sliding_window", True) else None] * layers
    if unknown := [kind for kind in types if kind not in _KV_LAYER_TYPES]:
        raise LayoutError(f"layer_types has {unknown[0]!r}: want one of {', '.join(_KV_LAYER_TYPES)}")
    return [window if kind == "sliding_attention" else None for kind in types]


def _layer_group(
    layer: int,
    pages: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    v_size: int | None,
    opaque: bool,
    window: int | None,
) -> LayerGroup:
    """Return the group of one layer, numbered 0, so that layers of one kind have equal groups."""
    if isinstance(pages, tuple):
        k, v = pages
        if k.shape[:3] != v.shape[:3] or k.dtype != v.dtype or opaque:
            raise LayoutError(f"pages[{layer}]: K {tuple(k.shape)} and V {tuple(v.shape)} do not match")
        group, v_group = (_layer_group(layer, tensor, 0, False, window) for tensor in pages)
        return replace(group, v_size=v_group.k_size, strides=None)
    if pages.ndim != 4:
        raise LayoutError(f"pages[{layer}]: shape {tuple(pages.shape)}, want [B, H, N, C]")
    heads, tokens, channels = pages.shape[1:]
    strides = tuple(pages.stride())
    if channels > 1 and strides[3] != 1:
        raise LayoutError(f"pages[{layer}]: stride {strides}, want C innermost (stride 1)")
    v_channels = channels // 2 if v_size is None else v_size
    if not 0 <= v_channels < channels:
        raise LayoutError(f"v_size={v_size}: want 0 <= v_size < C={channels}")
    page_bytes = None
    if opaque:
        page_bytes = heads * tokens * channels * pages.element_size()
        extent = 1 + sum((n - 1) * s for n, s in zip(pages.shape[1:], strides[1:], strict=True))
        if extent != heads * tokens * channels:
            raise LayoutError(f"pages[{layer}]: stride {strides}, an opaque block must be contiguous bytes")
    return LayerGroup(
        layers=(0,),
        kv_heads=heads,
        k_size=channels - v_channels,
        v_size=v_channels,
        dtype=str(pages.dtype).removeprefix("torch."),
        block_tokens=tokens,
        order="LBHNC" if heads == 1 or strides[1] >= strides[2] else "LBNHC",
        strides=(strides[0], strides[1], strides[2], strides[3]),
        window=window,
        page_bytes=page_bytes,
    )
