"""Lookups of prompts, in tiers and in transfers from prefill engines, until they are answered."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any

from kvkit.adapters.engine.loads import PromptHit, result_of
from kvkit.adapters.engine.lookup_request import LookupAnswer, LookupRequest, Sequence
from kvkit.adapters.engine.speed import saved_tokens_per_s
from kvkit.cache import Cache
from kvkit.format.layout import Namespace
from kvkit.handoff.prompt import tail_of
from kvkit.handoff.protocol.messages import HANDOFF
from kvkit.handoff.protocol.states import Phase
from kvkit.handoff.receiver import Receiver
from kvkit.transfer.sequence import Chunks, Hit
from kvkit.workers import Transfer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _PromptLookups:
    """A lookup in flight of a prompt and its documents; it times out at `until` (monotonic)."""

    lookup: LookupRequest
    prompt: Transfer[Hit]
    documents: tuple[Transfer[Hit], ...]
    until: float

    @property
    def done(self) -> bool:
        return all(transfer.done() for transfer in (self.prompt, *self.documents))

    def cancel(self) -> None:
        for transfer in (self.prompt, *self.documents):
            transfer.cancel()


NEWS_S = 5.0
"""Seconds that a request waits for its transfer to ask for room once the prefill engine has answered: that
engine asks before it computes."""


@dataclass(eq=False, slots=True)
class Lookups:
    """The lookups of one rank. For the thread that runs steps: nothing here waits.

    Args:
        receiver: receives the transfers of prefill engines; None: this engine receives none.
        namespace_of: returns a sequence's namespace, or None if it must not be looked up; called again for
            the answer.
        block_tokens: tokens per record of a handed-off unfilled chunk.
        timeout_s: timeout of a lookup.
        handoff_timeout_s: timeout of a transfer from a prefill engine.
        tokens_per_s: returns how many prompt tokens the engine computes per second; None: unknown.
        rows_per_s: returns how many tokens of documents it recomputes per second; None: unknown.
        wake: called when a lookup is over, from any thread.

    Attributes:
        awaited: by request id, lookups that wait for a transfer, and since when (monotonic).
        asked: by request id, lookups in flight.
    """

    cache: Cache
    receiver: Receiver | None
    namespace_of: Callable[[Sequence], Namespace | None]
    _: KW_ONLY
    block_tokens: int
    timeout_s: float
    handoff_timeout_s: float
    tokens_per_s: Callable[[], float | None]
    rows_per_s: Callable[[], float | None]
    wake: Callable[[object], object]
    awaited: dict[str, tuple[LookupRequest, float]] = field(default_factory=dict, init=False)
    _received: dict[str, str] = field(default_factory=dict, init=False)
    asked: dict[str, _PromptLookups] = field(default_factory=dict, init=False)
    _answered: list[LookupAnswer] = field(default_factory=list, init=False)
    _found: dict[str, tuple[int, PromptHit]] = field(default_factory=dict, init=False)

    def ask(self, lookup: LookupRequest) -> None:
        """Look a prompt up, once its transfer (if any) has arrived or failed."""
        if lookup.transfer and self.receiver is not None:
            self._received[lookup.request_id] = lookup.transfer
            self.awaited[lookup.request_id] = lookup, time.monotonic()
        else:
            self._look_up(lookup)

    def lookup_inline(self, lookup: LookupRequest) -> LookupAnswer | None:
        """Answer at once if the lookup's transfer has arrived and all tiers to look in are in memory.

        Returns:
            None if not: call `ask` then; nothing was changed.
        """
        cache, space = self.cache, self.namespace_of(lookup.sequence)
        status = None if self.receiver is None else self.receiver.status(lookup.transfer)
        if space is None or status is None or status.phase is not Phase.COMMITTED or lookup.documents:
            return None
        if lookup.policy.load_from or not all(cache.tiers[n].near for n in cache.policy.retrieve_from):
            return None
        self.cancel(lookup.request_id)
        self._received[lookup.request_id] = lookup.transfer
        self._answer(lookup, cache.lookup(lookup.sequence.tokens, space, **self._how(lookup, space)))
        return self._answered.pop()

    def receive(self) -> bool:
        """Look up the prompts whose transfers arrived or failed; return whether there were any."""
        awaited = list(self.awaited.values())
        for lookup, since in awaited:
            assert self.receiver is not None
            status = self.receiver.status(lookup.transfer)
            over = status is not None and status.phase in (None, Phase.COMMITTED)
            patience_s = self.handoff_timeout_s
            if status is None and lookup.computed_there:
                patience_s = min(patience_s, NEWS_S)
            if over or time.monotonic() >= since + patience_s:
                if status is None or status.phase is not Phase.COMMITTED:
                    reason = "it did not arrive" if status is None else status.reason or str(status.phase)
                    log.warning("%s: nothing from the prefill engine: %s", lookup.request_id, reason)
                del self.awaited[lookup.request_id]
                self._look_up(lookup)
        return len(self.awaited) < len(awaited)

    def answers(self) -> list[LookupAnswer]:
        """Return the answers since the last call. `claim` returns the hits to load."""
        now = time.monotonic()
        for request_id, asked in list(self.asked.items()):
            if asked.done:
                documents = [result_of(document) for document in asked.documents]
                self._answer(asked.lookup, result_of(asked.prompt), documents)
            elif now >= asked.until:
                asked.cancel()
                log.info("%s: no lookup result within %s s: nothing is loaded", request_id, self.timeout_s)
                self._answer(asked.lookup, None)
            else:
                continue
            del self.asked[request_id]
        answered, self._answered = self._answered, []
        return answered

    def claim(self, request_id: str, number: int) -> PromptHit | None:
        """Take the hit of lookup `number`, to be loaded; None if it was not the last lookup."""
        last, hit = self._found.pop(request_id, (None, None))
        return hit if last == number else None

    def found(self, request_id: str) -> Chunks | None:
        """Return the whole chunks of a request's hit; None if there is no hit to claim."""
        _, hit = self._found.get(request_id, (None, None))
        return None if hit is None else hit.whole.chunks.part(0, hit.whole.plan.chunks)

    def cancel(self, request_id: str) -> None:
        """Forget a request's lookups and hits, but not its transfer."""
        self._found.pop(request_id, None)
        self.awaited.pop(request_id, None)
        if request_id in self.asked:
            self.asked.pop(request_id).cancel()

    def release(self, request_id: str) -> None:
        """Release what was received for a request: it was loaded, or will not be."""
        transfer = self._received.pop(request_id, None)
        if transfer is not None and self.receiver is not None:
            self.receiver.release(transfer)

    def clear(self) -> None:
        """Forget all hits."""
        self._found.clear()

    @property
    def done(self) -> bool:
        """True if a lookup is over that `answers` has not returned."""
        return any(asked.done for asked in self.asked.values())

    def _look_up(self, lookup: LookupRequest) -> None:
        space = self.namespace_of(lookup.sequence)
        if space is None:
            self._answer(lookup, None)
            return
        how = self._how(lookup, space)
        # a slow save of the same chunks must not cost a hit
        look = partial(self.cache.lookup_async, wait_s=self.timeout_s / 2, policy=how.pop("policy"))
        prompt = look(lookup.sequence.tokens, space, **how)
        saved = saved_tokens_per_s(how["prefill_tokens_per_s"], self.rows_per_s(), lookup.recomputed)
        sequences = lookup.documents
        if sequences and saved == 0.0:
            log.info("%s: its documents are computed: blending would be slower", lookup.request_id)
            sequences = ()
        documents = tuple(look(d.tokens, space, prefill_tokens_per_s=saved) for d in sequences)
        asked = _PromptLookups(lookup, prompt, documents, time.monotonic() + self.timeout_s)
        for found in (prompt, *documents):
            found.add_done_callback(self.wake)
        if lookup.request_id in self.asked:  # no one waits for the answer to an earlier lookup
            self.asked[lookup.request_id].cancel()
        self.asked[lookup.request_id] = asked

    def _how(self, lookup: LookupRequest, space: Namespace) -> dict[str, Any]:
        """Return the keyword arguments of a prompt's lookup, for `Cache.lookup`."""
        policy = lookup.policy
        if lookup.transfer and policy.load_from is not None:
            policy = replace(policy, load_from=(HANDOFF, *policy.load_from))
        first = lookup.computed // space.chunk_tokens
        return {"first": first, "prefill_tokens_per_s": self.tokens_per_s(), "policy": policy}

    def _answer(self, lookup: LookupRequest, whole: Hit | None, documents: Iterable[Hit | None] = ()) -> None:
        """Note an answer, with the handed-off blocks of an unfilled chunk after the whole ones."""
        tail, prompt, found = None, lookup.sequence, (0,) * len(lookup.documents)
        segments: tuple[tuple[str, int], ...] = ()
        if whole is not None and self.namespace_of(prompt) is not None:
            if lookup.request_id in self._received and len(whole.chunks) == whole.plan.chunks:
                rest = tail_of(whole.chunks, prompt.tokens, self.block_tokens, prompt.rest)
                tail = rest and self.cache.lookup(*rest, retrieve_from=(HANDOFF,))
            nothing = whole.part(0, 0)
            hits = tuple(document or nothing for document in documents)
            found = tuple(document.tokens for document in hits) or found
            hit = PromptHit(whole, tail, hits)
            self._found[lookup.request_id] = lookup.number, hit
            segments = hit.segments
        tokens = min(sum(tokens for _, tokens in segments), len(prompt.tokens))
        rank = self.cache.namespace.rank
        answer = LookupAnswer(lookup.request_id, lookup.number, rank, tokens, segments, found)
        self._answered.append(answer)
