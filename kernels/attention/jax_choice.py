"""Choose what computes attention of JAX arrays: the Triton kernels through jax-triton, or XLA."""

from __future__ import annotations

import functools
import logging
import os
import sys
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import jax

from kvkit.environment import version_of
from kvkit.kernels.attention import jax_plan
from kvkit.kernels.attention.layer import Requests, Scoring
from kvkit.kernels.checks import LaunchError

if TYPE_CHECKING:
    from kvkit.kernels.attention.rows import Rows

log = logging.getLogger(__name__)

Backend: TypeAlias = Literal["triton", "xla"]
LEAST = {"torch": (2, 8), "jax": (0, 11), "triton": (3, 7), "jax-triton": (0, 4, 1)}
"""Oldest versions with which jax-triton takes outputs anywhere among a kernel's arguments."""
INSTALL = "pip install 'kvkit-llm[jax-triton]', on Python 3.12 or later"


def choose(
    arrays: tuple[jax.Array, jax.Array, jax.Array],
    requests: Requests | Rows,
    scoring: Scoring,
    backend: Backend | None,
) -> tuple[jax_plan.Work, jax_plan.Calls] | None:
    """Return the plan of the Triton kernels; None: XLA computes.

    Logs a warning, once, where there is a CUDA device, but no jax-triton for it.

    Args:
        arrays: q, k_pages and v_pages.
        backend: None: Triton where it can.

    Raises:
        LaunchError: `backend` is unknown, or cannot compute this.
        RowsError: values of `requests` do not fit each other.
    """
    if backend not in (None, "triton", "xla"):
        raise LaunchError(f"backend={backend!r}: want 'triton', 'xla', or None to choose")
    q, k_pages, v_pages = arrays
    if backend == "xla" or not len(q) or (backend is None and not has_cuda()):
        return None
    reason = unsupported(k_pages, v_pages, requests)
    if not reason and (reason := unusable()) and backend is None:
        warn_once(reason)
    if not reason:
        rows = requests
        if isinstance(rows, Requests):
            rows = jax_plan.rows_of(rows, k_pages.shape[2])
        return jax_plan.plan(rows, q, k_pages, v_pages, scoring)
    if backend is None:
        return None
    raise LaunchError(f"backend='triton': {reason}. Choices: 'xla', or None for Triton where it can")


def unsupported(k_pages: Any, v_pages: Any, requests: Requests | Rows) -> str:
    """Return why the Triton kernels cannot compute this; "" if they can."""
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(requests)):
        return (
            "requests are traced, but the host plans from their values: leave them out of jax.jit's arguments"
        )
    most = 576 if k_pages.dtype.itemsize == 2 else 256
    size = max(k_pages.shape[3], v_pages.shape[3])
    return f"heads of {size} channels, want at most {most}" if size > most else ""


@functools.cache
def unusable() -> str:
    """Return why the kernels cannot be called here, and what to install; "" if they can."""
    if sys.version_info < (3, 12) or any(_version(name) < least for name, least in LEAST.items()):
        found = ", ".join(f"{name} {version_of(name) or 'missing'}" for name in LEAST)
        wanted = ", ".join(f"{name} {'.'.join(map(str, least))}" for name, least in LEAST.items())
        return f"{found}; want {wanted} or later: {INSTALL}"
    if reason := blind_torch():
        return reason
    cache_folder = os.environ.get("TRITON_CACHE_DIR")
    try:
        from kvkit.kernels.attention import jax_triton

        jax_triton.trace()
    except Exception as error:  # a JAX that is too new for it; whatever it raises
        return (
            f"jax-triton {version_of('jax-triton')} fails under jax {jax.__version__} "
            f"({type(error).__name__}: {error}): install versions of them that fit each other"
        )
    finally:
        if cache_folder is not None:  # jax-triton 0.4.1 unsets it for all that use Triton
            os.environ["TRITON_CACHE_DIR"] = cache_folder
    return ""


def blind_torch() -> str:
    """Return that torch sees no GPU, whose kind and size it tells plans and Triton; "" if it sees one."""
    import torch

    if torch.cuda.is_available():
        return ""
    return f"torch {torch.__version__} sees no CUDA device: install a build of torch for CUDA"


@functools.cache
def has_cuda() -> bool:
    """Return whether JAX has a CUDA device."""
    try:
        return bool(jax.devices("cuda"))
    except RuntimeError:
        return False


@functools.cache
def warn_once(reason: str) -> None:
    """Log that XLA computes what the Triton kernels would."""
    log.warning("blend_attention of JAX arrays runs in XLA, not in the Triton kernel: %s", reason)


def _version(package: str) -> tuple[int, ...]:
    """Return the leading numbers of an installed version; empty, the lowest, if it is missing."""
    numbers = []
    for part in (version_of(package) or "").split(".")[:3]:
        if not part.isdecimal():
            break
        numbers.append(int(part))
    return tuple(numbers)
