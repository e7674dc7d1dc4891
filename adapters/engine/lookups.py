"""What is asked about prompts, until it is answered: of tiers, and of what prefill engines send."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field

from kvkit.adapters.engine.loads import PromptHit, result_of
from kvkit.adapters.engine.question import LookupAnswer, Question, Sequence
from kvkit.cache import Cache
from kvkit.format.layout import Namespace
from kvkit.handoff.prompt import tail_of
from kvkit.handoff.protocol.messages import HANDOFF
from kvkit.handoff.protocol.states import Phase
from kvkit.handoff.receiver import Receiver
from kvkit.moving.sequence import Hit
from kvkit.workers import Transfer

log = logging.getLogger(__name__)

NEWS_S = 5.0
"""How long a request waits for word of its transfer once the prefill engine has answered: that one asks for
room before it computes."""


@dataclass(eq=False, slots=True)
class Lookups:
    """The questions of one rank. For the thread that runs steps: nothing here waits.

    Args:
        receiver: of what prefill engines send; None where nothing is taken.
        space_of: what a sequence is looked up in, None: nothing of it is to be; asked again for the answer.
        block_tokens: what an unfilled chunk comes in.
        timeout_s: how long a lookup may take.
        handoff_timeout_s: how long what is sent may take to come.
        tokens_per_s: how fast the engine computes prompts; None: not known.
        wake: called when a lookup is over, from any thread.

    Attributes:
        awaited: by request, what waits for a prefill engine, and since when (monotonic).
        asked: by request, what is being looked up, and until when.
    """

    cache: Cache
    receiver: Receiver | None
    space_of: Callable[[Sequence], Namespace | None]
    _: KW_ONLY
    block_tokens: int
    timeout_s: float
    handoff_timeout_s: float
    tokens_per_s: Callable[[], float | None]
    wake: Callable[[object], object]
    awaited: dict[str, tuple[Question, float]] = field(default_factory=dict, init=False)
    _received: dict[str, str] = field(default_factory=dict, init=False)
    asked: dict[str, tuple[Question, Transfer[Hit], float]] = field(default_factory=dict, init=False)
    _answered: list[LookupAnswer] = field(default_factory=list, init=False)
    _found: dict[str, tuple[int, PromptHit]] = field(default_factory=dict, init=False)

    def ask(self, question: Question) -> None:
        """Look a prompt up, as soon as what is sent of it has come, or will not."""
        if question.transfer and self.receiver is not None:
            self._received[question.request] = question.transfer
            self.awaited[question.request] = question, time.monotonic()
        else:
            self._look_up(question)

    def receive(self) -> bool:
        """Look up the prompts whose transfers arrived, or will not; whether there were any."""
        awaited = list(self.awaited.values())
        for question, since in awaited:
            assert self.receiver is not None
            status = self.receiver.status(question.transfer)
            over = status is not None and status.phase in (None, Phase.COMMITTED)
            patience_s = self.handoff_timeout_s
            if status is None and question.computed_there:
                patience_s = min(patience_s, NEWS_S)
            if over or time.monotonic() >= since + patience_s:
                if status is None or status.phase is not Phase.COMMITTED:
                    reason = "it did not come" if status is None else status.reason or str(status.phase)
                    log.warning("%s: nothing from the prefill engine: %s", question.request, reason)
                del self.awaited[question.request]
                self._look_up(question)
        return len(self.awaited) < len(awaited)

    def answers(self) -> list[LookupAnswer]:
        """What was found since the last call. `claim` has it, too."""
        now = time.monotonic()
        for name, (question, lookup, until) in list(self.asked.items()):
            if lookup.done():
                self._answer(question, result_of(lookup))
            elif now >= until:
                lookup.cancel()
                log.info("%s: not looked up within %s s", name, self.timeout_s)
                self._answer(question, None)
            else:
                continue
            del self.asked[name]
        answered, self._answered = self._answered, []
        return answered

    def claim(self, request: str, number: int) -> PromptHit | None:
        """What question `number` found, to be loaded; None if it was not the last one. Forgets it."""
        last, hit = self._found.pop(request, (None, None))
        return hit if last == number else None

    def cancel(self, request: str) -> None:
        """Forget a request's questions and answers, but not what it was sent."""
        self._found.pop(request, None)
        self.awaited.pop(request, None)
        if request in self.asked:
            self.asked.pop(request)[1].cancel()

    def release(self, request: str) -> None:
        """Give back what was received for a request: it was loaded, or will not be."""
        transfer = self._received.pop(request, None)
        if transfer is not None and self.receiver is not None:
            self.receiver.release(transfer)

    def clear(self) -> None:
        """Forget all that was found."""
        self._found.clear()

    @property
    def done(self) -> bool:
        """Whether there is something new for `answers`."""
        return any(lookup.done() for _, lookup, _ in self.asked.values())

    def _look_up(self, question: Question) -> None:
        space = self.space_of(question.sequence)
        if space is None:
            self._answer(question, None)
            return
        lookup = self.cache.lookup_async(
            question.sequence.tokens,
            space,
            wait_s=self.timeout_s / 2,  # a slow save shall not cost what the tiers have already
            first=question.computed // space.chunk_tokens,
            prefill_tokens_per_s=self.tokens_per_s(),
        )
        lookup.add_done_callback(self.wake)
        if question.request in self.asked:  # nobody waits for the answer to an earlier question
            self.asked[question.request][1].cancel()
        self.asked[question.request] = question, lookup, time.monotonic() + self.timeout_s

    def _answer(self, question: Question, whole: Hit | None) -> None:
        """Note an answer, with the blocks of an unfilled chunk that came with the whole ones."""
        tail, prompt = None, question.sequence
        segments: tuple[tuple[str, int], ...] = ()
        if whole is not None and self.space_of(prompt) is not None:
            if question.request in self._received and len(whole.chunks) == whole.plan.chunks:
                rest = tail_of(whole.chunks, prompt.tokens, self.block_tokens, prompt.rest)
                tail = rest and self.cache.lookup(*rest, retrieve_from=(HANDOFF,))
            hit = PromptHit(whole, tail)
            self._found[question.request] = question.number, hit
            segments = hit.segments
        tokens = min(sum(tokens for _, tokens in segments), len(prompt.tokens))
        rank = self.cache.namespace.rank
        self._answered.append(LookupAnswer(question.request, question.number, rank, tokens, segments))
