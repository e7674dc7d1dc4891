"""A handshake accepts the documented proof of a shared secret, and no other."""

from __future__ import annotations

import hashlib
import hmac

import pytest

from kvkit.handoff.transport.handshake import NONCE_BYTES, Identity, Side, is_proof, prove

SECRET, CLIENT, SERVER = b"s3cret", b"client hello", b"server hello"


def test_a_proof_is_the_mac_that_the_documentation_says() -> None:
    said = b"kvkit handoff client" + (12).to_bytes(8, "little") + CLIENT + (12).to_bytes(8, "little") + SERVER
    assert prove(SECRET, "client", CLIENT, SERVER) == hmac.new(SECRET, said, hashlib.sha256).digest()


@pytest.mark.parametrize("role", ["client", "server"])
def test_each_side_accepts_the_proof_of_the_other(role: Side) -> None:
    assert is_proof(prove(SECRET, role, CLIENT, SERVER), SECRET, role, CLIENT, SERVER)


@pytest.mark.parametrize(
    "other",
    [
        prove(b"s3cret ", "client", CLIENT, SERVER),
        prove(b"", "client", CLIENT, SERVER),
        prove(SECRET, "server", CLIENT, SERVER),  # one's own proof, sent back
        prove(SECRET, "client", SERVER, CLIENT),
        prove(SECRET, "client", CLIENT + b"s", b"erver hello"),  # the same bytes, cut elsewhere
        prove(SECRET, "client", CLIENT, b"server hellO"),
        prove(SECRET, "client", CLIENT, SERVER)[:-1],
        b"",
    ],
)
def test_no_other_proof_is_accepted(other: bytes) -> None:
    assert not is_proof(other, SECRET, "client", CLIENT, SERVER)


def test_nonces_do_not_repeat() -> None:
    nonces = {Identity("n", "space", "layout", 1).hello().nonce for _ in range(100)}
    assert {len(nonce) for nonce in nonces} == {NONCE_BYTES}
    assert len(nonces) == 100
