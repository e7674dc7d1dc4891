"""Requests to tokenize documents hold up no other request, and are given up in time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from kvkit.router.marks import MarkedDocuments
from kvkit.router.openai import ParsedRequest
from kvkit.router.tokens import CONTEXTS, NoTokens, Tokenizer
from kvkit.tiers.testing.contract import DEADLINE_S


class SlowEngine:
    """Answers what it was asked first once it is told to: a token for each character."""

    def __init__(self) -> None:
        self.up, self.requests = True, 0
        self.asked: list[str] = []
        self.waiting: list[asyncio.Event] = []

    async def ask(self, _: str, __: str, body: Any, *rest: Any) -> tuple[int, ...]:
        self.asked.append(body["prompt"])
        self.waiting.append(gate := asyncio.Event())
        await gate.wait()
        return tuple(body["prompt"].encode())

    async def settle(self) -> int:
        """How many questions wait for their answers, once no more come."""
        for _ in range(50):
            await asyncio.sleep(0)
        return len(self.waiting)


TEXTS = tuple(f"document {number}, which is long enough" for number in range(40))
PROMPT = "behind" + "".join(TEXTS)


def many_documents() -> ParsedRequest:
    return ParsedRequest("completions", {"prompt": PROMPT}, params={"blend": {}})


@pytest.mark.parametrize("behind", [None, "behind"])
def test_one_requests_documents_leave_room_for_others(behind: str | None) -> None:
    async def run() -> None:
        engine = SlowEngine()
        tokenizer = Tokenizer([engine], DEADLINE_S)  # type: ignore[list-item]
        placing = asyncio.create_task(
            tokenizer.locate_documents(many_documents(), MarkedDocuments(TEXTS, behind), {})
        )
        most = 0
        while not placing.done():
            most = max(most, await engine.settle())
            before = len(engine.asked)
            other = asyncio.create_task(tokenizer.tokenize({"prompt": "another's"}, {}))
            await engine.settle()
            assert engine.asked[before:][:1] == ["another's"], "it is asked at once"
            while engine.waiting:
                engine.waiting.pop(0).set()
            await other
        asked, ids = placing.result()
        assert most <= len(CONTEXTS)
        assert ids == tuple(PROMPT.encode())
        blend = asked.params["blend"]
        assert len(blend["documents"]) == len(TEXTS)

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))


def test_a_question_that_finds_no_place_is_given_up() -> None:
    async def run() -> None:
        engine = SlowEngine()
        tokenizer = Tokenizer([engine], DEADLINE_S)  # type: ignore[list-item]
        others = [asyncio.create_task(tokenizer.tokenize({"prompt": "a"}, {})) for _ in range(100)]
        await engine.settle()
        with pytest.raises(NoTokens, match=r"no answer within 0\.01 s"):
            await tokenizer.tokenize({"prompt": "b"}, {}, 0.01)
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))


def test_documents_that_take_too_long_are_not_blended() -> None:
    async def run() -> None:
        engine = SlowEngine()
        tokenizer = Tokenizer([engine], 0.05)  # type: ignore[list-item]
        asked, ids = await tokenizer.locate_documents(many_documents(), MarkedDocuments(TEXTS), {})
        assert (asked.params, ids) == ({}, None)

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))
