"""The tuning strategy `tpe`: Optuna's tree-structured Parzen estimator over a space of configurations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import optuna
from optuna.distributions import BaseDistribution, IntDistribution
from optuna.trial import TrialState, create_trial

from kvkit.kernels.tuning.configs import KernelConfig
from kvkit.kernels.tuning.strategies import FIRST_SAMPLES, nearest_first

FIRST_NEAREST = 8
"""Configurations asked for nearest to the default before the estimator has a say."""


class TreeParzen:
    """Ask for the configuration nearest to the point that the estimator suggests.

    The tree-structured Parzen estimator (https://arxiv.org/abs/2304.11127) of Optuna suggests the rank of
    each setting among its values, all together. The nearest configuration that was not asked for yet, by
    ranks, is asked for, so that every point is in the space and none comes twice. The estimator learns
    logarithms of seconds.

    Args:
        space: configurations, the default first.
        seed: seed of the sampler.
    """

    samples = FIRST_SAMPLES

    def __init__(self, space: Sequence[KernelConfig], seed: int = 0) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        settings = [_settings(config) for config in space]
        values = {name: sorted({one.get(name, 0) for one in settings}) for one in settings for name in one}
        self._ranks = {
            config: {name: found.index(one.get(name, 0)) for name, found in values.items() if len(found) > 1}
            for config, one in zip(space, settings, strict=True)
        }
        self._distributions: dict[str, BaseDistribution] = {
            name: IntDistribution(0, len(found) - 1) for name, found in values.items() if len(found) > 1
        }
        self._waiting = dict.fromkeys(nearest_first(space))
        self._near = FIRST_NEAREST
        sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=0)
        self._study = optuna.create_study(sampler=sampler)

    def ask(self) -> KernelConfig | None:
        """Return the nearest to the default, then the nearest to what the estimator suggests."""
        if not self._waiting:
            return None
        if self._near > 0 or not self._distributions:
            config = next(iter(self._waiting))
        else:
            trial = self._study.ask(self._distributions)
            suggested = trial.params
            self._study.tell(trial, state=TrialState.FAIL)  # the configuration is told in its place
            config = min(self._waiting, key=lambda one: _distance(self._ranks[one], suggested))
        self._near -= 1
        del self._waiting[config]
        return config

    def tell(self, config: KernelConfig, seconds: float | None) -> None:
        """Add a time to the study; a configuration without one teaches nothing."""
        self._waiting.pop(config, None)
        if seconds is not None:
            self._study.add_trial(
                create_trial(
                    params=dict(self._ranks[config]),
                    distributions=self._distributions,
                    value=math.log(seconds),
                )
            )


def _settings(config: KernelConfig) -> dict[str, int]:
    return {**dict(config.tiles), "warps": config.warps, "stages": config.stages}


def _distance(ranks: Mapping[str, int], suggested: Mapping[str, int]) -> int:
    return sum(abs(rank - suggested[name]) for name, rank in ranks.items())
