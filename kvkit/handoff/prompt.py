"""Prompts on their way to decode engines: a transfer is opened when one begins, and fed as it is computed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvkit.format.layout import KVLayout, Namespace
from kvkit.handoff.protocol.messages import HANDOFF
from kvkit.handoff.sender import HandoffError, Sender, Sending
from kvkit.moving.sequence import Chunks, SequencePages
from kvkit.moving.store import Stored
from kvkit.workers import Transfer

log = logging.getLogger(__name__)

PATIENCE_S = 0.25
"""How long `release_pages` waits for copies that are under way."""
ROOM_S = 0.25
"""How long after it was asked `wait` counts on a receiver's room. It may have none before the request is
answered whose last tokens this very step computed."""
NO_TOKEN = -1
"""Stands for the tokens that would fill the last block."""
Ready = Callable[[], object]
"""Returns when pages hold what is to be read from them."""


def tail_of(
    chunks: Chunks, tokens: npt.NDArray[np.int32], block_tokens: int, rest: str = ""
) -> tuple[npt.NDArray[np.int32], Namespace] | None:
    """What stands for those of `tokens` after their whole chunks, `chunks`; None if there are none.

    They are records of blocks, of a sequence that the last chunk begins: nothing takes them for the chunk
    that they are the beginning of. The last block's record has all that its page has, after the tokens too.

    Args:
        rest: what decides their KV besides the tokens and what comes before them; empty for nothing.

    Returns:
        The ids, int32 [blocks * block_tokens], and their namespace.
    """
    left = tokens[len(chunks.tokens) :]
    if not len(left):
        return None
    filled = np.pad(left, (0, -len(left) % block_tokens), constant_values=NO_TOKEN)
    space, key = chunks.formats[0].namespace, chunks.keys[-1] if chunks.keys else chunks.parent
    salt = f"{space.salt}/{key.hex()}" + (f"/{rest}" if rest else "")
    return filled, replace(space, chunk_tokens=block_tokens, salt=salt)


class ChunkStore(Protocol):
    """What sending prompts uses of a `kvkit.cache.Cache`."""

    @property
    def layout(self) -> KVLayout: ...

    def held_async(self, chunks: Chunks, tiers: Sequence[str]) -> Transfer[int]: ...

    def store_chunks(
        self, chunks: Chunks, pages: Sequence[SequencePages], *, to: Sequence[str], ready: Ready
    ) -> Transfer[Stored]: ...


@dataclass(frozen=True, slots=True)
class PromptPiece:
    """Tokens [first, stop) of a prompt that an engine computes.

    Args:
        first: a multiple of the chunk size.
        stop: likewise, but at the prompt's end.
        pages: where tokens [first, stop) of the prompt lie, whichever are asked for.
        last: no other follows.
    """

    first: int
    stop: int
    pages: Callable[[int, int], Sequence[SequencePages]]
    ready: Ready
    last: bool


@dataclass(eq=False, slots=True)
class _Prompt:
    """A prompt's transfer.

    Attributes:
        begun: when, on the monotonic clock.
        shared: how many of `chunks` the receiver can read from a shared tier.
        waiting: pieces for which the receiver has no room yet.
        stores: they read the pages until they are done.
        told_last: its last piece was sent or cancelled.
        finished: the engine has ended its request.
        over: nothing more is read for it.
    """

    request: str
    transfer: str
    address: str
    begun: float
    chunks: Chunks
    tail: Chunks | None = None
    shared: Transfer[int] | None = None
    handle: Sending | None = None
    waiting: list[PromptPiece] = field(default_factory=list)
    stores: list[Transfer[Stored]] = field(default_factory=list)
    told_last: bool = False
    finished: bool = False
    over: bool = False

    @property
    def stored(self) -> bool:
        """Whether no store reads its pages."""
        return all(store.done() for store in self.stores)


class Prompts:
    """The transfers of one rank. For the thread that runs steps.

    Args:
        cache: has a tier `handoff`, which sends by `sender`.
        shared: tiers that the receivers read, too: what these hold is not sent.
        block_tokens: what an unfilled chunk is sent in.
        allocation_s: how long a receiver may take to find room, in seconds.
        wake: called when something changed, from any thread.
    """

    def __init__(
        self,
        cache: ChunkStore,
        sender: Sender,
        *,
        shared: Sequence[str],
        block_tokens: int,
        allocation_s: float,
        wake: Callable[[object], object],
    ) -> None:
        self._cache = cache
        self._sender = sender
        self._shared = shared
        self._block_tokens = block_tokens
        self._allocation_s = allocation_s
        self._wake = wake
        self._news = threading.Event()
        self._prompts: dict[str, _Prompt] = {}

    def begin(
        self,
        request: str,
        transfer: str,
        address: str,
        tokens: npt.NDArray[np.int32],
        space: Namespace | None,
        rest: str = "",
    ) -> None:
        """Ask the receiver at `address` for room, which it finds while the engine computes.

        Args:
            request: if it has begun already, only a missing `space` is noted.
            tokens: int32 [T], all that the transfer is of.
            space: None where nothing is to be sent, or nothing more.
            rest: as in `tail_of`.
        """
        if request in self._prompts:
            if space is None:
                self._cancel(self._prompts[request])
            return
        nothing = Chunks(tokens[:0], [], [], (), b"")
        chunks = nothing if space is None else Chunks.of(tokens, self._cache.layout, space)
        prompt = _Prompt(request, transfer, address, time.monotonic(), chunks, over=space is None)
        self._prompts[request] = prompt
        if prompt.over:
            return
        tail = tail_of(chunks, tokens, self._block_tokens, rest)
        prompt.tail = Chunks.of(tail[0], self._cache.layout, tail[1]) if tail else None
        if self._shared and len(chunks):
            prompt.shared = self._cache.held_async(chunks, self._shared)
            prompt.shared.add_done_callback(self._changed)
        else:
            self._open(prompt, 0)

    def send(self, request: str, piece: PromptPiece) -> None:
        """Send a piece of what has begun.

        Its pages must stay until `done` names the request, or `release_pages` returns.
        """
        prompt = self._prompts[request]
        prompt.told_last |= piece.last
        if not prompt.over:
            prompt.waiting.append(piece)

    def cancel(self, request: str, last: bool) -> None:
        """Send no more of what has begun: a piece of it is not whole. `last`: no other follows."""
        prompt = self._prompts[request]
        prompt.told_last |= last
        self._cancel(prompt)

    def go_on(self) -> None:
        """Open transfers, pack what receivers have room for, commit what is complete."""
        for prompt in self._prompts.values():
            if not prompt.over:
                try:
                    self._go_on(prompt)
                except HandoffError as error:
                    log.warning("%s: nothing is handed off: %s", prompt.request, error)
                    self._cancel(prompt)

    def wait(self, timeout_s: float) -> None:
        """Return when what was sent has arrived, or cannot before something else is done."""
        until = time.monotonic() + timeout_s
        while True:
            self._news.clear()
            self.go_on()
            if time.monotonic() >= until or not any(map(self._is_coming, self._prompts.values())):
                return
            self._news.wait(ROOM_S)

    def done(self, finished: set[str]) -> set[str]:
        """Requests that are finished, now or earlier, and whose pages are read no more. Told once."""
        for request in finished & self._prompts.keys():
            prompt = self._prompts[request]
            prompt.finished = True
            if not prompt.told_last:  # it was aborted
                self._cancel(prompt)
        done = {p.request for p in self._prompts.values() if p.finished and p.over and p.stored}
        for request in done:
            del self._prompts[request]
        return done

    @property
    def under_way(self) -> bool:
        """Whether any transfer is."""
        return any(not prompt.over for prompt in self._prompts.values())

    def __contains__(self, request: object) -> bool:
        """Whether a request's pages may still be read."""
        return request in self._prompts

    def release_pages(self) -> None:
        """See to it that no pages are read any more: what was not packed is not sent."""
        self.go_on()
        wait([store for prompt in self._prompts.values() for store in prompt.stores], PATIENCE_S)
        for prompt in self._prompts.values():
            reading = [store for store in prompt.stores if not store.done()]
            if not prompt.over and (prompt.waiting or reading):
                log.warning("%s: its pages are wanted back before they were sent", prompt.request)
                for store in reading:
                    store.release_pages()
                self._cancel(prompt)

    def _open(self, prompt: _Prompt, skip: int) -> None:
        """Ask the receiver for room for all but the first `skip` chunks. One record goes in any case."""
        names = prompt.chunks.names + (prompt.tail.names if prompt.tail else [])
        left = names[min(skip * prompt.chunks.groups, len(names) - 1) :]
        try:
            prompt.handle = self._sender.open(
                prompt.transfer, prompt.address, left, self._allocation_s, self._changed
            )
        except (HandoffError, ValueError) as error:
            log.warning("%s: nothing is handed off: %s", prompt.request, error)
            self._cancel(prompt)

    def _go_on(self, prompt: _Prompt) -> None:
        if prompt.handle is None:
            if prompt.shared is None or not prompt.shared.done():
                return
            failed = prompt.shared.cancelled() or prompt.shared.exception() is not None
            self._open(prompt, 0 if failed else prompt.shared.result())
        if prompt.handle is None or not prompt.handle.admitted.done():
            return
        prompt.handle.admitted.result()
        for piece in prompt.waiting:
            self._pack(prompt, piece)
        prompt.waiting.clear()
        if prompt.told_last and prompt.stored:
            prompt.over = True
            self._sender.finish(prompt.transfer)  # what could not be put is missing

    def _pack(self, prompt: _Prompt, piece: PromptPiece) -> None:
        size, chunks, tail = prompt.chunks.chunk_tokens, prompt.chunks, prompt.tail
        whole = min(piece.stop, len(chunks.tokens))
        parts = [(chunks.part(piece.first // size, whole // size), whole)] if whole > piece.first else []
        if piece.stop > whole and tail is not None:
            parts.append((tail, whole + len(tail.tokens)))
        for part, stop in parts:
            pages = piece.pages(stop - len(part.tokens), stop)
            store = self._cache.store_chunks(part, pages, to=(HANDOFF,), ready=piece.ready)
            store.add_done_callback(self._changed)
            prompt.stores.append(store)

    def _cancel(self, prompt: _Prompt) -> None:
        if prompt.over:
            return
        prompt.over = True
        prompt.waiting.clear()
        if prompt.handle is not None:
            self._sender.cancel(prompt.transfer)

    def _is_coming(self, prompt: _Prompt) -> bool:
        """Whether something that was sent has not arrived, and can before anything else is done."""
        expected = time.monotonic() < prompt.begun + ROOM_S
        if prompt.handle is None:
            return not prompt.over and expected
        if prompt.handle.done.done():
            return False
        packed = prompt.told_last and not prompt.waiting  # stored, maybe, since `go_on`, which commits it
        if packed or prompt.over or prompt.handle.queued or not prompt.stored:
            return True
        return bool(prompt.waiting) and (prompt.handle.admitted.done() or expected)

    def _changed(self, what: object) -> None:
        self._news.set()
        self._wake(what)
