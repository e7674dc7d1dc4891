"""Tiers of other packages, found by the entry-point group `kvkit.tiers`.

A package registers a factory in that group under a `kind`, which configurations name.
docs/research/own-tier.md has an example.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any

from kvkit.staging import Staging
from kvkit.tiers.base import Tier

GROUP = "kvkit.tiers"

Factory = Callable[[str, Staging, Mapping[str, Any]], Tier]
"""(name, staging, settings) -> the tier, with that name.

`staging` is the cache's arena of slots. `settings` are those of the configuration besides `kind`: a capacity
in bytes, others with their TOML types, or as strings if they come from the environment. The factory raises
ValueError for an invalid setting, with its name and the choices, and OSError if the tier cannot be opened.
"""


def kinds() -> list[str]:
    """Return the kinds of tier that installed packages register."""
    return sorted({entry.name for entry in entry_points(group=GROUP)})


def check_kind(kind: str) -> None:
    """Check that an installed package registers a kind.

    Raises:
        ValueError: none does. The message lists the registered kinds.
    """
    if kind not in kinds():
        raise ValueError(
            f"kind={kind!r}: no installed package has it (entry points {GROUP!r}); "
            f"the kinds are {', '.join(kinds()) or 'none'}"
        )


def open_plugin(kind: str, name: str, staging: Staging, settings: Mapping[str, Any]) -> Tier:
    """Return the tier that the factory of `kind` makes.

    Raises:
        ValueError: not exactly one package has the kind, or its factory fails, or its result is not a tier
            called `name`.
    """
    check_kind(kind)
    (entry, *others) = entry_points(group=GROUP, name=kind)
    if others:
        raise ValueError(f"tier {name!r}: kind={kind!r}: {len(others) + 1} packages have it; want one")
    try:
        tier = entry.load()(name, staging, settings)
    except Exception as error:  # another package's code
        raise ValueError(f"tier {name!r}: kind={kind!r}: {str(error) or type(error).__name__}") from error
    if not isinstance(tier, Tier) or tier.name != name:
        raise ValueError(f"tier {name!r}: kind={kind!r}: its factory made {tier!r}, want a Tier of that name")
    return tier
