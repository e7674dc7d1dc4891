"""Messages between two nodes: small structs with bounded fields, encoded as MessagePack.

docs/reference/protocol.md describes the protocol: the order of the messages, and their frames.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

import msgspec

from kvkit.format.names import RECORD

VERSION = 2
"""Version of the protocol. Nodes of different versions refuse each other."""

MAX_BODY_BYTES = 4 << 20
"""Largest body of a frame, which is one message."""

MAX_NAMES = 32768
"""Most records in one transfer or query. Their names, however long, fit in MAX_BODY_BYTES."""

MAX_DEADLINE_S = 3600.0
"""Longest time that a sender may give a receiver to find slots."""

MAX_ID = 128
"""Most characters of a transfer id."""

MAX_PEER_NAME = 100
"""Most characters of a peer's name. The id of a pull from it is this name and a number."""

MAX_RANKS = 1024
"""Most ranks of an engine, and most transfers of one request."""

MAX_LABEL = 256
"""Most characters of a node's or tier's name."""

HANDOFF = "handoff"
"""Name of the tier that holds records from peers."""

Name = Annotated[str, msgspec.Meta(pattern=rf"^{RECORD}\Z")]
"""Name of a record."""

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
    """A message is malformed or out of bounds. The text describes the fault and never quotes the bytes."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag=str.lower):
    """Base class of the messages."""


class Hello(Message, frozen=True, forbid_unknown_fields=False):
    """First message of each side: its identity. Unknown fields are ignored: other versions may add some.

    Attributes:
        version: `VERSION`.
        node: name of the node, for logs.
        namespace: digest of the namespace without LoRA and salt, in hex; both sides need the same.
        layout: `KVLayout.fingerprint()`.
        slot_bytes: bytes of its largest record.
        nonce: random bytes, different for each connection.
        ranks: number of ranks of its engine.
        record_ranks: number of records that the heads of a layer are divided into; 0: only the peer's rank
            of the same number can use them.
        draft: identity of the draft model, if the records hold its KV too; empty for none.
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
    """Proof that this side knows the secret: HMAC-SHA256 over both hellos, see `transport.handshake`."""

    mac: Random


class Query(Message, frozen=True):
    """Client: asks how many leading `names` each host-memory tier holds. Answered by `Found` of this id."""

    id: Number
    names: Names


class TierRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Number of leading names of a query that one tier holds: `records`."""

    tier: Label
    scope: Literal["node", "shared"]
    records: Annotated[int, msgspec.Meta(ge=0, le=MAX_NAMES)]


class Found(Message, frozen=True):
    """Answer to the `Query` of this id: one run for each host-memory tier."""

    id: Number
    runs: Annotated[tuple[TierRun, ...], msgspec.Meta(max_length=64)]


class TransferMessage(Message, frozen=True):
    """Base class of messages about one transfer. The side that opens the transfer chooses its id."""

    transfer: Id


class NamedRecords(TransferMessage, frozen=True):
    """Base class of messages that list records by name, each once."""

    names: Names

    def __post_init__(self) -> None:
        if len(set(self.names)) != len(self.names):
            raise ValueError("names: a record is listed twice")


class Reserve(NamedRecords, frozen=True):
    """Sender: requests slots for all of `names`. The receiver answers `Admit` or `Refuse` by the deadline.

    Attributes:
        deadline_s: seconds within which the receiver must find slots.
        request: id of the request that the transfer belongs to; empty: the transfer's own id.
        parts: number of transfers to this receiver that make up the request. All are admitted together.
    """

    deadline_s: Seconds
    request: Annotated[str, msgspec.Meta(pattern=rf"({_ID})|^\Z")] = ""
    parts: Ranks = 1


class Admit(TransferMessage, frozen=True):
    """Receiver: a slot for each name, -1 for a record that it has already."""

    slots: Annotated[tuple[Slot, ...], msgspec.Meta(min_length=1, max_length=MAX_NAMES)]


class Refuse(TransferMessage, frozen=True):
    """Receiver: it has no slots for the transfer, which ends."""

    reason: Reason


class Data(TransferMessage, frozen=True):
    """Sender: the record `names[index]` of `size` bytes is this frame's payload, or is in its shared slot."""

    index: Index
    size: ByteCount


class Commit(TransferMessage, frozen=True):
    """Sender: all records were sent, except for the `missing` ones."""

    missing: Annotated[tuple[Index, ...], msgspec.Meta(max_length=MAX_NAMES)] = ()


class Done(TransferMessage, frozen=True):
    """Receiver: all records have arrived and are available."""


class Cancel(TransferMessage, frozen=True):
    """Sender: it no longer writes to slots of the transfer. Ends it, or acknowledges its `Release`."""


class Release(TransferMessage, frozen=True):
    """Receiver: the transfer was used, expired or failed, and ends. The sender answers `Cancel`."""

    reason: Reason


class Pull(NamedRecords, frozen=True):
    """Receiver: requests records. Answered by `Data` with payload, then `Commit`. `Release` ends the pull."""


class Error(Message, frozen=True):
    """The recipient broke the protocol or is refused: the connection ends."""

    code: Code
    message: Reason


AnyTransferMessage = Reserve | Admit | Refuse | Data | Commit | Done | Cancel | Release | Pull
AnyMessage = Hello | Proof | Query | Found | AnyTransferMessage | Error

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    """Encode `message` as the body of a frame.

    Raises:
        MessageError: the body is longer than MAX_BODY_BYTES.
    """
    body = _encoder.encode(message)
    if len(body) > MAX_BODY_BYTES:
        raise MessageError(f"{type(message).__name__}: {len(body)} bytes; want at most {MAX_BODY_BYTES}")
    return body


def decode(body: bytes | memoryview) -> AnyMessage:
    """Decode the message in the body of a frame, and check the bounds of its fields.

    Raises:
        MessageError: the body is no valid message.
    """
    if len(body) > MAX_BODY_BYTES:
        raise MessageError(f"a message of {len(body)} bytes; want at most {MAX_BODY_BYTES}")
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise MessageError(f"malformed message: {error}"[:1024]) from None


def check_id(what: str, name: object, most: int = MAX_ID) -> str:
    """Return `name`, the id of a `what` ("transfer", "peer"), if it is valid: peers refuse an invalid one.

    Raises:
        MessageError: the id is invalid.
    """
    if isinstance(name, str) and len(name) <= most and re.search(_ID, name):
        return name
    raise MessageError(f"{what} {name!r}: want 1 to {most} printable ASCII characters without space")
