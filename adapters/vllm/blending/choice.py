"""Whose attention the rows of a blend get on a GPU: the engine's, run by run, or kvkit's, all together. Pure.

An engine takes rows as sequences: every run of consecutive rows is one, and a tile of one run reads all keys
before it again. kvkit's tiles are filled with rows whatever lies between them. Both do the same work for
each tile and key, so that tiles stand for the bytes that are read and for the programs that read them.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvkit.environment import version_of
from kvkit.kernels.tuning.configs import KernelConfig, ProblemBucket, host_config
from kvkit.kernels.tuning.tables import best

ENGINE, KVKIT = host_config(TOGETHER=0), host_config(TOGETHER=1)
CHOICES = (ENGINE, KVKIT)

TILE_ROWS = 128
"""Rows of a tile, each of one query head, of engines' kernels as of kvkit's."""

MARGIN = 2
"""An engine's kernel is taken to be up to so many times as fast with a tile: a guess, until it is tuned."""


@dataclass(frozen=True, slots=True)
class RowsForm:
    """Rows as attention takes them.

    Args:
        rows: of all requests.
        runs: of consecutive ones.
        context: keys that the last of them sees.
        group: query heads of a KV head.
        size: channels of a head.
        dtype: of the pages.
    """

    rows: int
    runs: int
    context: int
    group: int
    size: int
    dtype: str

    def tiles(self, config: KernelConfig) -> int:
        """How many tiles a KV head's rows fill, runs being of equal length."""
        runs = 1 if config == KVKIT else self.runs
        return runs * -(-self.rows * self.group // (runs * TILE_ROWS))

    @property
    def untuned(self) -> KernelConfig:
        """The choice where nothing was tuned."""
        return KVKIT if self.tiles(ENGINE) >= MARGIN * self.tiles(KVKIT) else ENGINE

    @property
    def bucket(self) -> ProblemBucket:
        """The rows that share a choice, in this version of vLLM."""
        counts = self.rows * self.group, self.runs, self.context
        sizes = tuple(1 << (count - 1).bit_length() for count in counts)
        form = f"{self.dtype} SIZE={self.size} vllm {version_of('vllm')}"
        return ProblemBucket("rows_of_blends", form, sizes)

    def tuned(self) -> KernelConfig:
        """What was faster on this process's GPU; where nothing was tuned, the choice of the model above."""
        from kvkit.kernels.attention.triton_kernels import attend

        return best(self.bucket, self.untuned, CHOICES, attend)
