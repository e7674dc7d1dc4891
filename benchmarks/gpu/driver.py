"""`make gpu`: the machine, whether the carried Triton cache fits it, and how it sees pinned memory."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

from triton.runtime.cache import triton_key

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.triton_cache import KEY
from kvkit.lab.files import about
from kvkit.staging import Staging


def run(bench: Bench) -> None:
    """Records "machine", "Triton cache" and, by the way that memory was pinned, "pinned memory"."""
    bench.results.record(
        "machine", **about("make gpu", seed=0), target=bench.target, nvidia_smi=_nvidia_smi()
    )
    bench.results.record("Triton cache", **carried_cache())
    library = ctypes.CDLL(bench.libcuda)
    version = ctypes.c_int()
    _check(library.cuDriverGetVersion(ctypes.byref(version)))
    bench.results.record("driver", cuda=version.value)
    allocated = bench.pinned(1 << 20)
    staging = Staging(1 << 20, 1)
    staging.ready.wait()
    registered = staging.arrays[0].ctypes.data
    for how, address in (("allocated", allocated.data_ptr()), ("registered", registered)):
        same = device_address(library, address) == address
        bench.results.record("pinned memory", how=how, device_address_is_the_hosts=same)
    staging.close()


def device_address(library: ctypes.CDLL, address: int) -> int:
    """What the device calls a byte of pinned memory.

    Raises:
        OSError: the driver says that it cannot reach it.
    """
    found = ctypes.c_uint64()
    _check(library.cuMemHostGetDevicePointer_v2(ctypes.byref(found), ctypes.c_void_p(address), 0))
    return found.value


def carried_cache() -> dict[str, object]:
    """Whether Triton uses a carried cache here, and whether that was made for this very Triton."""
    folder = os.environ.get("TRITON_CACHE_DIR")
    file = Path(folder or "") / KEY
    if not folder or not file.exists():
        return {"carried": False, "fits": False}
    return {"carried": True, "fits": file.read_text() == triton_key()}


def _check(status: int) -> None:
    if status:
        raise OSError(f"the CUDA driver answers {status}")


def _nvidia_smi() -> str | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    fields = "--query-gpu=driver_version,power.limit,clocks.max.sm,clocks.max.memory,pcie.link.gen.current"
    command = [tool, fields, "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
