"""The policy of a vLLM request: its `kv_transfer_params.kv_cache`, and an orchestrator's `kv_hints`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvkit.adapters.vllm import params
from kvkit.settings import ConfigError
from kvkit.transfer import hints, requests
from kvkit.transfer.policy import DEFAULT_REQUEST_POLICY, RequestPolicy
from kvkit.transfer.requests import RequestLimits

log = logging.getLogger(__name__)


def read(
    request_id: str,
    transfer_params: Mapping[str, Any] | None,
    kv_hints: Any,
    limits: RequestLimits,
    setting: str,
) -> RequestPolicy:
    """Return a request's policy. What is invalid is ignored, with a warning, except `store = false`.

    Args:
        transfer_params: the request's `kv_transfer_params`.
        kv_hints: its `KvHintsEnvelope`; None: it has none.
        setting: name of the setting of `limits`, for messages.
    """
    policy = _read_params(request_id, (transfer_params or {}).get(requests.FIELD), limits, setting)
    if kv_hints is None:
        return policy
    prefixes, ignored = hints.read(kv_hints, limits)
    for reason in ignored:
        log.warning("%s: a hint is ignored: %s", request_id, reason)
    return replace(policy, prefixes=prefixes)


def _read_params(request_id: str, value: Any, limits: RequestLimits, setting: str) -> RequestPolicy:
    """Return the policy of a request's `kv_cache` object."""
    if value is None:
        return DEFAULT_REQUEST_POLICY
    try:
        return requests.read(value, limits, f"{params.WHERE}.{requests.FIELD}", setting)
    except ConfigError as error:
        is_unstored = isinstance(value, dict) and value.get("store") is False
        log.warning("%s: kv_cache is ignored, except store = false: %s", request_id, error)
        return RequestPolicy(store_to=()) if is_unstored else DEFAULT_REQUEST_POLICY
