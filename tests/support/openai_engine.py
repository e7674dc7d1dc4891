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
from pathlib import Path
from typing import Any

from aiohttp import web

try:
    from servers import Process, free_ports
except ImportError:  # run as a program, where nothing of the tests is needed
    Process, free_ports = object, None  # type: ignore[misc,assignment]

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
        return [sys.executable, __file__, str(self.port)]

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
        chat = request.path.startswith("/v1/chat")
        given = (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
        if chat:
            prompt = given or render(body["messages"])
        else:
            prompt = body["prompt"] if isinstance(body["prompt"], list) else list(body["prompt"].encode())
        count = body.get("max_tokens") or body.get("max_completion_tokens") or 16
        pieces, finish = pieces_of(prompt, count, body, self.settings)
        head = {
            "id": f"cmpl-{request.headers.get('X-Request-Id')}-{len(self.seen)}",
            "created": len(self.seen),
            "model": body["model"],
        }
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": count,
            "total_tokens": len(prompt) + count,
        }
        if not body.get("stream"):
            text = "".join(piece for piece, _ in pieces)
            choice: Body = {"index": 0, "finish_reason": finish}
            choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
            note["done"] = True
            params = self.settings["params"]
            transfer = body.get("kv_transfer_params") or {}
            if params is None and transfer.get("do_remote_decode") and self.settings["hands"]:
                params = {
                    "do_remote_prefill": True,
                    "do_remote_decode": False,
                    "transfer_id": transfer["transfer_id"],
                    "remote_num_tokens": len(prompt),
                }
            said = {} if params is None else {"kv_transfer_params": params}
            return web.json_response({**head, "choices": [choice], "usage": usage, **said})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def send(event: Body) -> None:
            await response.write(b"data: " + json.dumps({**head, **event}).encode() + b"\r\n\r\n")

        ids = self.settings["ids"] and body.get("return_token_ids")
        if chat:
            role: Body = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            await send({"choices": [role]} | ({"prompt_token_ids": prompt} if ids else {}))
        for number, (text, tokens) in enumerate(pieces):
            while self.settings["hold_after"] is not None and number >= self.settings["hold_after"]:
                await self.changed.wait()
            if number == self.settings["end_after"]:
                if self.settings["end"] == "error":
                    await send({"error": {"message": "EngineCore died", "code": 500}})
                if self.settings["end"] == "garbled":
                    await send({"choices": [7]})
                if self.settings["end"] == "abort":
                    await send({"choices": [{"index": 0, "text": "", "finish_reason": "abort"}]})
                request.transport.abort()
                return response
            part: Body = {"delta": {"content": text}} if chat else {"text": text}
            if ids:
                part["token_ids"] = tokens
                if number == 0 and not chat:
                    part["prompt_token_ids"] = prompt
            reason = finish if number == len(pieces) - 1 else None
            await send({"choices": [{"index": 0, "finish_reason": reason, **part}]})
        if not self.settings["closes"]:
            return response
        if (body.get("stream_options") or {}).get("include_usage"):
            await send({"choices": [], "usage": usage})
        await response.write(b": a comment\n\ndata: [DONE]\n\n")
        note["done"] = True
        return response


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
