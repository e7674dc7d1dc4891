"""`kv_transfer_params` of a router are read and answered, and errors name the choices."""

from __future__ import annotations

from typing import Any

import pytest

from kvkit.adapters.vllm.params import (
    HandoffUnavailable,
    RemoteDecode,
    RemotePrefill,
    answer,
    read,
    read_for,
)
from kvkit.handoff.settings import HandoffConfig
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


TAKE = {"do_remote_prefill": True, "transfer_id": "t"}
SETTINGS = {
    role: HandoffConfig(role=role, listen=("unix:///d",), buffer=1 << 20, peers={"d": "unix:///d"})
    for role in ("prefill", "decode", "both")
}


@pytest.mark.parametrize("role", [None, *SETTINGS])
@pytest.mark.parametrize(("params", "sends"), [(SEND, True), (TAKE, False)])
def test_a_side_that_the_settings_have_not_is_refused_by_name(
    params: dict[str, Any], sends: bool, role: str | None
) -> None:
    if role in ("both", "prefill" if sends else "decode"):
        asked = read_for(params, SETTINGS[role])
        assert isinstance(asked, RemoteDecode if sends else RemotePrefill)
        return
    have = r"there is no \[handoff\]" if role is None else f"handoff.role is '{role}'"
    want = "'prefill'" if sends else "'decode'"
    asked_for = "do_remote_decode" if sends else "do_remote_prefill"
    with pytest.raises(HandoffUnavailable, match=f"{asked_for}: {have} .*; want role = {want} or 'both'"):
        read_for(params, None if role is None else SETTINGS[role])


def test_who_asks_for_no_handoff_needs_no_settings_of_it() -> None:
    assert read_for(None, None) is None
    assert read_for({"do_remote_decode": False, "other": 1}, None) is None
