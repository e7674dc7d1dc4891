"""A move that goes on in the background: a future whose cancel is safe for the memory that it moves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from kvkit.threads import Workers

T = TypeVar("T")


class Transfer(Future[T], Generic[T]):
    """The future result of a load, a store or a prefetch.

    While it is under way the engine's pages are in use: `cancel` asks it to stop, and the future completes,
    soon, with what was moved by then. Only a transfer that had not begun becomes cancelled.

    Attributes:
        pages: held while a store reads the engine's pages.
    """

    def __init__(self) -> None:
        super().__init__()
        self._stop = threading.Event()
        self.pages = threading.Lock()
        self._wake: Callable[[], None] = lambda: None

    @property
    def stopped(self) -> bool:
        """Whether someone asked it to stop."""
        return self._stop.is_set()

    def cancel(self) -> bool:
        """Ask it to stop; True if it had not begun, and so moves nothing."""
        self._stop.set()
        self._wake()
        return super().cancel()

    def revoke(self) -> None:
        """Have a store read the engine's pages no more: they may change when this returns.

        Waits for a copy that is under way, never for a tier or a slot. What was copied is still stored.
        """
        self.cancel()
        with self.pages:
            pass

    def when_stopped(self, wake: Callable[[], None]) -> None:
        """Have `wake` called when someone asks it to stop; at once if someone has. Replaces the last one."""
        self._wake = wake
        if self._stop.is_set():
            wake()

    @staticmethod
    def start(workers: Workers, move: Callable[[Transfer[T]], T], urgent: bool = False) -> Transfer[T]:
        """Have one of `workers` carry out `move`, which looks at `stopped` now and then; urgent ones first.

        Raises:
            Closed: the workers were told to end.
        """
        transfer: Transfer[T] = Transfer()

        def work() -> None:
            if not transfer.set_running_or_notify_cancel():
                return
            try:
                transfer.set_result(move(transfer))
            except BaseException as error:
                transfer.set_exception(error)

        workers.start(work, urgent=urgent)
        return transfer
