"""A request's `blend` object: the documents of its prompt, and the selection of tokens to recompute."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from kvkit.settings import ConfigError, read_object

FIELD = "blend"
WHERE = "kv_transfer_params.blend"
_Position = Annotated[int, Field(lt=2**31)]
_JointToken = Annotated[int, Field(ge=0, lt=2**31)]


class BlendFields(BaseModel):
    """The fields of `kv_transfer_params.blend`."""

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)
    documents: list[list[_Position]] | None = None
    joints: list[list[_JointToken]] = []
    prefix: int | None = Field(default=None, ge=0, lt=2**31)
    ratio: float | None = Field(default=None, ge=0, le=1)
    method: str | None = None
    first_n: int | None = Field(default=None, ge=0, lt=2**31)
    drift: float | None = Field(default=None, ge=0, le=1)


def read(given: Any, least_ratio: float, methods: Sequence[str]) -> BlendFields:
    """Parse a request's `blend` object.

    Args:
        given: the object, decoded from JSON.
        least_ratio: smallest allowed `ratio`.
        methods: allowed methods.

    Raises:
        ConfigError: a field is unknown, invalid or not allowed.
    """
    fields = read_object(given, BlendFields, WHERE, "false, or ")
    if fields.method is not None and fields.method not in methods:
        method = reprlib.repr(fields.method)
        raise ConfigError(f"{WHERE}.method = {method}: want one of {', '.join(methods)}")
    if fields.ratio is not None and fields.ratio < least_ratio:
        raise ConfigError(f"{WHERE}.ratio = {fields.ratio}: want at least {least_ratio}")
    return fields


def check_spans(fields: BlendFields, tokens: int | None) -> None:
    """Check the documents and joints of a prompt of `tokens` tokens; None: its length is unknown.

    Raises:
        ConfigError: documents are empty, overlap, or lie outside the prompt; or joints do not match them.
    """
    if fields.documents is None:
        if fields.joints:
            raise ConfigError(f"{WHERE}.joints: want {WHERE}.documents with them")
        return
    end = prefix = fields.prefix or 0
    for document in fields.documents:
        ends_in_prompt = tokens is None or document[-1:] <= [tokens]
        if len(document) != 2 or not end <= document[0] < document[1] or not ends_in_prompt:
            within = "" if tokens is None else f" and within {tokens} tokens"
            raise ConfigError(
                f"{WHERE}.documents: {reprlib.repr(document)}: want [start, stop] in order, apart, "
                f"not empty, after the prefix of {prefix}{within}"
            )
        end = document[1]
    if fields.joints and len(fields.joints) != len(fields.documents):
        raise ConfigError(
            f"{WHERE}.joints: {len(fields.joints)}, want one for each of {len(fields.documents)} documents"
        )
    if tokens is not None and sum(map(len, fields.joints)) > tokens:
        raise ConfigError(f"{WHERE}.joints: want fewer tokens than the {tokens} of the prompt")
