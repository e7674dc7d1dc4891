"""The OpenAI wire format as vLLM speaks it: what a request asks for, what P and D are sent and answer."""

from __future__ import annotations

import hashlib
import json
import math
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from kvkit.moving import requests
from kvkit.moving.requests import RequestLimits
from kvkit.settings import ConfigError

Kind = Literal["completions", "chat"]
Body = dict[str, Any]
PATHS: dict[Kind, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
MAX_EVENT_BYTES = 16 << 20
"""The longest event of a stream: the first may carry the token ids of the whole prompt."""
MAX_DEPTH = 100
"""So many objects and lists within each other; deeper JSON is refused, as to write it takes a deep stack."""
MAX_VALUES = 2 << 20
"""So many lists, objects and commas a client's request may have: in 64 MiB there is room for ones that take
1.6 GB once they are read. A prompt has a comma per token at most."""
MAX_INTEGER = 2**53 - 1
"""The largest integer that every reader of JSON understands."""
BLEND_TOKENS = ("exact", "blended", "recomputed", "computed")
"""What an engine says of a prompt that it blended, in tokens."""
_CHARS_PER_TOKEN = 4
_OPENING_CHARS = 1024
_OPENING_TOKENS = 256
_DEFAULT_MAX_TOKENS = 16
_EVENT_END = re.compile(rb"\r?\n\r?\n")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_ROUTERS_OWN = ("kv_transfer_params", "ec_transfer_params")
"""What vLLM hands to its connectors: whoever sets them could have an engine fetch from any address."""
_COUNTS = ("n", "best_of", "max_tokens", "max_completion_tokens", "min_tokens")
_TYPES: dict[str, type] = {"stream": bool, "stream_options": dict, **dict.fromkeys(_COUNTS, int)}
_PROMPTS: dict[Kind, tuple[str, ...]] = {"completions": ("prompt", "prompt_embeds"), "chat": ()}
_RENDERING = {
    "completions": ("model", "prompt", "add_special_tokens"),
    "chat": (
        *("model", "messages", "tools", "add_generation_prompt", "continue_final_message"),
        *("add_special_tokens", "chat_template", "chat_template_kwargs"),
    ),
}
_ONLY_FOR_ANSWERS = ("stream_options", "min_tokens", "logprobs", "top_logprobs", "return_token_ids")


class BadRequest(ValueError):
    """A client's request is refused. The message names the field, its value and what is wanted.

    Attributes:
        status: the HTTP status that says so.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class ParsedRequest:
    """A client's request.

    Attributes:
        body: as it came; not to be changed.
        token_ids: take the place of the prompt; None: the engine tokenizes what `body` holds.
        blend: what kvkit's connector in the engine is told of documents in the prompt; False: that there are
            none, None: nothing.
        kv_cache: what it is told that the request wants of the cache; None: nothing.
    """

    kind: Kind
    body: Mapping[str, Any]
    token_ids: tuple[int, ...] | None = None
    blend: Mapping[str, Any] | Literal[False] | None = None
    kv_cache: Mapping[str, Any] | None = None

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

    @cached_property
    def single(self) -> bool:
        """Whether it has one prompt and wants one answer."""
        given = (self.body.get(name) for name in _PROMPTS[self.kind])
        several = any(isinstance(prompt, list) and not _are_token_ids(prompt) for prompt in given)
        return not several and all((self.body.get(name) or 1) == 1 for name in ("n", "best_of"))

    @cached_property
    def most_choices(self) -> int:
        """How many choices a whole answer has; none has more."""
        prompts = 0
        for name in _PROMPTS[self.kind]:
            prompt = self.body.get(name)
            if isinstance(prompt, list) and not _are_token_ids(prompt):
                prompts += len(prompt)
            else:
                prompts += prompt is not None
        return max(1, prompts) * max(1, self.body.get("n") or 1)

    @property
    def can_disaggregate(self) -> bool:
        """Whether P can compute the prompt for a D: one answer, and nothing of the prompt's own is wanted.
        What is blended is D's alone."""
        own = ("echo", "use_beam_search", "prompt_logprobs", "prompt_embeds")
        asked = [self.body.get(name) for name in own]  # (0 logprobs are logprobs)
        return not self.blends and self.single and all(value is None or value is False for value in asked)

    @property
    def blends(self) -> bool:
        """Whether its prompt may be blended."""
        return isinstance(self.blend, Mapping)

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


def read_body(raw: bytes) -> Body:
    """The JSON object that a client sent. Raises BadRequest: it is none, or one of too many values."""
    if sum(map(raw.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise BadRequest(f"the body has over {MAX_VALUES} lists, objects and commas", 413)
    try:
        body = read_json(raw)
        if _SURROGATE.search(raw):  # each half of a pair is written so, too
            json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise BadRequest(f"the body has half a character in it: {error.reason}") from error
    except ValueError as error:
        raise BadRequest(f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest(f"the body is {shown(body)}, want an object")
    return body


def parse(kind: Kind, raw: bytes) -> ParsedRequest:
    """The request in `raw`. What routing depends on is checked; the rest is the engine's to judge.
    Raises BadRequest: it is no JSON object, of too many values, or a field has the wrong type."""
    body = read_body(raw)
    extra = body.get("vllm_xargs")
    for name in _ROUTERS_OWN:
        if body.get(name) is not None:
            raise BadRequest(f"{name}: not for clients; leave it out")
        if isinstance(extra, dict) and name in extra:
            raise BadRequest(f"vllm_xargs.{name}: not for clients; leave it out")
    for name, wanted in _TYPES.items():
        value = body.get(name)
        if value is not None and type(value) is not wanted:
            raise BadRequest(f"{name} = {shown(value)}: want {wanted.__name__}")
        if type(value) is int and abs(value) > MAX_INTEGER:
            raise BadRequest(f"{name} = {shown(value)}: want at most {MAX_INTEGER}")
    if kind == "chat":
        messages = body.get("messages")
        if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
            raise BadRequest(f"messages = {shown(messages)}: want a list of objects")
    elif body.get("prompt_embeds") is None and not isinstance(body.get("prompt"), str | list):
        raise BadRequest(f"prompt = {shown(body.get('prompt'))}: want a string or a list")
    return ParsedRequest(kind, body)


def take_request_policy(asked: ParsedRequest, limits: RequestLimits | None) -> ParsedRequest:
    """`asked` with what it wants of the cache as engines are told of it. `limits`: None: it may want nothing.
    Raises BadRequest: that is wrong, or not allowed."""
    said = asked.body.get(requests.FIELD)
    if said is None:
        return asked
    if limits is None:
        words = "this router passes none on; its settings have no table [requests]"
        raise BadRequest(f"{requests.FIELD}: {words}")
    try:
        requests.read(said, limits, requests.FIELD, "requests")
    except ConfigError as error:
        raise BadRequest(str(error)) from error
    body = {name: value for name, value in asked.body.items() if name != requests.FIELD}
    return replace(asked, body=body, kv_cache=said)


def session_of(asked: ParsedRequest, header: str | None) -> str:
    """The conversation that a request belongs to: by its header, `session_id` or `user`, else by how it
    begins. 32 hex digits, however long a name the client gave it."""
    named = (header, asked.body.get("session_id"), asked.body.get("user"))
    name = next((given for given in named if isinstance(given, str) and given), None)
    said = f"opening {_opening(asked)}" if name is None else f"named {name}"
    return hashlib.blake2b(said.encode(errors="backslashreplace"), digest_size=16).hexdigest()


def estimated_tokens(asked: ParsedRequest) -> int:
    """About how many tokens its prompt has; exact where these are known."""
    if asked.prompt_ids is not None:
        return len(asked.prompt_ids)
    if asked.kind == "chat":
        return sum(len(_text_of(m)) for m in asked.body["messages"]) // _CHARS_PER_TOKEN
    prompt = asked.body.get("prompt")
    parts = prompt if isinstance(prompt, list) else [prompt]
    texts = sum(len(part) for part in parts if isinstance(part, str))
    return texts // _CHARS_PER_TOKEN + sum(len(part) for part in parts if isinstance(part, list))


def tokenize_body(asked: ParsedRequest) -> Body:
    """What `/tokenize` is to be asked for the prompt's tokens."""
    return {name: asked.body[name] for name in _RENDERING[asked.kind] if name in asked.body}


def documents_of(asked: ParsedRequest, ids: Sequence[int]) -> Iterator[tuple[Sequence[int], int, int]]:
    """What each of a prompt's documents was computed behind, in tokens, and where it stands: start, stop."""
    told = asked.blend or {}
    prefix, spans = ids[: told.get("prefix", 0)], told.get("documents", ())
    joints = told.get("joints") or ((),) * len(spans)
    for (start, stop), joint in zip(spans, joints, strict=True):
        yield (*prefix, *joint), start, stop


def prefill_body(asked: ParsedRequest, params: Mapping[str, Any]) -> Body:
    """What P is sent: the same prompt, one token, no stream."""
    body = {name: value for name, value in asked.body.items() if name not in _ONLY_FOR_ANSWERS}
    body |= {"stream": False, "max_tokens": 1}
    if asked.kind == "chat":
        body["max_completion_tokens"] = 1
    return _with_prompt(asked, body, params)


def decode_body(asked: ParsedRequest, params: Mapping[str, Any] | None) -> Body:
    """What D is sent: the request, with what P said of the prompt's KV (None: there was no P).

    Of a stream with one answer it is asked for token ids, by which another D can go on with it. (Not with
    `echo`: vLLM leaves the prompt's text out where ids are wanted.)
    """
    body = dict(asked.body)
    if asked.streams and asked.single and not body.get("echo"):
        body["return_token_ids"] = True
    return _with_prompt(asked, body, params)


def _with_prompt(asked: ParsedRequest, body: Body, params: Mapping[str, Any] | None) -> Body:
    given = dict(params or {})
    if asked.blend is not None:
        given["blend"] = asked.blend
    if asked.kv_cache is not None:
        given[requests.FIELD] = asked.kv_cache
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
        Raises ValueError: an event is longer than MAX_EVENT_BYTES."""
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


def read_json(raw: bytes | bytearray) -> Any:
    """What JSON in UTF-8 says. Stricter than Python: no NaN, no infinity, nothing nested over MAX_DEPTH deep.
    Raises ValueError: it is none."""
    too_deep = f"it is nested over {MAX_DEPTH} deep"
    try:
        found = json.loads(raw.decode("utf-8-sig"), parse_float=_finite, parse_constant=_finite)
    except RecursionError as error:
        raise ValueError(too_deep) from error
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH and _depth(found) > MAX_DEPTH:
        raise ValueError(too_deep)
    return found


def read_object(raw: bytes) -> Body:
    """The JSON object that an engine sent. Raises ValueError: it is none."""
    try:
        found = read_json(raw)
    except ValueError as error:
        raise ValueError(f"it sent no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"it sent a JSON {type(found).__name__}, want an object")
    return found


def read_answer(asked: ParsedRequest, raw: bytes) -> Body:
    """An answer that is no stream. Raises ValueError: it is none: an error in its place is none, either."""
    answer = read_object(raw)
    if answer.get("error") is not None:
        raise ValueError(f"it answered with an error: {shown(answer['error'])}")
    _check_choices(asked, answer, "message")
    if not answer["choices"]:
        raise ValueError("choices = []: want at least one")
    return answer


def read_event(asked: ParsedRequest, data: bytes) -> Body:
    """An event of a stream, or the error in its place: that has the field `error`.
    Raises ValueError: it is neither."""
    event = read_object(data)
    if event.get("error") is None:
        _check_choices(asked, event, "delta")
    return event


def read_tokens(raw: bytes) -> tuple[int, ...]:
    """The token ids that `/tokenize` answered. Raises ValueError: there are none."""
    tokens = read_object(raw).get("tokens")
    if not isinstance(tokens, list) or not all(type(token) is int and 0 <= token < 2**31 for token in tokens):
        raise ValueError(f"tokens = {shown(tokens)}: want a list of token ids")
    return tuple(tokens)


def read_hit(raw: bytes, name: str = "hit_tokens") -> int:
    """The tokens that kvkit's `/lookup` answered, or its `/pin`. Raises ValueError: there are none."""
    tokens = _want(read_object(raw), name, int)
    if tokens is None:
        raise ValueError(f"{name}: missing")
    return int(tokens)


def show_blend(answer: Body) -> None:
    """Leave of what an engine's connector says the tokens by the way that they were come by, where it has
    blended: in `usage.prompt_tokens_details.blend`. Mutates."""
    said = answer.pop("kv_transfer_params", None)
    blend = said.get("blend") if isinstance(said, dict) else None
    if not isinstance(blend, dict) or not isinstance(answer.get("usage"), dict):
        return
    tokens = {name: n for name in BLEND_TOKENS if type(n := blend.get(name)) is int}
    details = answer["usage"].get("prompt_tokens_details")
    answer["usage"]["prompt_tokens_details"] = (details if isinstance(details, dict) else {}) | {
        "blend": tokens
    }


def aborted(event: Mapping[str, Any]) -> bool:
    """Whether an answer, or an event of one, says that the engine gave it up, as vLLM does when it ends."""
    return any(choice.get("finish_reason") in ("abort", "error") for choice in event["choices"])


def computed_tokens(reply: Mapping[str, Any]) -> int | None:
    """Tokens of the prompt that an answer was computed from, without those from a cache; None: it does not
    say."""
    usage = reply.get("usage") or {}
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    if type(cached) is not int or not 0 <= cached <= MAX_INTEGER:
        return None
    return max(0, (usage.get("prompt_tokens") or 0) - cached)


DONE = b"[DONE]"
DONE_EVENT = b"data: [DONE]\n\n"


def error_body(status: int, message: str) -> Body:
    """An error as OpenAI's clients expect it."""
    kind = "BadRequestError" if 400 <= status < 500 else "InternalServerError"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def _check_choices(asked: ParsedRequest, answer: Body, part: str) -> None:
    """Check what is read of an answer, or of an event of one, here and in `answers`.

    Args:
        part: the field of a choice that holds what a chat's answer says.

    Raises:
        ValueError: something is missing or of a type that it never has. The message names it.
    """
    _want(answer, "id", str)
    _want(answer, "created", int)
    choices = answer.get("choices")
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise ValueError(f"choices = {shown(choices)}: want a list of objects")
    if len(choices) > asked.most_choices:
        raise ValueError(f"{len(choices)} choices, want at most {asked.most_choices}")
    _want(answer, "usage", dict)
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        _want(answer.get("usage") or {}, name, int)
    parts = [choice[part] for choice in choices if isinstance(choice.get(part), dict)]
    for holder in (answer, *choices, *parts):
        for name in ("prompt_token_ids", "token_ids"):
            ids = _want(holder, name, list)
            if ids and not _are_token_ids(ids):
                raise ValueError(f"{name} = {shown(ids)}: want token ids")
    for choice in choices:
        _want(choice, "finish_reason", str)
        if (_want(choice, "index", int) or 0) >= asked.most_choices:
            raise ValueError(f"index = {choice['index']}: want less than {asked.most_choices}")
        if asked.kind == "chat":
            said = _want(choice, part, dict)
            for name, kind in (("role", str), ("content", str), ("tool_calls", list)):
                _want(said or {}, name, kind)
        else:
            said = _want(choice, "text", str)
        if said is None and part == "message":
            raise ValueError(f"a choice says nothing: {shown(choice)}")


def _want(holder: Mapping[str, Any], name: str, kind: type) -> Any:
    """A field, which may be missing.
    Raises ValueError: it is of another type, or a number that counts nothing."""
    value = holder.get(name)
    if value is None:
        return None
    if type(value) is not kind or (type(value) is int and not 0 <= value <= MAX_INTEGER):
        raise ValueError(f"{name} = {shown(value)}: want {kind.__name__}")
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no number")
    return value


def _depth(value: Any) -> int:
    """How many objects and lists are within each other, at most."""
    depth, level = 0, [value] if isinstance(value, dict | list) else []
    while level:
        depth += 1
        insides = (outer.values() if isinstance(outer, dict) else outer for outer in level)
        level = [inner for inside in insides for inner in inside if isinstance(inner, dict | list)]
    return depth


def _are_token_ids(prompt: list[Any]) -> bool:
    return bool(prompt) and all(type(token) is int for token in prompt)


def _opening(asked: ParsedRequest) -> str:
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


def shown(value: Any) -> str:
    """A value that came from outside, as a message quotes it."""
    text = reprlib.repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
