"""Send prompts to decode engines, piece by piece while the prompts are computed."""

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
"""Interval, in seconds, at which `release_pages` checks for a shortage of slots."""
ADMISSION_S = 0.25
"""Seconds from the start of a prompt for which `wait_for_arrival` waits for its admission.

It does not wait longer: the receiver may have no slots until this step completes another request.
"""
NO_TOKEN = -1
"""Token id that fills the last block after its last token."""


def tail_of(
    chunks: Chunks, tokens: npt.NDArray[np.int32], block_tokens: int, rest: str = ""
) -> tuple[npt.NDArray[np.int32], Namespace] | None:
    """Return token ids and a namespace for the `tokens` after the whole `chunks`; None if there are none.

    Each of their blocks is one record. The last record holds a whole page, data after the tokens included.
    The namespace contains the key of the last chunk: no lookup confuses these records with those of a chunk.

    Args:
        rest: anything that determines their KV besides the tokens and their prefix; empty for nothing.

    Returns:
        The token ids, int32 [blocks * block_tokens], and their namespace.
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
        ready: returns when the pages hold the piece.
        last: True if no other piece follows.
    """

    first: int
    stop: int
    pages: Callable[[int, int], Sequence[SequencePages]]
    ready: Callable[[], object]
    last: bool


@dataclass(eq=False, slots=True)
class _Piece:
    """A piece of a prompt: its chunks and the blocks after them.

    Attributes:
        sequences: the chunks and the blocks, each with their pages.
        packings: one for each of `sequences` if the piece is packed while it is computed, else empty.
        copied: True if the pages of `sequences` are copies of the engine's.
    """

    piece: PromptPiece
    sequences: Sequence[tuple[Chunks, Sequence[SequencePages]]]
    packings: Sequence[Packing]
    copied: bool = False

    @property
    def records(self) -> int:
        return sum(len(chunks.names) for chunks, _ in self.sequences)

    def abandon(self) -> None:
        """Stop the packings. They no longer read the engine's pages afterwards."""
        for packing in self.packings:
            packing.abandon()


@dataclass(eq=False, slots=True)
class _Prompt:
    """State of one prompt.

    Attributes:
        chunks, tail: whole chunks of the prompt, and the blocks after them.
        transfers: transfers to the receiver's ranks.
        computing: piece of the current step.
        pending: pieces that wait for the receiver to admit the prompt.
        sends: sends of the other pieces; each reads pages until it is done.
        has_last: True if its last piece was given to `send_piece` or cancelled.
        finished: True if the engine has ended the request.
        closed: True if no further pieces are sent.
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
        """True if no send reads the engine's pages."""
        return all(send.done() for send in self.sends)

    def split(self, piece: PromptPiece) -> list[tuple[Chunks, Sequence[SequencePages]]]:
        """Return the chunks of a piece and the blocks after them, each with its pages."""
        size, chunks, tail = self.chunks.chunk_tokens, self.chunks, self.tail
        whole_stop = min(piece.stop, len(chunks.tokens))
        sequences = []
        if whole_stop > piece.first:
            sequences.append((chunks.part(piece.first // size, whole_stop // size), whole_stop))
        if piece.stop > whole_stop and tail is not None:
            sequences.append((tail, whole_stop + len(tail.tokens)))
        return [(sequence, piece.pages(stop - len(sequence.tokens), stop)) for sequence, stop in sequences]

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
        """Return whether something that was sent has not arrived and can do so before the next step."""
        transfers = self.transfers
        admission_expected = time.monotonic() < transfers.begun + ADMISSION_S
        if transfers.handles is None:
            return not self.closed and admission_expected
        if transfers.done:
            return False
        complete = self.has_last and not self.pending  # the next `advance` may commit it
        if complete or self.closed or transfers.queued or not self.packed:
            return True
        return bool(self.pending) and (transfers.admitted or admission_expected)


class Prompts:
    """Prompts that one rank sends. Only the engine's thread may call it.

    Args:
        chunk_sender: packs and sends chunks.
        namespace: namespace of this rank.
        count_shared: returns how many leading chunks are in tiers that the receivers also read, and which
            are not sent. None if there are no such tiers.
        block_tokens: tokens of each record of an incomplete chunk.
        allocation_s: longest wait for a receiver to find slots, in seconds.
        wake: called after every change, from any thread.
    """

    def __init__(
        self,
        chunk_sender: ChunkSender,
        namespace: Namespace,
        *,
        count_shared: Callable[[Chunks], Transfer[int]] | None,
        block_tokens: int,
        allocation_s: float,
        wake: Callable[[object], object],
    ) -> None:
        self._chunk_sender = chunk_sender
        self._count_shared = count_shared
        self._block_tokens = block_tokens
        self._wake = wake
        self._rank = SendingRank(
            chunk_sender.sender, chunk_sender.layout, namespace, allocation_s, self._on_change
        )
        self._changed = threading.Event()
        self._prompts: dict[str, _Prompt] = {}
        self._packers = Workers(1, "kvkit-handoff-pack")
        self._senders = Workers(SENDING_THREADS, "kvkit-handoff-send")
        self._computed_layers: tuple[int, ...] = ()

    def begin_prompt(
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
            request_id: id of the request. If it was begun before, a `space` of None cancels it, and any other
                changes nothing.
            transfer: transfer id at the receiver.
            address: address of the receiver's ranks, with `{rank}` if there are several.
            tokens: all tokens of the transfer, int32 [T].
            space: namespace of the records; None to send nothing.
            rest: as in `tail_of`.
        """
        if request_id in self._prompts:
            if space is None:
                self._prompts[request_id].cancel()
            return
        layout = self._chunk_sender.layout
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
            transfers.open(
                None if self._count_shared is None or not len(chunks) else self._count_shared(chunks)
            )
        except (HandoffError, ValueError) as error:
            self._fail(prompt, error)

    def begin_pieces(self, pieces: Mapping[str, PromptPiece]) -> None:
        """Prepare to pack the pieces that the next step computes on a CPU, layer by layer with `pack_layer`.

        Takes effect if the receiver's memory is mapped here. Prompts with states are left out: states are
        complete only after the step.

        Args:
            pieces: by request id; the prompts have begun.
        """
        self.drop_pieces()
        self._computed_layers = ()
        for request_id, piece in pieces.items():
            prompt = self._prompts[request_id]
            if not (prompt.closed or prompt.chunks.states):
                sequences = prompt.split(piece)
                packings = [
                    Packing(self._chunk_sender, prompt.transfers, *sequence) for sequence in sequences
                ]
                prompt.computing = _Piece(piece, sequences, packings)

    def pack_layer(self, layer: int) -> None:
        """Pack a layer that the step has computed, in the background, for the pieces of `begin_pieces`."""
        self._computed_layers += (layer,)
        pieces = [prompt.computing for prompt in self._prompts.values() if prompt.computing is not None]
        for packing in (packing for piece in pieces for packing in piece.packings):
            self._packers.submit(partial(packing.pack, self._computed_layers))

    def drop_pieces(self) -> None:
        """Discard the step's pieces that `send_piece` has not taken."""
        for prompt in self._prompts.values():
            prompt.drop_computing()

    def send_piece(self, request_id: str, piece: PromptPiece) -> None:
        """Send a piece of a prompt that has begun.

        Its pages must stay unchanged until `take_released` returns the request or `release_pages` returns.
        """
        prompt = self._prompts[request_id]
        prompt.has_last |= piece.last
        if not prompt.closed:
            computing, prompt.computing = prompt.computing, None
            prompt.pending.append(computing or _Piece(piece, prompt.split(piece), ()))

    def cancel_prompt(self, request_id: str, last: bool) -> None:
        """Cancel a prompt that has begun, because a piece lacks pages. `last`: as in `PromptPiece`."""
        prompt = self._prompts[request_id]
        prompt.has_last |= last
        prompt.cancel()

    def cancel_prompts(self) -> None:
        """Cancel all prompts, and discard the step's pieces."""
        self.drop_pieces()
        for prompt in self._prompts.values():
            prompt.cancel()

    def advance(self) -> None:
        """Pack the pieces of admitted prompts, and commit complete prompts."""
        for prompt in self._prompts.values():
            if not prompt.closed:
                try:
                    self._advance_prompt(prompt)
                except (HandoffError, ValueError) as error:
                    self._fail(prompt, error)

    def wait_for_arrival(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` seconds for what can arrive before the next step."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._changed.clear()
            self.advance()
            if time.monotonic() >= deadline or not any(p.is_arriving() for p in self._prompts.values()):
                return
            self._changed.wait(ADMISSION_S)

    def take_released(self, finished: set[str]) -> set[str]:
        """Forget the finished requests whose pages are no longer read, and return their ids.

        Args:
            finished: ids of requests that the engine has ended since the last call.
        """
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
        """Stop reading the engine's pages before this returns.

        Pieces that wait for admission are copied, at most as many records as there are slots. A prompt is
        cancelled if its records are too many for that, or get no slots in time.
        """
        self.advance()
        tiers = self._chunk_sender.writes.tiers
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
        """End the threads after their queued work, and wait for them at most `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        for workers in (self._packers, self._senders):
            if not workers.close(max(0.0, deadline - time.monotonic())):
                log.warning("close: a job of %r has not ended and is abandoned", workers.name)

    def _advance_prompt(self, prompt: _Prompt) -> None:
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
        """Pack a piece into borrowed slots of the receiver, if its packings have any, else into own slots."""
        for i, (chunks, pages) in enumerate(piece.sequences):
            packing = piece.packings[i] if piece.packings else None
            if packing is not None and packing.open(last=True):
                send = packing.packed
                self._packers.submit(packing.end)
            else:
                pack = partial(self._chunk_sender.send, chunks, pages, piece.piece.ready)
                send = Transfer.start(self._senders, pack)
            send.add_done_callback(self._on_change)
            prompt.sends.append(send)

    def _copy(self, piece: _Piece) -> bool:
        """Copy a piece out of the engine's pages; return False if it and other copies exceed the slots."""
        if not piece.copied:
            copied = [p for prompt in self._prompts.values() for p in prompt.pending if p.copied]
            if sum(p.records for p in (piece, *copied)) > self._chunk_sender.writes.tiers.staging.slots:
                return False
            piece.piece.ready()
            piece.abandon()
            piece.packings, piece.copied = (), True
            piece.sequences = [
                (chunks, [group.copied() for group in pages]) for chunks, pages in piece.sequences
            ]
        return True

    def _fail(self, prompt: _Prompt, error: Exception) -> None:
        log.warning("%s: nothing is handed off: %s", prompt.request_id, error)
        prompt.cancel()

    def _on_change(self, source: object) -> None:
        self._changed.set()
        self._wake(source)
