"""Division of records between the ranks of two engines, by pure functions.

Every rank of both engines computes the same result, so no message has to announce the senders.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from kvkit.format.layout import KVLayout, LayerGroup, Namespace, heads_of


@dataclass(frozen=True, slots=True)
class RankShare:
    """Records that a rank sends to one rank of the receiving engine.

    Attributes:
        rank: number of the receiving rank.
        groups: indices of the sender's layer groups that the receiving rank needs.
        senders: number of ranks that send to it; together they send everything that it needs.
    """

    rank: int
    groups: tuple[int, ...]
    senders: int


@functools.lru_cache(maxsize=64)
def shares(layout: KVLayout, rank: int, ranks: int, receivers: int) -> tuple[RankShare, ...]:
    """Return what rank `rank` of `ranks` sends to each of `receivers` ranks that needs its records.

    If several ranks have the same KV, one of them sends it; which one depends on the receiving rank.

    Args:
        layout: layout of the sending rank. Every rank of both engines has all heads of its records.
    """
    shards = [
        replace(array, layers=array.all_layers[start : start + len(array.layers)], first_head=head)
        for array in layout.arrays
        for start in range(0, len(array.all_layers), len(array.layers))
        for head in range(0, array.heads, array.kv_heads)
    ]
    group_index = {group: index for index, group in enumerate(layout.groups)}
    senders: dict[int, set[int]] = {}  # by receiver
    own_groups: dict[int, list[int]] = {}
    for shard in shards:
        owners = holders(shard, ranks)
        for receiver in holders(shard, receivers) if owners else ():
            sender = owners[receiver % len(owners)]
            senders.setdefault(receiver, set()).add(sender)
            if sender == rank and shard in group_index:
                own_groups.setdefault(receiver, []).append(group_index[shard])
    return tuple(
        RankShare(receiver, tuple(sorted(groups)), len(senders[receiver]))
        for receiver, groups in sorted(own_groups.items())
    )


def fits(layout: KVLayout, ranks: int) -> bool:
    """Return whether each of `ranks` ranks has whole records: none has only some of a record's heads."""
    return all(
        array.head_shards % ranks == 0 or (array.kv_heads == 1 and ranks % array.heads == 0)
        for array in layout.arrays
    )


def divided(namespace: Namespace, layout: KVLayout) -> bool:
    """Return whether engines of other sizes can use a rank's records: they hold all layers and no states."""
    all_layers = {layer for group in layout.groups for layer in group.all_layers}
    stateless = layout.token_groups == len(layout.groups)  # the format of states depends on the rank
    return stateless and (namespace.ranks_share or namespace.world == 1) and layout.layers == len(all_layers)


def holders(group: LayerGroup, ranks: int) -> list[int]:
    """Return the numbers of those of `ranks` ranks that have the heads of `group`."""
    return [rank for rank in range(ranks) if group.first_head in heads_of(group.heads, rank, ranks)]
