"""Changes that fuzzers make to bytes."""

from __future__ import annotations

from collections.abc import Sequence


def change(data: bytearray, how: str, where: int, value: bytes, others: Sequence[bytes]) -> None:
    """Mutates `data`, at `where` (from the end if negative; beyond either end it begins anew).

    Args:
        how: "write", "insert" or "delete" as much as `value`; "drop" or "grow" by as much as it says; "cut"
            the rest, "double" some, or "splice" with one of `others`.
    """
    at = where % (len(data) + 1)
    match how:
        case "write":
            data[at : at + len(value)] = value
        case "insert":
            data[at:at] = value
        case "delete":
            del data[at : at + len(value)]
        case "drop":
            del data[at : at + int.from_bytes(value[:2], "little")]
        case "grow":
            data += bytes(int.from_bytes(value[:2], "little") // 8)
        case "cut":
            del data[at:]
        case "double":
            data[at:at] = data[at : at + 16] * 64
        case "splice":
            data[at:] = others[where % len(others)][at:]
        case _:
            raise ValueError(f"how={how!r}")
