"""Which rank of one engine sends what to which rank of another: pure functions of their numbers.

Every rank of both reckons the same, so nobody has to be told who sends.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from kvkit.format.layout import KVLayout, LayerGroup, Namespace, heads_of


@dataclass(frozen=True, slots=True)
class RankShare:
    """What a rank sends to one rank of the receiving engine.

    Attributes:
        rank: of the receiving engine.
        groups: layer groups of the sender, by index, whose records that one needs.
        parts: how many ranks send it something; all of that together is what it needs.
    """

    rank: int
    groups: tuple[int, ...]
    parts: int


@functools.lru_cache(maxsize=64)
def shares(layout: KVLayout, rank: int, ranks: int, receivers: int) -> tuple[RankShare, ...]:
    """What rank `rank` of `ranks` sends to each of `receivers` ranks that needs something of it.

    Of KV that several ranks have, one sends it, for different receivers different ones.

    Args:
        layout: of the rank; records are of heads that no rank of either engine has in part.
    """
    parts = [
        replace(array, layers=array.all_layers[start : start + len(array.layers)], first_head=head)
        for array in layout.arrays
        for start in range(0, len(array.all_layers), len(array.layers))
        for head in range(0, array.heads, array.kv_heads)
    ]
    own = {group: index for index, group in enumerate(layout.groups)}
    senders: dict[int, set[int]] = {}  # by receiver
    mine: dict[int, list[int]] = {}
    for part in parts:
        have = holders(part, ranks)
        for receiver in holders(part, receivers) if have else ():
            sends = have[receiver % len(have)]
            senders.setdefault(receiver, set()).add(sends)
            if sends == rank and part in own:
                mine.setdefault(receiver, []).append(own[part])
    return tuple(
        RankShare(receiver, tuple(sorted(groups)), len(senders[receiver]))
        for receiver, groups in sorted(mine.items())
    )


def fits(layout: KVLayout, ranks: int) -> bool:
    """Whether each of so many ranks would have whole records: some of them, or with others the same one."""
    return all(
        array.parts % ranks == 0 or (array.kv_heads == 1 and ranks % array.heads == 0)
        for array in layout.arrays
    )


def divided(namespace: Namespace, layout: KVLayout) -> bool:
    """Whether ranks of engines of other sizes can use a rank's records: of all layers, some of the heads."""
    every = {layer for group in layout.groups for layer in group.all_layers}
    stateless = layout.token_groups == len(layout.groups)  # states are as one rank has them
    return stateless and (namespace.ranks_share or namespace.world == 1) and layout.layers == len(every)


def holders(group: LayerGroup, ranks: int) -> list[int]:
    """Those of `ranks` ranks that have the heads of a group."""
    return [rank for rank in range(ranks) if group.first_head in heads_of(group.heads, rank, ranks)]
