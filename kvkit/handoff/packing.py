"""Packing of chunks directly into slots of their receiver, one layer at a time as the engine computes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from functools import partial

from kvkit.handoff.chunk_sender import ChunkSender
from kvkit.handoff.rank_transfers import RankTransfers
from kvkit.handoff.sender import HandoffError, RemoteSlots
from kvkit.handoff.transport.channel import ChannelError
from kvkit.staging import release_all
from kvkit.transfer.layer_store import LayerPacker
from kvkit.transfer.sequence import Chunks, SequencePages, check_pages
from kvkit.workers import Transfer

log = logging.getLogger(__name__)


class Packing:
    """Records that are packed layer by layer into slots from `Sender.lend`, without a copy.

    Little work is left when the last layer is computed. If a transfer ends meanwhile, or `abandon` is called,
    none of the records is put: their slots hold incomplete data that was never announced to the receiver.

    Args:
        out: sends the records.
        transfers: transfers whose receivers lend the slots.
        pages: pages of `chunks`, one entry per layer group.

    Attributes:
        packed: future that is done when the pages are no longer read; returns the number of chunks sent.

    Raises:
        CacheError: `pages` do not match the layout or are too short, or a group has states.
    """

    def __init__(
        self, out: ChunkSender, transfers: RankTransfers, chunks: Chunks, pages: Sequence[SequencePages]
    ) -> None:
        self._out = out
        self._transfers = transfers
        self._chunks = chunks
        self._pages = check_pages(pages, chunks, len(chunks), out.layout)
        self.packed: Transfer[int] = Transfer()
        self.packed.set_running_or_notify_cancel()
        self._packer: LayerPacker | None = None
        self._remote_slots: RemoteSlots | None = None
        self._closed = False
        self._sent = 0
        self._lock = threading.Lock()

    def open(self, *, last: bool = False) -> bool:
        """Borrow slots unless done already, and return whether it has them. `last`: never try again."""
        with self._lock:
            if self._packer is None and not self._closed and self._transfers.admitted:
                self._packer = self._borrow()
            self._closed = self._closed or (last and self._packer is None)
            return self._packer is not None

    def pack(self, layers: Collection[int]) -> None:
        """Pack the computed `layers` that are not packed yet. Call it from the same thread as `end`."""
        if not self.open() or self._packer is None:
            return
        for number in [number for number in self._packer.left if number in layers]:
            if self._closed or not self._write(partial(self._packer.layer, number)):
                self._close(complete=False)
                return

    def end(self) -> None:
        """Pack the remaining layers and put the records. All layers must be computed."""
        try:
            if self._packer is not None:
                self.pack(tuple(self._packer.left))
                if not self._closed:
                    self._close(complete=self._write(self._packer.seal))
        finally:
            self._done()

    def abandon(self) -> None:
        """Stop reading the pages. Waits for a layer that is being packed."""
        self.packed.release_pages()
        self._close(complete=False)
        self._done()

    def _borrow(self) -> LayerPacker | None:
        """Return a packer into slots of the receivers for all that they lack; None if they lend none."""
        numbers = self._out.awaited(self._chunks)
        if not numbers:
            return LayerPacker(self._chunks, self._pages, (), ())
        names = [name for number in numbers for name in self._chunks.records(number, number + 1)]
        self._remote_slots = self._out.sender.lend(self._transfers.handles or (), names)
        if self._remote_slots is None:
            return None
        return LayerPacker(self._chunks, self._pages, numbers, self._remote_slots.leases)

    def _write(self, work: Callable[[], object]) -> bool:
        """Run `work`, which writes into the slots; return whether it was allowed to and completed."""
        if self._remote_slots is None:  # the receivers lack none of the records
            return True
        try:
            with self.packed.pages, self._remote_slots.writing():
                if not self.packed.stopped:
                    work()
                return not self.packed.stopped
        except (HandoffError, ChannelError) as error:
            log.info("nothing more is packed: %s", error)
        except Exception:
            log.exception("packing failed")
        return False

    def _close(self, complete: bool) -> None:
        with self._lock:
            was_closed, self._closed = self._closed, True
        packer, slots = self._packer, self._remote_slots
        if was_closed or packer is None or slots is None:
            return
        try:
            if complete:
                self._out.put(self._chunks, packer.numbers, slots.leases)
                self._sent = len(packer.numbers)
        finally:
            release_all(slots.leases)

    def _done(self) -> None:
        with self._lock:
            if not self.packed.done():
                self.packed.set_result(self._sent)
