"""Prompts on their way to decode engines: a transfer is opened when one begins, and fed as it is computed."""

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
from kvkit.moving.layerwise import LayerStore, Lend
from kvkit.moving.sequence import Chunks, SequencePages
from kvkit.moving.store import Stored
from kvkit.staging import Staging
from kvkit.workers import Transfer, Workers

log = logging.getLogger(__name__)

PATIENCE_S = 0.25
"""How long `release_pages` waits for stores that are under way before it looks whether slots are short."""
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
class _Piece:
    """A piece, what it is made of, and how each part is packed where that is not after it was computed.

    `copied`: the parts are no longer in the engine's pages.
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
    """What is sent of a prompt.

    Attributes:
        transfer: what the receiver calls it.
        address: where the receiver's ranks listen.
        begun: when, on the monotonic clock.
        shared: how many of `chunks` the receiver can read from a shared tier.
        receiver: what it says of itself.
        handles: a transfer to each of the receiver's ranks that needs something from this one; None before
            these are known.
        failure: why there is none to one of them.
        computing: the piece of the step under way.
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
        """Whether no store reads its pages."""
        return all(store.done() for store in self.stores)

    @property
    def admitted(self) -> bool:
        """Whether all the receiver's ranks have room, or will not have."""
        return self.handles is not None and all(handle.admitted.done() for handle in self.handles)


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
        request: str,
        transfer: str,
        address: str,
        tokens: npt.NDArray[np.int32],
        space: Namespace | None,
        rest: str = "",
    ) -> None:
        """Ask the receiver at `address` for room, which it finds while the engine computes.

        Args:
            address: of its ranks, with `{rank}` in it where there are several.
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
        """Note what the next step computes of requests that have begun, on a CPU.

        Where the receiver's memory is mapped here, `computed` has it packed there, layer by layer; but not
        where there are states, which are whole when the step is done.
        """
        self.drop()
        self._computed = ()
        for request, piece in pieces.items():
            prompt = self._prompts[request]
            if not (prompt.over or prompt.chunks.states):
                parts = self._parts(prompt, piece)
                packings = [self._packing(prompt, *part) for part in parts]
                prompt.computing = _Piece(piece, parts, packings)

    def computed(self, layer: int) -> None:
        """Note that the step has computed a layer of the model, and those before it."""
        self._computed += (layer,)
        pieces = [prompt.computing for prompt in self._prompts.values() if prompt.computing is not None]
        packings = [packing for piece in pieces for packing in piece.packings]
        if packings:
            self._packers.submit(partial(_pack, packings, self._computed))

    def drop(self) -> None:
        """Send nothing of what the step computed, but for what was sent before."""
        for prompt in self._prompts.values():
            self._abandon(prompt.computing)
            prompt.computing = None

    def send(self, request: str, piece: PromptPiece) -> None:
        """Send a piece of what has begun.

        Its pages must stay until `done` names the request, or `release_pages` returns.
        """
        prompt = self._prompts[request]
        prompt.told_last |= piece.last
        if not prompt.over:
            computing, prompt.computing = prompt.computing, None
            prompt.waiting.append(computing or _Piece(piece, self._parts(prompt, piece), ()))

    def cancel(self, request: str, last: bool) -> None:
        """Send no more of what has begun: a piece of it is not whole. `last`: no other follows."""
        prompt = self._prompts[request]
        prompt.told_last |= last
        self._cancel(prompt)

    def cancel_all(self) -> None:
        """Send no more of anything that has begun, whatever was computed of it."""
        self.drop()
        for prompt in self._prompts.values():
            if not prompt.over:
                self._cancel(prompt)

    def go_on(self) -> None:
        """Pack what receivers have room for, commit what is complete."""
        for prompt in self._prompts.values():
            if not prompt.over:
                try:
                    self._go_on(prompt)
                except (HandoffError, ValueError) as error:
                    self._give_up(prompt, error)

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
        """See to it that no pages are read any more.

        What receivers have no room for yet is copied, in all as many records as there are slots. A prompt
        that this is too little for, or for whose records no slots come free, is not sent.
        """
        self.go_on()
        stores = [store for prompt in self._prompts.values() for store in prompt.stores]
        until = time.monotonic() + self._cache.timeout_s
        while wait(stores, PATIENCE_S).not_done:
            if self._cache.staging.waiting or time.monotonic() >= until:
                break
        for prompt in self._prompts.values():
            reading = [store for store in prompt.stores if not store.done()]
            if not prompt.over and (reading or not all(map(self._copy, prompt.waiting))):
                log.warning("%s: its pages are wanted back before they were sent", prompt.request)
                for store in reading:
                    store.release_pages()
                self._cancel(prompt)

    def close(self, timeout_s: float) -> None:
        """End the thread that packs, when it has done what it was given; wait no longer than `timeout_s`."""
        self._packers.close(timeout_s)

    def _open(self, prompt: _Prompt) -> None:
        """Ask the receiver's ranks for room for what they need, once it is known. From any thread.

        Of what a shared tier holds nothing is sent; one record goes in any case. What was cancelled before is
        asked for, too, and cancelled: the receiver shall not wait for it.
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
            prompt.handles = handles  # all of them: none misses what is put from now on
            if prompt.over:
                self._cancel_handles(prompt)
        self._changed(prompt)

    def _shares(
        self, prompt: _Prompt, met: Future[Hello]
    ) -> tuple[Sequence[RankShare], HandoffError | ValueError | None]:
        """What this rank sends to each rank of the receiver; with an error, nothing.

        That is where it is not there, its ranks cannot use this one's records, or the address is not of all
        of them.
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
            parts = f"node {receiver.node!r} has {ranks} ranks, of which some would have parts of records"
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
            self._cancel(prompt)  # other ranks send what there is
        if not prompt.admitted:
            return
        for waiting in prompt.waiting:
            self._pack(prompt, waiting)
        prompt.waiting.clear()
        if prompt.told_last and prompt.stored:
            prompt.over = True
            for handle in prompt.handles or ():
                self._sender.finish(handle.id)  # what could not be put is missing

    def _parts(self, prompt: _Prompt, piece: PromptPiece) -> list[tuple[Chunks, Sequence[SequencePages]]]:
        """The chunks of a piece, and the blocks after them, each with its pages."""
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
        """Have what is left of a piece packed: where it has slots of the receiver, there."""
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
        """Have a piece no longer read the engine's pages; whether there is room for that."""
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
        log.warning("%s: nothing is handed off: %s", prompt.request, error)
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
        """Whether something that was sent has not arrived, and can before anything else is done."""
        expected = time.monotonic() < prompt.begun + ROOM_S
        if prompt.handles is None:
            return not prompt.over and expected
        if all(handle.done.done() for handle in prompt.handles):
            return False
        packed = prompt.told_last and not prompt.waiting  # stored, maybe, since `go_on`, which commits it
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
