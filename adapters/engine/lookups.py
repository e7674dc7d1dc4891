"""Lookups of prompts, in tiers and in transfers from prefill engines, until they are answered."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, field, replace

from kvkit.adapters.engine.loads import PromptHit, result_of
from kvkit.adapters.engine.lookup_request import LookupAnswer, LookupRequest, Sequence
from kvkit.adapters.engine.speed import Speed, saved_tokens_per_s
from kvkit.cache import Cache
from kvkit.format.layout import Namespace
from kvkit.handoff.prompt import tail_of
from kvkit.handoff.protocol.messages import HANDOFF
from kvkit.handoff.protocol.states import Phase
from kvkit.handoff.receiver import Receiver
from kvkit.transfer.lookup import look_up_in_memory
from kvkit.transfer.policy import RequestPolicy
from kvkit.transfer.sequence import Chunks, Hit
from kvkit.workers import Transfer

log = logging.getLogger(__name__)

ALLOCATION_WAIT_S = 5.0
"""Seconds that a request waits, once the prefill engine has answered, for its transfer to ask for room. The
prefill engine asks for room before it computes, so its transfer is lost after that time."""


@dataclass(eq=False, slots=True)
class PromptRequest:
    """A request on one rank: from its lookup until its hit is loaded, or it ends.

    Attributes:
        awaiting: lookup that waits for a transfer since `awaiting_since` (monotonic).
        pending: lookup in flight. `transfers` look up the prompt and then its documents; they time out at
            `deadline` (monotonic).
        received: id of the transfer that was received for it, until it is released; empty for none.
        hit: hit of lookup `number`, to be claimed.
        claimed: True while a load of the hit, which may be None, is in flight.
    """

    awaiting: LookupRequest | None = None
    awaiting_since: float = 0.0
    pending: LookupRequest | None = None
    transfers: tuple[Transfer[Hit], ...] = ()
    deadline: float = 0.0
    received: str = ""
    number: int = 0
    hit: PromptHit | None = None
    claimed: bool = False

    @property
    def has_result(self) -> bool:
        """True if its lookup is over and not answered yet."""
        return self.pending is not None and all(transfer.done() for transfer in self.transfers)

    @property
    def is_over(self) -> bool:
        """True if it has no lookup, hit, transfer or load any more."""
        return not (self.awaiting or self.pending or self.received or self.hit or self.claimed)

    def cancel_pending(self) -> None:
        """Cancel its lookup in flight, if any."""
        for transfer in self.transfers:
            transfer.cancel()
        self.pending, self.transfers = None, ()


@dataclass(eq=False, slots=True)
class Lookups:
    """The lookups of one rank. For the thread that runs steps; no method waits.

    Args:
        receiver: receives the transfers of prefill engines; None: this engine receives none.
        namespace_of: returns a sequence's namespace, or None if it must not be looked up; called again for
            the answer.
        block_tokens: tokens per record of a handed-off unfilled chunk.
        timeout_s: timeout of a lookup.
        handoff_timeout_s: timeout of a transfer from a prefill engine.
        tokens_per_s: returns how many prompt tokens the engine computes per second; None: unknown.
        row_speed: speed at which it recomputes tokens of documents.
        wake: called when a lookup is over, from any thread.
    """

    cache: Cache
    receiver: Receiver | None
    namespace_of: Callable[[Sequence], Namespace | None]
    _: KW_ONLY
    block_tokens: int
    timeout_s: float
    handoff_timeout_s: float
    tokens_per_s: Callable[[], float | None]
    row_speed: Speed
    wake: Callable[[object], object]
    _requests: dict[str, PromptRequest] = field(default_factory=dict, init=False)
    _answered: list[LookupAnswer] = field(default_factory=list, init=False)

    def begin_lookup(self, lookup: LookupRequest) -> None:
        """Look up a prompt, once its transfer (if any) has arrived or failed."""
        if lookup.transfer and self.receiver is not None:
            request = self._request_of(lookup.request_id)
            request.received = lookup.transfer
            request.awaiting, request.awaiting_since = lookup, time.monotonic()
        else:
            self._look_up(lookup)

    def lookup_inline(self, lookup: LookupRequest) -> LookupAnswer | None:
        """Answer at once if its transfer (if any) has arrived, and host memory holds all of the prompt.

        Of a part, saves may be in flight, and other tiers may hold more.

        Returns:
            None if it cannot be answered at once: then nothing has changed, and the caller calls
            `begin_lookup`.
        """
        namespace = self.namespace_of(lookup.sequence)
        if namespace is None or lookup.documents or (lookup.transfer and not self._has_arrived(lookup)):
            return None
        chunks = self.cache.chunks(lookup.sequence.tokens, namespace, _lookup_policy(lookup))
        first = lookup.computed // namespace.chunk_tokens
        hit = look_up_in_memory(self.cache.tier_set, chunks, first, self.tokens_per_s())
        if hit is None:
            return None
        self.cancel_lookup(lookup.request_id)
        self._request_of(lookup.request_id).received = lookup.transfer
        self._answer(lookup, hit)
        return self._answered.pop()

    def receive_transfers(self) -> bool:
        """Look up the prompts whose transfers arrived or failed. Return whether there were any."""
        received = False
        for request in list(self._requests.values()):
            lookup = request.awaiting
            if lookup is None:
                continue
            assert self.receiver is not None
            status = self.receiver.status(lookup.transfer)
            is_over = status is not None and status.phase in (None, Phase.COMMITTED)
            timeout_s = self.handoff_timeout_s
            if status is None and lookup.computed_remotely:
                timeout_s = min(timeout_s, ALLOCATION_WAIT_S)
            if is_over or time.monotonic() >= request.awaiting_since + timeout_s:
                if status is None or status.phase is not Phase.COMMITTED:
                    reason = "it did not arrive" if status is None else status.reason or str(status.phase)
                    log.warning("%s: nothing from the prefill engine: %s", lookup.request_id, reason)
                request.awaiting, received = None, True
                self._look_up(lookup)
        return received

    def release_transfer(self, transfer: str) -> None:
        """Release a transfer that no request waits for any more."""
        if self.receiver is not None:
            self.receiver.release(transfer, "not wanted")

    def take_answers(self) -> list[LookupAnswer]:
        """Return the answers since the last call. `claim` returns the hits to load."""
        now = time.monotonic()
        for request in list(self._requests.values()):
            lookup = request.pending
            if lookup is None:
                continue
            if request.has_result:
                hit, *document_hits = (result_of(transfer) for transfer in request.transfers)
                self._answer(lookup, hit, document_hits)
            elif now >= request.deadline:
                timeout_s = self.timeout_s
                log.info("%s: no lookup result within %s s: nothing is loaded", lookup.request_id, timeout_s)
                self._answer(lookup, None)
            else:
                continue
            request.cancel_pending()
            self._drop_if_over(lookup.request_id)
        answered, self._answered = self._answered, []
        return answered

    def claim(self, request_id: str, number: int) -> PromptHit | None:
        """Take the hit of lookup `number` to load it, until `release`; None if it was not the last lookup."""
        request = self._request_of(request_id)
        hit, request.hit, request.claimed = request.hit, None, True
        return hit if request.number == number else None

    def found_chunks(self, request_id: str) -> Chunks | None:
        """Return the whole chunks of a request's hit; None if there is no hit to claim."""
        request = self._requests.get(request_id)
        hit = None if request is None else request.hit
        return None if hit is None else hit.whole.chunks.part(0, hit.whole.plan.chunks)

    def finish_request(self, request_id: str) -> None:
        """Forget a request that ended. Its received transfer stays until a load in flight is over."""
        self.cancel_lookup(request_id)
        request = self._requests.get(request_id)
        if request is not None and not request.claimed:
            self.release(request_id)

    def cancel_lookup(self, request_id: str) -> None:
        """Forget a request's lookups and hits, but not its transfer."""
        request = self._requests.get(request_id)
        if request is not None:
            request.hit = request.awaiting = None
            request.cancel_pending()
            self._drop_if_over(request_id)

    def release(self, request_id: str) -> None:
        """Release the transfer that was received for a request: it was loaded, or will not be."""
        request = self._requests.get(request_id)
        if request is None:
            return
        transfer, request.received, request.claimed = request.received, "", False
        if transfer and self.receiver is not None:
            self.receiver.release(transfer)
        self._drop_if_over(request_id)

    def drop_hits(self) -> None:
        """Forget all hits."""
        for request_id, request in list(self._requests.items()):
            request.hit = None
            self._drop_if_over(request_id)

    @property
    def has_result(self) -> bool:
        """True if a lookup is over that `take_answers` has not returned."""
        return any(request.has_result for request in self._requests.values())

    @property
    def has_pending(self) -> bool:
        """True if a lookup is in flight."""
        return any(request.pending is not None for request in self._requests.values())

    @property
    def awaits_transfer(self) -> bool:
        """True if a lookup waits for a transfer."""
        return any(request.awaiting is not None for request in self._requests.values())

    def _request_of(self, request_id: str) -> PromptRequest:
        return self._requests.setdefault(request_id, PromptRequest())

    def _drop_if_over(self, request_id: str) -> None:
        if self._requests[request_id].is_over:
            del self._requests[request_id]

    def _has_arrived(self, lookup: LookupRequest) -> bool:
        """Return whether the transfer of a lookup has arrived."""
        status = None if self.receiver is None else self.receiver.status(lookup.transfer)
        return status is not None and status.phase is Phase.COMMITTED

    def _look_up(self, lookup: LookupRequest) -> None:
        """Start the lookups of a prompt and its documents."""
        prompt, namespace = lookup.sequence, self.namespace_of(lookup.sequence)
        if namespace is None:
            self._answer(lookup, None)
            return
        speed, documents = self.tokens_per_s(), lookup.documents
        saved = saved_tokens_per_s(speed, self.row_speed.tokens_per_s, lookup.recomputed_share)
        if documents and saved == 0.0:
            log.info("%s: its documents are computed: blending would be slower", lookup.request_id)
            documents = ()
        computed = lookup.computed // namespace.chunk_tokens
        sequences = [(prompt, computed, speed), *((document, 0, saved) for document in documents)]
        transfers = tuple(
            self.cache.lookup_async(
                sequence.tokens,
                namespace,
                wait_s=self.timeout_s / 2,  # a slow save of the same chunks must not cost a hit
                first=first,
                prefill_tokens_per_s=tokens_per_s,
                policy=_lookup_policy(lookup),
            )
            for sequence, first, tokens_per_s in sequences
        )
        request = self._request_of(lookup.request_id)
        request.cancel_pending()  # the scheduler drops the answer to an earlier lookup
        request.pending, request.transfers = lookup, transfers
        request.deadline = time.monotonic() + self.timeout_s
        for transfer in transfers:
            transfer.add_done_callback(self.wake)

    def _answer(
        self, lookup: LookupRequest, hit: Hit | None, document_hits: Iterable[Hit | None] = ()
    ) -> None:
        """Note the answer for a hit of whole chunks, with the blocks that were handed off after them."""
        tail, prompt, document_tokens = None, lookup.sequence, (0,) * len(lookup.documents)
        segments: tuple[tuple[str, int], ...] = ()
        if hit is not None and self.namespace_of(prompt) is not None:
            request = self._request_of(lookup.request_id)
            if request.received and len(hit.chunks) == hit.plan.chunks:
                tail_input = tail_of(hit.chunks, prompt.tokens, self.block_tokens, prompt.rest)
                tail = tail_input and self.cache.lookup(*tail_input, retrieve_from=(HANDOFF,))
            no_hit = hit.part(0, 0)
            found_documents = tuple(document_hit or no_hit for document_hit in document_hits)
            document_tokens = tuple(found.tokens for found in found_documents) or document_tokens
            request.number, request.hit = lookup.number, PromptHit(hit, tail, found_documents)
            segments = request.hit.segments
        tokens = min(sum(tokens for _, tokens in segments), len(prompt.tokens))
        rank = self.cache.namespace.rank
        answer = LookupAnswer(lookup.request_id, lookup.number, rank, tokens, segments, document_tokens)
        self._answered.append(answer)


def _lookup_policy(lookup: LookupRequest) -> RequestPolicy:
    """Return the policy of a lookup's request, which may always load what was handed off to it."""
    policy = lookup.policy
    if lookup.transfer and policy.load_from is not None:
        return replace(policy, load_from=(HANDOFF, *policy.load_from))
    return policy
