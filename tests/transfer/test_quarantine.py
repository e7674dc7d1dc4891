"""A damaged record is avoided in its tier for a while."""

from __future__ import annotations

from kvkit.tiers.testing.contract import record_names
from kvkit.transfer.tier_set import MAX_QUARANTINED, QUARANTINE_S, Quarantine


def test_a_record_is_shunned_in_its_tier_for_a_while() -> None:
    shunned, names = Quarantine(), record_names(4)
    assert shunned.before("disk", names, 0.0) == 4
    shunned.add("disk", names[2], 0.0)
    shunned.add("disk", names[1], 1.0)
    assert shunned.before("disk", names, 1.0) == 1
    assert shunned.before("disk", names[2:], 1.0) == 0
    assert shunned.before("disk", names[3:], 1.0) == 1
    assert shunned.before("bucket", names, 1.0) == 4
    assert shunned.before("disk", names[2:], QUARANTINE_S) == 2
    shunned.add("disk", names[1], QUARANTINE_S)
    assert shunned.before("disk", names, QUARANTINE_S + 1) == 1, "it was found again"
    shunned.add("disk", names[2], QUARANTINE_S)
    shunned.add("bucket", names[0], QUARANTINE_S)
    shunned.forget("disk", but=[names[2]])
    assert shunned.before("disk", names, QUARANTINE_S + 1) == 2
    assert shunned.before("bucket", names, QUARANTINE_S + 1) == 0
    assert shunned.before("disk", names, 2 * QUARANTINE_S) == 4


def test_the_oldest_is_forgotten_where_there_are_too_many() -> None:
    shunned, names = Quarantine(), record_names(MAX_QUARANTINED + 1)
    for name in names:
        shunned.add("disk", name, 0.0)
    assert shunned.before("disk", names, 0.0) == 1
    assert shunned.before("disk", names[1:], 0.0) == 0
