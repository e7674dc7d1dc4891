"""One rank's transfers to decode engines: opened when a prompt begins, fed as it is computed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import dataclass, field, replace

import numpy as np

from kvkit.adapters.vllm.params import of_rank
from kvkit.adapters.vllm.step import Send, TokenIds
from kvkit.cache import Cache, SequencePages, Stored
from kvkit.format.layout import Namespace
from kvkit.handoff.sender import HandoffError, Sender, Sending
from kvkit.moving.sequence import Chunks
from kvkit.workers import Transfer

log = logging.getLogger(__name__)

TARGET = "handoff"
PATIENCE_S = 0.25
"""How long `give_up` waits for copies that are under way."""
ROOM_S = 0.25
"""How long after it was asked `behind` counts on a receiver's room. It may have none before the request is
answered whose last tokens this very step computed."""
Places = Callable[[Send, int, int], list[SequencePages]]
"""Where tokens [first, stop) of what is sent lie."""


NO_TOKEN = -1
"""Stands for the tokens that would fill the last block."""


def tail_of(
    tokens: TokenIds, space: Namespace, key: bytes, block_tokens: int
) -> tuple[TokenIds, Namespace] | None:
    """What stands for `tokens`, which fill no chunk, behind the chunk with `key`; None if there are none.

    They are records of blocks, of a sequence that this chunk begins: nothing takes them for the chunk that
    they are the beginning of. The last block's record has all that its page has, behind the tokens too.

    Returns:
        The ids, int32 [blocks * block_tokens], and their namespace.
    """
    if not len(tokens):
        return None
    filled = np.pad(tokens, (0, -len(tokens) % block_tokens), constant_values=NO_TOKEN)
    return filled, replace(space, chunk_tokens=block_tokens, salt=f"{space.salt}/{key.hex()}")


@dataclass(eq=False, slots=True)
class _Sent:
    """A transfer, and what it begins with.

    Attributes:
        asked: when, on the monotonic clock.
        pieces: what waits for room at the receiver.
        stores: they read the pages until they are done.
        over: nothing more is read for it.
    """

    first: Send
    asked: float
    chunks: Chunks
    tail: Chunks | None
    shared: Transfer[int] | None
    handle: Sending | None = None
    pieces: list[tuple[Send, Callable[[], object] | None]] = field(default_factory=list)
    stores: list[Transfer[Stored]] = field(default_factory=list)
    told_last: bool = False
    over: bool = False


class Sends:
    """The transfers of one rank. For the thread that runs steps.

    Args:
        cache: has a tier `handoff`, which sends by `sender`.
        shared: tiers that the receivers read, too: what these hold is not sent.
        places: where tokens of a `Send` lie.
        block_tokens: what an unfilled chunk is sent in.
        rank: of the receivers', the one that has the same share of the KV.
        allocation_s: how long a receiver may take to find room, in seconds.
        wake: called when something changed, from any thread.
    """

    def __init__(
        self,
        cache: Cache,
        sender: Sender,
        *,
        shared: tuple[str, ...],
        places: Places,
        block_tokens: int,
        rank: int,
        allocation_s: float,
        wake: Callable[[object], None],
    ) -> None:
        self._cache = cache
        self._sender = sender
        self._shared = shared
        self._places = places
        self._block_tokens = block_tokens
        self._rank = rank
        self._allocation_s = allocation_s
        self._wake = wake
        self._sent: dict[str, _Sent] = {}
        self._ended: set[str] = set()

    def expect(self, send: Send, space: Namespace | None) -> None:
        """Note what will be sent once it is computed: with the first of a request, its receiver is asked for
        room, which it finds while the engine computes. Nothing is sent where there is no `space`.
        """
        if send.request not in self._sent:
            self._sent[send.request] = self._begin(send, space)
        elif space is None:
            self.refuse(send)

    def send(self, send: Send, ready: Callable[[], object] | None) -> None:
        """Send what was expected. Its pages must stay until `done` names the request, or `give_up` returns.

        Args:
            ready: returns when the pages hold it; None: they do.
        """
        sent = self._sent[send.request]
        sent.pieces.append((send, ready))
        sent.told_last = sent.told_last or send.last

    def refuse(self, send: Send) -> None:
        """Send no more of what was expected: it is not whose KV it was said to be, or not whole."""
        sent = self._sent[send.request]
        sent.told_last = sent.told_last or send.last
        if not sent.over:
            self._end(sent)

    def go_on(self) -> None:
        """Open transfers, pack what receivers have room for, commit what is complete."""
        for request, sent in self._sent.items():
            if not sent.over:
                try:
                    self._go_on(sent)
                except HandoffError as error:
                    log.warning("%s: nothing is handed off: %s", request, error)
                    self._end(sent)

    def done(self, finished: set[str]) -> set[str]:
        """Requests that are finished, now or earlier, and whose pages are read no more. Told once."""
        for name in finished & self._sent.keys():
            self._ended.add(name)
            if not self._sent[name].told_last:  # it was aborted
                self._end(self._sent[name])
        done = {name for name in self._ended if self._is_done(self._sent[name])}
        for name in done:
            del self._sent[name]
        self._ended -= done
        return done

    @property
    def under_way(self) -> bool:
        """Whether any transfer is."""
        return any(not sent.over for sent in self._sent.values())

    @property
    def behind(self) -> bool:
        """Whether something that was given to `send` has not arrived, and can before anything else is."""
        return any(self._is_behind(sent) for sent in self._sent.values())

    def __contains__(self, request: object) -> bool:
        """Whether a request's pages may still be read."""
        return request in self._sent

    def give_up(self) -> None:
        """See to it that no pages are read any more: what was not packed is not sent."""
        self.go_on()
        wait([store for sent in self._sent.values() for store in sent.stores], PATIENCE_S)
        for request, sent in self._sent.items():
            reading = [store for store in sent.stores if not store.done()]
            if not sent.over and (sent.pieces or reading):
                log.warning("%s: its pages are wanted back before they were sent", request)
                for store in reading:
                    store.revoke()
                self._end(sent)

    def _begin(self, send: Send, space: Namespace | None) -> _Sent:
        if space is None:
            nothing = Chunks.of(send.sequence.tokens[:0], self._cache.layout, self._cache.namespace)
            return _Sent(send, time.monotonic(), nothing, tail=None, shared=None, over=True)
        chunks = Chunks.of(send.sequence.tokens, self._cache.layout, space)
        key = chunks.keys[-1] if chunks.keys else chunks.parent
        rest = tail_of(send.sequence.tokens[len(chunks.tokens) :], space, key, self._block_tokens)
        tail = None if rest is None else Chunks.of(rest[0], self._cache.layout, rest[1])
        shared = None
        if self._shared and len(chunks):
            shared = self._cache.held_async(chunks, self._shared)
            shared.add_done_callback(self._wake)
        sent = _Sent(send, time.monotonic(), chunks, tail, shared)
        if shared is None:
            self._open(sent, 0)
        return sent

    def _open(self, sent: _Sent, skip: int) -> None:
        """Ask the receiver for room for all but the first `skip` chunks. One record goes in any case."""
        names = sent.chunks.records(0, len(sent.chunks)) + (sent.tail.names if sent.tail else [])
        left = names[min(skip * sent.chunks.groups, len(names) - 1) :]
        try:
            address = of_rank(sent.first.address, self._rank)
            sent.handle = self._sender.open(
                sent.first.transfer, address, left, self._allocation_s, on_change=lambda: self._wake(sent)
            )
        except (HandoffError, ValueError) as error:
            log.warning("%s: nothing is handed off: %s", sent.first.request, error)
            self._end(sent)

    def _go_on(self, sent: _Sent) -> None:
        if sent.handle is None:
            if sent.shared is None or not sent.shared.done():
                return
            failed = sent.shared.cancelled() or sent.shared.exception() is not None
            held = 0 if failed else sent.shared.result()
            self._open(sent, held)
            if sent.handle is None:
                return
        if not sent.handle.admitted.done():
            return
        sent.handle.admitted.result()
        for send, ready in sent.pieces:
            self._pack(sent, send, ready)
        sent.pieces.clear()
        if sent.told_last and all(store.done() for store in sent.stores):
            sent.over = True
            self._sender.finish(sent.first.transfer)  # what could not be put is missing

    def _pack(self, sent: _Sent, send: Send, ready: Callable[[], object] | None) -> None:
        size = sent.chunks.chunk_tokens
        whole = min(send.stop, len(sent.chunks) * size)
        if whole > send.first:
            part = sent.chunks.part(send.first // size, whole // size)
            self._store(sent, part, self._places(send, send.first, whole), ready)
        if send.stop > whole and sent.tail is not None:
            stop = whole + len(sent.tail.tokens)
            self._store(sent, sent.tail, self._places(send, whole, stop), ready)

    def _store(
        self,
        sent: _Sent,
        chunks: Chunks,
        places: list[SequencePages],
        ready: Callable[[], object] | None,
    ) -> None:
        store = self._cache.store_chunks(chunks, places, to=(TARGET,), ready=ready or (lambda: None))
        store.add_done_callback(self._wake)
        sent.stores.append(store)

    def _end(self, sent: _Sent) -> None:
        sent.over = True
        sent.pieces.clear()
        if sent.handle is not None:
            self._sender.cancel(sent.first.transfer)

    def _is_behind(self, sent: _Sent) -> bool:
        if sent.handle is None:
            return not sent.over and time.monotonic() < sent.asked + ROOM_S
        if sent.handle.done.done():
            return False
        if sent.over or sent.handle.queued or any(not store.done() for store in sent.stores):
            return True
        admitted = sent.handle.admitted.done()
        return bool(sent.pieces) and (admitted or time.monotonic() < sent.asked + ROOM_S)

    def _is_done(self, sent: _Sent) -> bool:
        reading = any(not store.done() for store in sent.stores)
        return sent.over and not reading
