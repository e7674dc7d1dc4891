"""The OpenAI wire format as vLLM speaks it: what a request asks for, what P and D are sent, event streams."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["completions", "chat"]
Body = dict[str, Any]
PATHS: dict[Kind, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
MAX_EVENT_BYTES = 64 << 20
"""The longest event of a stream: the first may carry the token ids of the whole prompt."""
_CHARS_PER_TOKEN = 4
_OPENING_CHARS = 1024
_OPENING_TOKENS = 256
_DEFAULT_MAX_TOKENS = 16
_EVENT_END = re.compile(rb"\r?\n\r?\n")
_TYPES: dict[str, type] = {
    "stream": bool,
    "stream_options": dict,
    "n": int,
    "best_of": int,
    "max_tokens": int,
    "max_completion_tokens": int,
    "min_tokens": int,
}
_RENDERING = {
    "completions": ("model", "prompt", "add_special_tokens"),
    "chat": (
        "model",
        "messages",
        "tools",
        "add_generation_prompt",
        "continue_final_message",
        "add_special_tokens",
        "chat_template",
        "chat_template_kwargs",
    ),
}
_ONLY_FOR_ANSWERS = (
    "stream_options",
    "min_tokens",
    "logprobs",
    "top_logprobs",
    "return_token_ids",
)


class BadRequest(ValueError):
    """A client's request is refused. The message names the field, its value and what is wanted."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A client's request.

    Attributes:
        body: as it came; not to be changed.
        token_ids: take the place of the prompt; None: the engine tokenizes what `body` holds.
    """

    kind: Kind
    body: Mapping[str, Any]
    token_ids: tuple[int, ...] | None = None

    @property
    def path(self) -> str:
        return PATHS[self.kind]

    @property
    def model(self) -> str | None:
        """What it calls the model or an adapter; None: the engine's own."""
        given = self.body.get("model")
        return given if isinstance(given, str) else None

    @property
    def salt(self) -> str:
        """What keeps its KV apart; empty for nothing."""
        given = self.body.get("cache_salt")
        return given if isinstance(given, str) else ""

    @property
    def streams(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def single(self) -> bool:
        """Whether it has one prompt and wants one answer."""
        prompt = self.body.get("prompt")
        several = isinstance(prompt, list) and not _are_token_ids(prompt)
        return not several and all((self.body.get(name) or 1) == 1 for name in ("n", "best_of"))

    @property
    def hands_over(self) -> bool:
        """Whether P can compute the prompt for a D: one answer, and nothing of the prompt's own is wanted."""
        own = ("echo", "use_beam_search", "prompt_logprobs", "prompt_embeds")
        asked = [self.body.get(name) for name in own]  # (0 logprobs are logprobs)
        return self.single and all(value is None or value is False for value in asked)

    @property
    def max_tokens(self) -> int | None:
        """The longest answer, in tokens; None: what the model's context leaves."""
        given: int | None = self.body.get("max_tokens")
        if self.kind == "completions":
            return _DEFAULT_MAX_TOKENS if given is None else given
        longest: int | None = self.body.get("max_completion_tokens")
        return given if longest is None else longest

    @property
    def wants_usage(self) -> bool:
        return bool((self.body.get("stream_options") or {}).get("include_usage"))

    @property
    def prompt_ids(self) -> tuple[int, ...] | None:
        """The prompt's tokens, where they are known without a tokenizer."""
        prompt = self.body.get("prompt")
        if self.token_ids is None and isinstance(prompt, list) and _are_token_ids(prompt):
            return tuple(prompt)
        return self.token_ids


def parse(kind: Kind, raw: bytes) -> Asked:
    """The request in `raw`. What routing depends on is checked; the rest is the engine's to judge.

    Raises:
        BadRequest: it is no JSON object, or a field has the wrong type.
    """
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest(f"the body is {_shown(body)}, want an object")
    if body.get("kv_transfer_params") is not None:  # it could have an engine fetch from any address
        raise BadRequest("kv_transfer_params: the router sets them; leave them out")
    for name, wanted in _TYPES.items():
        value = body.get(name)
        if value is not None and type(value) is not wanted:
            raise BadRequest(f"{name} = {_shown(value)}: want {wanted.__name__}")
    if kind == "chat":
        messages = body.get("messages")
        if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
            raise BadRequest(f"messages = {_shown(messages)}: want a list of objects")
    elif body.get("prompt_embeds") is None and not isinstance(body.get("prompt"), str | list):
        raise BadRequest(f"prompt = {_shown(body.get('prompt'))}: want a string or a list")
    return Asked(kind, body)


def session_of(asked: Asked, header: str | None) -> str:
    """The conversation that a request belongs to: by its header, `session_id` or `user`, else by how it
    begins."""
    for given in (header, asked.body.get("session_id"), asked.body.get("user")):
        if isinstance(given, str) and given:
            return given
    return hashlib.blake2b(_opening(asked).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def estimated_tokens(asked: Asked) -> int:
    """About how many tokens its prompt has; exact where these are known."""
    if asked.prompt_ids is not None:
        return len(asked.prompt_ids)
    if asked.kind == "chat":
        return sum(len(_text_of(m)) for m in asked.body["messages"]) // _CHARS_PER_TOKEN
    prompt = asked.body.get("prompt")
    parts = prompt if isinstance(prompt, list) else [prompt]
    texts = sum(len(part) for part in parts if isinstance(part, str))
    return texts // _CHARS_PER_TOKEN + sum(len(part) for part in parts if isinstance(part, list))


def tokenize_body(asked: Asked) -> Body:
    """What `/tokenize` is to be asked for the prompt's tokens."""
    return {name: asked.body[name] for name in _RENDERING[asked.kind] if name in asked.body}


def prefill_body(asked: Asked, params: Mapping[str, Any]) -> Body:
    """What P is sent: the same prompt, one token, no stream."""
    body = {name: value for name, value in asked.body.items() if name not in _ONLY_FOR_ANSWERS}
    body |= {"stream": False, "max_tokens": 1}
    if asked.kind == "chat":
        body["max_completion_tokens"] = 1
    return _with_prompt(asked, body, params)


def decode_body(asked: Asked, params: Mapping[str, Any] | None) -> Body:
    """What D is sent: the request, with what P said of the prompt's KV (None: there was no P).

    Of a stream with one answer it is asked for token ids, by which another D can go on with it. (Not with
    `echo`: vLLM leaves the prompt's text out where ids are wanted.)
    """
    body = dict(asked.body)
    if asked.streams and asked.single and not body.get("echo"):
        body["return_token_ids"] = True
    return _with_prompt(asked, body, params)


def _with_prompt(asked: Asked, body: Body, params: Mapping[str, Any] | None) -> Body:
    given = dict(params or {})
    if asked.token_ids is not None:
        if asked.kind == "completions":
            body["prompt"] = list(asked.token_ids)
        else:  # vLLM takes them in place of what it would render from the messages
            given["prompt_token_ids"] = list(asked.token_ids)
    if given:
        body["kv_transfer_params"] = given
    return body


class EventParser:
    """Server-sent events out of bytes that come in pieces of any size. `feed` mutates it."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The data of each event that is complete; comments and other fields are left out.

        Raises:
            ValueError: an event is longer than MAX_EVENT_BYTES.
        """
        searched = max(0, len(self._rest) - 3)  # an end may have begun in what was there
        self._rest += data
        while end := _EVENT_END.search(self._rest, searched):
            lines = bytes(self._rest[: end.start()]).splitlines()
            del self._rest[: end.end()]
            searched = 0
            values = [line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:")]
            if values:
                yield b"\n".join(values)
        if len(self._rest) > MAX_EVENT_BYTES:
            raise ValueError(f"an event is longer than {MAX_EVENT_BYTES} bytes")


def event_bytes(event: Mapping[str, Any]) -> bytes:
    """An event as it is sent."""
    return b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"


def aborted(event: Mapping[str, Any]) -> bool:
    """Whether an answer, or an event of one, says that the engine gave it up, as vLLM does when it ends."""
    return any(choice.get("finish_reason") in ("abort", "error") for choice in event.get("choices") or ())


def computed_tokens(reply: Mapping[str, Any]) -> int | None:
    """Tokens of the prompt that an answer was computed from, without those from a cache; None: it does not
    say."""
    usage = reply.get("usage")
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    if not isinstance(cached, int) or not isinstance(usage, dict):
        return None
    return max(0, int(usage.get("prompt_tokens") or 0) - cached)


DONE = b"[DONE]"
DONE_EVENT = b"data: [DONE]\n\n"


def error_body(status: int, message: str) -> Body:
    """An error as OpenAI's clients expect it."""
    kind = "BadRequestError" if 400 <= status < 500 else "InternalServerError"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def _are_token_ids(prompt: list[Any]) -> bool:
    return bool(prompt) and all(type(token) is int for token in prompt)


def _opening(asked: Asked) -> str:
    """What stays the same from turn to turn: the first messages, or how the prompt begins."""
    model = asked.body.get("model")
    if asked.kind == "chat":
        messages = asked.body["messages"]
        first = next((i for i, m in enumerate(messages) if m.get("role") == "user"), len(messages))
        return json.dumps([model, messages[: first + 1]], sort_keys=True)
    prompt = asked.body.get("prompt")
    if isinstance(prompt, str):
        return json.dumps([model, prompt[:_OPENING_CHARS]])
    return json.dumps([model, (prompt or [])[:_OPENING_TOKENS]])


def _text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        texts = (part.get("text") for part in content if isinstance(part, dict))
        return "".join(text for text in texts if isinstance(text, str))
    return content if isinstance(content, str) else ""


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
