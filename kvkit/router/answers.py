"""State of a streamed answer: the tokens and text that the client has, and a request for the missing part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvkit.router.openai import Body, ParsedRequest

_RESTARTED_FIELDS = (
    *("stop", "echo", "seed", "tools", "logprobs", "presence_penalty", "frequency_penalty"),
    *("response_format", "structured_outputs", "repetition_detection"),
)
"""Fields with effects that depend on the answer's beginning: another engine continues differently.
(With `stop`, vLLM also holds text back, so that the tokens are ahead of the text.)"""
_IDS = "token_ids"
_UTF32, _CHAR_BYTES = "utf-32-le", 4  # append without a copy, and random access
MAX_KEPT = 16 << 20
"""Maximum number of characters and tokens kept of an answer, for another engine to continue it."""


class CannotContinue(RuntimeError):
    """No other engine can continue an answer; the message gives the reason."""


class Answer:
    """Events of one streamed answer, from one or more engines. `advance` and `resume` mutate it.

    An engine that takes over gets the tokens so far as the end of its prompt. If it would then continue
    differently, it makes the answer again from the start; the client gets nothing until the new answer is
    past what the client has, which must be the same.

    Attributes:
        finished: True if each of its choices has a finish reason.
        took_over: True if an engine had to continue the answer of another.
        prompt_tokens: prompt length of the client's request; None until an engine reported it.
    """

    def __init__(self, request: ParsedRequest) -> None:
        self.finished = False
        self.took_over = False
        self.prompt_tokens: int | None = None
        self._request = request
        self._text = "text" if request.kind == "completions" else "content"
        self._texts: dict[str, bytearray] = {}  # by field: what the client has, in _UTF32
        self._ids: list[int] = []  # kept even if the client does not get them
        self._kept_count = 0
        self._prompt_ids: tuple[int, ...] = ()
        self._aligned: dict[str, int] = {}  # by field: last position at which tokens and text ended together
        self._position: dict[str, int] = {}  # by field: the current engine's position in the answer
        self._given_tokens = 0  # of the answer, in the current engine's prompt
        self._identity: Body = {}
        self._usage_sent = False
        self._began = False
        self._has_tokens = True
        self._calls_tools = False
        self._ended: dict[int, bool] = {}  # by index, for several choices

    def advance(self, event: Mapping[str, Any]) -> Body | None:
        """Take the current engine's next event, and return the client's version; None: nothing to send.

        Args:
            event: event from `openai.read_event`.

        Raises:
            CannotContinue: the engine took over, and makes another answer than the client has; or the answer
                is longer than MAX_KEPT.
        """
        self._began = True
        self._identity = self._identity or {k: event[k] for k in ("id", "created") if k in event}
        client_event = {k: v for k, v in event.items() if k != "kv_transfer_params"} | self._identity
        if not self._request.single:
            self._count_choices(client_event["choices"])
            return client_event
        if client_event.get("usage"):
            prompt, completion = (
                client_event["usage"].get(name) or 0 for name in ("prompt_tokens", "completion_tokens")
            )
            client_event["usage"] = client_event["usage"] | {
                "prompt_tokens": max(0, prompt - self._given_tokens),
                "completion_tokens": completion + self._given_tokens,
            }
        if not client_event["choices"]:
            self._usage_sent |= bool(client_event.get("usage"))
            return client_event
        choice = dict(client_event["choices"][0])
        client_event["choices"] = [choice]
        self._record_prompt(client_event, choice)
        is_new = self._advance_choice(choice)
        if choice.get("finish_reason") is not None:
            if self._position.get(self._text, 0) < len(self._texts.get(self._text, b"")) // _CHAR_BYTES:
                raise CannotContinue("the engine that took over ends the answer before what the client has")
            self.finished = is_new = True
        return client_event if is_new else None

    def resume(self) -> ParsedRequest:
        """Return the request for another engine after the current one failed; `advance` then gets its events.
        Raises CannotContinue if the answer has several choices or tool calls."""
        if not self._began:
            return self._request
        if not self._request.single or self._calls_tools:
            raise CannotContinue("no other engine can continue an answer with several choices or tool calls")
        self.took_over = True
        ids = self._ids
        kept = self._aligned.get(_IDS, 0)
        max_tokens = self._request.max_tokens
        remaining = None if max_tokens is None else max_tokens - kept
        if not self._can_continue or kept == 0 or (remaining is not None and remaining <= 0):
            kept, remaining = 0, max_tokens
        if not self._shows_ids:  # tokens that the client does not have may differ
            del ids[kept:]
        if kept == 0:
            self._position, self._given_tokens = {}, 0
            return self._request
        self._position, self._given_tokens = dict(self._aligned), kept
        body = dict(self._request.body)
        if remaining is not None:
            limits = [n for n in ("max_tokens", "max_completion_tokens") if body.get(n) is not None]
            body |= dict.fromkeys(limits or ["max_tokens"], remaining)
        if body.get("min_tokens"):
            body["min_tokens"] = max(0, body["min_tokens"] - kept)
        return replace(self._request, body=body, token_ids=(*self._prompt_ids, *ids[:kept]))

    def last_event(self) -> Body | None:
        """Return the usage event that the engine did not send before it failed; None: none is missing."""
        if not self._request.includes_usage or self._usage_sent or self.prompt_tokens is None:
            return None
        prompt, completion = self.prompt_tokens, len(self._ids)
        kind = "text_completion" if self._request.kind == "completions" else "chat.completion.chunk"
        return {
            **self._identity,
            "object": kind,
            "model": self._request.body.get("model"),
            "choices": [],
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": completion,
                "total_tokens": prompt + completion,
            },
        }

    @property
    def _shows_ids(self) -> bool:
        return bool(self._request.body.get("return_token_ids"))

    @property
    def _can_continue(self) -> bool:
        """True if another engine, given the tokens so far, continues as the first engine would have."""
        return self._has_tokens and not any(self._request.body.get(name) for name in _RESTARTED_FIELDS)

    def _count_choices(self, choices: Sequence[Mapping[str, Any]]) -> None:
        """Record which of several choices have ended."""
        self._ended |= {c.get("index") or 0: c.get("finish_reason") is not None for c in choices}
        self.finished = len(self._ended) == self._request.max_choices and all(self._ended.values())

    def _record_prompt(self, event: Body, choice: Body) -> None:
        """Record the prompt's tokens of the first event; remove them unless the client asked for them."""
        for holder in (event, choice):
            ids = holder.get("prompt_token_ids")
            shows = False
            if ids is not None and self.prompt_tokens is None:
                self._prompt_ids, self.prompt_tokens, shows = tuple(ids), len(ids), self._shows_ids
            if not shows:
                holder.pop("prompt_token_ids", None)

    def _advance_choice(self, choice: Body) -> bool:
        """Record what is new in a choice, and remove the rest; return whether to send it. Mutates."""
        delta, has_other_fields = choice, False
        names = {self._text} if isinstance(choice.get(self._text), str) else set()
        if self._request.kind == "chat":
            delta = choice["delta"] = dict(choice.get("delta") or {})
            if self.took_over:
                delta.pop("role", None)
            names = {name for name, value in delta.items() if isinstance(value, str)} - {"role"}
            has_other_fields = any(value for name, value in delta.items() if name not in names)
            self._has_tokens = self._has_tokens and names <= {self._text}
            self._calls_tools = self._calls_tools or bool(delta.get("tool_calls"))
        texts = {name: self._append_new(name, delta[name]) for name in names}
        delta |= texts
        ids, new_ids = choice.pop(_IDS, None), []
        if ids is None:
            self._has_tokens = self._has_tokens and not any(texts.values())  # else some tokens are not known
        else:
            new_ids = self._append_new(_IDS, ids)
            if len(ids) == 1 and texts.get(self._text):
                self._aligned = dict(self._position)
            if self._shows_ids:
                choice[_IDS] = new_ids
        if self.took_over:
            return has_other_fields or any(texts.values()) or bool(new_ids and self._shows_ids)
        return delta is choice or bool(delta) or bool(new_ids and self._shows_ids)

    def _append_new(self, name: str, piece: Any) -> Any:
        """Record `piece`, and return its end that is new."""
        start = self._position.get(name, 0)
        text = self._texts.setdefault(name, bytearray()) if isinstance(piece, str) else None
        stop = start + len(piece)
        known: Any = self._ids[start:stop] if text is None else _chars(text, start, stop)
        if piece[: len(known)] != known:
            raise CannotContinue("the engine that took over makes another answer than the client has")
        new = piece[len(known) :]
        self._kept_count += len(new)
        if self._kept_count > MAX_KEPT:
            raise CannotContinue(f"the answer is longer than {MAX_KEPT} characters and tokens")
        if text is None:
            self._ids += new
        else:
            text += new.encode(_UTF32, "surrogatepass")
        self._position[name] = stop
        return new


def _chars(text: bytearray, start: int, stop: int) -> str:
    """Return characters `start` to `stop`, or fewer at the end of the text."""
    return text[start * _CHAR_BYTES : stop * _CHAR_BYTES].decode(_UTF32, "surrogatepass")
