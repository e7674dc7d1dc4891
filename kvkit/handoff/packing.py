"""Packing of chunks directly into slots of their receiver, one layer at a time as the engine computes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from functools import partial

from kvkit.handoff.sender import HandoffError, RemoteSlots
from kvkit.handoff.transport.channel import ChannelError
from kvkit.staging import Lease
from kvkit.transfer.layerwise import LayerStore, Lend
from kvkit.transfer.store import Stored
from kvkit.workers import Transfer

log = logging.getLogger(__name__)


class Packing:
    """Records that are packed layer by layer into slots from `Sender.lend`, without a copy.

    Little work is left when the last layer is computed. If a transfer ends meanwhile, or `abandon` is called,
    none of the records is put: their slots hold incomplete data that was never announced to the receiver.

    Args:
        admitted: returns whether the receivers have reported which records they lack.
        store: creates the layer store, given a function that leases its slots.
        lend: borrows slots for records of these names; returns None if it cannot.

    Attributes:
        stored: future that is done when the pages are no longer read.
    """

    def __init__(
        self,
        admitted: Callable[[], bool],
        store: Callable[[Lend], LayerStore],
        lend: Callable[[Sequence[str]], RemoteSlots | None],
    ) -> None:
        self._admitted = admitted
        self.stored: Transfer[Stored] = Transfer()
        self.stored.set_running_or_notify_cancel()
        self._store = store(self._take)
        self._lend = lend
        self._remote_slots: RemoteSlots | None = None
        self._refused = self._opened = self._closed = False
        self._lock = threading.Lock()

    def open(self, *, last: bool = False) -> bool:
        """Take slots unless taken already, and return whether it has them. `last`: never try again."""
        with self._lock:
            if not (self._opened or self._closed) and self._admitted():
                self._refused = False
                self._store.open()
                self._opened = not self._refused
            self._closed = self._closed or (last and not self._opened)
            return self._opened

    def pack(self, layers: Collection[int]) -> None:
        """Pack the computed `layers` that are not packed yet. Call it from the same thread as `end`."""
        if not self.open():
            return
        for number in [number for number in self._store.left if number in layers]:
            if self._closed or not self._write(partial(self._store.layer, number)):
                self._close(complete=False)
                return

    def end(self) -> None:
        """Pack the remaining layers and put the records. All layers must be computed."""
        try:
            self.pack(tuple(self._store.left))
            if not self._closed:
                self._close(complete=self._write(self._store.seal))
        finally:
            self._done()

    def abandon(self) -> None:
        """Stop reading the pages. Waits for a layer that is being packed."""
        self.stored.release_pages()
        self._close(complete=False)
        self._done()

    def _take(self, names: Sequence[str]) -> Sequence[Lease]:
        self._remote_slots = self._lend(names)
        self._refused = self._remote_slots is None
        return () if self._remote_slots is None else self._remote_slots.leases

    def _write(self, work: Callable[[], object]) -> bool:
        """Run `work`, which writes into the slots; return whether it was allowed to and completed."""
        if self._remote_slots is None:  # the receivers lack none of the records
            return True
        try:
            with self.stored.pages, self._remote_slots.writing():
                if not self.stored.stopped:
                    work()
                return not self.stored.stopped
        except (HandoffError, ChannelError) as error:
            log.info("nothing more is packed: %s", error)
        except Exception:
            log.exception("packing failed")
        return False

    def _close(self, complete: bool) -> None:
        with self._lock:
            closed, self._closed = self._closed, True
        if self._opened and not closed:
            self._store.close(complete)

    def _done(self) -> None:
        with self._lock:
            if not self.stored.done():
                self.stored.set_result(self._store.stored)
