"""Tiers of other packages, found by the entry-point group `kvkit.tiers`.

A package names a factory there, under the kind that a configuration asks for. docs/tiers.md shows one.
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

`staging` is where the cache's slots are; `settings` is what the configuration says besides `kind`: a capacity
in bytes, any others as TOML has them, or strings where they come from the environment. It raises ValueError,
naming the setting and the choices, for what it cannot take, and OSError for what cannot be opened.
"""


def kinds() -> list[str]:
    """The kinds that the installed packages have."""
    return sorted({entry.name for entry in entry_points(group=GROUP)})


def check_kind(kind: str) -> None:
    """Refuse a kind that no installed package has.

    Raises:
        ValueError: it is one. The message lists those that are there.
    """
    if kind not in kinds():
        raise ValueError(
            f"kind={kind!r}: no installed package has it (entry points {GROUP!r}); "
            f"the kinds are {', '.join(kinds()) or 'none'}"
        )


def open_plugin(kind: str, name: str, staging: Staging, settings: Mapping[str, Any]) -> Tier:
    """The tier that the factory of `kind` makes.

    Raises:
        ValueError: no package has the kind, or its factory fails or makes something else than a tier `name`.
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
