"""Errors of the vLLM connector's settings name the setting, the value and the choices."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from kvkit.adapters.vllm.settings import read_settings
from kvkit.settings import ConfigError


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        (
            {"laod": "sync"},
            r"extra_config\.laod: unknown setting; did you mean 'load'\? the settings here are",
        ),
        ({"load": "later"}, r"extra_config\.load = 'later': .*'async', 'sync' or 'layerwise'"),
        ({"lookup_timeout_s": 0}, r"extra_config\.lookup_timeout_s = 0: .*greater than 0"),
        ({"kvkit": {"chunk_token": 3}}, "chunk_token: unknown setting; did you mean 'chunk_tokens'"),
        ({}, "extra_config: no tiers; give kvkit_config"),
    ],
)
def test_a_setting_that_cannot_be_is_named_with_the_choices(extra: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read_settings(extra)
