"""The ways in which KV comes to a request, gone by a real vLLM engine with a model of the zoo.

Every way answers what plain vLLM has answered before, and tells how many tokens it loaded. Each has a cache
salt of its own: it finds nothing of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from models.architectures import IMAGE, Architecture
from models.faults import StoredRecord, stored, with_fault
from small_models import VOCABULARY
from vllm_engine import Engine, Settings, connector, prompt

from kvkit.lab.prove.verdict import Reply, compare

ANSWER = 8
LIKELY = 5
"""So many tokens are looked at where another one than expected is chosen."""
PROMPTS = [prompt(n, seed=n, vocabulary=VOCABULARY) for n in (636, 380)]
"""With its answer each fills one more chunk."""
PREFILLED = "vllm:prompt_tokens_total{}"
PREEMPTED = "vllm:num_preemptions_total{}"
OPTIONS: Settings = {
    "skip_tokenizer_init": True,
    "max_model_len": 1024,
    "max_num_batched_tokens": 256,  # in pieces, so that windows lose blocks before their chunks are saved
    "max_num_seqs": 4,
    "kv_cache_memory_bytes": 1 << 26,
}
MOST_STEPS = 2000
"""An engine that takes more does not come to an end."""


class Visit:
    """An engine that has a model of the zoo open, with memory and a folder, and hands off to another one.

    Args:
        engine: opens the model here.
        other: opens it without a connector, for what is expected, and then to take what is handed off.
        folder: of the model, the tier, and the socket.
    """

    def __init__(self, engine: Engine, other: Engine, architecture: Architecture, folder: Path) -> None:
        self.engine, self._other, self._architecture = engine, other, architecture
        self._model = architecture.save(folder / "model")
        self._disk, self.address = folder / "kv", f"unix://{folder}/decode/socket"
        self._options = OPTIONS | architecture.options
        self.image = {} if architecture.image is None else {"image": architecture.image}
        engine.open(self.transfer(), self._model, **self._options)
        other.open(None, self._model, **self._options)
        self.prompts = [[IMAGE, *given[1:]] for given in PROMPTS] if self.image else PROMPTS
        whole = self.answers(other, self.prompts, 2 * ANSWER + 1, logprobs=LIKELY)
        self.expected = [_part(answer, slice(ANSWER)) for answer in whole]
        self.turns = [
            [*given, *answer["tokens"][: ANSWER + 1]]
            for given, answer in zip(self.prompts, whole, strict=True)
        ]
        self.expected_turns = [_part(answer, slice(ANSWER + 1, None)) for answer in whole]

    def transfer(self) -> Settings:
        """The engine's `kv_transfer_config`."""
        tiers = {"memory": {"capacity": "64MiB"}, "disk": {"url": f"file://{self._disk}"}}
        hands = {} if self._architecture.no_handoff else {"handoff": {"role": "prefill"}}
        return self._connector({"tiers": tiers} | hands)

    def _connector(self, settings: Settings) -> Settings:
        return connector({"chunk_tokens": self._architecture.chunk_tokens} | settings)

    @cached_property
    def decode(self) -> Engine:
        receives = {"role": "decode", "listen": [self.address], "buffer": "32MiB"}
        return self._other.open(self._connector({"handoff": receives}), self._model, **self._options)

    def no_handoff(self) -> str:
        """Why an engine that is to hand off is refused."""
        transfer = self._connector({"handoff": {"role": "prefill"}})
        try:
            self._other.open(transfer, self._model, **self._options)
        except AssertionError as error:
            return reason(error)
        raise AssertionError("it opens")

    @cached_property
    def kept(self) -> list[Settings]:
        """Answers, whose KV is then kept."""
        return self.ask("kept", self.prompts)

    def ask(self, salt: str, prompts: Sequence[list[int]]) -> list[Settings]:
        """Answers; what vLLM itself holds is forgotten before."""
        self.engine.flush()
        self.engine.do("reset", False)
        return self.answers(self.engine, prompts, cache_salt=salt)

    def answers(
        self, engine: Engine, prompts: Sequence[list[int]], tokens: int = ANSWER, **more: Any
    ) -> list[Settings]:
        """Of so many tokens, to prompts that come as those of the architecture do."""
        batches = self.batches(prompts)
        return [one for batch in batches for one in engine.generate(batch, tokens, **more, **self.image)]

    def batches(self, prompts: Sequence[list[int]]) -> list[Sequence[list[int]]]:
        """Prompts that come together."""
        return [[given] for given in prompts] if self._architecture.alone else [prompts]

    def forget_memory(self) -> None:
        self.engine.flush()
        self.engine.do("clear", "memory")

    def start(self, salt: str, prompts: Sequence[list[int]], prompt_tokens: int) -> None:
        """Have prompts wait, and step until so many of their tokens are computed."""
        until = self.engine.metrics().get(PREFILLED, 0.0) + prompt_tokens
        for number, given in enumerate(prompts):
            self.engine.submit(f"{salt} {number}", given, ANSWER, cache_salt=salt, **self.image)
        for _ in range(MOST_STEPS):
            self.engine.step(1)
            if self.engine.metrics()[PREFILLED] >= until:
                return
        raise AssertionError(f"{prompt_tokens} tokens are not computed")

    def finish(self, salt: str, prompts: int) -> list[Settings]:
        """The answers to so many that were started."""
        found: dict[str, Settings] = {}
        for _ in range(MOST_STEPS):
            found |= self.engine.step(1)
            if len(found) == prompts:
                return [found[f"{salt} {number}"] for number in range(prompts)]
        raise AssertionError(f"only {sorted(found)} end")

    def loaded(self, tier: str) -> float:
        """Tokens so far that came from a tier."""
        engine = self.decode if tier == "handoff" else self.engine
        return engine.metrics().get(f"vllm:kvkit_loaded_tokens_total{{tier={tier}}}", 0.0)

    def go(self, way: str) -> Settings:
        """How far the answers of a way are from the expected ones, and how many tokens it loaded."""
        tier, least, take = WAYS[way]
        if take is handed_off and self._architecture.no_handoff:
            return {"refused": self.no_handoff()}
        before = self.loaded(tier)
        found = take(self)
        expected = self.expected_turns if take is next_turn else self.expected
        same = [one["tokens"] for one in expected] == [one["tokens"] for one in found]
        compared = [
            compare(_reply(one), _reply(other), self._architecture.tolerance)
            for one, other in zip(expected, found, strict=True)
        ]
        loaded, worst = int(self.loaded(tier) - before), max(one.largest for one in compared)
        works = not any(one.wrong for one in compared) and (loaded >= least if least else not loaded)
        return {"works": works, "same_tokens": same, "difference": worst, "loaded_tokens": loaded}

    @cached_property
    def _records(self) -> list[StoredRecord]:
        """On disk, where there is nothing else."""
        self.engine.do("clear", "disk")
        self.ask("records", self.prompts)
        return stored(self._disk)

    def fault(self, name: str) -> float:
        """How far the answers are from the expected ones where records on disk hold the wrong KV."""
        wrong = with_fault(self._records, name)
        assert wrong
        self.forget_memory()
        for record in wrong:
            record.path.write_bytes(record.now)
        before = self.loaded("disk")
        found = self.ask("records", self.prompts)
        assert self.loaded("disk") > before, "kvkit sees the fault itself"
        for record in wrong:
            record.path.write_bytes(record.before)
        return difference(self.expected, found)


def reason(error: AssertionError) -> str:
    """What an engine said when it was not to be opened."""
    return str(error).partition(": ")[2]


Answers = list[Settings]


def cold(visit: Visit) -> Answers:
    return visit.kept


def from_memory(visit: Visit) -> Answers:
    return visit.kept and visit.ask("kept", visit.prompts)


def from_disk(visit: Visit) -> Answers:
    assert visit.kept
    visit.forget_memory()
    return visit.ask("kept", visit.prompts)


def next_turn(visit: Visit) -> Answers:
    """The answers come back as a part of longer prompts, with the chunks that they have filled."""
    return visit.kept and visit.ask("kept", visit.turns)


def after_preemption(visit: Visit) -> Answers:
    """Requests lose their blocks while they decode, and load what they have stored themselves."""
    found: Answers = []
    for batch in visit.batches(visit.prompts):
        visit.start("preempted", batch, sum(map(len, batch)))
        before = visit.engine.metrics()[PREEMPTED]
        visit.engine.do("preempt")
        found += visit.finish("preempted", len(batch))
        assert visit.engine.metrics()[PREEMPTED] == before + len(batch)
    return found


def after_abort(visit: Visit) -> Answers:
    """The first prompt is computed, the next one in part, when both are aborted; they come again."""
    for batch in visit.batches(visit.prompts):
        visit.start("aborted", batch, len(batch[0]))
        for number in range(len(batch)):
            visit.engine.do("abort", f"aborted {number}")
    return visit.ask("aborted", visit.prompts)


def handed_off(visit: Visit) -> Answers:
    asked = {"do_remote_decode": True, "do_remote_prefill": False, "handoff": visit.address}
    decode, salt = visit.decode, "handed"
    first = visit.answers(
        visit.engine, visit.prompts, 1, cache_salt=salt, extra_args={"kv_transfer_params": asked}
    )
    found = []
    for given, answer in zip(visit.prompts, first, strict=True):
        passed = {"kv_transfer_params": answer["handoff"]}
        found += visit.answers(decode, [given], cache_salt=salt, extra_args=passed)
    return found


FIRST, SECOND = ((len(one) - 1) // 256 * 256 for one in PROMPTS)
"""Tokens of whole chunks, whatever their size is."""
WAYS: dict[str, tuple[str, int, Callable[[Visit], Answers]]] = {
    "cold": ("memory", 0, cold),
    "from memory": ("memory", FIRST + SECOND, from_memory),
    "from disk": ("disk", FIRST + SECOND, from_disk),
    "next turn": ("memory", FIRST + SECOND, next_turn),
    "after preemption": ("memory", FIRST + SECOND, after_preemption),
    "after abort": ("memory", FIRST, after_abort),
    "P to D": ("handoff", FIRST + SECOND, handed_off),
}
"""By name, as the documentation has it: the tier that loads, how many tokens at least, and what is done."""


def _part(answer: Settings, part: slice) -> Settings:
    """Some of its tokens."""
    return answer | {name: answer[name][part] for name in ("tokens", "logprobs", "likely")}


def _reply(answer: Settings) -> Reply:
    likely = ({int(token): logprob for token, logprob in step.items()} for step in answer["likely"])
    return Reply(tuple(answer["tokens"]), tuple(answer["logprobs"]), tuple(likely))


def difference(expected: Answers, found: Answers) -> float:
    """The largest of log-probabilities of the tokens of answers."""
    pairs = [
        pair
        for one, other in zip(expected, found, strict=True)
        for pair in zip(one["logprobs"], other["logprobs"], strict=True)
    ]
    return max(abs(a - b) for a, b in pairs)
