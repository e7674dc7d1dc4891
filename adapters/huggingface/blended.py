"""A Hugging Face decoder that reuses documents anywhere in a prompt.

blended = BlendedModel.open(model, config)
blended.precompute(document)                               # once; stores its KV in the tiers
blended.prefill(prompt, documents=[(start, stop), ...])    # after any other text
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from kvkit.adapters.engine.lookup_request import TokenIds
from kvkit.adapters.huggingface.cached import CachedModel, CacheOwner
from kvkit.adapters.huggingface.fingerprint import model_fingerprint
from kvkit.adapters.huggingface.growing import GrowingCache
from kvkit.adapters.huggingface.probe import probe_layout
from kvkit.adapters.huggingface.steps import decode, forward
from kvkit.blend import gate
from kvkit.blend.methods.method import NeedsRecompute
from kvkit.blend.methods.registry import method_named
from kvkit.blend.plan import BlendError, BlendPlan, Selection, Span, plan_blend, split
from kvkit.blend.run import Attention, PagedKV, Reader, blend, recompute
from kvkit.cache import Cache, SequencePages, Stored
from kvkit.config import Config
from kvkit.format.keys import as_tokens
from kvkit.format.layout import LayoutError, Namespace, layer_windows
from kvkit.format.rope import Rope, Rotation
from kvkit.kernels.attention.layer import Scoring
from kvkit.kernels.checks import LaunchError
from kvkit.kernels.pages import reference
from kvkit.transfer.policy import DEFAULT_REQUEST_POLICY, RequestPolicy

_PROBE_TOKENS = 12


class HuggingFaceDecoder:
    """The layers of a Llama-like causal language model, as a `kvkit.blend.run.Decoder`.

    Every layer must be: h += o_proj(attention(norm(h))), then h += mlp(norm(h)), with q_proj, k_proj, v_proj,
    optional q_norm and k_norm per head, and one rotary embedding for all layers. The constructor verifies
    this by computing a few tokens both ways.

    Raises:
        BlendError: the model is of another kind; the message names its type and what differs.
    """

    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config(decoder=True)
        self.kind = str(config.model_type)
        self.model = model
        self.base = model.get_decoder() if hasattr(model, "get_decoder") else model.model
        self._require(self.base, "layers", "norm", "embed_tokens", "rotary_emb")
        block = self.base.layers[0]
        self._require(block, "self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
        rotary_channels = self._verify_parts(block.self_attn)
        self._require(self.base.rotary_emb, "inv_freq")
        if getattr(config, "num_kv_shared_layers", None):
            raise BlendError(f"model type {self.kind!r}: its layers share KV, which cannot be blended")
        self.layers = len(self.base.layers)
        self.device: torch.device = next(model.parameters()).device
        self.windows = layer_windows(config, self.layers)
        self.rope = self._matching_rope(rotary_channels)

    def attention(self, layer: int) -> Attention:
        scale = float(self.base.layers[layer].self_attn.scaling)
        return Attention(self.rope, Scoring(scale, self.windows[layer]))

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.base.embed_tokens(ids))

    def qkv(self, layer: int, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        block = self.base.layers[layer]
        attention = block.self_attn
        x = block.input_layernorm(h)
        q, k, v = (
            project(x).unflatten(-1, (-1, attention.head_dim))
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if getattr(attention, "q_norm", None) is not None:
            q, k = attention.q_norm(q), attention.k_norm(k)
        return q, k, v

    def post(self, layer: int, h: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
        block = self.base.layers[layer]
        h = h + block.self_attn.o_proj(o.flatten(1))
        mixed = block.mlp(block.post_attention_layernorm(h)[None])[0]  # MoE expects [1, M, E]
        return cast(torch.Tensor, h + mixed)

    def logits(self, h: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.model.get_output_embeddings()(self.base.norm(h)))

    def pages(self, kv: GrowingCache) -> PagedKV:
        """Return a cache of this model as pages."""
        return paged(kv)

    def write_back(self, pages: PagedKV, kv: GrowingCache) -> None:
        """Write `pages` to the cache that they were made of, unless they share its memory. Mutates `kv`."""

    def moved(
        self, k: torch.Tensor, v: torch.Tensor, shifts: NDArray[np.int64]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of a cache's layer, [B, H, T, ...], with tokens moved by `shifts`, [T]."""
        table = torch.from_numpy(self.rope.delta_table(shifts)).to(k.device)
        return reference.rotate(k, table, self.rope), v

    def _verify_parts(self, attention: Any) -> int:
        """Check that an attention layer has what `qkv` needs; return the most rotary channels of a head."""
        self._require(attention, "q_proj", "k_proj", "v_proj", "o_proj", "head_dim", "scaling")
        return int(attention.head_dim)

    def _require(self, module: Any, *names: str) -> None:
        for name in names:
            if not hasattr(module, name):
                reason = f"{type(module).__name__} lacks {name}, not Llama-like"
                raise BlendError(f"model type {self.kind!r}: {reason}")

    def _matching_rope(self, most_channels: int) -> Rope:
        """Return the rope with the order of channels that reproduces the model's results."""
        rotary = self.base.rotary_emb
        frequencies = tuple(rotary.inv_freq.double().tolist())
        scale = float(getattr(rotary, "attention_scaling", 1.0))
        differences = {}
        for interleaved in (False, True):
            self.rope = Rope(frequencies, interleaved, scale=scale)
            if self.rope.channels > most_channels:
                break
            differences[interleaved] = self._difference()
            if differences[interleaved] < (1e-3 if self.model.dtype == torch.float32 else 0.1):
                return self.rope
        raise BlendError(
            f"model type {self.kind!r}: its keys, values or logits are not those of a Llama-like decoder "
            f"(relative difference {min(differences.values(), default=float('inf')):.2g})"
        )

    @torch.inference_mode()
    def _difference(self) -> float:
        """Return the largest relative difference from the model in the logits or any layer's K or V."""
        vocabulary = self.base.embed_tokens.weight.shape[0]
        ids = np.arange(_PROBE_TOKENS, dtype=np.int32) * 7919 % vocabulary
        try:
            layout = probe_layout(self.model)
            model_kv, own_kv = (GrowingCache(layout, _PROBE_TOKENS, self.device) for _ in range(2))
            expected = [forward(self.model, ids, model_kv)]
            pages = self.pages(own_kv)
            actual = [recompute(self, pages, ids, plan_blend(len(ids)), np.zeros(0, np.int32)).logits]
            self.write_back(pages, own_kv)
        except (LayoutError, LaunchError, RuntimeError, TypeError) as error:
            raise BlendError(f"model type {self.kind!r}: does not run as Llama does: {error}") from error
        for a, b in zip(model_kv.layers, own_kv.layers, strict=True):
            expected += [a.room_k, a.room_v]
            actual += [b.room_k, b.room_v]
        return max(
            float((x.float() - y.float()).norm() / x.float().norm())
            for x, y in zip(expected, actual, strict=True)
        )


@dataclass(frozen=True, slots=True, eq=False)
class BlendedPrefill:
    """A prompt with complete KV, partly blended.

    Attributes:
        logits: logits of the last token, [V].
        kv: the model's cache (`past_key_values`). Do not store it: a full prefill computes other KV.
        plan: plan of the blend: the KV that was found, and whether it is exact.
        prefix_tokens: leading tokens loaded unchanged.
        reused_tokens: tokens of documents loaded from the cache, including the selected ones.
        computed_tokens: tokens without KV, including the question.
        selected_tokens: reused tokens that were recomputed.
        row_layers: computed rows, summed over layers; a full prefill takes tokens * layers.
    """

    logits: torch.Tensor
    kv: GrowingCache
    plan: BlendPlan
    prefix_tokens: int
    reused_tokens: int
    computed_tokens: int
    selected_tokens: int
    row_layers: int


class BlendedModel(CacheOwner):
    """A `CachedModel` for prompts with documents that were computed elsewhere.

    Documents are stored as separate sequences in a separate namespace. Keys are hashes of tokens, and every
    record's tokens are compared before it is used. The last tokens of a document, fewer than a chunk, are
    computed with the prompt, so `chunk_tokens` should be small (16 to 64).

    Args:
        cached: the model with its cache.
        selection: method and share of the tokens to recompute.
        unchecked: blend even if `kvkit doctor --blend` has not measured this model.
        auxiliary: reader for methods that need one, such as an `AuxiliaryModel`.

    Raises:
        BlendError: the model cannot be blended, there is no cache, the model has not passed the check, or
            the method needs full recompute.
    """

    def __init__(
        self,
        cached: CachedModel,
        selection: Selection | None = None,
        *,
        unchecked: bool = False,
        auxiliary: Reader | None = None,
    ) -> None:
        if cached.cache is None:
            raise BlendError("cached: has no cache to take documents from")
        self.selection, self.auxiliary = selection or Selection(), auxiliary
        if isinstance(needs := method_named(self.selection.method).needs, NeedsRecompute):
            raise BlendError(
                f"method={self.selection.method!r}: needs {needs}: for `kvkit bench blend` alone"
            )
        if not unchecked:
            gate.check(model_fingerprint(cached.model), self.selection, "unchecked=True")
        self.cached = cached
        self.cache: Cache = cached.cache
        self.decoder = HuggingFaceDecoder(cached.model)
        self.namespace = document_namespace(cached.cache.namespace)

    @staticmethod
    def open(
        model: Any,
        config: Config,
        selection: Selection | None = None,
        *,
        unchecked: bool = False,
        auxiliary: Reader | None = None,
    ) -> BlendedModel:
        """Open `model` with the tiers of `config`; raises as `CachedModel.open` and the constructor do."""
        cached = CachedModel.open(model, config)
        try:
            return BlendedModel(cached, selection, unchecked=unchecked, auxiliary=auxiliary)
        except BaseException:
            cached.close()
            raise

    @torch.inference_mode()
    def precompute(
        self, document: Any, prefix: Any = (), policy: RequestPolicy = DEFAULT_REQUEST_POLICY
    ) -> Stored:
        """Compute a document's KV alone, int32 [T], and store its whole chunks.

        With a `prefix` (such as a system prompt), the document is computed right after it, and found only by
        a `prefill` with the same `prefix`.

        Raises:
            BlendError: the document is empty.
            PolicyError: `policy` names a tier that does not exist.
        """
        ids = np.concatenate([as_tokens(prefix), as_tokens(document)])
        if not len(as_tokens(document)):
            raise BlendError("document: it has no tokens")
        kv = GrowingCache(self.cached.layout, len(ids), self.cached.device)
        kv.load(self.cache, ids, self.namespace, policy)
        if kv.length < len(ids):
            forward(self.cached.model, ids[kv.length :], kv)
        return self.cache.store(ids[: kv.exact], kv.sequence_pages(kv.exact), self.namespace, policy=policy)

    @torch.inference_mode()
    def prefill(
        self,
        tokens: Any,
        documents: Sequence[tuple[int, int]] | None = None,
        *,
        prefix: Any = (),
        room: int = 0,
        policy: RequestPolicy = DEFAULT_REQUEST_POLICY,
    ) -> BlendedPrefill:
        """Load the exact prefix, load and move documents, and compute the rest. Stores nothing.

        Args:
            tokens: int32 [T], the prompt.
            documents: (start, stop) of every document to look up, ascending and disjoint. None: the pieces
                that `kvkit.blend.plan.split` cuts the prompt into; documents must then have been precomputed
                in these pieces.
            prefix: tokens after which the documents were precomputed.
            room: further tokens that fit before the KV must be copied to larger memory.
            policy: request policy of the lookups; `max_load_tokens` limits the prompt's prefix and each
                document separately.

        Raises:
            BlendError: the prompt is empty, or documents lie outside it, overlap or are out of order.
            PolicyError: `policy` names a tier that does not exist.
        """
        ids, prefix_ids = as_tokens(tokens), as_tokens(prefix)
        if not len(ids):
            raise BlendError("tokens: the prompt is empty")
        if documents is None:
            documents = list(itertools.pairwise(split(ids).tolist()))
        plan_blend(len(ids), 0, [Span(*document) for document in documents])  # checked before any load
        kv = GrowingCache(self.cached.layout, len(ids) + room, self.cached.device)
        exact = kv.load(self.cache, ids[:-1], policy=policy).tokens
        spans = [self._load(ids, Span(*document), exact, prefix_ids, kv, policy) for document in documents]
        plan = plan_blend(len(ids), exact, spans)
        blended = blend(self.decoder, paged(kv), ids, plan, self.selection, auxiliary=self.auxiliary)
        kv.mark_filled(len(ids))
        reused = sum(span.stop - span.start for span in plan.spans)
        with self.cache.tier_set.counting() as counts:
            counts.blended(reused, len(blended.selected), len(plan.computed))
        return BlendedPrefill(
            logits=blended.logits,
            kv=kv,
            plan=plan,
            prefix_tokens=exact,
            reused_tokens=reused,
            computed_tokens=len(plan.computed),
            selected_tokens=len(blended.selected),
            row_layers=blended.row_layers,
        )

    @torch.inference_mode()
    def decode(self, prefill: BlendedPrefill, max_new_tokens: int, stop: Collection[int] = ()) -> list[int]:
        """Decode greedily until a token of `stop`, included. Mutates the prefill's KV; stores nothing.

        Raises:
            BlendError: `max_new_tokens` is below 1.
        """
        if max_new_tokens < 1:
            raise BlendError(f"max_new_tokens={max_new_tokens}: want at least 1")
        return list(decode(self.cached.model, prefill.logits, prefill.kv, max_new_tokens, stop))

    def _load(
        self,
        ids: TokenIds,
        document: Span,
        exact: int,
        prefix_ids: TokenIds,
        kv: GrowingCache,
        policy: RequestPolicy,
    ) -> Span:
        """Load a document's KV beyond the exact prefix, rotated to its positions; return the loaded span."""
        first, start, stop = len(prefix_ids), document.start, document.stop
        document_ids = np.concatenate([prefix_ids, ids[start:stop]])
        if stop <= exact:
            return Span(start, start, first)
        hit = self.cache.lookup(document_ids, self.namespace, policy=policy)
        slots = np.arange(hit.tokens, dtype=np.int64) - first + start
        slots[: min(first, hit.tokens)] = -1
        slots[slots < exact] = -1
        pages = [SequencePages(group_pages.pages, slots=slots) for group_pages in kv.sequence_pages(0)]
        chunks = hit.tokens // self.namespace.chunk_tokens
        rotate = Rotation(self.decoder.rope, np.full(chunks, start - first, np.int64))
        loaded = self.cache.load(hit, pages, rotate if start != first else None).tokens
        is_exact = first == start and np.array_equal(prefix_ids, ids[:start])
        return Span(start, max(start, start + loaded - first), first, exact=is_exact)


def document_namespace(namespace: Namespace) -> Namespace:
    """Return the namespace of documents, separate from `namespace`, which holds exact KV only."""
    return replace(namespace, revision=f"{namespace.revision}+documents")


def paged(kv: GrowingCache) -> PagedKV:
    """Return the cache as pages: the whole room is one block, and a slot is a position."""
    return PagedKV([(layer.room_k, layer.room_v) for layer in kv.layers], np.zeros(1, np.int64))
