"""The scheduler's side: who asks, who waits, what is loaded and saved. Bookkeeping over plain data, no I/O.

Nothing here waits. A lookup is a message: `match` notes a question, `plan` puts it into the next step's
message, the workers look up in the background, and `hear` notes their answers. Until all ranks have answered,
`match` says None and vLLM asks again in its next step. The workers keep the deadline: with asynchronous
scheduling, a question may lie for as long as a step takes before they hear of it.

What vLLM does not admit in the step in which it could be asked about is queued: the workers are told of the
first few such requests, and bring near what they will hit, until a request is admitted or ends.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from itertools import count, islice
from typing import Any

from kvkit.adapters.engine.question import LookupAnswer, Question, Sequence
from kvkit.adapters.vllm import params as parameters
from kvkit.adapters.vllm.params import RemoteDecode, RemotePrefill
from kvkit.adapters.vllm.step import (
    LoadTask,
    PrefetchTask,
    SaveTask,
    SendTask,
    StepMetadata,
    Tables,
    WorkerReport,
)

FRESH_S = 10.0
"""Seconds for which an answer counts: a request that could not be admitted for longer asks again."""

AHEAD = 8
"""Queued requests for which something is brought near at a time. The workers bound its bytes."""


@dataclass(slots=True)
class _Question:
    number: int
    chunks: int
    computed: int = 0
    answers: dict[int, LookupAnswer] = field(default_factory=dict)
    known_at: float = math.inf


@dataclass(slots=True)
class _Request:
    """What is known of a request. `saved` is None until it computes for the first time after an admission.

    Attributes:
        handoff: with whom its KV is exchanged.
        sent: tokens of its prompt that were told to be sent; None before the first.
        passed_over: there is nothing to bring near for it, until it is admitted.
    """

    view: Any
    handoff: RemoteDecode | RemotePrefill | None = None
    sent: int | None = None
    question: _Question | None = None
    admitted: LookupAnswer | None = None
    start: int = 0
    saved: int | None = None
    barred: bool = False
    passed_over: bool = False


@dataclass(eq=False)
class Scheduler:
    """The requests of one engine and what is asked, loaded and saved for them. Not thread-safe, like vLLM's.

    What it is told of a request is vLLM's `Request`.

    Args:
        block_tokens: tokens of a block, per KV cache group of vLLM; each divides a chunk.
        sequence: the first n tokens of a request, as the keys see them; None where it cannot be cached.
        windows: whether a request loses blocks before its end, which sliding windows leave.
        ranks: workers that answer.
        waits: whether the step that loads waits for it (sync and layerwise loading).
        save_generated: whether chunks with generated tokens are saved.
        clock: seconds that never go back.
        handoff: what a request's parameters ask for.
        has: how many tokens of a request vLLM has in its own cache.
        on_save: called with a request whose chunks [first, stop) are to be saved.
    """

    chunk_tokens: int
    block_tokens: tuple[int, ...]
    sequence: Callable[[Any, int], Sequence | None]
    _: KW_ONLY
    windows: bool = False
    ranks: int
    waits: bool
    save_generated: bool
    clock: Callable[[], float]
    handoff: Callable[[Any], RemoteDecode | RemotePrefill | None] = lambda view: None
    has: Callable[[Any], int] = lambda view: 0
    on_save: Callable[[Any, int, int], object] = lambda view, first, stop: None

    def __post_init__(self) -> None:
        # after a window's end, only whole chunks are known to hold all that is attended to
        self._grain_tokens = self.chunk_tokens if self.windows else math.lcm(*self.block_tokens)
        self._requests: dict[str, _Request] = {}
        self._queue: dict[str, None] = {}  # in the order in which they came
        self._ahead: set[str] = set()
        self._numbers, self._steps = count(1), count(1)
        self._next = StepMetadata()
        self._heard = 0
        self.epoch = self._told_epoch = ""

    def arrive(self, view: Any) -> None:
        """Note a new request: it is queued, although vLLM may not ask about it for long."""
        self._request(view)
        self._queue[view.request_id] = None

    def match(self, view: Any, computed: int) -> tuple[int | None, bool]:
        """How many tokens after the first `computed` can be loaded, and whether that goes on between steps.

        None: not known yet. Notes a question where there is none; asked again, it says the same.
        """
        request = self._request(view)
        if not request.passed_over:
            self._queue.setdefault(view.request_id)  # a preempted one is queued again
        receiving = request.handoff if isinstance(request.handoff, RemotePrefill) else None
        asked, most = self._asked(view, receiving)
        wanted = -(-asked // self.chunk_tokens)
        if view.skip_reading_prefix_cache or request.barred or min(asked, most) <= computed:
            return 0, False
        question = request.question
        if question is None or question.chunks != wanted or self.clock() > question.known_at + FRESH_S:
            sequence = self.sequence(view, asked)
            if sequence is None:
                request.barred = True
                return 0, False
            question = request.question = _Question(next(self._numbers), wanted)
            transfer = ("", False) if receiving is None else (receiving.transfer, receiving.computed)
            self._next.questions.append(
                Question(view.request_id, question.number, sequence, computed, *transfer)
            )
            return None, False
        if not self._is_known(question):
            return None, False
        question.computed = computed
        found = max(0, min(self._least(question).tokens, most) - computed)
        return found, found > 0 and not self.waits

    def admit(self, view: Any, blocks: Tables, tokens: int) -> None:
        """Note that a request got its blocks, and that `tokens` tokens are to be loaded into them."""
        request = self._request(view)
        self._leave(view.request_id)
        request.saved, request.passed_over = None, False
        question, request.question = request.question, None
        if not tokens or question is None:
            if isinstance(request.handoff, RemotePrefill):
                self._next.unwanted.append(request.handoff.transfer)
            return
        request.admitted = self._least(question)
        request.start = start = question.computed
        stop, chunk = start + tokens, self.chunk_tokens
        table = self._cut(blocks, start // chunk * chunk, -(-stop // chunk) * chunk, start, stop)
        self._next.loads.append(LoadTask(view.request_id, question.number, start, stop, table))

    def sources(self, request_id: str, tokens: int) -> dict[str, int]:
        """Which tiers the last `tokens` tokens of what was admitted come from."""
        request = self._requests.get(request_id)
        if request is None or request.admitted is None:
            return {}
        start, stop, end = request.start, request.start + tokens, 0
        found: Counter[str] = Counter()
        for tier, size in request.admitted.segments:
            end += size
            found[tier] += max(0, min(end, stop) - max(end - size, start))
        return +found

    def plan(self, scheduled: dict[str, int], blocks: Callable[[str], Tables | None]) -> StepMetadata:
        """The message of a step that computes `scheduled` tokens by request. Forgets what it tells."""
        step, self._next = self._next, StepMetadata()
        step.number = next(self._steps)
        step.prefetches += self._prefetches()
        step.saves += self._saves(scheduled, blocks)
        step.sends += self._sends(scheduled, blocks)
        step.computed, step.idle = sum(scheduled.values()), not scheduled
        step.heard, step.epoch = self._heard, self.epoch
        self._told_epoch = self.epoch
        return step

    def hear(self, report: WorkerReport) -> None:
        """Note what the workers tell."""
        for answer in report.answers:
            request = self._requests.get(answer.request)
            question = None if request is None else request.question
            if question is None or question.number != answer.number:
                continue  # about an earlier question
            question.answers[answer.rank] = answer
            if self._is_known(question):
                question.known_at = self.clock()
        for name in report.failed:
            if name in self._requests:  # it would be tried again and again
                self._requests[name].barred = True
        self._heard = max(self._heard, report.failed_step)

    def finish(self, view: Any, blocks: Tables | None) -> bool:
        """Forget a request; whether its blocks must stay until a worker tells that they are saved.

        With asynchronous scheduling, the step that fills a chunk does not know the chunk's last token yet,
        and if that ends the request, no step of its own comes after it. `blocks`: None where nothing is to
        be saved, as the request was aborted or failed.
        """
        request = self._requests.pop(view.request_id, None)
        self._leave(view.request_id)
        if request is None:
            return False
        self._next.ended[view.request_id] = view.num_prompt_tokens
        if isinstance(request.handoff, RemotePrefill):
            self._next.unwanted.append(request.handoff.transfer)
        sends = request.sent is not None
        if request.saved is None or blocks is None:
            return sends
        chunk, first = self.chunk_tokens, request.saved
        stop = min(view.num_computed_tokens, self._known(view, view.num_tokens - 1)) // chunk
        if stop <= first:
            return sends
        end = stop * chunk
        sequence = self.sequence(view, end)
        table = self._cut(blocks, first * chunk, end, 0, end)
        sizes = zip(table, self.block_tokens, strict=True)
        if sequence is None or any(-1 in part or len(part) * n < end - first * chunk for part, n in sizes):
            return sends  # a window has left some behind
        self._next.saves.append(SaveTask(view.request_id, sequence, first, table, last=True))
        self.on_save(view, first, stop)
        return True

    def answer(self, view: Any) -> dict[str, Any] | None:
        """What a request that ends tells the router: the parameters of the decode engine's request."""
        request = self._requests.get(view.request_id)
        if request is None or request.sent is None or not isinstance(request.handoff, RemoteDecode):
            return None
        return parameters.answer(request.handoff, request.sent)

    def forget(self, epoch: str) -> None:
        """Have nothing found from now on that was saved before. `epoch` differs from every earlier one."""
        self.epoch = epoch
        for request in self._requests.values():
            request.question = None
        self._ahead.clear()  # the workers do so, too: it is told anew

    @property
    def has_news(self) -> bool:
        """Whether the workers are to hear at once that everything is forgotten: others may ask them."""
        return self.epoch != self._told_epoch

    def _request(self, view: Any) -> _Request:
        request = self._requests.get(view.request_id)
        if request is None:
            request = self._requests[view.request_id] = _Request(view, self.handoff(view))
        request.view = view
        return request

    def _leave(self, name: str) -> None:
        """A request is queued no more."""
        self._queue.pop(name, None)
        if name in self._ahead:
            self._ahead.remove(name)
            self._next.called_off.append(name)

    def _prefetches(self) -> Iterator[PrefetchTask]:
        """What is to be brought near, for the first of the requests that were not admitted."""
        for name in list(islice(self._queue, AHEAD)):
            request = self._requests[name]
            is_asked = request.question is not None and not self._is_known(request.question)
            if name in self._ahead or is_asked:
                continue  # once there is an answer, it may be admitted
            view, sequence, computed = request.view, None, 0
            receives = isinstance(request.handoff, RemotePrefill)
            if not (receives or request.barred or view.skip_reading_prefix_cache):
                asked, most = self._asked(view, None)
                computed = self.has(view)
                sequence = self.sequence(view, asked) if computed < min(asked, most) else None
            if sequence is None:  # it is not looked at again in each step
                request.passed_over = True
                del self._queue[name]
            else:
                self._ahead.add(name)
                yield PrefetchTask(name, sequence, computed)

    def _asked(self, view: Any, receiving: RemotePrefill | None) -> tuple[int, int]:
        """How many tokens of a request are looked up, and how many of them may be loaded."""
        if receiving is not None:  # the unfilled last chunk comes, too
            asked = self._handed(view.num_tokens)
            return asked, min(asked, view.num_tokens - 1)
        # the last token is always computed, for its logits
        chunk, most = self.chunk_tokens, self._whole_grains(view.num_tokens - 1)
        return min(view.num_tokens // chunk, -(-most // chunk)) * chunk, most

    def _whole_grains(self, tokens: int) -> int:
        """What of so many tokens a hit may be: a multiple of a chunk, or of every block."""
        return tokens // self._grain_tokens * self._grain_tokens

    def _handed(self, tokens: int) -> int:
        """Tokens of a prompt of so many that one engine sends and the other takes.

        Whoever takes them computes the last one in any case: if that has a block of its own, it does not go.
        """
        grains = self._whole_grains(tokens - 1)
        return grains if self.windows or grains == tokens - 1 else tokens

    def _is_known(self, question: _Question) -> bool:
        return len(question.answers) == self.ranks

    def _least(self, question: _Question) -> LookupAnswer:
        """What every rank can load. All have answered."""
        return min(question.answers.values(), key=lambda answer: (answer.tokens, answer.rank))

    def _saves(self, scheduled: dict[str, int], blocks: Callable[[str], Tables | None]) -> Iterator[SaveTask]:
        """The chunks that this step completes.

            tokens     |  chunk 0  |  chunk 1  |  chunk 2  |  chunk 3  |
            computed   [------ before this step -----[ this step [
            saved      [-------- before -------[--- now ---[
                                               first       stop

        A sliding window's older blocks may be gone (-1), even within the first chunk that is saved, as far as
        they lie a window before the tokens that were computed when it was begun. Whoever resumes at that
        chunk's end or after it attends to a window before that end, which begins later: the zeros in their
        place are never read. Chunks before the first may have larger gaps, and are not saved.
        """
        chunk = self.chunk_tokens
        for name, tokens in scheduled.items():
            request = self._requests.get(name)
            if request is None:
                continue
            view = request.view
            computed = view.num_computed_tokens
            # lower than what was saved after a preemption or a failed load: those chunks are computed anew
            first = min(computed // chunk, computed // chunk if request.saved is None else request.saved)
            if request.saved is None and isinstance(request.handoff, RemotePrefill) and not self.windows:
                first = 0  # what was received is in no tier
            stop = min(computed + tokens, self._known(view, view.num_tokens)) // chunk
            request.saved = max(first, stop)
            if stop <= first:
                continue
            end = stop * chunk
            sequence, table = self.sequence(view, end), blocks(name)
            if sequence is not None and table is not None:
                self.on_save(view, first, stop)
                yield SaveTask(name, sequence, first, self._cut(table, first * chunk, end, 0, end))

    def _sends(self, scheduled: dict[str, int], blocks: Callable[[str], Tables | None]) -> Iterator[SendTask]:
        """What of prompts that are handed off this step completes: whole chunks, and the rest at the end.

        tokens     |  chunk 0  |  chunk 1  |  chunk 2  |       | the prompt's end
        computed   [------ before this step -----[- this step -[
        sent       [-------- before -------[------- now -------[
                                           first               stop
        """
        chunk = self.chunk_tokens
        for name, tokens in scheduled.items():
            request = self._requests.get(name)
            if request is None or not isinstance(request.handoff, RemoteDecode):
                continue
            view = request.view
            whole = self._handed(view.num_prompt_tokens)
            computed, first = view.num_computed_tokens + tokens, request.sent or 0
            stop = whole if computed >= view.num_prompt_tokens else computed // chunk * chunk
            if stop <= first:
                continue
            sequence, table = self.sequence(view, whole), blocks(name)
            if sequence is None or table is None:
                continue
            request.sent = stop
            transfer, address = request.handoff.transfer, request.handoff.address
            cut = self._cut(table, first, -(-stop // chunk) * chunk, 0, stop)
            yield SendTask(name, transfer, address, sequence, first, stop, cut, last=stop == whole)

    def _known(self, view: Any, tokens: int) -> int:
        """How many of the first `tokens` tokens may be saved."""
        return tokens if self.save_generated else min(tokens, view.num_prompt_tokens)

    def _cut(self, blocks: Tables, first: int, last: int, start: int, stop: int) -> Tables:
        """The blocks of tokens [first, last); -1 for the null block and those outside of [start, stop)."""
        return tuple(
            [
                block if block and start <= i * size < stop else -1
                for i, block in enumerate(table[first // size : last // size], first // size)
            ]
            for table, size in zip(blocks, self.block_tokens, strict=True)
        )
