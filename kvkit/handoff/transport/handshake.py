"""The handshake of a connection: both sides name themselves, and prove that they hold the same secret.

A proof is an HMAC-SHA256 over both hellos: it does not contain the secret, and is valid for one connection.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import secrets
from dataclasses import dataclass, field
from typing import Literal

from kvkit.handoff.protocol import messages
from kvkit.handoff.protocol.messages import Error, Hello, Proof, decode, encode
from kvkit.handoff.transport.channel import Channel, ChannelError, ChannelIdle

NONCE_BYTES = 32
Side = Literal["client", "server"]

_REFUSAL_BYTES = 512


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of this node, sent in its hello and compared with that of peers; fields as in `Hello`.

    Args:
        secret: secret that peers must know; empty for none.
    """

    node: str
    namespace: str
    layout: str
    slot_bytes: int
    secret: bytes = field(default=b"", repr=False)
    ranks: int = 1
    record_ranks: int = 1
    draft: str = ""

    def hello(self) -> Hello:
        """Return a hello for one connection, with a nonce of its own."""
        return Hello(
            version=messages.VERSION,
            node=self.node,
            namespace=self.namespace,
            layout=self.layout,
            slot_bytes=self.slot_bytes,
            nonce=new_nonce(),
            ranks=self.ranks,
            record_ranks=self.record_ranks,
            draft=self.draft,
        )

    def check(self, hello: Hello) -> None:
        """Refuse a peer that has no usable records for this node.

        Raises:
            ChannelError: the peer is refused. The message names both values.
        """
        own = self.hello()
        advice: dict[str, str] = {}
        if not (common := math.lcm(hello.record_ranks, own.record_ranks)):
            advice = dict.fromkeys(("ranks", "record_ranks"), "; want two engines that are divided alike")
        elif hello.draft != own.draft:
            advice = {"draft": "; want both engines with the same draft, or both without"}
        elif hello.layout != own.layout:
            advice = {"record_ranks": f"; want record_ranks = {common} for both"}
        for name in ("version", *advice, "layout", "namespace", "slot_bytes"):
            peer_value, own_value = getattr(hello, name), getattr(own, name)
            if peer_value != own_value:
                values = f"node {hello.node!r} has {peer_value!r}, {self.node!r} has {own_value!r}"
                raise ChannelError(f"{name}: {values}{advice.get(name, '')}")


def shake_hands(channel: Channel, side: Side, identity: Identity, timeout_s: float) -> Hello:
    """Exchange hellos and proofs, mark the channel as trusted, and return the peer's hello.

    Neither side accepts other messages before the other's proof. The client proves itself first.

    Raises:
        ChannelError: one of the two refuses the other, or the peer sent nothing for `timeout_s` seconds.
        MessageError: a message is malformed.
    """
    own_hello, secret, client = encode(identity.hello()), identity.secret, side == "client"
    if client:
        channel.send(own_hello)
    peer_hello = _receive(channel, timeout_s)
    hello = decode(peer_hello)
    if not isinstance(hello, Hello):
        raise ChannelError(f"{channel.peer} did not send a hello")
    if not client:
        channel.send(own_hello)
    hellos = (own_hello, peer_hello) if client else (peer_hello, own_hello)
    own_proof = encode(Proof(prove(secret, side, *hellos)))
    if client:
        channel.send(own_proof)
    proof = decode(_receive(channel, timeout_s))
    if isinstance(proof, Error):
        raise ChannelError(f"{channel.peer}: {proof.message}")
    peer_side: Side = "server" if client else "client"
    try:
        if not isinstance(proof, Proof) or not is_proof(proof.mac, secret, peer_side, *hellos):
            raise ChannelError("the secrets differ")
        identity.check(hello)
    except ChannelError as error:
        refusal = str(error).encode()[:_REFUSAL_BYTES].decode(errors="ignore")
        channel.send(encode(Error("refused", refusal)))
        raise ChannelError(f"{channel.peer}: {error}") from None
    channel.trusted = True
    if not client:
        channel.send(own_proof)
    return hello


def new_nonce() -> bytes:
    """Return random bytes that make a hello, and so a proof, valid for one connection only."""
    return secrets.token_bytes(NONCE_BYTES)


def prove(secret: bytes, side: Side, client_hello: bytes, server_hello: bytes) -> bytes:
    """Return the proof of one side. It depends on the side, so that a peer cannot send it back.

    Args:
        secret: shared secret; empty if none is set, so that a peer with a secret is refused.
        client_hello, server_hello: first messages of both sides as they were sent, with their nonces.

    Returns:
        32 bytes.
    """
    mac = hmac.new(secret, b"kvkit handoff " + side.encode(), hashlib.sha256)
    for hello in (client_hello, server_hello):
        mac.update(len(hello).to_bytes(8, "little") + hello)
    return mac.digest()


def is_proof(proof: bytes, secret: bytes, side: Side, client_hello: bytes, server_hello: bytes) -> bool:
    """Return whether `proof` is that of `side`, in constant time."""
    return hmac.compare_digest(proof, prove(secret, side, client_hello, server_hello))


def _receive(channel: Channel, timeout_s: float) -> bytes:
    """Receive a message of the handshake."""
    try:
        return channel.receive(lambda body: None, timeout_s)
    except ChannelIdle:
        raise ChannelError(f"{channel.peer} sent nothing for {timeout_s} s") from None
