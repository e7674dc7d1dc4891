"""What two nodes say to each other: small structs, each with bounds, as MessagePack; one decoder, one error.

docs/handoff.md is the protocol: who says what when, and how a message is framed.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

import msgspec

from kvkit.format.names import RECORD

VERSION = 2
"""Of the protocol. Nodes of different versions do not talk."""

MAX_BODY_BYTES = 4 << 20
"""The largest body of a frame, which is one message."""

MAX_NAMES = 32768
"""Records of one transfer, or of one question. With the longest names that is less than MAX_BODY_BYTES."""

MAX_DEADLINE_S = 3600.0

MAX_ID = 128
"""Characters of the name of a transfer."""

MAX_PEER_NAME = 100
"""Those of a peer's, which its pulls are called by, with a number."""

MAX_RANKS = 1024
"""Of an engine; so many transfers may a request have."""

MAX_LABEL = 256
"""Characters of a node's or tier's name."""

HANDOFF = "handoff"
"""The name of the tier that holds what peers sent."""

Name = Annotated[str, msgspec.Meta(pattern=rf"^{RECORD}\Z")]
"""Of a record."""

Names = Annotated[tuple[Name, ...], msgspec.Meta(min_length=1, max_length=MAX_NAMES)]
_ID = rf"^[\x21-\x7e]{{1,{MAX_ID}}}\Z"
Id = Annotated[str, msgspec.Meta(pattern=_ID)]
Label = Annotated[str, msgspec.Meta(max_length=MAX_LABEL)]
Reason = Annotated[str, msgspec.Meta(max_length=1024)]
Ranks = Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=MAX_DEADLINE_S)]
Number = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Index = Annotated[int, msgspec.Meta(ge=0, lt=MAX_NAMES)]
ByteCount = Annotated[int, msgspec.Meta(ge=0, lt=2**40)]
Random = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Code = Literal["malformed", "unexpected", "refused"]
Slot = Annotated[int, msgspec.Meta(ge=-1, lt=2**31)]


class MessageError(ValueError):
    """A message is malformed, or out of bounds. The text says what is wrong, never the bytes."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag=str.lower):
    """Anything that is said."""


class Hello(Message, frozen=True, forbid_unknown_fields=False):
    """Who speaks: the first message of each side. (Other versions may say more in it.)

    Attributes:
        version: `VERSION`.
        node: its name, for logs.
        namespace: digest of the namespace without LoRA and salt, hex: records of others are of no use here.
        layout: `KVLayout.fingerprint()`.
        slot_bytes: of its largest record.
        nonce: random, for this connection alone.
        ranks: of the engine that it is a rank of.
        record_ranks: how many records hold the heads of a layer; 0: no other rank has any use for them.
        draft: what the draft is whose KV is in the records, too; empty for none.
    """

    version: Number
    node: Label
    namespace: Label
    layout: Label
    slot_bytes: ByteCount
    nonce: Random
    ranks: Ranks = 1
    record_ranks: Annotated[int, msgspec.Meta(ge=0, le=MAX_RANKS)] = 1
    draft: Label = ""


class Proof(Message, frozen=True):
    """That this side knows the secret: HMAC-SHA256 over both hellos, see `kvkit.handoff.transport.auth`."""

    mac: Random


class Query(Message, frozen=True):
    """How long a run of these is held near? Answered by `Found` with the same id; computes nothing."""

    id: Number
    names: Names


class TierRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first `records` of the names asked for are in this tier."""

    tier: Label
    scope: Literal["node", "shared"]
    records: Annotated[int, msgspec.Meta(ge=0, le=MAX_NAMES)]


class Found(Message, frozen=True):
    """The answer to a `Query`: one run for each near tier."""

    id: Number
    runs: Annotated[tuple[TierRun, ...], msgspec.Meta(max_length=64)]


class OfTransfer(Message, frozen=True):
    """What concerns one transfer, named by its sender."""

    transfer: Id


class Asking(OfTransfer, frozen=True):
    """What names records, each once."""

    names: Names

    def __post_init__(self) -> None:
        if len(set(self.names)) != len(self.names):
            raise ValueError("names: one is there twice")


class Reserve(Asking, frozen=True):
    """Sender: may I send these? All or nothing; the receiver answers `Admit` or `Refuse` by the deadline.

    Attributes:
        request: what the transfer brings, or a part of; empty: it has the transfer's name.
        parts: how many transfers bring that to this receiver. All of them are admitted together.
    """

    deadline_s: Seconds
    request: Annotated[str, msgspec.Meta(pattern=rf"({_ID})|^\Z")] = ""
    parts: Ranks = 1


class Admit(OfTransfer, frozen=True):
    """Receiver: a slot for each name, -1 for what it has already."""

    slots: Annotated[tuple[Slot, ...], msgspec.Meta(min_length=1, max_length=MAX_NAMES)]


class Refuse(OfTransfer, frozen=True):
    """Receiver: there will be no slots. The transfer is over."""

    reason: Reason


class Data(OfTransfer, frozen=True):
    """Sender: the record `names[index]`, `size` bytes, follows, or lies in its slot of the shared memory."""

    index: Index
    size: ByteCount


class Commit(OfTransfer, frozen=True):
    """Sender: that was all; what is `missing` does not come."""

    missing: Annotated[tuple[Index, ...], msgspec.Meta(max_length=MAX_NAMES)] = ()


class Done(OfTransfer, frozen=True):
    """Receiver: everything is in, and available."""


class Cancel(OfTransfer, frozen=True):
    """Sender: I write no more to any slot of this transfer. Ends it, or acknowledges its `Release`."""


class Release(OfTransfer, frozen=True):
    """Receiver: it needs the transfer no more: used, expired or cancelled. The sender answers `Cancel`."""

    reason: Reason


class Pull(Asking, frozen=True):
    """Receiver: send me these. Answered by `Data` with payload, then `Commit`; its `Release` ends it."""


class Error(Message, frozen=True):
    """The other side broke the protocol, or is nobody to talk to: the connection is over."""

    code: Code
    message: Reason


AnyMessage = (
    Hello
    | Proof
    | Query
    | Found
    | Reserve
    | Admit
    | Refuse
    | Data
    | Commit
    | Done
    | Cancel
    | Release
    | Pull
    | Error
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    """`message` as the body of a frame.

    Raises:
        MessageError: it is longer than MAX_BODY_BYTES.
    """
    body = _encoder.encode(message)
    if len(body) > MAX_BODY_BYTES:
        raise MessageError(f"{type(message).__name__}: {len(body)} bytes, at most {MAX_BODY_BYTES} are sent")
    return body


def decode(body: bytes | memoryview) -> AnyMessage:
    """The message in the body of a frame; only what is in bounds.

    Raises:
        MessageError: it is no such message.
    """
    if len(body) > MAX_BODY_BYTES:
        raise MessageError(f"{len(body)} bytes, at most {MAX_BODY_BYTES} are read")
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise MessageError(f"malformed message: {error}"[:1024]) from None


def check_id(what: str, name: object, most: int = MAX_ID) -> str:
    """`name` of a `what`, as it may be said: whoever is told another one hangs up.

    Raises:
        MessageError: it may not.
    """
    if isinstance(name, str) and len(name) <= most and re.search(_ID, name):
        return name
    raise MessageError(f"{what} {name!r}: want 1 to {most} printable ASCII characters without space")
