"""Records that stores are making: whoever looks for one that no tier has yet can wait for it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable


class Promises:
    """Names of records that are being made. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._makers: Counter[str] = Counter()

    def make(self, names: Collection[str], on_done: Callable[[], object] = lambda: None) -> Promise:
        """Promise records; whoever makes them must `give_up` once, when it has begun all that it will.

        Args:
            on_done: called once, from any thread, when every attempt has ended.
        """
        with self._changed:
            self._makers.update(names)
        return Promise(self, names, on_done)

    def among(self, names: Iterable[str]) -> set[str]:
        """Those of `names` that are promised."""
        with self._changed:
            return {name for name in names if name in self._makers}

    def wait(self, names: Collection[str], timeout_s: float) -> bool:
        """Wait until none of `names` is promised any more; whether that came within `timeout_s` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not any(n in self._makers for n in names), timeout_s)

    def end(self, names: Collection[str]) -> None:
        """One maker less for each of `names`."""
        with self._changed:
            for name in names:
                self._makers[name] -= 1
                if not self._makers[name]:
                    del self._makers[name]
            self._changed.notify_all()


class Promise:
    """One store's: for each record it ends when a tier has it, or when the last attempt was given up.

    Thread-safe. The store itself counts as one attempt, until it has begun all others.
    """

    def __init__(self, promises: Promises, names: Collection[str], on_done: Callable[[], object]) -> None:
        self._promises = promises
        self._attempts = dict.fromkeys(names, 1)
        self._under_way = len(self._attempts)
        self._on_done: Callable[[], object] | None = on_done
        self._lock = threading.Lock()

    def attempt(self, names: Iterable[str]) -> None:
        """A tier is about to be given these: it will be `kept` or `give_up` once for each."""
        with self._lock:
            for name in names:
                self._under_way += 1
                if name in self._attempts:
                    self._attempts[name] += 1

    def kept(self, names: Collection[str]) -> None:
        """A tier has these."""
        with self._lock:
            self._under_way -= len(names)
            over = [name for name in names if self._attempts.pop(name, None) is not None]
        self._end(over)

    def withdraw(self) -> None:
        """All attempts are off: the store did not begin."""
        with self._lock:
            over = list(self._attempts)
            self._attempts.clear()
            self._under_way = 0
        self._end(over)

    def give_up(self, names: Collection[str]) -> None:
        """One attempt at each of these came to nothing, or began all others."""
        over = []
        with self._lock:
            self._under_way -= len(names)
            for name in names:
                left = self._attempts.get(name)
                if left == 1:
                    del self._attempts[name]
                    over.append(name)
                elif left is not None:
                    self._attempts[name] = left - 1
        self._end(over)

    def _end(self, names: Collection[str]) -> None:
        self._promises.end(names)
        with self._lock:
            last = None if self._under_way > 0 else self._on_done
            if last is not None:
                self._on_done = None
        if last is not None:
            last()
