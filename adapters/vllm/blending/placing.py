"""Placing of documents from tiers in a request's blocks, with keys rotated to their new positions."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvkit.adapters.vllm.blending.choosing import PagesOfLayers
from kvkit.adapters.vllm.blending.order import PageOrder
from kvkit.adapters.vllm.pages import GroupPages
from kvkit.adapters.vllm.step import Tables
from kvkit.format.record import RecordFormat
from kvkit.format.rope import Rope, Rotation
from kvkit.kernels.pages.api import Pages, unpack
from kvkit.kernels.pages.streams import CudaEvents
from kvkit.transfer.sequence import SequencePages


@dataclass(frozen=True, slots=True)
class MovedPages(SequencePages):
    """Pages for a document's tokens, with keys that a load rotates by `delta` positions.

    Args:
        ropes: rope of each layer of the group; None: its keys are not rotated.
        order: order of K and V in opaque pages, as `unpack_ordered` takes it; None: pages are not opaque.
        delta: distance from the position at which tokens were computed to their new position.
        noted: called with the seconds that each part took.
    """

    ropes: tuple[Rope | None, ...] = ()
    order: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None
    delta: int = 0
    noted: Callable[[float], object] = lambda seconds: None

    def fill(
        self,
        form: RecordFormat,
        first: int,
        payloads: Sequence[NDArray[np.uint8]],
        rotate: Rotation | None,
        after: CudaEvents | None,
    ) -> None:
        """Unpack payloads of records and rotate their keys by `delta`; ignore `rotate`. Mutates the pages."""
        began, slots = time.perf_counter(), self.rows_of(form, range(first, first + len(payloads)))["slots"]
        if self.order is not None:
            from kvkit.kernels.pages.ordered import unpack_ordered  # numba stays out of vLLM's start

            unpack_ordered(self.pages, payloads, slots, self.order, self.ropes, self.delta)
        elif len(set(self.ropes)) == 1:
            self._unpack(self.pages, self.ropes[0], payloads, slots, after)
        else:
            for i, rope in enumerate(self.ropes):
                span = slice(i * form.layer_bytes, (i + 1) * form.layer_bytes)
                self._unpack(self.pages.layer(i), rope, [payload[span] for payload in payloads], slots, after)
        self.noted(time.perf_counter() - began)

    def _unpack(
        self,
        pages: Pages,
        rope: Rope | None,
        payloads: Sequence[NDArray[np.uint8]],
        slots: NDArray[np.int64],
        after: CudaEvents | None,
    ) -> None:
        deltas = np.full(len(payloads), self.delta, np.int64)
        rotate = Rotation(rope, deltas) if rope is not None and self.delta else None
        unpack(pages, payloads, slots=slots, rotate=rotate, after=after)


@dataclass(frozen=True, slots=True)
class Placing:
    """One rank's pages, and the ropes of their keys.

    Args:
        groups: groups of the layout.
        orders: page order of each group; None: its pages are not opaque.
        ropes: rope of each layer by the layer's name; None: its keys are not rotated.
    """

    groups: Sequence[GroupPages]
    orders: Sequence[PageOrder | None]
    ropes: Mapping[str, Rope | None]

    @staticmethod
    def of(groups: Sequence[GroupPages], pages: PagesOfLayers, ropes: Sequence[Rope | None]) -> Placing:
        """Describe a rank's groups, given the rope of each layer of `pages`."""
        names = [layer.name for layer in pages.layers]
        order_of, rope_of = dict(zip(names, pages.orders, strict=True)), dict(zip(names, ropes, strict=True))
        group_orders = []
        for group in groups:
            heads, order = group.pages.group, order_of[group.names[0]]
            first = min(g.pages.group.first_head for g in groups if g.names == group.names)
            if order is not None:
                order = order.part(heads.first_head - first, heads.kv_heads) if heads.opaque else None
            group_orders.append(order)
        return Placing(groups, group_orders, rope_of)

    def warm_up(self, formats: Sequence[RecordFormat]) -> None:
        """Compile the kernels that rotate keys before a request waits for them. Mutates no pages.

        Args:
            formats: record format of each group.
        """
        no_positions = np.full(formats[0].namespace.chunk_tokens, -1)
        no_blocks: Tables = tuple([] for _ in range(1 + max(group.table for group in self.groups)))
        moved_pages = self.places(no_blocks, no_positions, 1, lambda _: None)
        for pages, form in zip(moved_pages, formats, strict=True):
            pages.fill(form, 0, [np.zeros(form.shape[0] * form.layer_bytes, np.uint8)], None, ())

    def places(
        self,
        blocks: Tables,
        positions: NDArray[np.int64],
        delta: int,
        noted: Callable[[float], object],
    ) -> list[SequencePages]:
        """Return the pages of each group for the tokens of a document.

        Args:
            blocks: block tables of the request, from token 0 on.
            positions: int64 [tokens of the record], positions in the prompt; < 0: the token is left out.
            delta: number of positions that keys move.
            noted: called from any thread with the seconds that each part of a group took.
        """
        moved_pages: list[SequencePages] = []
        for group, order in zip(self.groups, self.orders, strict=True):
            table = np.append(np.array(blocks[group.table], np.int64), -1)
            size = group.block_tokens
            token_blocks = table[np.where(positions < 0, -1, positions // size)]
            slots = np.where(token_blocks < 0, -1, token_blocks * size + positions % size)
            moved_pages.append(
                MovedPages(
                    group.pages,
                    slots=slots,
                    ropes=tuple(self.ropes[name] for name in group.names),
                    order=None if order is None else (order.k.numpy(), order.v.numpy()),
                    delta=delta,
                    noted=noted,
                )
            )
        return moved_pages
