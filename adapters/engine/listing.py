"""Lists the chunks that tiers held before an engine started, by the headers of their records."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvkit.cache import Cache
from kvkit.format.layout import LayoutError, Namespace
from kvkit.format.record import Header, RecordError, RecordFormat, read_header
from kvkit.transfer.sequence import formats_of
from kvkit.workers import Workers


@dataclass(frozen=True, slots=True, eq=False)
class ListedChunk:
    """A chunk of a sequence that tiers held.

    Args:
        key: key of the chunk.
        parent: key of the chunk before it; empty for the first chunk of a sequence.
        tokens: int32 [chunk_tokens].
        names: names of its records.
    """

    key: bytes
    parent: bytes
    tokens: npt.NDArray[np.int32]
    names: tuple[str, ...]


class Listing:
    """Lists the chunks of one namespace, in a thread of its own.

    Args:
        held: (tier, name of a record that the tier holds) pairs.

    Attributes:
        is_complete: True if all of `held` belongs to this namespace, so that only listed chunks can be hit.
    """

    def __init__(self, cache: Cache, held: Iterable[tuple[str, str]], namespace: Namespace) -> None:
        self._cache = cache
        self._formats = formats_of(cache.layout, namespace)
        arrays = {record_format.array for record_format in self._formats}
        self._tiers: dict[str, str] = {}  # by name of the first record of a chunk
        self.is_complete = True
        for tier, name in held:
            array = name.rpartition("/")[0]
            self.is_complete = self.is_complete and array in arrays
            if array == self._formats[0].array:
                self._tiers[name] = tier
        self._chunks: deque[ListedChunk] = deque()
        self._ended = self._closed = False
        self._workers = Workers(1, "kvkit-list")
        self._workers.start(self._list)

    @property
    def done(self) -> bool:
        """True if all chunks were listed and taken."""
        return self._ended and not self._chunks

    def take(self, limit: int) -> list[ListedChunk]:
        """Take up to `limit` chunks, each after its parent. A chunk without a held parent is left out."""
        return [self._chunks.popleft() for _ in range(min(limit, len(self._chunks)))]

    def close(self) -> None:
        """Stop reading."""
        self._closed = True
        self._workers.close(0)  # a read may hang

    def _list(self) -> None:
        record_format = self._formats[0]
        headers: dict[bytes, list[Header]] = {}  # by parent
        for name, tier in self._tiers.items():
            if self._closed:
                return
            header = self._read_header(record_format, tier, name)
            if header is not None:
                headers.setdefault(header.parent, []).append(header)
        parents = deque([record_format.digest])
        while parents:
            for header in headers.pop(parents.popleft(), ()):
                names = tuple(record_format.name(header.key) for record_format in self._formats)
                parent = b"" if header.parent == record_format.digest else header.parent
                self._chunks.append(ListedChunk(header.key, parent, header.tokens, names))
                parents.append(header.key)
        self._ended = True

    def _read_header(self, record_format: RecordFormat, tier: str, name: str) -> Header | None:
        """Return a record's header; None if the record is gone or damaged, or its name does not match."""
        buffer = bytearray(record_format.header_bytes)
        try:
            self._cache.tiers[tier].get_ranges(name, [(0, len(buffer))], [memoryview(buffer)])
            header = read_header(buffer)
        except (OSError, RecordError, LayoutError):
            return None
        matches = header.namespace == record_format.digest and record_format.name(header.key) == name
        return header if matches else None
