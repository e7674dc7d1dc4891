"""The contract of a tier as pytest tests to inherit, for authors of tiers."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pytest

from kvkit.staging import Lease, Staging, release_all
from kvkit.tiers.base import DamagedObject, Tier

DEADLINE_S = 60.0
"""Timeout for a completion, in seconds; passing tests wait far less."""

SLOT_BYTES = 16384
"""Bytes of a slot in the arena of a `TierContract`; the tier under test must hold 8 such records."""

RECORDS, SLOTS = 8, 32


class Completions:
    """An `on_complete` callback that collects its calls. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._calls: list[tuple[str, BaseException | None]] = []

    def __call__(self, name: str, error: BaseException | None) -> None:
        with self._changed:
            self._calls.append((name, error))
            self._changed.notify_all()

    @property
    def count(self) -> int:
        """Number of calls so far."""
        with self._changed:
            return len(self._calls)

    def wait(self, count: int) -> list[tuple[str, BaseException | None]]:
        """Wait for `count` calls and return all calls.

        Raises:
            AssertionError: there are fewer after `DEADLINE_S`.
        """
        with self._changed:
            done = self._changed.wait_for(lambda: len(self._calls) >= count, DEADLINE_S)
            assert done, f"{len(self._calls)} of {count} completions came"
            return list(self._calls)


def record_names(count: int, space: str = "0123456789abcdef") -> list[str]:
    """Return the names of `count` objects, as `kvkit.format.names` describes them."""
    return [f"{space}/0/c.{i}.{i * 7919}.0.0.0.0" for i in range(count)]


def record_bytes(name: str, size: int = SLOT_BYTES) -> npt.NDArray[np.uint8]:
    """Return uint8 [size] with bytes that depend on `name` alone: equal names hold equal bytes."""
    return np.random.default_rng(zlib.crc32(name.encode())).integers(0, 256, size, np.uint8)


def put(tier: Tier, staging: Staging, names: Sequence[str], size: int = SLOT_BYTES) -> list[OSError | None]:
    """Put `record_bytes` of each name and wait; return the errors in the order of `names`."""
    leases, done = _filled(staging, names, size), Completions()
    tier.put(names, leases, done)
    release_all(leases)
    return _in_order(names, done)


def get(tier: Tier, staging: Staging, names: Sequence[str]) -> list[npt.NDArray[np.uint8] | OSError]:
    """Get each name and wait; return its bytes or error in the order of `names`."""
    leases = staging.acquire(len(names), DEADLINE_S, at_least=len(names))
    for lease in leases:
        lease.array[:] = 0xA5
    done = Completions()
    tier.get(names, leases, done)
    errors = _in_order(names, done)
    found = [lease.record.copy() if e is None else e for lease, e in zip(leases, errors, strict=True)]
    release_all(leases)
    return found


def _filled(staging: Staging, names: Sequence[str], size: int) -> list[Lease]:
    """Lease slots and fill them with `record_bytes` of each name."""
    leases = staging.acquire(len(names), DEADLINE_S, at_least=len(names))
    for name, lease in zip(names, leases, strict=True):
        lease.array[:size] = record_bytes(name, size)
        lease.used = size
    return leases


def _expect(tier: Tier, staging: Staging, names: Sequence[str], sizes: Sequence[int] = ()) -> None:
    """Assert that each name is read as it was put, with `SLOT_BYTES` or its size in `sizes`."""
    expected_sizes = sizes or [SLOT_BYTES] * len(names)
    for name, size, found in zip(names, expected_sizes, get(tier, staging, names), strict=True):
        assert isinstance(found, np.ndarray), found
        assert np.array_equal(found, record_bytes(name, size)), f"{name}: its {size} bytes differ"


def _in_order(names: Sequence[str], done: Completions) -> list[OSError | None]:
    """Wait for the completion of each name; return the errors in the order of `names`."""
    errors: dict[str, OSError | None] = {}
    for name, error in done.wait(len(names)):
        assert name not in errors, f"{name} completed twice"
        assert error is None or isinstance(error, OSError), f"{name}: {error!r} is not an OSError"
        errors[name] = error
    return [errors[name] for name in names]


class TierContract:
    """Tests of the contract of every tier. Inherit this class and supply two fixtures:

        class TestMine(TierContract):
            @pytest.fixture
            def staging(self):
                return Staging(SLOT_BYTES, SLOTS)

            @pytest.fixture
            def tier(self, staging):
                return MyTier(...)

    `staging` has `SLOTS` slots of `SLOT_BYTES`, all of them free; `tier` is empty and holds `RECORDS` records
    of that size without evicting one. The tests close both.
    """

    @pytest.fixture(autouse=True)
    def finished(self, tier: Tier, staging: Staging) -> Iterator[None]:
        """Call `finish` at the end of every test."""
        yield
        self.finish(tier, staging)

    def finish(self, tier: Tier, staging: Staging) -> None:
        """Close the tier and assert that it released every slot."""
        tier.close()
        staging.check_integrity()
        assert staging.free == staging.slots, "the closed tier keeps slots"
        staging.close()

    def test_attributes(self, tier: Tier, staging: Staging) -> None:
        assert tier.name
        assert tier.scope in ("node", "shared")
        assert tier.reads_at_once >= 1

    def test_starts_empty(self, tier: Tier, staging: Staging) -> None:
        names = record_names(2)
        assert tier.match_prefix(names) == 0
        assert tier.match_prefix([]) == 0
        assert tier.size(names[0]) is None
        assert tier.borrow(names[0]) is None
        assert list(tier.scan()) == []

    def test_what_was_put_is_read(self, tier: Tier, staging: Staging) -> None:
        sizes = [1, 4095, 4096, 4097, SLOT_BYTES - 1, SLOT_BYTES]
        names = record_names(len(sizes))
        for name, size in zip(names, sizes, strict=True):
            assert put(tier, staging, [name], size) == [None]
            assert tier.size(name) == size
        _expect(tier, staging, names, sizes)
        assert dict(tier.scan()) == dict(zip(names, sizes, strict=True))

    def test_order_of_a_batch_does_not_matter(self, tier: Tier, staging: Staging) -> None:
        names = record_names(RECORDS)
        assert put(tier, staging, names[::-1]) == [None] * RECORDS
        _expect(tier, staging, names[1::2] + names[::2])

    def test_the_leading_count_ends_at_the_first_gap(self, tier: Tier, staging: Staging) -> None:
        names = record_names(RECORDS)
        put(tier, staging, names[:3] + names[4:6])
        assert tier.match_prefix(names) == 3
        assert tier.match_prefix(names[3:]) == 0
        assert tier.match_prefix(names[4:]) == 2
        put(tier, staging, [names[3]])
        assert tier.match_prefix(names) == 6
        assert tier.match_prefix(names[:2]) == 2

    def test_a_missing_object_completes_with_an_error(self, tier: Tier, staging: Staging) -> None:
        names = record_names(3)
        put(tier, staging, [names[0], names[2]])
        kinds = [type(found) for found in get(tier, staging, names)]
        assert kinds == [np.ndarray, FileNotFoundError, np.ndarray]

    def test_an_object_larger_than_the_slot_is_an_error(self, tier: Tier, staging: Staging) -> None:
        name = record_names(1)[0]
        put(tier, staging, [name], 4097)
        small = Staging(4096, 1)
        (found,) = get(tier, small, [name])
        assert isinstance(found, DamagedObject), found
        assert small.free == 1
        small.close()

    def test_an_object_is_written_once(self, tier: Tier, staging: Staging) -> None:
        name = record_names(1)[0]
        put(tier, staging, [name])
        (lease,) = staging.acquire(1, DEADLINE_S)
        lease.array[:] = 0
        lease.used = 4096
        done = Completions()
        tier.put([name], [lease], done)
        lease.release()
        assert done.wait(1) == [(name, None)]
        _expect(tier, staging, [name])

    def test_delete(self, tier: Tier, staging: Staging) -> None:
        names = record_names(3)
        put(tier, staging, names)
        tier.delete([names[1], record_names(9)[8]])
        tier.delete([names[1]])
        assert tier.match_prefix(names) == 1
        assert tier.size(names[1]) is None
        assert tier.borrow(names[1]) is None
        assert isinstance(get(tier, staging, [names[1]])[0], FileNotFoundError)
        assert sorted(name for name, _ in tier.scan()) == [names[0], names[2]]
        assert put(tier, staging, [names[1]]) == [None]
        assert tier.match_prefix(names) == 3

    def test_a_listener_gets_every_change(self, tier: Tier, staging: Staging) -> None:
        """Only for tiers with `reports_evictions`."""
        names, held = record_names(RECORDS), dict[str, bool]()
        tier.subscribe(lambda reported, now: held.update(dict.fromkeys(reported, now)))
        put(tier, staging, names)
        tier.delete(names[6:])
        tier.match_prefix(names)
        expected = {name: name in dict(tier.scan()) for name in names}
        assert held == (expected if tier.reports_evictions else {})

    def test_borrow_agrees_with_get(self, tier: Tier, staging: Staging) -> None:
        name = record_names(1)[0]
        put(tier, staging, [name], 5000)
        lent = tier.borrow(name)
        if lent is not None:
            with lent:
                assert lent.used == 5000
                assert np.array_equal(lent.record, record_bytes(name, 5000))
                tier.delete([name])
                assert np.array_equal(lent.record, record_bytes(name, 5000)), "a borrowed slot was reused"
        assert tier.borrow("ffff/0/c.1.1.0.0.0.0") is None

    def test_parts_of_a_record(self, tier: Tier, staging: Staging) -> None:
        """Ranges anywhere in it are read to the front of their buffers; the rest of a buffer stays."""
        first, second = record_names(2)
        put(tier, staging, [first], 5000)
        record = record_bytes(first, 5000)
        for ranges in ([(0, 1), (4096, 904), (17, 3000), (4999, 1)], [(17, 3000)], [(10, 20), (30, 40)]):
            buffers = [memoryview(bytearray(b"\xa5" * (size + 3))) for _, size in ranges]
            tier.get_ranges(first, ranges, buffers)
            for (offset, size), buffer in zip(ranges, buffers, strict=True):
                assert np.array_equal(buffer[:size], record[offset : offset + size])
                assert bytes(buffer[size:]) == b"\xa5" * 3
        for name, ranges, expected_error in (
            (first, [(4990, 11)], DamagedObject),
            (first, [(0, 4), (5000, 1)], DamagedObject),
            (second, [(0, 4)], FileNotFoundError),
            (second, [(0, 4), (8, 4)], FileNotFoundError),
        ):
            try:
                tier.get_ranges(name, ranges, [memoryview(bytearray(16)) for _ in ranges])
            except expected_error:
                continue
            raise AssertionError(f"{ranges} of {name} were read")

    def test_a_caller_may_release_before_completion(self, tier: Tier, staging: Staging) -> None:
        names = record_names(RECORDS)
        leases, done = _filled(staging, names, SLOT_BYTES), Completions()
        tier.put(names, leases, done)
        release_all(leases)
        # later leases must not include a slot that a put still reads
        later_leases = staging.acquire(SLOTS - RECORDS, DEADLINE_S)
        for lease in later_leases:
            lease.array[:] = 0
        release_all(later_leases)
        assert _in_order(names, done) == [None] * RECORDS
        _expect(tier, staging, names)

    def test_a_callback_that_raises_does_no_harm(self, tier: Tier, staging: Staging) -> None:
        names = record_names(4)
        done = Completions()

        def on_complete(name: str, error: BaseException | None) -> None:
            done(name, error)
            raise RuntimeError("from a callback, on purpose")

        leases = _filled(staging, names, 4096)
        tier.put(names, leases, on_complete)
        assert _in_order(names, done) == [None] * 4
        tier.get(names, leases, on_complete)
        assert len(done.wait(8)) == 8
        release_all(leases)
        assert tier.match_prefix(names) == 4

    def test_threads_put_the_same_names(self, tier: Tier, staging: Staging) -> None:
        names = record_names(5)
        start = threading.Barrier(4)
        results: list[list[OSError | None]] = []

        def work(shift: int) -> None:
            start.wait(DEADLINE_S)
            results.append(put(tier, staging, names[shift:] + names[:shift]))

        threads = [threading.Thread(target=work, args=(shift,)) for shift in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert results == [[None] * 5] * 4
        assert sorted(name for name, _ in tier.scan()) == names
        _expect(tier, staging, names)

    def test_close_finishes_what_was_started(self, tier: Tier, staging: Staging) -> None:
        names = record_names(RECORDS)
        leases, done = _filled(staging, names, SLOT_BYTES), Completions()
        tier.put(names, leases, done)
        release_all(leases)
        tier.close()
        assert done.count == RECORDS, "close returned before all was reported"

    def test_a_closed_tier_completes_with_errors(self, tier: Tier, staging: Staging) -> None:
        names = record_names(3)
        tier.close()
        tier.close()
        assert all(isinstance(error, OSError) for error in put(tier, staging, names))
        assert all(isinstance(found, OSError) for found in get(tier, staging, names))

    def test_describe_twice(self, tier: Tier, staging: Staging) -> None:
        for _ in range(2):
            tier.describe("0123456789abcdef/0", b"{}")
        assert list(tier.scan()) == []
