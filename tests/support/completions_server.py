"""A small OpenAI-compatible server with a prefix cache of words, and ways to fail, on 127.0.0.1."""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import takewhile
from typing import Any, Self

from kvkit.tiers.testing.contract import DEADLINE_S


def common(one: str, other: str) -> int:
    """Words of the common beginning of two texts."""
    pairs = zip(one.split(), other.split(), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


class Completions:
    """The server; a context manager. The first part of a path says how it behaves:

        good       streams its answer, and tells the cached tokens of the prompt
        counting   tells them in /metrics alone, as vLLM does; takes token ids, lists probabilities, blends
        mute       tells them nowhere
        pairs      answers when two requests are there
        refusing   HTTP status 400
        failing    an error within the stream
        failing-later  the same, from the third request on
        cut        the stream ends before the answer does
        garbled    no JSON in the stream
        hanging    accepts and never answers
        trickling  sends a byte now and then, and no answer

    A word is a token.

    Attributes:
        prompts: of the requests, as they came.
        bodies: of the requests.
        most: requests that were there at a time.
        pair: where two requests wait for each other.
        closing: set when the server ends.
    """

    def __init__(self) -> None:
        self.prompts: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.most = 0
        self.hits = 0
        self.blended: Counter[str] = Counter()
        self._words: list[str] = []
        self._present = 0
        self._lock = threading.Lock()
        self.pair = threading.Barrier(2)
        self.closing = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def url(self, way: str) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/{way}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(DEADLINE_S)

    def tokens(self, text: str) -> list[int]:
        """A number for each word of a text, with the white space in front of it."""
        found = re.findall(r"\s*\S+|\s+$", text)
        with self._lock:
            self._words += [word for word in dict.fromkeys(found) if word not in self._words]
            return [self._words.index(word) for word in found]

    def begin(self, body: dict[str, Any]) -> int:
        """Note a request; the words of its prompt that an earlier one began with."""
        if isinstance(body["prompt"], list):
            body["prompt"] = "".join(self._words[token] for token in body["prompt"])
        blend = body.get("kv_transfer_params", {}).get("blend")
        with self._lock:
            if blend:
                reused = sum(stop - start for start, stop in blend["documents"])
                self.blended.update(exact=blend["prefix"], reused=reused, selected=reused // 4, computed=3)
            hit = max((common(body["prompt"], earlier) for earlier in self.prompts), default=0)
            self.prompts.append(body["prompt"])
            self.bodies.append(body)
            self.hits += hit
            self._present += 1
            self.most = max(self.most, self._present)
            return hit

    def end(self) -> None:
        with self._lock:
            self._present -= 1

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        served = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def handle(self) -> None:
                with suppress(ConnectionResetError):  # a client that was out of patience
                    super().handle()

            def do_GET(self) -> None:
                _, way, path = self.path.split("/", 2)
                if path == "v1/models":
                    entries = [{"id": "first", "owned_by": "vllm" if way == "counting" else "us"}]
                    self._send(200, json.dumps({"data": [*entries, {"id": "second"}]}))
                elif path == "metrics" and way == "counting":
                    name = "vllm:external_prefix_cache_hits_total"
                    lines = [f"# TYPE {name} counter", f'{name}{{engine="0"}} {served.hits}']
                    loaded = "vllm:kvkit_loaded_tokens_total"
                    lines += [f"# TYPE {loaded} counter"]
                    lines += [f'{loaded}{{rank="{rank}",tier="disk"}} 7.0' for rank in (0, 1)]
                    for kind in ("exact", "reused", "selected", "computed"):
                        name = f"vllm:kvkit_blend_{kind}_tokens_total"
                        lines += [f"# TYPE {name} counter", f'{name}{{engine="0"}} {served.blended[kind]}']
                    self._send(200, "\n".join([*lines, ""]))
                else:
                    self._send(404, "{}")

            def do_POST(self) -> None:
                way = self.path.split("/")[1]
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path.endswith("/tokenize"):
                    self._send(200, json.dumps({"tokens": served.tokens(body["prompt"])}))
                    return
                hit = served.begin(body)
                with ExitStack() as present:
                    present.callback(served.end)
                    try:
                        self._answer(way, body, hit, present.close)
                    except (BrokenPipeError, ConnectionResetError):
                        self.close_connection = True

            def _answer(self, way: str, body: dict[str, Any], hit: int, end: Callable[[], None]) -> None:
                if way == "refusing":
                    self._send(400, '{"error": "too long"}')
                    return
                if way == "hanging":
                    served.closing.wait(DEADLINE_S)
                    self.close_connection = True
                    return
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                while way == "trickling" and not served.closing.wait(0.01):
                    self._chunk(b" ")
                if way == "pairs":
                    served.pair.wait(DEADLINE_S)
                if way == "garbled":
                    self._chunk(b"data: {\n\n")
                if way == "failing" or (way == "failing-later" and len(served.prompts) > 2):
                    self._event({"error": {"message": "out of memory"}})
                count = body["max_tokens"]
                for number in range(count):
                    last = number == count - 1
                    if way == "cut" and last:
                        break
                    reason = "length" if last else None
                    choice: dict[str, Any] = {"text": f" w{number}", "finish_reason": reason}
                    if "logprobs" in body:
                        choice["logprobs"] = {"top_logprobs": [{"token_id:1": -0.5, "token_id:2": -1.5}]}
                    self._event({"choices": [choice]})
                usage: dict[str, Any] = {
                    "prompt_tokens": len(body["prompt"].split()),
                    "completion_tokens": count,
                }
                if way not in ("counting", "mute"):
                    usage["prompt_tokens_details"] = {"cached_tokens": hit}
                self._chunk(b": a comment\n\n")
                self._event({"choices": [], "usage": usage})
                end()  # whoever reads the next line may send another request at once
                self._chunk(b"data: [DONE]\n\n")
                self._chunk(b"")

            def _send(self, status: int, text: str) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def _event(self, event: dict[str, Any]) -> None:
                self._chunk(b"data: " + json.dumps(event).encode() + b"\n\n")

            def _chunk(self, data: bytes) -> None:
                self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

        return Handler
