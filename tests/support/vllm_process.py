"""Processes in which vLLM is imported: forks of one that has done so, for that takes longer than most tests.

vLLM is as it is elsewhere, but that it compiles nothing that `enforce_eager` leaves to torch.compile, and for
what `_prepare` does.

Run as a program, with the number of a socket, it is the one that is forked.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import async_scheduling
from repository import TESTS

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",  # what has threads cannot be forked
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # no processes for the two or three functions that are compiled
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
FORKED = ENVIRONMENT | {"TORCHDYNAMO_DISABLE": "1"}
IMPORTED = (
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.worker.cpu_worker",
    "vllm.lora.worker_manager",
    "vllm.model_executor.layers.quantization.online.base",
    "zarr",
)
"""Of what engines import, what takes long and asks for no settings. vLLM does not start behind numba."""


class Fork:
    """A process that runs a module of Python with vLLM imported: of `subprocess.Popen` what tests use.

    Args:
        module: run as `python -m` does.
        streams: descriptors of its input, output and errors.
        environment: variables that differ from those here and in `FORKED`.
        network: the file of a network namespace to be in, where it is another.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        streams: tuple[int, int, int],
        environment: Mapping[str, str],
        folder: Path | None = None,
        network: str = "",
    ) -> None:
        asked = {
            "module": module,
            "arguments": list(arguments),
            "environment": _inherited() | FORKED | environment,
            "folder": str(folder or Path.cwd()),
            "network": network,
        }
        source = _source()
        socket.send_fds(source, [json.dumps(asked).encode()], streams)
        answer = source.recv(64)
        assert answer, "vLLM cannot be imported"
        self.pid = int(answer)
        self._ended = os.pidfd_open(self.pid)  # nobody else has the number: see `_forget_ended`

    def poll(self) -> int | None:
        """None while it runs, then 0: with what it ended is told to its parent alone."""
        return 0 if select.select([self._ended], [], [], 0)[0] else None

    def wait(self, timeout: float) -> int:
        """Wait until it has ended.

        Raises:
            subprocess.TimeoutExpired: it runs after so many seconds.
        """
        if not select.select([self._ended], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return 0

    def kill(self) -> None:
        signal.pidfd_send_signal(self._ended, signal.SIGKILL)

    def __del__(self) -> None:
        if hasattr(self, "_ended"):
            os.close(self._ended)


def _inherited() -> dict[str, str]:
    """This process's variables but for one that vLLM sets in it, with which engines import all anew."""
    return {name: value for name, value in os.environ.items() if name != METHOD}


@cache
def _source() -> socket.socket:
    """The way to the process that is forked, which lives as long as this one."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with there:
        command = [sys.executable, __file__, str(there.fileno())]
        environment = os.environ | FORKED
        subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[there.fileno()], env=environment)
    return here


def _forget_ended() -> None:
    """Let the numbers of processes that have ended be given to others."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _serve(way: socket.socket) -> None:
    sys.path.insert(1, str(TESTS))
    for module in IMPORTED:
        importlib.import_module(module)
    _prepare()
    gc.collect()
    gc.freeze()
    while True:
        text, streams, _, _ = socket.recv_fds(way, 1 << 20, 3)
        if not text:
            return
        _forget_ended()
        pid = os.fork()
        if not pid:
            way.close()
            _become(json.loads(text), streams)
            return
        for stream in streams:
            os.close(stream)
        way.send(str(pid).encode())


def _prepare() -> None:
    """Do once, or without another process, what each process of vLLM would do anew.

    It looks at a model's class in a process that imports all, which keeps CUDA out of the one that serves;
    starts an engine's processes likewise on a CPU, for those with threads of OpenMP cannot be forked; and
    seeks in all modules for what stands for Triton's kernels. Here are no CUDA and no threads.
    """
    import torch
    import vllm.envs
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    if torch.cuda.is_available():
        return
    registry._run_in_subprocess = lambda look: look()
    setattr(vllm.envs, METHOD, "fork")  # unless a process asks for "spawn"
    current_platform.register_triton_kernel_overrides()
    current_platform.__class__.register_triton_kernel_overrides = classmethod(lambda cls: None)


def _become(asked: dict[str, Any], streams: list[int]) -> None:
    """Run what is asked for, to its end."""
    libc, pr_set_pdeathsig = ctypes.CDLL(None, use_errno=True), 1
    libc.prctl(pr_set_pdeathsig, signal.SIGKILL)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    if asked["network"]:
        with open(asked["network"]) as namespace:
            if libc.setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), asked["network"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    if os.environ.get(METHOD) == "spawn":
        vars(sys.modules["vllm.envs"]).pop(METHOD, None)
    if os.environ.get(async_scheduling.ASKED):
        async_scheduling.force()
    os.chdir(asked["folder"])
    found = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [folder for folder in found if folder and folder not in sys.path]
    sys.argv[1:] = asked["arguments"]
    sys.modules.pop(asked["module"], None)  # it is run, not imported
    runpy.run_module(asked["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
