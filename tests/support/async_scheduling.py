"""vLLM's asynchronous scheduling on a CPU, where its platform turns it off: what GPUs have by default.

The next step is scheduled before the last one's tokens are known, as on a GPU. The forward pass itself is
synchronous: streams and events of CUDA, which the model runner waits for, are nothing here.
"""

from __future__ import annotations

import contextlib
from typing import Any

ASKED = "KVKIT_TESTS_OVERLAP"
"""An environment variable: where it is set, engines of the tests schedule so."""


class _Nothing:
    """Stands for a stream or an event: all that is asked of it has happened."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None

    def query(self) -> bool:
        return True


def force() -> None:
    """Have engines that this process makes from now on schedule asynchronously. Mutates vLLM and torch."""
    import torch
    from vllm.platforms import current_platform

    platform = current_platform.__class__
    check = platform.check_and_update_config.__func__

    def check_and_force(cls: Any, vllm_config: Any) -> None:
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    platform.check_and_update_config = classmethod(check_and_force)
    for module, names in ((torch.cuda, ("Stream", "Event")), (torch, ("Event",))):
        for name in names:
            setattr(module, name, _Nothing)
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *_: _Nothing()
