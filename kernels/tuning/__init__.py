"""Names for tuning a kernel of your own; docs/research/own-kernel.md has an example.

Importing this package imports nothing else: each name comes from its module on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__all__ = [
    "Case",
    "HostLaunch",
    "KernelConfig",
    "Launch",
    "Problem",
    "ProblemBucket",
    "Work",
    "autotuned",
    "best",
    "different",
    "fill",
    "host_config",
    "not_close",
    "tools_here",
    "tune",
]

if TYPE_CHECKING:
    from kvkit.kernels.tuning.autotune import autotuned
    from kvkit.kernels.tuning.cases import Case, Problem, Work, different, fill, not_close
    from kvkit.kernels.tuning.configs import HostLaunch, KernelConfig, Launch, ProblemBucket, host_config
    from kvkit.kernels.tuning.devices import tools_here
    from kvkit.kernels.tuning.search import tune
    from kvkit.kernels.tuning.tables import best
else:
    _HOMES = {
        **dict.fromkeys(("Case", "Problem", "Work", "different", "not_close", "fill"), "cases"),
        **dict.fromkeys(("HostLaunch", "KernelConfig", "Launch", "ProblemBucket", "host_config"), "configs"),
        "best": "tables",
        "tools_here": "devices",
        "tune": "search",
        "autotuned": "autotune",
    }

    def __getattr__(name):
        if name not in _HOMES:
            raise AttributeError(f"module 'kvkit.kernels.tuning' has no attribute {name!r}")
        return getattr(import_module(f"kvkit.kernels.tuning.{_HOMES[name]}"), name)

    def __dir__():
        return sorted([*globals(), *__all__])
