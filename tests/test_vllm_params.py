"""What a router asks for in `kv_transfer_params`: read, refused with the choices, answered."""

from __future__ import annotations

from typing import Any

import pytest

from kvkit.adapters.vllm.params import RemoteDecode, RemotePrefill, answer, read
from kvkit.settings import ConfigError

PEERS = {"d0": "tcp://127.0.0.1:7000", "d1": "unix:///run/d1"}
SEND = {"do_remote_decode": True, "do_remote_prefill": False}


def test_who_asks_for_nothing_gets_nothing() -> None:
    assert read(None, PEERS) is None
    assert read({}, PEERS) is None
    assert read({"do_remote_decode": False, "other": 1}, PEERS) is None


@pytest.mark.parametrize("given", ["d1", "unix:///run/d1"])
def test_a_peer_is_named_or_told_by_its_address(given: str) -> None:
    assert read({**SEND, "transfer_id": "t", "handoff": given}, PEERS) == RemoteDecode("t", "unix:///run/d1")


def test_the_only_peer_need_not_be_told_and_ids_differ() -> None:
    first, second = (read(SEND, {"d": "unix:///d"}) for _ in range(2))
    assert isinstance(first, RemoteDecode)
    assert isinstance(second, RemoteDecode)
    assert first.address == second.address == "unix:///d"
    assert first.transfer != second.transfer


def test_what_is_answered_is_what_the_other_engine_reads() -> None:
    told = answer(RemoteDecode("t", "unix:///d"), 384)
    assert read(told, {}) == RemotePrefill("t", computed=True)
    del told["remote_num_tokens"]
    assert read(told, {}) == RemotePrefill("t", computed=False), (
        "asked before the prefill engine has answered"
    )


@pytest.mark.parametrize(
    ("params", "word"),
    [
        ({**SEND, "do_remote_prefill": True}, "both"),
        (SEND, "the peers are d0, d1"),
        ({**SEND, "handoff": "d2"}, "'d2': no such peer; the peers are d0, d1"),
        ({**SEND, "handoff": 7}, "handoff = 7"),
        ({**SEND, "handoff": "d0", "transfer_id": 7}, "transfer_id: transfer 7: want"),
        ({**SEND, "handoff": "d0", "transfer_id": "a b"}, "transfer 'a b': want 1 to 128"),
        ({"do_remote_prefill": True}, "transfer None"),
        ({"do_remote_prefill": True, "transfer_id": ""}, "transfer ''"),
    ],
)
def test_what_is_wrong_is_named(params: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        read(params, PEERS)
