"""Bytes that come in decode to a message within bounds, or raise one kind of error."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkit.handoff.protocol import messages
from kvkit.handoff.protocol.messages import (
    MAX_BODY_BYTES,
    MAX_NAMES,
    AnyMessage,
    Commit,
    Data,
    Hello,
    MessageError,
    Reserve,
    TierRun,
    decode,
    encode,
)
from kvkit.tiers.testing.contract import record_names

TYPES = get_args(AnyMessage)
EXTREMES = [-(2**63), -1, 0, 1, 2**31, 2**40, 2**63, 2**64 - 1, float("nan"), float("inf"), -0.0, 1e308]
VALUES = st.recursive(
    st.none() | st.booleans() | st.sampled_from(EXTREMES) | st.text(max_size=8) | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
names = st.lists(st.sampled_from(record_names(20)), min_size=1, max_size=20, unique=True).map(tuple)
ids = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=128)
numbers = st.integers(0, 2**31 - 1)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "version": numbers,
    "id": numbers,
    "node": st.text(max_size=20),
    "namespace": st.text(max_size=20),
    "layout": st.text(max_size=20),
    "slot_bytes": st.integers(0, 2**40 - 1),
    "ranks": st.integers(1, 1024),
    "record_ranks": st.integers(0, 1024),
    "draft": st.text(max_size=20),
    "request": ids | st.just(""),
    "parts": st.integers(1, 1024),
    "nonce": st.binary(min_size=32, max_size=32),
    "mac": st.binary(min_size=32, max_size=32),
    "names": names,
    "runs": st.lists(
        st.builds(
            TierRun, st.text(max_size=9), st.sampled_from(["node", "shared"]), st.integers(0, MAX_NAMES)
        ),
        max_size=5,
    ).map(tuple),
    "transfer": ids,
    "deadline_s": st.floats(0, 3600, exclude_min=True),
    "slots": st.lists(st.integers(-1, 2**31 - 1), min_size=1, max_size=20).map(tuple),
    "reason": st.text(max_size=20),
    "index": st.integers(0, MAX_NAMES - 1),
    "size": st.integers(0, 2**40 - 1),
    "missing": st.lists(st.integers(0, MAX_NAMES - 1), max_size=9).map(tuple),
    "code": st.sampled_from(["malformed", "unexpected", "refused"]),
    "message": st.text(max_size=20),
}
MESSAGES = st.one_of([st.builds(t, **{f: FIELDS[f] for f in t.__struct_fields__}) for t in TYPES])


@given(MESSAGES)
def test_what_is_encoded_is_decoded(message: Any) -> None:
    assert decode(encode(message)) == message
    assert decode(memoryview(encode(message))) == message


@given(st.binary(max_size=200))
def test_garbage_is_one_kind_of_error(body: bytes) -> None:
    with pytest.raises(MessageError):
        decode(body)


@given(MESSAGES, st.data())
def test_a_damaged_message_is_a_message_or_an_error(message: Any, data: st.DataObject) -> None:
    body = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = decode(bytes(body))
    except MessageError:
        return
    assert encode(found)


@given(MESSAGES, st.data())
def test_a_message_cut_short_is_an_error(message: Any, data: st.DataObject) -> None:
    body = encode(message)
    with pytest.raises(MessageError):
        decode(body[: data.draw(st.integers(0, len(body) - 1))])
    with pytest.raises(MessageError):
        decode(body + b"\0")


@given(MESSAGES, st.data())
def test_a_field_that_is_no_such_thing_is_an_error_or_in_bounds(message: Any, data: st.DataObject) -> None:
    fields = msgspec.to_builtins(message)
    name = data.draw(st.sampled_from([*type(message).__struct_fields__, "another"]))
    fields[name] = data.draw(VALUES)
    try:
        found = decode(msgspec.msgpack.encode(fields))
    except MessageError:
        return
    assert decode(encode(found)) == found
    assert name != "another" or type(message) is Hello


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "reserve", "transfer": "a", "names": record_names(1) * 2, "deadline_s": 1.0},
        {"type": "reserve", "transfer": "a", "names": record_names(1), "deadline_s": float("nan")},
        {"type": "reserve", "transfer": "a", "names": ["../../etc/passwd"], "deadline_s": 1.0},
        {"type": "reserve", "transfer": "a", "names": [record_names(1)[0] + "\n"], "deadline_s": 1.0},
        {"type": "reserve", "transfer": "a b", "names": record_names(1), "deadline_s": 1.0},
        {"type": "pull", "transfer": "a", "names": []},
        {"type": "query", "id": 1, "names": record_names(MAX_NAMES + 1)},
        {"type": "data", "transfer": "a", "index": MAX_NAMES, "size": 1},
        {"type": "done", "transfer": "a", "unknown": 1},
        {"type": "shout"},
    ],
)
def test_out_of_bounds(fields: dict[str, Any]) -> None:
    with pytest.raises(MessageError):
        decode(msgspec.msgpack.encode(fields))


def test_depth_and_length_are_limited() -> None:
    with pytest.raises(MessageError, match="recursion"):
        decode(b"\x81\xa4xype" + b"\x91" * 100_000)
    with pytest.raises(MessageError, match=f"at most {MAX_BODY_BYTES}"):
        decode(bytes(MAX_BODY_BYTES + 1))
    with pytest.raises(MessageError, match=f"at most {MAX_BODY_BYTES}"):
        encode(Reserve("a", tuple(record_names(2 * MAX_NAMES, "f" * 64)), 1.0))


def test_the_largest_request_is_a_message() -> None:
    longest = tuple(f"{'f' * 64}/9999/c.65535.{2**46 - 1 - i}.0.0.0.0" for i in range(MAX_NAMES))
    message = Reserve("x" * 128, longest, 3600.0)
    assert decode(encode(message)) == message


def test_an_error_does_not_show_the_bytes() -> None:
    with pytest.raises(MessageError) as caught:
        decode(msgspec.msgpack.encode({"type": "data", "transfer": "secret text", "index": 0, "size": 1}))
    assert "secret text" not in str(caught.value)


def test_data_and_commit_are_small() -> None:
    """They go with every record: their bytes count."""
    assert len(encode(Data("x" * 36, MAX_NAMES - 1, 2**32))) < 100
    assert len(encode(Commit("x" * 36))) < 100


def test_every_message_has_bounds() -> None:
    """No field is an unlimited string, integer or list."""
    schema = msgspec.json.schema_components(TYPES)[1]
    for name, component in schema.items():
        for field, kind in component["properties"].items():
            bounded = {"maxLength", "pattern", "maxItems", "enum", "exclusiveMaximum", "maximum"}
            shapes = kind.get("anyOf", [kind])
            for shape in shapes:
                assert shape.get("type") == "null" or bounded & set(shape), f"{name}.{field}: {shape}"
    assert messages.VERSION == 2
