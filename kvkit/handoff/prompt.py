"""Sending of prompts to decode engines: their transfers get records while the prompts are computed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from kvkit.format.layout import Namespace
from kvkit.handoff.chunk_sender import ChunkSender
from kvkit.handoff.packing import Packing
from kvkit.handoff.rank_transfers import RankTransfers, SendingRank
from kvkit.handoff.sender import HandoffError
from kvkit.transfer.sequence import Chunks, SequencePages
from kvkit.workers import Transfer, Workers

log = logging.getLogger(__name__)

SENDING_THREADS = 2
"""Threads that pack pieces into slots of this node. They mostly wait for slots or for a GPU."""
COPY_WAIT_S = 0.25
"""Seconds for which `release_pages` waits for copies before it checks for a shortage of slots."""
ADMISSION_S = 0.25
"""Seconds from the start of a prompt within which `wait` expects its receiver to admit it.

The receiver may have no slots until this very step completes another request.
"""
NO_TOKEN = -1
"""Fills the last block after its last token."""
Ready = Callable[[], object]
"""Returns when the pages hold the data to read."""


def tail_of(
    chunks: Chunks, tokens: npt.NDArray[np.int32], block_tokens: int, rest: str = ""
) -> tuple[npt.NDArray[np.int32], Namespace] | None:
    """Return ids and a namespace for the `tokens` after `chunks`, the whole ones; None if none follow.

    Each of their blocks is one record. The namespace contains the key of the last chunk, so that no lookup
    takes these records for the chunk that they begin. The last record holds its whole page, including data
    after the tokens.

    Args:
        rest: anything that determines their KV besides the tokens and their prefix; empty for nothing.

    Returns:
        The ids, int32 [blocks * block_tokens], and their namespace.
    """
    remaining = tokens[len(chunks.tokens) :]
    if not len(remaining):
        return None
    padded = np.pad(remaining, (0, -len(remaining) % block_tokens), constant_values=NO_TOKEN)
    namespace, key = chunks.formats[0].namespace, chunks.keys[-1] if chunks.keys else chunks.parent
    salt = f"{namespace.salt}/{key.hex()}" + (f"/{rest}" if rest else "")
    return padded, replace(namespace, chunk_tokens=block_tokens, salt=salt)


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

    def abandon(self) -> None:
        """Stop packing while the piece is computed."""
        for packing in self.packings:
            packing.abandon()


@dataclass(eq=False, slots=True)
class _Prompt:
    """State of one prompt that is sent.

    Attributes:
        tail: blocks after `chunks`, the whole chunks.
        transfers: transfers to the receiver's ranks.
        computing: piece of the current step.
        pending: pieces that the receiver has not admitted yet.
        sends: sends of the other pieces, which read the pages until they are done.
        has_last: True if its last piece was given to `send` or cancelled.
        finished: True if the engine has ended the request.
        closed: True if no further pieces are sent for it.
    """

    request_id: str
    chunks: Chunks
    tail: Chunks | None
    transfers: RankTransfers
    computing: _Piece | None = None
    pending: list[_Piece] = field(default_factory=list)
    sends: list[Transfer[int]] = field(default_factory=list)
    has_last: bool = False
    finished: bool = False
    closed: bool = False

    @property
    def packed(self) -> bool:
        """True if no send reads its pages."""
        return all(send.done() for send in self.sends)

    def split(self, piece: PromptPiece) -> list[tuple[Chunks, Sequence[SequencePages]]]:
        """Return the chunks of a piece and the blocks after them, each with its pages."""
        size, chunks, tail = self.chunks.chunk_tokens, self.chunks, self.tail
        whole_stop = min(piece.stop, len(chunks.tokens))
        parts = []
        if whole_stop > piece.first:
            parts.append((chunks.part(piece.first // size, whole_stop // size), whole_stop))
        if piece.stop > whole_stop and tail is not None:
            parts.append((tail, whole_stop + len(tail.tokens)))
        return [(part, piece.pages(stop - len(part.tokens), stop)) for part, stop in parts]

    def drop_computing(self) -> None:
        """Discard the piece of the current step."""
        if self.computing is not None:
            self.computing.abandon()
            self.computing = None

    def cancel(self) -> None:
        """Discard all pieces and cancel the transfers, unless the prompt is closed."""
        if self.closed:
            return
        self.drop_computing()
        for piece in self.pending:
            piece.abandon()
        self.pending.clear()
        self.closed = True
        self.transfers.cancel()

    def is_arriving(self) -> bool:
        """Return whether something that was sent is still to arrive, and can before another step."""
        transfers = self.transfers
        admission_expected = time.monotonic() < transfers.begun + ADMISSION_S
        if transfers.handles is None:
            return not self.closed and admission_expected
        if transfers.done:
            return False
        complete = self.has_last and not self.pending  # `go_on` commits it: sends may have ended since
        if complete or self.closed or transfers.queued or not self.packed:
            return True
        return bool(self.pending) and (transfers.admitted or admission_expected)


class Prompts:
    """Prompts that one rank sends. For the thread that runs steps.

    Args:
        out: packs and sends chunks.
        namespace: namespace of this rank.
        held: returns how many leading chunks are in tiers that the receivers also read; these are not sent.
            None if there are no such tiers.
        block_tokens: block size in which an incomplete chunk is sent.
        allocation_s: how long a receiver may take to find slots, in seconds.
        wake: called after every change, from any thread.
    """

    def __init__(
        self,
        out: ChunkSender,
        namespace: Namespace,
        *,
        held: Callable[[Chunks], Transfer[int]] | None,
        block_tokens: int,
        allocation_s: float,
        wake: Callable[[object], object],
    ) -> None:
        self._out = out
        self._held = held
        self._block_tokens = block_tokens
        self._wake = wake
        self._rank = SendingRank(out.sender, out.layout, namespace, allocation_s, self._on_change)
        self._changed = threading.Event()
        self._prompts: dict[str, _Prompt] = {}
        self._packers = Workers(1, "kvkit-handoff-pack")
        self._senders = Workers(SENDING_THREADS, "kvkit-handoff-send")
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
        """Ask the receiver at `address` for slots, which it finds while the engine computes.

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
                self._prompts[request_id].cancel()
            return
        layout = self._out.layout
        chunks, tail = Chunks(tokens[:0], [], [], (), b""), None
        if space is not None:
            chunks = Chunks.of(tokens, layout, space)
            tail_input = tail_of(chunks, tokens, self._block_tokens, rest)
            tail = Chunks.of(tail_input[0], layout, tail_input[1]) if tail_input else None
        transfers = RankTransfers(self._rank, transfer, address, chunks, tail)
        prompt = _Prompt(request_id, chunks, tail, transfers, closed=space is None)
        self._prompts[request_id] = prompt
        if prompt.closed:
            return
        try:
            transfers.open(None if self._held is None or not len(chunks) else self._held(chunks))
        except (HandoffError, ValueError) as error:
            self._give_up(prompt, error)

    def compute(self, pieces: Mapping[str, PromptPiece]) -> None:
        """Note the pieces that the next step computes of prompts that have begun, on a CPU.

        If the receiver's memory is mapped here, `computed` packs the pieces there layer by layer. Prompts
        with states are left out: states are complete only after the step.
        """
        self.drop()
        self._computed = ()
        for request_id, piece in pieces.items():
            prompt = self._prompts[request_id]
            if not (prompt.closed or prompt.chunks.states):
                parts = prompt.split(piece)
                packings = [Packing(self._out, prompt.transfers, *part) for part in parts]
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
            prompt.drop_computing()

    def send(self, request_id: str, piece: PromptPiece) -> None:
        """Send a piece of a prompt that has begun.

        Its pages must stay unchanged until `done` returns the request, or until `release_pages` returns.
        """
        prompt = self._prompts[request_id]
        prompt.has_last |= piece.last
        if not prompt.closed:
            computing, prompt.computing = prompt.computing, None
            prompt.pending.append(computing or _Piece(piece, prompt.split(piece), ()))

    def cancel(self, request_id: str, last: bool) -> None:
        """Cancel a prompt that has begun, since a piece of it is incomplete. `last`: no piece follows."""
        prompt = self._prompts[request_id]
        prompt.has_last |= last
        prompt.cancel()

    def cancel_all(self) -> None:
        """Cancel all prompts that have begun, and discard the step's pieces."""
        self.drop()
        for prompt in self._prompts.values():
            prompt.cancel()

    def go_on(self) -> None:
        """Pack the pieces that receivers have admitted, and commit complete prompts."""
        for prompt in self._prompts.values():
            if not prompt.closed:
                try:
                    self._advance(prompt)
                except (HandoffError, ValueError) as error:
                    self._give_up(prompt, error)

    def wait(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` until everything sent has arrived, or cannot before another step."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._changed.clear()
            self.go_on()
            if time.monotonic() >= deadline or not any(p.is_arriving() for p in self._prompts.values()):
                return
            self._changed.wait(ADMISSION_S)

    def done(self, finished: set[str]) -> set[str]:
        """Return the finished requests whose pages are no longer read. Reports each request once."""
        for request_id in finished & self._prompts.keys():
            prompt = self._prompts[request_id]
            prompt.finished = True
            if not prompt.has_last:  # it was aborted
                prompt.cancel()
        done = {p.request_id for p in self._prompts.values() if p.finished and p.closed and p.packed}
        for request_id in done:
            del self._prompts[request_id]
        return done

    @property
    def in_flight(self) -> bool:
        """True if any transfer is in flight."""
        return any(not prompt.closed for prompt in self._prompts.values())

    def __contains__(self, request_id: object) -> bool:
        """Return whether a request's pages may still be read."""
        return request_id in self._prompts

    def release_pages(self) -> None:
        """Stop reading pages before this returns.

        Pieces that are not admitted are copied, at most as many records as there are slots. A prompt is
        cancelled if the slots are too few, or if none come free for its records.
        """
        self.go_on()
        tiers = self._out.writes.tiers
        sends = [send for prompt in self._prompts.values() for send in prompt.sends]
        deadline = time.monotonic() + tiers.timeout_s
        while wait(sends, COPY_WAIT_S).not_done:
            if tiers.staging.waiting or time.monotonic() >= deadline:
                break
        for prompt in self._prompts.values():
            reading = [send for send in prompt.sends if not send.done()]
            if not prompt.closed and (reading or not all(map(self._copy, prompt.pending))):
                log.warning("%s: not handed off: the engine needs its pages back too soon", prompt.request_id)
                for send in reading:
                    send.release_pages()
                prompt.cancel()

    def close(self, timeout_s: float) -> None:
        """End the threads after their queued work; wait at most `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        for workers in (self._packers, self._senders):
            if not workers.close(max(0.0, deadline - time.monotonic())):
                log.warning("close: a job of %r has not ended and is abandoned", workers.name)

    def _advance(self, prompt: _Prompt) -> None:
        """Pack the pending pieces of an admitted prompt, and commit it if it is complete."""
        transfers = prompt.transfers
        transfers.check()
        if transfers.handles == []:
            prompt.cancel()  # other ranks send all of it
        if not transfers.admitted:
            return
        for piece in prompt.pending:
            self._pack(prompt, piece)
        prompt.pending.clear()
        if prompt.has_last and prompt.packed:
            prompt.closed = True
            transfers.finish()

    def _pack(self, prompt: _Prompt, piece: _Piece) -> None:
        """Pack the rest of a piece, directly into slots of the receiver if it has them."""
        for i, (part, pages) in enumerate(piece.parts):
            packing = piece.packings[i] if piece.packings else None
            if packing is not None and packing.open(last=True):
                send = packing.packed
                self._packers.submit(packing.end)
            else:
                send = Transfer.start(self._senders, partial(self._out.send, part, pages, piece.piece.ready))
            send.add_done_callback(self._on_change)
            prompt.sends.append(send)

    def _copy(self, piece: _Piece) -> bool:
        """Copy a piece out of the engine's pages; return whether there were slots enough for it."""
        if not piece.copied:
            copied = [p for prompt in self._prompts.values() for p in prompt.pending if p.copied]
            if sum(p.records for p in (piece, *copied)) > self._out.writes.tiers.staging.slots:
                return False
            piece.piece.ready()
            piece.abandon()
            piece.packings, piece.copied = (), True
            piece.parts = [(part, [group.copied() for group in pages]) for part, pages in piece.parts]
        return True

    def _give_up(self, prompt: _Prompt, error: Exception) -> None:
        log.warning("%s: nothing is handed off: %s", prompt.request_id, error)
        prompt.cancel()

    def _on_change(self, source: object) -> None:
        self._changed.set()
        self._wake(source)


def _pack(packings: Sequence[Packing], layers: Sequence[int]) -> None:
    for packing in packings:
        packing.pack(layers)
