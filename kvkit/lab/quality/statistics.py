"""Statistics over samples: confidence intervals, a paired test, and the F1 of an answer."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.random import default_rng
from numpy.typing import NDArray

RESAMPLES = 2000


def bootstrap(
    values: NDArray[np.float64], over: NDArray[np.float64] | None = None, seed: int = 0
) -> tuple[float, float]:
    """Return the 95 % interval of the mean of `values`, or of its ratio to the mean of `over`.

    `values` and `over` are paired by sample. Percentiles of resampled means (Efron,
    https://doi.org/10.1214/aos/1176344552); equal for equal seeds.

    Raises:
        ValueError: there are no values, or their numbers differ.
    """
    if not len(values) or (over is not None and len(over) != len(values)):
        raise ValueError(
            f"values: {len(values)}, over: {0 if over is None else len(over)}; want equal numbers, above 0"
        )
    means = resampled_means(values, seed)
    if over is not None:
        means = means / resampled_means(over, seed)  # equal seeds and lengths: the same samples
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def resampled_means(values: NDArray[np.float64], seed: int = 0) -> NDArray[np.float64]:
    """Return the means [RESAMPLES] of bootstrap resamples of `values`; equal for equal seeds."""
    picks = default_rng(seed).integers(0, len(values), (RESAMPLES, len(values)))
    means: NDArray[np.float64] = values[picks].mean(1)
    return means


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """Return the 95 % interval of a share (Wilson 1927, https://doi.org/10.1080/01621459.1927.10502953).

    Raises:
        ValueError: there are no trials.
    """
    if trials < 1:
        raise ValueError(f"trials={trials}: want at least 1")
    share, z = successes / trials, 1.959964
    centre = share + z * z / (2 * trials)
    half = z * math.sqrt(share * (1 - share) / trials + (z / (2 * trials)) ** 2)
    scale = 1 + z * z / trials
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def paired_p(values: NDArray[np.float64], baseline: NDArray[np.float64], seed: int = 0) -> float:
    """Return the two-sided p of a paired randomisation test (Fisher) of equal means.

    Draws the signs of the differences by sample `RESAMPLES` times; equal for equal seeds.
    """
    differences = values - baseline
    signs = default_rng(seed).choice((-1.0, 1.0), (RESAMPLES, len(differences)))
    as_extreme = np.abs((signs * differences).mean(1)) >= abs(differences.mean()) - 1e-12
    return float((1 + as_extreme.sum()) / (1 + RESAMPLES))


def f1(predicted: Sequence[Hashable], expected: Sequence[Hashable]) -> float:
    """Return SQuAD's F1 of `predicted`: harmonic mean of precision and recall, counting repeated items."""
    common = sum((Counter(predicted) & Counter(expected)).values())
    return 2 * common / (len(predicted) + len(expected)) if common else 0.0
