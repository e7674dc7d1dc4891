"""Two endpoints prove to each other that they hold the same secret, without sending it: HMAC-SHA256."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Literal

NONCE_BYTES = 32
Side = Literal["client", "server"]


def new_nonce() -> bytes:
    """What makes a hello, and with it a proof, good for one connection only."""
    return secrets.token_bytes(NONCE_BYTES)


def prove(secret: bytes, role: Side, client_hello: bytes, server_hello: bytes) -> bytes:
    """The proof of one side: depends on its role, so that it cannot be sent back, and on all that was said.

    Args:
        secret: the shared secret; empty where none is set, so that one who has one is refused.
        client_hello, server_hello: the first messages of both sides as they were sent, with their nonces.

    Returns:
        32 bytes.
    """
    mac = hmac.new(secret, b"kvkit handoff " + role.encode(), hashlib.sha256)
    for hello in (client_hello, server_hello):
        mac.update(len(hello).to_bytes(8, "little") + hello)
    return mac.digest()


def is_proof(proof: bytes, secret: bytes, role: Side, client_hello: bytes, server_hello: bytes) -> bool:
    """Whether this is the proof of the side that has `role`; takes as long either way."""
    return hmac.compare_digest(proof, prove(secret, role, client_hello, server_hello))
