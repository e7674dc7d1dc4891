"""An engine that speaks vLLM's wire format, in a process of its own: a toy model, and ways to fail.

A token is a byte of UTF-8, so that some tokens make no text. The next token follows from all before it:
engines agree, and one that has another prompt does not. `set` changes how it behaves:

    hold_after      a stream pauses after so many events, until this is set again
    tokens_per_event  as vLLM's under load
    ids             whether it returns token ids when asked
    status          of an answer, 200: none of its own
    end_after, end  after so many events a stream ends: "cut", "abort", "error" or "garbled"
    closes          whether usage and [DONE] follow a stream's answer
    hang            accepts and never answers
    health          HTTP status of /health
    params          kv_transfer_params of its answers; None: as kvkit's, when it is asked to hand off
    hands           whether it hands off when it is asked to
    takes           whether it answers what another has prefilled; False: HTTP status 500
    held            what /lookup says, and /pin
    tokenizes       whether /tokenize answers; False: HTTP status 500
    other           it is another model
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from kvkit.lab.testbed.servers import Process, free_ports

TOKEN = "the-token-of-the-endpoint"
LETTERS = ["a", "b", " ", "é", "日", "😀", "c", "d"]
Body = dict[str, Any]


def render(messages: list[Body], generate: bool = True) -> list[int]:
    """The toy's chat template."""
    text = "".join(f"<{m['role']}>{_content(m['content'])}\n" for m in messages)
    return list((text + ("<assistant>" if generate else "")).encode())


def _content(content: str | list[Body]) -> str:
    """As vLLM does for templates that take texts."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def tokens_after(prompt: list[int], count: int, salt: str = "") -> list[int]:
    """What the toy model makes."""
    made = list(prompt)
    for _ in range(count):
        made.append(_next(bytes(made), salt))
    return made[len(prompt) :]


def text_after(prompt: list[int], count: int, salt: str = "") -> str:
    """The same as text, without what is incomplete at its end."""
    return bytes(tokens_after(prompt, count, salt)).decode(errors="ignore")


def _next(made: bytes, salt: str) -> int:
    whole = len(made)
    while True:
        try:
            made[:whole].decode()
            break
        except UnicodeDecodeError as error:
            whole = error.start
    digest = hashlib.sha256(salt.encode() + made[:whole]).digest()
    return LETTERS[digest[0] % len(LETTERS)].encode()[len(made) - whole]


class OpenAIEngine(Process):
    """The process. Started again, it is as at first."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        (self.port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        return [sys.executable, "-m", "kvkit.lab.testbed.openai_engine", str(self.port)]

    def answers(self) -> bool:
        return isinstance(self.seen(), list)

    def set(self, **settings: Any) -> None:
        """Change how it behaves; what was set before stays."""
        self._call({"set": settings})

    def reset(self) -> None:
        """Have it be as it was when it was started; start it if it was killed, resume it if stopped."""
        if self._process is None:
            self.start()
        self.resume()
        self._call({"reset": True})

    def seen(self) -> list[Body]:
        """The requests so far: path, body, headers, done: whether its answer was sent to the end, and left:
        whether the client went away before."""
        found: list[Body] = self._call({})
        return found

    def _call(self, body: Body) -> Any:
        request = urllib.request.Request(f"{self.url}/control", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=10) as reply:
            return json.loads(reply.read())


DEFAULTS: Body = {
    "hold_after": None,
    "tokens_per_event": 1,
    "ids": True,
    "status": 200,
    "end_after": None,
    "end": "cut",
    "closes": True,
    "hang": False,
    "health": 200,
    "params": None,
    "hands": True,
    "takes": True,
    "held": None,
    "tokenizes": True,
    "other": "",
}


class Toy:
    """What the process does."""

    def __init__(self) -> None:
        self.settings = dict(DEFAULTS)
        self.seen: list[Body] = []
        self.changed = asyncio.Event()

    async def control(self, request: Any) -> Any:
        body = await request.json()
        if "reset" in body:
            body["set"] = DEFAULTS
            self.seen.clear()
        if "set" in body:
            self.settings |= body["set"]
            self.changed.set()
            self.changed = asyncio.Event()
        return web.json_response(self.seen)

    async def health(self, _: Any) -> Any:
        return web.Response(status=self.settings["health"])

    async def models(self, _: Any) -> Any:
        return web.json_response({"object": "list", "data": [{"id": "toy"}]})

    async def tokenize(self, request: Any) -> Any:
        body = await request.json()
        if not self.settings["tokenizes"]:
            return web.json_response({"error": {"message": "no tokenizer"}}, status=500)
        ids = list(body["prompt"].encode()) if "prompt" in body else render(body["messages"])
        return web.json_response({"count": len(ids), "tokens": ids})

    async def lookup(self, request: Any) -> Any:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return web.json_response({"error": "who?"}, status=401)
        tokens, held = (await request.json())["tokens"], self.settings["held"]
        if held is None:
            return web.json_response({"error": "no"}, status=500)
        count = min(held, len(tokens))
        return web.json_response({"hit_tokens": count, "pinned_tokens": count})

    async def complete(self, request: Any) -> Any:
        try:
            return await self._complete(request)
        except (asyncio.CancelledError, ConnectionError):
            self.seen[-1]["left"] = True
            raise

    async def _complete(self, request: Any) -> Any:
        body = await request.json()
        note = {
            "path": request.path,
            "body": body,
            "headers": {k.lower(): v for k, v in request.headers.items()},
            "done": False,
            "left": False,
        }
        self.seen.append(note)
        if self.settings["hang"]:
            await asyncio.Event().wait()
        if not self.settings["takes"] and (body.get("kv_transfer_params") or {}).get("do_remote_prefill"):
            return web.json_response({"error": {"message": "no KV came"}}, status=500)
        if self.settings["status"] != 200:
            return web.json_response({"error": {"message": "as told"}}, status=self.settings["status"])
        head = {
            "id": f"cmpl-{request.headers.get('X-Request-Id')}-{len(self.seen)}",
            "created": len(self.seen),
            "model": body["model"],
        }
        answer = answer_to(body, request.path.startswith("/v1/chat"), head, self.settings)
        if body.get("stream"):
            return await self._stream(request, answer, note)
        note["done"] = True
        return self._whole(answer)

    def _whole(self, answer: Answer) -> Any:
        """The answer to a request that is no stream, with the parameters of a handoff where it wants one."""
        text = "".join(piece for piece, _ in answer.pieces)
        choice: Body = {"index": 0, "finish_reason": answer.finish}
        choice |= {"message": {"role": "assistant", "content": text}} if answer.is_chat else {"text": text}
        params = self.settings["params"]
        transfer = answer.body.get("kv_transfer_params") or {}
        if params is None and transfer.get("do_remote_decode") and self.settings["hands"]:
            params = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "transfer_id": transfer["transfer_id"],
                "remote_num_tokens": len(answer.prompt),
            }
        said = {} if params is None else {"kv_transfer_params": params}
        return web.json_response({**answer.head, "choices": [choice], "usage": answer.usage, **said})

    async def _stream(self, request: Any, answer: Answer, note: Body) -> Any:
        """Send the answer in events, or a part of it, as the settings are by then. Marks `note` as done."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def send(event: Body) -> None:
            await response.write(b"data: " + json.dumps({**answer.head, **event}).encode() + b"\r\n\r\n")

        ids = bool(self.settings["ids"] and answer.body.get("return_token_ids"))
        if answer.is_chat:
            role: Body = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            await send({"choices": [role]} | ({"prompt_token_ids": answer.prompt} if ids else {}))
        for number in range(len(answer.pieces)):
            while self.settings["hold_after"] is not None and number >= self.settings["hold_after"]:
                await self.changed.wait()
            if number == self.settings["end_after"]:
                if self.settings["end"] in ENDS:
                    await send(ENDS[self.settings["end"]])
                request.transport.abort()
                return response
            await send({"choices": [answer.choice(number, ids)]})
        if not self.settings["closes"]:
            return response
        if (answer.body.get("stream_options") or {}).get("include_usage"):
            await send({"choices": [], "usage": answer.usage})
        await response.write(b": a comment\n\ndata: [DONE]\n\n")
        note["done"] = True
        return response


ENDS: dict[str, Body] = {
    "error": {"error": {"message": "EngineCore died", "code": 500}},
    "garbled": {"choices": [7]},
    "abort": {"choices": [{"index": 0, "text": "", "finish_reason": "abort"}]},
}
"""The last event of a stream that ends early, by the setting `end`; "cut" sends none."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the toy says to a request.

    Attributes:
        prompt: its tokens.
        pieces: (text, tokens) of each event.
        finish: why it ends.
        head: fields of each event, and of the whole.
    """

    body: Body
    is_chat: bool
    prompt: list[int]
    pieces: list[tuple[str, list[int]]]
    finish: str
    head: Body
    usage: Body

    def choice(self, number: int, ids: bool) -> Body:
        """The choice of one event. `ids`: with token ids."""
        text, tokens = self.pieces[number]
        part: Body = {"delta": {"content": text}} if self.is_chat else {"text": text}
        if ids:
            part["token_ids"] = tokens
            if number == 0 and not self.is_chat:
                part["prompt_token_ids"] = self.prompt
        reason = self.finish if number == len(self.pieces) - 1 else None
        return {"index": 0, "finish_reason": reason, **part}


def answer_to(body: Body, is_chat: bool, head: Body, settings: Body) -> Answer:
    given = (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
    if is_chat:
        prompt = given or render(body["messages"])
    else:
        prompt = body["prompt"] if isinstance(body["prompt"], list) else list(body["prompt"].encode())
    count = body.get("max_tokens") or body.get("max_completion_tokens") or 16
    pieces, finish = pieces_of(prompt, count, body, settings)
    usage = {
        "prompt_tokens": len(prompt),
        "completion_tokens": count,
        "total_tokens": len(prompt) + count,
    }
    return Answer(body, is_chat, prompt, pieces, finish, head, usage)


def pieces_of(
    prompt: list[int], count: int, body: Body, settings: Body
) -> tuple[list[tuple[str, list[int]]], str]:
    """(text, tokens) of each event, and why it ends. Text is held back for what may be a stop string."""
    made = tokens_after(prompt, count, settings["other"])
    stops = [body["stop"]] if isinstance(body.get("stop"), str) else body.get("stop") or []
    back = max((len(stop) for stop in stops), default=1) - 1
    found: list[tuple[str, list[int]]] = []
    shown = 0
    for start in range(0, count, settings["tokens_per_event"]):
        tokens = made[start : start + settings["tokens_per_event"]]
        text = bytes(made[: start + len(tokens)]).decode(errors="ignore")
        for stop in stops:
            if stop in text:
                return [*found, (text[shown : text.index(stop)], tokens)], "stop"
        end = len(text) if start + len(tokens) >= count else max(shown, len(text) - back)
        found.append((text[shown:end], tokens))
        shown = end
    return found, "length"


def _serve(port: int) -> None:
    toy = Toy()
    app = web.Application()
    app.router.add_post("/control", toy.control)
    app.router.add_get("/health", toy.health)
    app.router.add_get("/v1/models", toy.models)
    app.router.add_post("/tokenize", toy.tokenize)
    app.router.add_post("/lookup", toy.lookup)
    app.router.add_post("/pin", toy.lookup)
    app.router.add_post("/v1/completions", toy.complete)
    app.router.add_post("/v1/chat/completions", toy.complete)
    web.run_app(app, host="127.0.0.1", port=port, handler_cancellation=True, print=None)


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
