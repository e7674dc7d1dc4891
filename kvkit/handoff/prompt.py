"""Sending of prompts to decode engines: each has transfers, which are fed as it is computed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvkit.format.layout import KVLayout, Namespace
from kvkit.handoff.packing import Packing
from kvkit.handoff.protocol.messages import HANDOFF, Hello
from kvkit.handoff.protocol.states import RequestRef
from kvkit.handoff.ranks import RankShare, divided, fits, shares
from kvkit.handoff.sender import HandoffError, Sender, Sending
from kvkit.handoff.transport.addresses import RANK, of_rank
from kvkit.staging import Staging
from kvkit.transfer.layerwise import LayerStore, Lend
from kvkit.transfer.sequence import Chunks, SequencePages
from kvkit.transfer.store import Stored
from kvkit.workers import Transfer, Workers

log = logging.getLogger(__name__)

STORE_WAIT_S = 0.25
"""Seconds for which `release_pages` waits for pending stores before it checks for a shortage of slots."""
ROOM_S = 0.25
"""Seconds from the start of a prompt within which `wait` expects its receiver to have room.

The receiver may have none until a request is answered that this very step completes.
"""
NO_TOKEN = -1
"""Fills the last block after its last token."""
Ready = Callable[[], object]
"""Returns when the pages hold the data to read."""


def tail_of(
    chunks: Chunks, tokens: npt.NDArray[np.int32], block_tokens: int, rest: str = ""
) -> tuple[npt.NDArray[np.int32], Namespace] | None:
    """Return token ids and a namespace for the `tokens` after `chunks`, their whole chunks; None if none.

    Each of their blocks is one record. The namespace contains the key of the last chunk, so that no lookup
    takes these records for the chunk that they begin. The last record holds its whole page, including data
    after the tokens.

    Args:
        rest: what else determines their KV besides the tokens and their prefix; empty for nothing.

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
    """Part of `kvkit.cache.Cache` that sending prompts uses."""

    @property
    def layout(self) -> KVLayout: ...

    @property
    def namespace(self) -> Namespace: ...

    @property
    def staging(self) -> Staging: ...

    @property
    def timeout_s(self) -> float: ...

    def held_async(self, chunks: Chunks, tiers: Sequence[str]) -> Transfer[int]: ...

    def store_chunks(
        self, chunks: Chunks, pages: Sequence[SequencePages], *, to: Sequence[str], ready: Ready
    ) -> Transfer[Stored]: ...

    def store_chunk_layers(
        self, chunks: Chunks, pages: Sequence[SequencePages], to: Sequence[str], lend: Lend
    ) -> LayerStore: ...


@dataclass(frozen=True, slots=True)
class PromptPiece:
    """Tokens [first, stop) of a prompt that an engine computes.

    Args:
        first: a multiple of the chunk size.
        stop: a multiple of the chunk size, or the end of the prompt.
        pages: returns the pages of any tokens [first, stop) of the prompt.
        ready: waits until the pages hold the piece.
        last: True if no other piece follows.
    """

    first: int
    stop: int
    pages: Callable[[int, int], Sequence[SequencePages]]
    ready: Ready
    last: bool


@dataclass(eq=False, slots=True)
class _Piece:
    """A piece and its parts, with a packing for each part that is packed while it is computed.

    `copied`: True if the parts no longer lie in the engine's pages.
    """

    piece: PromptPiece
    parts: Sequence[tuple[Chunks, Sequence[SequencePages]]]
    packings: Sequence[Packing]
    copied: bool = False

    @property
    def records(self) -> int:
        return sum(len(part.names) for part, _ in self.parts)


@dataclass(eq=False, slots=True)
class _Prompt:
    """State of one prompt that is sent.

    Attributes:
        transfer: transfer id at the receiver.
        address: address of the receiver's ranks.
        begun: start time, on the monotonic clock.
        shared: number of `chunks` that the receiver can read from a shared tier.
        receiver: hello of the receiver.
        handles: transfers to the receiver's ranks that need records from this one; None before these are
            known.
        failure: why a transfer to one of them could not be opened.
        computing: piece of the current step.
        waiting: pieces that the receiver has no room for yet.
        stores: stores, which read the pages until they are done.
        told_last: True if its last piece was sent or cancelled.
        finished: True if the engine has ended the request.
        over: True if no further pieces are stored for it.
    """

    request_id: str
    transfer: str
    address: str
    begun: float
    chunks: Chunks
    tail: Chunks | None = None
    shared: Transfer[int] | None = None
    receiver: Future[Hello] | None = None
    handles: list[Sending] | None = None
    failure: Exception | None = None
    computing: _Piece | None = None
    waiting: list[_Piece] = field(default_factory=list)
    stores: list[Transfer[Stored]] = field(default_factory=list)
    told_last: bool = False
    finished: bool = False
    over: bool = False

    @property
    def stored(self) -> bool:
        """True if no store reads its pages."""
        return all(store.done() for store in self.stores)

    @property
    def admitted(self) -> bool:
        """True if every rank of the receiver has admitted or refused its transfer."""
        return self.handles is not None and all(handle.admitted.done() for handle in self.handles)


class Prompts:
    """Prompts that one rank sends. For the thread that runs steps.

    Args:
        cache: cache with a tier `handoff` that sends by `sender`.
        shared: tiers that the receivers read, too; chunks in these are not sent.
        block_tokens: block size in which an incomplete chunk is sent.
        allocation_s: how long a receiver may take to find room, in seconds.
        wake: called after every change, from any thread.
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
        self._divided = divided(cache.namespace, cache.layout)
        self._sender = sender
        self._shared = shared
        self._block_tokens = block_tokens
        self._allocation_s = allocation_s
        self._wake = wake
        self._news = threading.Event()
        self._opening = threading.RLock()
        self._prompts: dict[str, _Prompt] = {}
        self._packers = Workers(1, "kvkit-handoff-pack")
        self._computed: tuple[int, ...] = ()

    def begin(
        self,
        request_id: str,
        transfer: str,
        address: str,
        tokens: npt.NDArray[np.int32],
        space: Namespace | None,
        rest: str = "",
    ) -> None:
        """Ask the receiver at `address` for room, which it finds while the engine computes.

        Args:
            request_id: id of the request; if it has begun already, a `space` of None cancels it.
            transfer: transfer id at the receiver.
            address: address of the receiver's ranks, with `{rank}` if there are several.
            tokens: all tokens of the transfer, int32 [T].
            space: namespace of the records; None to send nothing, or nothing more.
            rest: as in `tail_of`.
        """
        if request_id in self._prompts:
            if space is None:
                self._cancel(self._prompts[request_id])
            return
        nothing = Chunks(tokens[:0], [], [], (), b"")
        chunks = nothing if space is None else Chunks.of(tokens, self._cache.layout, space)
        prompt = _Prompt(request_id, transfer, address, time.monotonic(), chunks, over=space is None)
        self._prompts[request_id] = prompt
        if prompt.over:
            return
        tail = tail_of(chunks, tokens, self._block_tokens, rest)
        prompt.tail = Chunks.of(tail[0], self._cache.layout, tail[1]) if tail else None
        if self._shared and len(chunks):
            prompt.shared = self._cache.held_async(chunks, self._shared)
        try:
            first = 0 if self._divided else self._cache.namespace.rank
            prompt.receiver = self._sender.meet(of_rank(address, first))
        except (HandoffError, ValueError) as error:
            self._give_up(prompt, error)
            return
        prompt.receiver.add_done_callback(lambda _: self._open(prompt))
        if prompt.shared is not None:
            prompt.shared.add_done_callback(lambda _: self._open(prompt))

    def compute(self, pieces: Mapping[str, PromptPiece]) -> None:
        """Note the pieces that the next step computes of prompts that have begun, on a CPU.

        If the receiver's memory is mapped here, `computed` packs the pieces there layer by layer. Prompts
        with states are left out: states are complete only after the step.
        """
        self.drop()
        self._computed = ()
        for request_id, piece in pieces.items():
            prompt = self._prompts[request_id]
            if not (prompt.over or prompt.chunks.states):
                parts = self._parts(prompt, piece)
                packings = [self._packing(prompt, *part) for part in parts]
                prompt.computing = _Piece(piece, parts, packings)

    def computed(self, layer: int) -> None:
        """Note that the step has computed a layer, and pack it in the background where possible."""
        self._computed += (layer,)
        pieces = [prompt.computing for prompt in self._prompts.values() if prompt.computing is not None]
        packings = [packing for piece in pieces for packing in piece.packings]
        if packings:
            self._packers.submit(partial(_pack, packings, self._computed))

    def drop(self) -> None:
        """Discard the step's pieces that `send` has not taken."""
        for prompt in self._prompts.values():
            self._abandon(prompt.computing)
            prompt.computing = None

    def send(self, request_id: str, piece: PromptPiece) -> None:
        """Send a piece of a prompt that has begun.

        Its pages must stay unchanged until `done` returns the request, or until `release_pages` returns.
        """
        prompt = self._prompts[request_id]
        prompt.told_last |= piece.last
        if not prompt.over:
            computing, prompt.computing = prompt.computing, None
            prompt.waiting.append(computing or _Piece(piece, self._parts(prompt, piece), ()))

    def cancel(self, request_id: str, last: bool) -> None:
        """Cancel a prompt that has begun, since a piece of it is incomplete. `last`: no piece follows."""
        prompt = self._prompts[request_id]
        prompt.told_last |= last
        self._cancel(prompt)

    def cancel_all(self) -> None:
        """Cancel all prompts that have begun, and discard the step's pieces."""
        self.drop()
        for prompt in self._prompts.values():
            if not prompt.over:
                self._cancel(prompt)

    def go_on(self) -> None:
        """Pack the pieces that receivers have room for, and commit complete prompts."""
        for prompt in self._prompts.values():
            if not prompt.over:
                try:
                    self._go_on(prompt)
                except (HandoffError, ValueError) as error:
                    self._give_up(prompt, error)

    def wait(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` until everything sent has arrived, or cannot before another step."""
        until = time.monotonic() + timeout_s
        while True:
            self._news.clear()
            self.go_on()
            if time.monotonic() >= until or not any(map(self._is_coming, self._prompts.values())):
                return
            self._news.wait(ROOM_S)

    def done(self, finished: set[str]) -> set[str]:
        """Return requests that are finished, now or earlier, with pages no longer read. Reports each once."""
        for request_id in finished & self._prompts.keys():
            prompt = self._prompts[request_id]
            prompt.finished = True
            if not prompt.told_last:  # it was aborted
                self._cancel(prompt)
        done = {p.request_id for p in self._prompts.values() if p.finished and p.over and p.stored}
        for request_id in done:
            del self._prompts[request_id]
        return done

    @property
    def under_way(self) -> bool:
        """True if any transfer is in flight."""
        return any(not prompt.over for prompt in self._prompts.values())

    def __contains__(self, request_id: object) -> bool:
        """Return whether a request's pages may still be read."""
        return request_id in self._prompts

    def release_pages(self) -> None:
        """Stop reading pages before this returns.

        Pieces without room at their receivers are copied, at most as many records as there are slots. A
        prompt is cancelled if that is too few, or if no slots come free for its records.
        """
        self.go_on()
        stores = [store for prompt in self._prompts.values() for store in prompt.stores]
        until = time.monotonic() + self._cache.timeout_s
        while wait(stores, STORE_WAIT_S).not_done:
            if self._cache.staging.waiting or time.monotonic() >= until:
                break
        for prompt in self._prompts.values():
            reading = [store for store in prompt.stores if not store.done()]
            if not prompt.over and (reading or not all(map(self._copy, prompt.waiting))):
                log.warning("%s: not handed off: the engine needs its pages back too soon", prompt.request_id)
                for store in reading:
                    store.release_pages()
                self._cancel(prompt)

    def close(self, timeout_s: float) -> None:
        """End the packing thread after its queued work; wait at most `timeout_s` seconds."""
        self._packers.close(timeout_s)

    def _open(self, prompt: _Prompt) -> None:
        """Ask the receiver's ranks for room, once their needs are known. Called from any thread.

        Chunks in a shared tier are not sent, but each rank is sent at least one record. A prompt that was
        cancelled before still opens its transfers and cancels them: else the receiver would wait for it.
        """
        shared, receiver = prompt.shared, prompt.receiver
        if receiver is None or not receiver.done() or (shared is not None and not shared.done()):
            return
        held = shared is not None and not shared.cancelled() and shared.exception() is None
        skip = shared.result() if shared is not None and held else 0
        found, failure = self._shares(prompt, receiver)  # before the lock, which the step thread takes
        with self._opening:
            if prompt.handles is not None:
                return
            handles: list[Sending] = []
            try:
                handles.extend(self._ask(prompt, share, skip, alone=len(found) == 1) for share in found)
            except (HandoffError, ValueError) as error:
                failure = error
            prompt.failure = failure
            prompt.handles = handles  # all at once: none misses records that are put from now on
            if prompt.over:
                self._cancel_handles(prompt)
        self._changed(prompt)

    def _shares(
        self, prompt: _Prompt, met: Future[Hello]
    ) -> tuple[Sequence[RankShare], HandoffError | ValueError | None]:
        """Return what this rank sends to each rank of the receiver, and the error, if any.

        With an error it sends nothing: the receiver cannot be reached, its ranks cannot use this rank's
        records, or the address does not cover all of them.
        """
        own, layout, address = self._cache.namespace, self._cache.layout, prompt.address
        try:
            receiver = met.result()
        except (HandoffError, ValueError) as error:
            return (), error
        ranks = receiver.ranks
        if not self._divided:
            return (RankShare(own.rank, tuple(range(layout.token_groups)), 1),), None
        if not fits(layout, ranks):
            parts = f"node {receiver.node!r} has {ranks} ranks, some of which would have parts of records"
            return (), HandoffError(f"{address}: {parts}; want record_ranks = {ranks} for both")
        if ranks > 1 and RANK not in address:
            return (), HandoffError(f"{address}: {ranks} ranks listen; want {RANK} in the address")
        return shares(layout, own.rank, own.world, ranks), None

    def _ask(self, prompt: _Prompt, share: RankShare, skip: int, *, alone: bool) -> Sending:
        """Ask a rank for room for its share of all but the first `skip` chunks, and for the last snapshot."""
        chunks = prompt.chunks
        names = chunks.names + (prompt.tail.names if prompt.tail else [])
        names = [name for i, name in enumerate(names) if i % chunks.groups in share.groups]
        left = names[min(skip * len(share.groups), len(names) - 1) :]
        left += chunks.snapshot(len(chunks) - 1).names if chunks.keys and chunks.states else []
        transfer = prompt.transfer
        if not alone or share.parts > 1:
            transfer += f"/{self._cache.namespace.rank}.{share.rank}"
        return self._sender.open(
            transfer,
            of_rank(prompt.address, share.rank),
            left,
            self._allocation_s,
            self._changed,
            RequestRef(prompt.transfer, share.parts),
        )

    def _go_on(self, prompt: _Prompt) -> None:
        if prompt.failure is not None:
            raise prompt.failure
        for handle in prompt.handles or ():
            if handle.admitted.done():
                handle.admitted.result()
        if prompt.handles == []:
            self._cancel(prompt)  # other ranks send all of it
        if not prompt.admitted:
            return
        for waiting in prompt.waiting:
            self._pack(prompt, waiting)
        prompt.waiting.clear()
        if prompt.told_last and prompt.stored:
            prompt.over = True
            for handle in prompt.handles or ():
                self._sender.finish(handle.id)  # records that could not be put are missing

    def _parts(self, prompt: _Prompt, piece: PromptPiece) -> list[tuple[Chunks, Sequence[SequencePages]]]:
        """Return the chunks of a piece and the blocks after them, each with its pages."""
        size, chunks, tail = prompt.chunks.chunk_tokens, prompt.chunks, prompt.tail
        whole = min(piece.stop, len(chunks.tokens))
        parts = [(chunks.part(piece.first // size, whole // size), whole)] if whole > piece.first else []
        if piece.stop > whole and tail is not None:
            parts.append((tail, whole + len(tail.tokens)))
        return [(part, piece.pages(stop - len(part.tokens), stop)) for part, stop in parts]

    def _packing(self, prompt: _Prompt, part: Chunks, pages: Sequence[SequencePages]) -> Packing:
        return Packing(
            lambda: prompt.admitted,
            lambda lend: self._cache.store_chunk_layers(part, pages, (HANDOFF,), lend),
            lambda names: self._sender.lend(prompt.handles or (), names),
        )

    def _pack(self, prompt: _Prompt, waiting: _Piece) -> None:
        """Pack the rest of a piece, directly into slots of the receiver if it has them."""
        for i, (part, pages) in enumerate(waiting.parts):
            packing = waiting.packings[i] if waiting.packings else None
            if packing is not None and packing.open(last=True):
                store = packing.stored
                self._packers.submit(packing.end)
            else:
                store = self._cache.store_chunks(part, pages, to=(HANDOFF,), ready=waiting.piece.ready)
            store.add_done_callback(self._changed)
            prompt.stores.append(store)

    def _copy(self, waiting: _Piece) -> bool:
        """Copy a piece out of the engine's pages; return whether there was room for it."""
        if not waiting.copied:
            every = [piece for prompt in self._prompts.values() for piece in prompt.waiting if piece.copied]
            if sum(piece.records for piece in (waiting, *every)) > self._cache.staging.slots:
                return False
            waiting.piece.ready()
            self._abandon(waiting)
            waiting.packings, waiting.copied = (), True
            waiting.parts = [(part, [group.copied() for group in pages]) for part, pages in waiting.parts]
        return True

    def _abandon(self, *pieces: _Piece | None) -> None:
        for packing in (packing for piece in pieces if piece is not None for packing in piece.packings):
            packing.abandon()

    def _give_up(self, prompt: _Prompt, error: Exception) -> None:
        log.warning("%s: nothing is handed off: %s", prompt.request_id, error)
        self._cancel(prompt)

    def _cancel(self, prompt: _Prompt) -> None:
        if prompt.over:
            return
        self._abandon(prompt.computing, *prompt.waiting)
        prompt.computing = None
        prompt.waiting.clear()
        with self._opening:
            prompt.over = True
            self._cancel_handles(prompt)

    def _cancel_handles(self, prompt: _Prompt) -> None:
        for handle in prompt.handles or ():
            self._sender.cancel(handle.id)

    def _is_coming(self, prompt: _Prompt) -> bool:
        """Return whether something that was sent is still to arrive, and can before another step."""
        expected = time.monotonic() < prompt.begun + ROOM_S
        if prompt.handles is None:
            return not prompt.over and expected
        if all(handle.done.done() for handle in prompt.handles):
            return False
        packed = prompt.told_last and not prompt.waiting  # stores may have ended since `go_on`: it commits
        queued = any(handle.queued for handle in prompt.handles)
        if packed or prompt.over or queued or not prompt.stored:
            return True
        return bool(prompt.waiting) and (prompt.admitted or expected)

    def _changed(self, what: object) -> None:
        self._news.set()
        self._wake(what)


def _pack(packings: Sequence[Packing], layers: Sequence[int]) -> None:
    for packing in packings:
        packing.pack(layers)
