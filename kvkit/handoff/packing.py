"""Chunks packed straight into slots of their receiver, each layer as soon as the engine has computed it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from functools import partial

from kvkit.handoff.sender import HandoffError, RemoteSlots
from kvkit.handoff.transport.channel import ChannelError
from kvkit.moving.layerwise import LayerStore, Lend
from kvkit.moving.store import Stored
from kvkit.staging import Lease
from kvkit.workers import Transfer

log = logging.getLogger(__name__)


class Packing:
    """Records in the making in slots that `Sender.lend` gave: none is copied, and little of them is left to
    be done when the last layer is computed.

    Where a transfer ends meanwhile, or `abandon` is called, none of them is put: what is in the slots then
    is no record, and its receiver has not heard of it.

    Args:
        admitted: whether receivers have said what they lack.
        store: makes the store, given what lends its slots.
        lend: slots for records of these names, None where there are none.

    Attributes:
        stored: done when the pages are read no more.
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
        """Take slots; whether it has them, now or from an earlier call. `last`: else it never will."""
        with self._lock:
            if not (self._opened or self._closed) and self._admitted():
                self._refused = False
                self._store.open()
                self._opened = not self._refused
            self._closed = self._closed or (last and not self._opened)
            return self._opened

    def pack(self, layers: Collection[int]) -> None:
        """Pack those of `layers`, which are computed, that are not yet. For one thread, with `end`."""
        if not self.open():
            return
        for number in [number for number in self._store.left if number in layers]:
            if self._closed or not self._write(partial(self._store.layer, number)):
                self._close(complete=False)
                return

    def end(self) -> None:
        """All is computed: pack what is left, and put the records."""
        try:
            self.pack(tuple(self._store.left))
            if not self._closed:
                self._close(complete=self._write(self._store.seal))
        finally:
            self._done()

    def abandon(self) -> None:
        """Read the pages no more: waits for a layer that is being packed."""
        self.stored.release_pages()
        self._close(complete=False)
        self._done()

    def _take(self, names: Sequence[str]) -> Sequence[Lease]:
        self._remote_slots = self._lend(names)
        self._refused = self._remote_slots is None
        return () if self._remote_slots is None else self._remote_slots.leases

    def _write(self, work: Callable[[], object]) -> bool:
        """Have `work` write into the slots; whether it may, and did."""
        if self._remote_slots is None:  # nothing of it is wanted
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
