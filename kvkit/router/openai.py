"""OpenAI's API as vLLM implements it: client requests, requests to P and D, and their responses."""

from __future__ import annotations

import hashlib
import json
import math
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from kvkit.blend.requests import FIELD as BLEND
from kvkit.settings import ConfigError
from kvkit.transfer import requests
from kvkit.transfer.requests import RequestLimits

Kind = Literal["completions", "chat"]
Body = dict[str, Any]
PATHS: dict[Kind, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
MAX_EVENT_BYTES = 16 << 20
"""Maximum length of a stream's event: the first may carry the token ids of the whole prompt."""
MAX_DEPTH = 100
"""Maximum nesting of objects and lists; deeper JSON is refused, because writing it takes a deep stack."""
MAX_VALUES = 2 << 20
"""Maximum number of lists, objects and commas in a client's request.
64 MiB of them can take 1.6 GB once parsed; a prompt has at most one comma per token."""
MAX_INTEGER = 2**53 - 1
"""Largest integer that every JSON parser represents exactly."""
BLEND_TOKENS = ("exact", "blended", "recomputed", "computed")
"""Token counts that an engine reports for a blended prompt."""
_CHARS_PER_TOKEN = 4
_OPENING_CHARS = 1024
_OPENING_TOKENS = 256
_DEFAULT_MAX_TOKENS = 16
_EVENT_END = re.compile(rb"\r?\n\r?\n")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_PARAMS = "kv_transfer_params"
_CONNECTOR_FIELDS = (_PARAMS, "ec_transfer_params")
"""Fields for vLLM's connectors: a client could use them to make engines fetch from any address."""
_CLIENT_PARAMS = (BLEND, requests.FIELD)
"""Fields of `kv_transfer_params` that clients may set."""
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
    """Refusal of a client's request; the message names the field, its value and what is valid.

    Attributes:
        status: HTTP status of the response.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class ParsedRequest:
    """A client's request.

    Attributes:
        body: JSON object; never mutated.
        token_ids: token ids that replace the prompt; None: the engine tokenizes what `body` holds.
        params: the client's `kv_transfer_params`, passed to engines; documents marked in the text included.
    """

    kind: Kind
    body: Mapping[str, Any]
    token_ids: tuple[int, ...] | None = None
    params: Mapping[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return PATHS[self.kind]

    @property
    def model(self) -> str | None:
        """Name of the model or adapter; None: the engine's default."""
        model = self.body.get("model")
        return model if isinstance(model, str) else None

    @property
    def salt(self) -> str:
        """Cache salt, which keeps its KV apart; empty if there is none."""
        salt = self.body.get("cache_salt")
        return salt if isinstance(salt, str) else ""

    @property
    def streams(self) -> bool:
        return bool(self.body.get("stream"))

    @cached_property
    def single(self) -> bool:
        """True if the request has one prompt and asks for one answer."""
        prompts = (self.body.get(name) for name in _PROMPTS[self.kind])
        several = any(isinstance(prompt, list) and not _are_token_ids(prompt) for prompt in prompts)
        return not several and all((self.body.get(name) or 1) == 1 for name in ("n", "best_of"))

    @cached_property
    def max_choices(self) -> int:
        """Number of choices in a complete answer; no answer or event has more."""
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
        """True if P can compute the prompt for a D.
        This takes a single answer without output about the prompt, and no blending, which only D does."""
        names = ("echo", "use_beam_search", "prompt_logprobs", "prompt_embeds")
        values = [self.body.get(name) for name in names]  # (prompt_logprobs = 0 still asks for logprobs)
        return not self.blends and self.single and all(value is None or value is False for value in values)

    @property
    def blends(self) -> bool:
        """True if the prompt may be blended."""
        return isinstance(self.params.get(BLEND), Mapping)

    def with_blend(self, blend: Body | None) -> ParsedRequest:
        """Return the request with another `blend` object; None: without one."""
        params = {name: value for name, value in self.params.items() if name != BLEND}
        return replace(self, params=params if blend is None else params | {BLEND: blend})

    @property
    def max_tokens(self) -> int | None:
        """Maximum length of the answer in tokens; None: limited by the model's context."""
        max_tokens: int | None = self.body.get("max_tokens")
        if self.kind == "completions":
            return _DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens
        max_completion_tokens: int | None = self.body.get("max_completion_tokens")
        return max_tokens if max_completion_tokens is None else max_completion_tokens

    @property
    def includes_usage(self) -> bool:
        return bool((self.body.get("stream_options") or {}).get("include_usage"))

    @property
    def prompt_ids(self) -> tuple[int, ...] | None:
        """Token ids of the prompt; None: a tokenizer is needed."""
        prompt = self.body.get("prompt")
        if self.token_ids is None and isinstance(prompt, list) and _are_token_ids(prompt):
            return tuple(prompt)
        return self.token_ids


def read_body(raw: bytes) -> Body:
    """Parse a client's JSON object. Raises BadRequest if it is not one, or has too many values."""
    if sum(map(raw.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise BadRequest(f"the body has over {MAX_VALUES} lists, objects and commas", 413)
    try:
        body = read_json(raw)
        if _SURROGATE.search(raw):  # valid pairs match, too
            json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise BadRequest(f"the body has half of a surrogate pair: {error.reason}") from error
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest(f"the body is {quoted(body)}, want an object")
    return body


def parse(kind: Kind, raw: bytes) -> ParsedRequest:
    """Parse a request, and check the fields that routing depends on; the engine checks the rest.
    Raises BadRequest if it is not a JSON object, has too many values, or a field has the wrong type."""
    body = read_body(raw)
    params = _client_params(body)
    for name, expected in _TYPES.items():
        value = body.get(name)
        if value is not None and type(value) is not expected:
            raise BadRequest(f"{name} = {quoted(value)}: want {expected.__name__}")
        if type(value) is int and abs(value) > MAX_INTEGER:
            raise BadRequest(f"{name} = {quoted(value)}: want at most {MAX_INTEGER}")
    if kind == "chat":
        messages = body.get("messages")
        if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
            raise BadRequest(f"messages = {quoted(messages)}: want a list of objects")
    elif body.get("prompt_embeds") is None and not isinstance(body.get("prompt"), str | list):
        raise BadRequest(f"prompt = {quoted(body.get('prompt'))}: want a string or a list")
    return ParsedRequest(kind, body, params=params)


def _client_params(body: Body) -> Body:
    """Take the client's `kv_transfer_params` out of `body`. Mutates it.
    Raises BadRequest if a field is for the router to set."""
    params = body.pop(_PARAMS, None) or {}
    for name in _CLIENT_PARAMS:
        if name in body:  # engines would ignore it there, "store": false included
            raise BadRequest(f"{name}: want it in {_PARAMS}")
    if not isinstance(params, dict):
        raise BadRequest(f"{_PARAMS} = {quoted(params)}: want an object of {', '.join(_CLIENT_PARAMS)}")
    xargs = body.get("vllm_xargs")
    refused = [f"{_PARAMS}.{name}" for name in params if name not in _CLIENT_PARAMS]
    for name in _CONNECTOR_FIELDS:
        refused += [name] if body.get(name) is not None else []
        refused += [f"vllm_xargs.{name}"] if isinstance(xargs, dict) and name in xargs else []
    if refused:
        raise BadRequest(f"{refused[0]:.80}: not for clients; leave it out")
    return {name: value for name, value in params.items() if value is not None}


def check_request_policy(request: ParsedRequest, limits: RequestLimits | None) -> None:
    """Raise BadRequest if the request's policy is wrong or not allowed; without `limits` none is."""
    policy = request.params.get(requests.FIELD)
    if policy is None:
        return
    field_path = f"{_PARAMS}.{requests.FIELD}"
    if limits is None:
        raise BadRequest(f"{field_path}: this router accepts none; its settings have no table [requests]")
    try:
        requests.read(policy, limits, field_path, "requests")
    except ConfigError as error:
        raise BadRequest(str(error)) from error


def session_of(request: ParsedRequest, header: str | None) -> str:
    """Return a name for the request's conversation: 32 hex digits.
    It is a digest of the header, `session_id` or `user`; without these, of how the prompt begins."""
    candidates = (header, request.body.get("session_id"), request.body.get("user"))
    name = next((candidate for candidate in candidates if isinstance(candidate, str) and candidate), None)
    key = f"opening {_opening(request)}" if name is None else f"named {name}"
    return hashlib.blake2b(key.encode(errors="backslashreplace"), digest_size=16).hexdigest()


def estimated_tokens(request: ParsedRequest) -> int:
    """Estimate the number of prompt tokens; exact if their ids are known."""
    if request.prompt_ids is not None:
        return len(request.prompt_ids)
    if request.kind == "chat":
        return sum(len(_text_of(m)) for m in request.body["messages"]) // _CHARS_PER_TOKEN
    prompt = request.body.get("prompt")
    entries = prompt if isinstance(prompt, list) else [prompt]
    chars = sum(len(entry) for entry in entries if isinstance(entry, str))
    return chars // _CHARS_PER_TOKEN + sum(len(entry) for entry in entries if isinstance(entry, list))


def tokenize_body(request: ParsedRequest) -> Body:
    """Return the body of a `/tokenize` request for the prompt."""
    return {name: request.body[name] for name in _RENDERING[request.kind] if name in request.body}


def documents_of(request: ParsedRequest, ids: Sequence[int]) -> Iterator[tuple[Sequence[int], int, int]]:
    """Yield (before, start, stop) of each document: the tokens that it was computed behind, and its span."""
    blend = request.params.get(BLEND) or {}
    prefix, spans = ids[: blend.get("prefix") or 0], blend.get("documents") or ()
    joints = blend.get("joints") or ((),) * len(spans)
    for (start, stop), joint in zip(spans, joints, strict=True):
        if stop <= len(ids):  # engines refuse others
            yield (*prefix, *joint), start, stop


def prefill_body(request: ParsedRequest, params: Mapping[str, Any]) -> Body:
    """Return the body for P: the same prompt, one token, no stream."""
    body = {name: value for name, value in request.body.items() if name not in _ONLY_FOR_ANSWERS}
    body |= {"stream": False, "max_tokens": 1}
    if request.kind == "chat":
        body["max_completion_tokens"] = 1
    return _with_prompt(request, body, params)


def decode_body(request: ParsedRequest, params: Mapping[str, Any] | None) -> Body:
    """Return the body for D: the request, with P's `params` for the prompt's KV (None: there was no P).

    A stream with one answer also asks for token ids, so that another D can continue it. (Not with `echo`:
    vLLM omits the prompt's text if asked for token ids.)
    """
    body = dict(request.body)
    if request.streams and request.single and not body.get("echo"):
        body["return_token_ids"] = True
    return _with_prompt(request, body, params)


def _with_prompt(request: ParsedRequest, body: Body, params: Mapping[str, Any] | None) -> Body:
    merged = {**(params or {}), **request.params}
    if request.token_ids is not None:
        if request.kind == "completions":
            body["prompt"] = list(request.token_ids)
        else:  # vLLM takes them in place of what it would render from the messages
            merged["prompt_token_ids"] = list(request.token_ids)
    if merged:
        body[_PARAMS] = merged
    return body


class EventParser:
    """Parser of server-sent events that arrive in pieces of any size. `feed` mutates it."""

    def __init__(self) -> None:
        self._unparsed = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the data of each complete event; comments and other fields are dropped.
        Raises ValueError if an event is longer than MAX_EVENT_BYTES."""
        searched = max(0, len(self._unparsed) - 3)  # an event's end may have begun in earlier data
        self._unparsed += data
        while end := _EVENT_END.search(self._unparsed, searched):
            lines = bytes(self._unparsed[: end.start()]).splitlines()
            del self._unparsed[: end.end()]
            searched = 0
            values = [line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:")]
            if values:
                yield b"\n".join(values)
        if len(self._unparsed) > MAX_EVENT_BYTES:
            raise ValueError(f"an event is longer than {MAX_EVENT_BYTES} bytes")


def event_bytes(event: Mapping[str, Any]) -> bytes:
    """Encode an event for the stream."""
    return b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"


def read_json(raw: bytes | bytearray) -> Any:
    """Parse JSON in UTF-8; stricter than Python: no NaN, no infinity, nesting of at most MAX_DEPTH.
    Raises ValueError if it is not such JSON."""
    too_deep = f"it is nested over {MAX_DEPTH} deep"
    try:
        value = json.loads(raw.decode("utf-8-sig"), parse_float=_finite, parse_constant=_finite)
    except RecursionError as error:
        raise ValueError(too_deep) from error
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH and _depth(value) > MAX_DEPTH:
        raise ValueError(too_deep)
    return value


def read_object(raw: bytes) -> Body:
    """Parse an engine's JSON object. Raises ValueError if it is not one."""
    try:
        value = read_json(raw)
    except ValueError as error:
        raise ValueError(f"it sent no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"it sent a JSON {type(value).__name__}, want an object")
    return value


def read_answer(request: ParsedRequest, raw: bytes) -> Body:
    """Parse an answer that is not a stream. Raises ValueError if it is invalid or an error object."""
    answer = read_object(raw)
    if answer.get("error") is not None:
        raise ValueError(f"it answered with an error: {quoted(answer['error'])}")
    _check_choices(request, answer, "message")
    if not answer["choices"]:
        raise ValueError("choices = []: want at least one")
    return answer


def read_event(request: ParsedRequest, data: bytes) -> Body:
    """Parse an event of a stream, or an error in its place, which has the field `error`.
    Raises ValueError if it is neither."""
    event = read_object(data)
    if event.get("error") is None:
        _check_choices(request, event, "delta")
    return event


def read_tokens(raw: bytes) -> tuple[int, ...]:
    """Parse the token ids in an answer of `/tokenize`. Raises ValueError if there are none."""
    tokens = read_object(raw).get("tokens")
    if not isinstance(tokens, list) or not all(type(token) is int and 0 <= token < 2**31 for token in tokens):
        raise ValueError(f"tokens = {quoted(tokens)}: want a list of token ids")
    return tuple(tokens)


def read_token_count(raw: bytes, name: str = "hit_tokens") -> int:
    """Parse the token count in an answer of kvkit's `/lookup` or `/pin`. Raises ValueError if it has none."""
    tokens = _optional_field(read_object(raw), name, int)
    if tokens is None:
        raise ValueError(f"{name}: missing")
    return int(tokens)


def remove_params(answer: Body) -> None:
    """Remove `kv_transfer_params`, except for the token counts of blending. Mutates."""
    params = answer.pop(_PARAMS, None)
    blend = params.get(BLEND) if isinstance(params, dict) else None
    if isinstance(blend, dict):
        answer[_PARAMS] = {BLEND: {name: n for name in BLEND_TOKENS if type(n := blend.get(name)) is int}}


def is_aborted(event: Mapping[str, Any]) -> bool:
    """Return whether the engine aborted this answer or event, as vLLM does when it shuts down."""
    return any(choice.get("finish_reason") in ("abort", "error") for choice in event["choices"])


def computed_tokens(reply: Mapping[str, Any]) -> int | None:
    """Return how many prompt tokens were computed, cached ones excluded; None: not reported."""
    usage = reply.get("usage") or {}
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    if type(cached) is not int or not 0 <= cached <= MAX_INTEGER:
        return None
    return max(0, (usage.get("prompt_tokens") or 0) - cached)


DONE = b"[DONE]"
DONE_EVENT = b"data: [DONE]\n\n"


def error_body(status: int, message: str) -> Body:
    """Return an error object as OpenAI's clients expect it."""
    kind = "BadRequestError" if 400 <= status < 500 else "InternalServerError"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def _check_choices(request: ParsedRequest, answer: Body, field_name: str) -> None:
    """Check the fields of an answer, or of an event, that are read here and in `answers`.

    Args:
        field_name: field of a choice that holds the message in a chat.

    Raises:
        ValueError: a field is missing or has a wrong type or value; the message names it.
    """
    _optional_field(answer, "id", str)
    _optional_field(answer, "created", int)
    choices = answer.get("choices")
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise ValueError(f"choices = {quoted(choices)}: want a list of objects")
    if len(choices) > request.max_choices:
        raise ValueError(f"{len(choices)} choices, want at most {request.max_choices}")
    _optional_field(answer, "usage", dict)
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        _optional_field(answer.get("usage") or {}, name, int)
    holders = [choice[field_name] for choice in choices if isinstance(choice.get(field_name), dict)]
    for holder in (answer, *choices, *holders):
        for name in ("prompt_token_ids", "token_ids"):
            ids = _optional_field(holder, name, list)
            if ids and not _are_token_ids(ids):
                raise ValueError(f"{name} = {quoted(ids)}: want token ids")
    for choice in choices:
        _optional_field(choice, "finish_reason", str)
        if (_optional_field(choice, "index", int) or 0) >= request.max_choices:
            raise ValueError(f"index = {choice['index']}: want less than {request.max_choices}")
        if request.kind == "chat":
            message = _optional_field(choice, field_name, dict)
            for name, kind in (("role", str), ("content", str), ("tool_calls", list)):
                _optional_field(message or {}, name, kind)
        else:
            message = _optional_field(choice, "text", str)
        if message is None and field_name == "message":
            raise ValueError(f"a choice has no content: {quoted(choice)}")


def _optional_field(holder: Mapping[str, Any], name: str, kind: type) -> Any:
    """Return a field, or None if it is missing.
    Raises ValueError if it has another type, or is an integer outside 0 to MAX_INTEGER."""
    value = holder.get(name)
    if value is None:
        return None
    if type(value) is not kind or (type(value) is int and not 0 <= value <= MAX_INTEGER):
        raise ValueError(f"{name} = {quoted(value)}: want {kind.__name__}")
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


def _depth(value: Any) -> int:
    """Return the maximum nesting of objects and lists."""
    depth, level = 0, [value] if isinstance(value, dict | list) else []
    while level:
        depth += 1
        contents = (outer.values() if isinstance(outer, dict) else outer for outer in level)
        level = [inner for content in contents for inner in content if isinstance(inner, dict | list)]
    return depth


def _are_token_ids(prompt: list[Any]) -> bool:
    return bool(prompt) and all(type(token) is int for token in prompt)


def _opening(request: ParsedRequest) -> str:
    """Return the beginning that a conversation's requests share: first messages, or start of the prompt."""
    model = request.body.get("model")
    if request.kind == "chat":
        messages = request.body["messages"]
        first = next((i for i, m in enumerate(messages) if m.get("role") == "user"), len(messages))
        return json.dumps([model, messages[: first + 1]], sort_keys=True)
    prompt = request.body.get("prompt")
    if isinstance(prompt, str):
        return json.dumps([model, prompt[:_OPENING_CHARS]])
    return json.dumps([model, (prompt or [])[:_OPENING_TOKENS]])


def _text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        texts = (part.get("text") for part in content if isinstance(part, dict))
        return "".join(text for text in texts if isinstance(text, str))
    return content if isinstance(content, str) else ""


def quoted(value: Any) -> str:
    """Format a value from outside for a message."""
    text = reprlib.repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
