"""Records that prove themselves and hold the wrong KV: what no checksum finds, and answers must show."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from xxhash import xxh3_64_intdigest

from kvkit.format.record import MAGIC, Header, read_header, relabel


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """A record in a folder.

    Args:
        before: its bytes as they were stored.
        now: what they are to be.
    """

    path: Path
    header: Header
    before: bytes
    now: bytearray

    @property
    def array(self) -> tuple[bytes, int, int, int]:
        """Of which array it is, and which part of its heads and layers."""
        return self.header.namespace, self.header.group, self.header.head_shard, self.header.layer_shard

    def layer(self, number: int) -> slice:
        start = self.header.header_bytes + number * self.header.layer_bytes
        return slice(start, start + self.header.layer_bytes)

    @property
    def payload(self) -> slice:
        return slice(self.header.header_bytes, self.header.layers_end)

    def seal(self) -> None:
        """Have the checksums tell of what it holds now."""
        sums = [xxh3_64_intdigest(self.now[self.layer(i)]) for i in range(self.header.shape[0])]
        view, head = memoryview(self.now), self.header
        relabel(view, head.codec, head.record_bytes, head.layers_end, sums, head.trailer_sum)


def stored(folder: Path) -> list[StoredRecord]:
    """Every record below a folder."""
    found = []
    for path in sorted(folder.rglob("*")):
        data = path.read_bytes() if path.is_file() else b""
        if data.startswith(MAGIC):
            found.append(StoredRecord(path, read_header(data), data, bytearray(data)))
    return found


def swap_layers(records: list[StoredRecord]) -> None:
    """Of each chunk, two layers have each other's KV."""
    chunks: dict[tuple[bytes, int], list[tuple[StoredRecord, slice]]] = defaultdict(list)
    for record in records:
        for number in range(record.header.shape[0]):
            place = record, record.layer(number)
            chunks[record.header.key, record.header.layer_bytes].append(place)
    for (one, here), *_, (other, there) in (places for places in chunks.values() if len(places) > 1):
        one.now[here], other.now[there] = other.before[there], one.before[here]


def shift_chunks(records: list[StoredRecord]) -> None:
    """Each chunk has the KV of the one before it."""
    for chain in chains(records):
        for one, following in pairwise(chain):
            following.now[following.payload] = one.before[one.payload]


def make_stale(records: list[StoredRecord]) -> None:
    """Each chunk has the KV of another prompt's at the same place."""
    of_arrays = defaultdict(list)
    for chain in chains(records):
        of_arrays[chain[0].array].append(chain)
    for alike in of_arrays.values():
        for chain, other in zip(alike, alike[1:] + alike[:1], strict=True):
            for record, wrong in zip(chain, other, strict=False):
                record.now[record.payload] = wrong.before[wrong.payload]


def chains(records: list[StoredRecord]) -> Iterator[list[StoredRecord]]:
    """The records of each prompt in each array, in their order."""
    following = {(record.array, record.header.parent): record for record in records}
    keys = {(record.array, record.header.key) for record in records}
    for record in records:
        if (record.array, record.header.parent) not in keys:
            chain = [record]
            while one := following.get((record.array, chain[-1].header.key)):
                chain.append(one)
            yield chain


FAULTS: dict[str, Callable[[list[StoredRecord]], None]] = {
    "layers swapped": swap_layers,
    "off by a chunk": shift_chunks,
    "stale": make_stale,
}


def with_fault(records: list[StoredRecord], fault: str) -> list[StoredRecord]:
    """Those that are to hold the wrong KV, which they prove; where there are snapshots, these alone."""
    records = [replace(record, now=bytearray(record.before)) for record in records]
    FAULTS[fault]([record for record in records if not record.header.k_size] or records)
    wrong = [record for record in records if record.now != record.before]
    for record in wrong:
        record.seal()
    return wrong
