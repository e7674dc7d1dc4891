"""vLLM's engine, as the scheduler's side of the connector sees it."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any

from kvkit.adapters.engine.lookup_request import LookupAnswer, LookupRequest, Lora, Sequence
from kvkit.adapters.vllm import compat, marks, params, request_policy
from kvkit.adapters.vllm.events import Events
from kvkit.adapters.vllm.media import Media, ids_in_keys
from kvkit.adapters.vllm.params import HandoffUnavailable, RemoteDecode, RemotePrefill
from kvkit.adapters.vllm.settings import WHERE, Settings
from kvkit.adapters.vllm.stats import Refusals
from kvkit.config import Config
from kvkit.observe.tracing import trace_headers
from kvkit.settings import ConfigError
from kvkit.transfer.policy import RequestPolicy

log = logging.getLogger(__name__)


class VllmEngine:
    """One engine's requests and blocks: a `kvkit.adapters.vllm.planner.EngineView`.

    Args:
        caches: True if any KV of this engine can be cached.
        events: receives the chunks whose records workers will name; None: the engine sends no events.

    Attributes:
        kv_cache_manager: vLLM's `KVCacheManager`; None until vLLM has made it.
        refusals: requests for handoffs that were refused.
    """

    def __init__(
        self, vllm_config: Any, settings: Settings, config: Config, caches: bool, events: Events | None
    ) -> None:
        self._vllm_config, self._settings, self._config = vllm_config, settings, config
        self._caches, self._events = caches, events
        self._media = Media()
        self._tool_calls = marks.encoded("tool_calls", settings.tool_calls, self.encode)
        self.kv_cache_manager: Any = None
        self.refusals = Refusals()

    def now(self) -> float:
        return time.monotonic()

    def sequence(self, request: Any, tokens: int) -> Sequence | None:
        """Return the first `tokens` tokens of vLLM's request; None if their KV cannot be cached."""
        media = self._media.of_request(request)
        if not self._caches or request.prompt_embeds is not None or media is None:
            return None
        lora = request.lora_request and Lora(
            request.lora_request.lora_int_id,
            request.lora_request.lora_path,
            request.lora_request.lora_name,
            request.lora_request.is_3d_lora_weight,
            request.lora_request.load_inplace,
        )
        ids, rest = ids_in_keys(request.all_token_ids[:tokens], media, chunk_tokens=self._config.chunk_tokens)
        return Sequence(ids, lora, request.cache_salt or "", rest)

    def note_media(self, request: Any) -> None:
        """Note the media of a request before vLLM computes it, even if the request is not looked up."""
        self._media.of_request(request)

    def cached_tokens(self, request: Any) -> int:
        return compat.computed_tokens(self.kv_cache_manager, request)

    def free_blocks(self) -> int:
        return compat.free_blocks(self.kv_cache_manager)

    def handoff_of(self, request: Any) -> RemoteDecode | RemotePrefill | None:
        """Return the handoff that a request asks for; None, with a warning, if its parameters are invalid."""
        try:
            return params.read_for(request.kv_transfer_params, self._config.handoff)
        except HandoffUnavailable as error:
            if self.refusals.first(str(error)):
                log.warning("%s: nothing is handed off (logged once): %s", request.request_id, error)
        except ConfigError as error:
            self.refusals.add()
            log.warning("%s: nothing is handed off: %s", request.request_id, error)
        return None

    def policy_of(self, request: Any) -> RequestPolicy:
        """Return a request's policy, by its `kv_cache` and `kv_hints`, or that of its session."""
        settings, sessions = self._settings, self._settings.sessions
        policy = request_policy.read(
            request.request_id,
            request.kv_transfer_params,
            request.kv_hints,
            settings.requests,
            f"{WHERE}.requests",
        )
        if request.session_id is None or policy.retains:
            return policy
        return replace(policy, keep_s=sessions.keep_s, priority=sessions.priority)

    def trace_of(self, request: Any) -> dict[str, str]:
        """Return the headers of the trace that a request came with; empty: it came with none."""
        return trace_headers(request.trace_headers)

    def calls_tool(self, request: Any) -> bool | None:
        """Return whether an answer has one of the marks of `tool_calls`; None: there are none."""
        return marks.holds(request.output_token_ids, self._tool_calls) if self._tool_calls else None

    def lookup_inline(self, lookup: LookupRequest) -> LookupAnswer | None:
        """Ask the worker at once if it is the only one and in this process; otherwise return None."""
        engine_id = self._vllm_config.kv_transfer_config.engine_id
        for connector in (
            compat.worker_connectors() if self._vllm_config.parallel_config.world_size == 1 else ()
        ):
            if hasattr(connector, "lookup_inline") and connector.engine_id == engine_id:
                answer: LookupAnswer | None = connector.lookup_inline(lookup)
                return answer
        return None

    def expect_chunks(self, request: Any, first: int, stop: int) -> None:
        if self._events is not None:
            self._events.expect(request, first, stop)

    def keeps_cached_blocks(self) -> bool:
        """Return whether vLLM's own prefix cache has blocks that it cannot reset."""
        return compat.keeps_cached_blocks(self.kv_cache_manager)

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Return the token ids of `text`; `special`: with those that the tokenizer adds, such as `<bos>`."""
        tokenizer = compat.find("cached_tokenizer_from_config")(self._vllm_config.model_config)
        ids: list[int] = tokenizer.encode(text, add_special_tokens=special)
        return ids
