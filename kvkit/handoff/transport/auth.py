"""Mutual proof that two endpoints hold the same secret, without sending it: HMAC-SHA256."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Literal

NONCE_BYTES = 32
Side = Literal["client", "server"]


def new_nonce() -> bytes:
    """Return random bytes that make a hello, and so a proof, valid for one connection only."""
    return secrets.token_bytes(NONCE_BYTES)


def prove(secret: bytes, role: Side, client_hello: bytes, server_hello: bytes) -> bytes:
    """Return the proof of one side. It depends on both hellos, and on the role: it cannot be sent back.

    Args:
        secret: shared secret; empty if none is set, so that a peer with a secret is refused.
        client_hello, server_hello: first messages of both sides as they were sent, with their nonces.

    Returns:
        32 bytes.
    """
    mac = hmac.new(secret, b"kvkit handoff " + role.encode(), hashlib.sha256)
    for hello in (client_hello, server_hello):
        mac.update(len(hello).to_bytes(8, "little") + hello)
    return mac.digest()


def is_proof(proof: bytes, secret: bytes, role: Side, client_hello: bytes, server_hello: bytes) -> bool:
    """Return whether `proof` is that of the side with this `role`, in constant time."""
    return hmac.compare_digest(proof, prove(secret, role, client_hello, server_hello))
