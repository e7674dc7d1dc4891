"""A defect that is planted: a change of the product that the simulation has to find."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """`old` of a file, which is there once, replaced by `new`.

    Attributes:
        what: the defect, in words.
        scenario: that finds it.
    """

    what: str
    file: str
    old: str
    new: str
    scenario: str = "cache"
