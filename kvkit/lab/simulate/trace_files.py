"""Trace files: their lines, compressed or not, and the rows of CSV traces, which have only lengths.

Azure's LLM inference traces (https://github.com/Azure/AzurePublicDataset) have the columns

    TIMESTAMP,ContextTokens,GeneratedTokens

with a date and time (UTC unless a zone is given). BurstGPT's (https://github.com/HPMLL/BurstGPT) have

    Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type

with seconds; newer ones also have a "Session ID". Columns may be in any order; other columns are ignored.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
import random
import zlib
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from kvkit.settings import ConfigError

MOST_TOKENS = 2**31
_GZIP = b"\x1f\x8b"
_SHOWN_COLUMNS = 200  # characters of another file's header


def read_lines(path: str | Path) -> Iterator[bytes]:
    r"""Yield the lines of a UTF-8 file, which may be gzipped, as they are read; only "\n" ends a line.

    Detects gzip by the content. Drops a byte order mark. Holds at most one line in memory.

    Raises:
        ConfigError: the file cannot be read or decompressed, or is UTF-16. The message names it.
    """
    try:
        with Path(path).open("rb") as raw:
            compressed = raw.peek(len(_GZIP)).startswith(_GZIP)
            file = io.BufferedReader(gzip.GzipFile(fileobj=raw)) if compressed else raw
            first = file.readline()
            if first.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
                raise ConfigError(f"{path}: is UTF-16 text, want UTF-8")
            if first:
                yield first.removeprefix(BOM_UTF8)
            yield from file
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path}: {error}") from error


def files_of(folder: str | Path, seed: int) -> list[Path]:
    """Return the .json files of a folder, in an order that is drawn from `seed`.

    Raises:
        ConfigError: there is none.
    """
    files = sorted(Path(folder).glob("*.json"))
    if not files:
        raise ConfigError(f"{folder}: a folder without .json files")
    random.Random(seed).shuffle(files)
    return files


class CsvRow(NamedTuple):
    """A request of a CSV trace."""

    time_ms: float
    session: str  # empty: not given
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class _CsvFormat:
    """The columns of one publisher's traces."""

    publisher: str
    time: str
    prompt: str
    answer: str
    read_time: Callable[[str], float]  # to milliseconds; its ValueError states what is expected
    session: str = ""  # optional
    fails: bool = False  # True: an answer without tokens marks a failed request


def _milliseconds_of_date(text: str) -> float:
    try:
        time = datetime.fromisoformat(text)
        time_s = (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        time_s = -1
    if time_s < 0:
        raise ValueError("want a date and time since 1970, such as 2023-11-16 18:15:46.68")
    return time_s * 1000


def _milliseconds_of_seconds(text: str) -> float:
    try:
        time_s = float(text)
    except ValueError:
        time_s = math.nan
    if not 0 <= time_s < math.inf:
        raise ValueError("want seconds, at least 0")
    return time_s * 1000


_FORMATS = (
    _CsvFormat("Azure", "TIMESTAMP", "ContextTokens", "GeneratedTokens", _milliseconds_of_date),
    _CsvFormat(
        "BurstGPT",
        "Timestamp",
        "Request tokens",
        "Response tokens",
        _milliseconds_of_seconds,
        session="Session ID",
        fails=True,
    ),
)


def read_rows(lines: Iterable[bytes], path: str | Path) -> Iterator[CsvRow | None]:
    """Yield the requests of a CSV trace as its lines are read; None for a failed request.

    Raises:
        ConfigError: the columns fit no format, or a value is invalid. The message names the line.
    """
    reader = csv.reader(_texts(lines, path), strict=True)
    try:
        columns = [name.strip() for name in next((row for row in reader if row), [])]
        csv_format = _format_of(columns, f"{path}:{reader.line_num}")
        time, prompt, answer = map(columns.index, (csv_format.time, csv_format.prompt, csv_format.answer))
        session = columns.index(csv_format.session) if csv_format.session in columns else None
        for row in reader:
            if not row:
                continue
            if len(row) != len(columns):
                raise ValueError(f"{len(row)} values, want {len(columns)}: {', '.join(columns)}")
            output_tokens = _tokens(csv_format.answer, row[answer], 0)
            if csv_format.fails and not output_tokens:
                yield None
                continue
            try:
                time_ms = csv_format.read_time(row[time].strip())
            except ValueError as error:
                raise ValueError(f"{csv_format.time} = {row[time]!r}: {error}") from None
            name = "" if session is None else row[session].strip()
            yield CsvRow(time_ms, name, _tokens(csv_format.prompt, row[prompt], 1), output_tokens)
    except ConfigError:
        raise
    except (ValueError, csv.Error) as error:
        raise ConfigError(f"{path}:{reader.line_num}: {error}") from error


def _texts(lines: Iterable[bytes], path: str | Path) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        try:
            yield line.decode()
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}:{number}: {error}") from error


def _format_of(columns: list[str], where: str) -> _CsvFormat:
    for csv_format in _FORMATS:
        if {csv_format.time, csv_format.prompt, csv_format.answer} <= set(columns):
            return csv_format
    expected = "; ".join(
        f"{csv_format.time}, {csv_format.prompt}, {csv_format.answer} ({csv_format.publisher})"
        for csv_format in _FORMATS
    )
    found = repr(", ".join(columns)[:_SHOWN_COLUMNS])
    raise ConfigError(f"{where}: want JSON lines, or a CSV trace with the columns {expected}; found {found}")


def _tokens(column: str, text: str, minimum: int) -> int:
    try:
        tokens = int(text)
    except ValueError:
        tokens = -1
    if not minimum <= tokens <= MOST_TOKENS:
        raise ValueError(f"{column} = {text!r}: want a whole number from {minimum} to {MOST_TOKENS}")
    return tokens
