"""What is asked about prompts, until it is answered: of tiers, and of what prefill engines send."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvkit.adapters.engine.loads import PromptHit, result_of
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


@dataclass(frozen=True, slots=True)
class Question:
    """How much of a prompt can be loaded.

    Args:
        number: tells it from the request's earlier questions.
        tokens: int32 [T].
        space: what they are looked up in; None: nothing of them is to be. Asked again for the answer.
        rest: as `kvkit.handoff.prompt.tail_of` takes it.
        computed: tokens that the engine has.
        transfer: what a prefill engine sends, to be waited for; empty for none.
        computed_there: whether that engine said that it has computed what it sends.
    """

    request: str
    number: int
    tokens: npt.NDArray[np.int32]
    space: Callable[[], Namespace | None]
    rest: str = ""
    computed: int = 0
    transfer: str = ""
    computed_there: bool = False


class Lookups:
    """The questions of one rank. For the thread that runs steps: nothing here waits.

    Args:
        receiver: of what prefill engines send; None where nothing is taken.
        block_tokens: what an unfilled chunk comes in.
        timeout_s: how long a lookup may take.
        handoff_timeout_s: how long what is sent may take to come.
        tokens_per_s: how fast the engine computes prompts; None: not known.
        wake: called when a lookup is over, from any thread.
    """

    def __init__(
        self,
        cache: Cache,
        receiver: Receiver | None,
        *,
        block_tokens: int,
        timeout_s: float,
        handoff_timeout_s: float,
        tokens_per_s: Callable[[], float | None],
        wake: Callable[[object], object],
    ) -> None:
        self._cache = cache
        self._receiver = receiver
        self._block_tokens = block_tokens
        self._timeout_s = timeout_s
        self._handoff_timeout_s = handoff_timeout_s
        self._tokens_per_s = tokens_per_s
        self._wake = wake
        self._awaited: dict[str, tuple[Question, float]] = {}  # since when, on the monotonic clock
        self._received: dict[str, str] = {}
        self._asked: dict[str, tuple[Question, Transfer[Hit], float]] = {}  # until when, likewise
        self._refused: list[Question] = []
        self._found: dict[str, tuple[int, PromptHit]] = {}

    def ask(self, question: Question) -> None:
        """Look a prompt up, as soon as what is sent of it has come, or will not."""
        if question.transfer and self._receiver is not None:
            self._received[question.request] = question.transfer
            self._awaited[question.request] = question, time.monotonic()
        else:
            self._look_up(question)

    def receive(self) -> bool:
        """Look up the prompts whose transfers arrived, or will not; whether there were any."""
        awaited = list(self._awaited.values())
        for question, since in awaited:
            assert self._receiver is not None
            status = self._receiver.status(question.transfer)
            over = status is not None and status.phase in (None, Phase.COMMITTED)
            patience_s = self._handoff_timeout_s
            if status is None and question.computed_there:
                patience_s = min(patience_s, NEWS_S)
            if over or time.monotonic() >= since + patience_s:
                if status is None or status.phase is not Phase.COMMITTED:
                    reason = "it did not come" if status is None else status.reason or str(status.phase)
                    log.warning("%s: nothing from the prefill engine: %s", question.request, reason)
                del self._awaited[question.request]
                self._look_up(question)
        return len(self._awaited) < len(awaited)

    def answers(self) -> list[tuple[Question, PromptHit | None]]:
        """What was found since the last call, None where nothing is to be loaded. `claim` has it, too."""
        refused, self._refused = self._refused, []
        found: list[tuple[Question, PromptHit | None]] = [(question, None) for question in refused]
        now = time.monotonic()
        for name, (question, lookup, until) in list(self._asked.items()):
            if not lookup.done() and now < until:
                continue
            del self._asked[name]
            if lookup.done():
                found.append((question, self._answer(question, result_of(lookup))))
            else:
                lookup.cancel()
                log.info("%s: not looked up within %s s", name, self._timeout_s)
                found.append((question, None))
        return found

    def claim(self, request: str, number: int) -> PromptHit | None:
        """What question `number` found, to be loaded; None if it was not the last one. Forgets it."""
        last, hit = self._found.pop(request, (None, None))
        return hit if last == number else None

    def cancel(self, request: str) -> None:
        """Forget a request's questions and answers, but not what it was sent."""
        self._found.pop(request, None)
        self._awaited.pop(request, None)
        if request in self._asked:
            self._asked.pop(request)[1].cancel()

    def release(self, request: str) -> None:
        """Give back what was received for a request: it was loaded, or will not be."""
        transfer = self._received.pop(request, None)
        if transfer is not None and self._receiver is not None:
            self._receiver.release(transfer)

    def clear(self) -> None:
        """Forget all that was found."""
        self._found.clear()

    @property
    def awaiting(self) -> bool:
        """Whether anything that a prefill engine sends is waited for."""
        return bool(self._awaited)

    @property
    def under_way(self) -> bool:
        """Whether anything is being looked up."""
        return bool(self._asked)

    @property
    def done(self) -> bool:
        """Whether there is something new for `answers`."""
        return any(lookup.done() for _, lookup, _ in self._asked.values())

    def _look_up(self, question: Question) -> None:
        space = question.space()
        if space is None:
            self._refused.append(question)
            return
        lookup = self._cache.lookup_async(
            question.tokens,
            space,
            wait_s=self._timeout_s / 2,  # a slow save shall not cost what the tiers have already
            first=question.computed // space.chunk_tokens,
            prefill_tokens_per_s=self._tokens_per_s(),
        )
        lookup.add_done_callback(self._wake)
        if question.request in self._asked:  # nobody waits for the answer to an earlier question
            self._asked[question.request][1].cancel()
        self._asked[question.request] = question, lookup, time.monotonic() + self._timeout_s

    def _answer(self, question: Question, whole: Hit | None) -> PromptHit | None:
        """With the blocks of an unfilled chunk that came with the whole ones."""
        if whole is None or question.space() is None:
            return None
        tail = None
        if question.request in self._received and len(whole.chunks) == whole.plan.chunks:
            rest = tail_of(whole.chunks, question.tokens, self._block_tokens, question.rest)
            if rest is not None:
                tail = self._cache.lookup(*rest, retrieve_from=(HANDOFF,))
        hit = PromptHit(whole, tail)
        self._found[question.request] = question.number, hit
        return hit
