"""Choice of attention for a blend's rows on a GPU: the engine's run by run, or kvkit's all together.

An engine takes every run of consecutive rows as a sequence, and a tile holds rows of one run. A tile of kvkit
holds any rows. Both read all keys before a tile and do the same work per tile and key, so the number of tiles
stands for the bytes that are read and for the programs that read them.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvkit.environment import version_of
from kvkit.kernels.tuning.configs import KernelConfig, ProblemBucket, host_config
from kvkit.kernels.tuning.tables import best

TILE_ROWS = 128
"""Rows of a tile, each of one query head, both in engines' kernels and in kvkit's."""

MARGIN = 2
"""Assumed speed of an engine's kernel per tile, relative to kvkit's: a guess, replaced by tuning."""


@dataclass(frozen=True, slots=True)
class RowsForm:
    """Sizes of an attention problem over rows.

    Args:
        rows: number of rows of all requests.
        runs: number of runs of consecutive rows.
        context: number of keys that the last row sees, in the longest request.
        group: query heads per KV head.
        size: channels of a head.
        dtype: dtype of the pages.
    """

    rows: int
    runs: int
    context: int
    group: int
    size: int
    dtype: str

    def tiles(self, together: bool) -> int:
        """Return the number of tiles that a KV head's rows fill if all runs are equally long.

        Args:
            together: whether they are kvkit's tiles, which hold rows of any run.
        """
        runs = 1 if together else self.runs
        return runs * -(-self.rows * self.group // (runs * TILE_ROWS))

    @property
    def untuned(self) -> bool:
        """True if kvkit's attention is chosen where there are no tuned results."""
        return self.tiles(together=False) >= MARGIN * self.tiles(together=True)

    @property
    def bucket(self) -> ProblemBucket:
        """Bucket of the problems that share a choice, for this version of vLLM."""
        counts = self.rows * self.group, self.runs, self.context
        sizes = tuple(1 << (count - 1).bit_length() for count in counts)
        form = f"{self.dtype} SIZE={self.size} vllm {version_of('vllm')}"
        return ProblemBucket("rows_of_blends", form, sizes)

    def tuned(self) -> bool:
        """Return whether tuning found kvkit's attention faster on this process's GPU; else, `untuned`."""
        from kvkit.kernels.attention.triton_kernels import attend

        choices = entry(self.untuned), entry(not self.untuned)
        return best(self.bucket, choices[0], choices, attend) == entry(True)


def entry(together: bool) -> KernelConfig:
    """Return the entry of tuned tables for kvkit's attention, or for the engine's."""
    return host_config(TOGETHER=int(together))
