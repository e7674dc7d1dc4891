"""Packing of chunks directly into slots of their receiver, layer by layer as the engine computes them."""

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
    """Packs the records of chunks layer by layer into slots from `Sender.borrow_slots`, without a copy.

    Little work is left when the last layer is computed. If a transfer ends before that, or `abandon` is
    called, no record is put: the slots hold incomplete data that was not announced to the receiver.

    Args:
        chunk_sender: sends the records.
        transfers: transfers whose receivers lend the slots.
        pages: pages of `chunks`, one entry per layer group.

    Attributes:
        packed: future that is done when the pages are no longer read; returns the number of chunks put.

    Raises:
        CacheError: `pages` do not match the layout or are too short, or a group has states.
    """

    def __init__(
        self,
        chunk_sender: ChunkSender,
        transfers: RankTransfers,
        chunks: Chunks,
        pages: Sequence[SequencePages],
    ) -> None:
        self._chunk_sender = chunk_sender
        self._transfers = transfers
        self._chunks = chunks
        self._pages = check_pages(pages, chunks, len(chunks), chunk_sender.layout)
        self.packed: Transfer[int] = Transfer()
        self.packed.set_running_or_notify_cancel()
        self._packer: LayerPacker | None = None
        self._remote_slots: RemoteSlots | None = None
        self._closed = False
        self._sent = 0
        self._lock = threading.Lock()

    def open(self, *, last: bool = False) -> bool:
        """Borrow slots unless done before, and return whether it has them. `last`: do not try again."""
        with self._lock:
            if self._packer is None and not self._closed and self._transfers.admitted:
                self._packer = self._borrow()
            self._closed = self._closed or (last and self._packer is None)
            return self._packer is not None

    def pack(self, layers: Collection[int]) -> None:
        """Pack those of the computed `layers` that are not packed. The thread that calls `end` calls it."""
        if not self.open() or self._packer is None:
            return
        for number in [number for number in self._packer.left if number in layers]:
            if self._closed or not self._write(partial(self._packer.layer, number)):
                self._close(complete=False)
                return

    def end(self) -> None:
        """Pack the remaining layers, all of which are computed, and put the records."""
        try:
            if self._packer is not None:
                self.pack(tuple(self._packer.left))
                if not self._closed:
                    self._close(complete=self._write(self._packer.seal))
        finally:
            self._done()

    def abandon(self) -> None:
        """Stop reading the pages; wait for a layer that is being packed."""
        self.packed.release_pages()
        self._close(complete=False)
        self._done()

    def _borrow(self) -> LayerPacker | None:
        """Return a packer of the chunks that receivers lack, into slots of theirs; None without slots."""
        numbers = self._chunk_sender.awaited_chunks(self._chunks)
        if not numbers:
            return LayerPacker(self._chunks, self._pages, (), ())
        names = [name for number in numbers for name in self._chunks.records(number, number + 1)]
        self._remote_slots = self._chunk_sender.sender.borrow_slots(self._transfers.handles or (), names)
        if self._remote_slots is None:
            return None
        return LayerPacker(self._chunks, self._pages, numbers, self._remote_slots.leases)

    def _write(self, work: Callable[[], object]) -> bool:
        """Run `work`, which writes into the slots; return False if it may not, or failed."""
        if self._remote_slots is None:  # the receivers lack none of the records
            return True
        try:
            with self.packed.pages, self._remote_slots.writing():
                if not self.packed.stopped:
                    work()
                return not self.packed.stopped
        except (HandoffError, ChannelError) as error:
            log.info("handoff: packing of a prompt stops: %s", error)
        except Exception:
            log.exception("handoff: packing of a prompt failed")
        return False

    def _close(self, complete: bool) -> None:
        with self._lock:
            was_closed, self._closed = self._closed, True
        packer, slots = self._packer, self._remote_slots
        if was_closed or packer is None or slots is None:
            return
        try:
            if complete:
                self._chunk_sender.put(self._chunks, packer.numbers, slots.leases)
                self._sent = len(packer.numbers)
        finally:
            release_all(slots.leases)

    def _done(self) -> None:
        with self._lock:
            if not self.packed.done():
                self.packed.set_result(self._sent)
