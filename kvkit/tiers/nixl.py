"""Files moved by a storage plug-in of NIXL, for stores whose fast client is such a plug-in, as that of 3FS.

`Folder` has the names: it creates, locks, renames, lists and removes files through the mount. A plug-in moves
their bytes between host memory and the open file (https://github.com/ai-dynamo/nixl, docs/nixl.md).
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np

from kvkit.tiers.folder import Access, Folder
from kvkit.tiers.nixl_api import import_nixl, translated

_MEMORIES = ("DRAM_SEG", "FILE_SEG")
_SPIN_S, _SLEEP_S, _LONGEST_SLEEP_S = 100e-6, 20e-6, 1e-3


class NixlFolder(Folder):
    """A `Folder` whose files a storage plug-in of NIXL reads and writes. Thread-safe and process-safe.

    Args:
        root, fsync, access: as for `Folder`.
        options: `plugin`, one that moves host memory to files (POSIX, HF3FS, ...; default POSIX), and the
            plug-in's own parameters, passed on as text.

    Raises:
        ValueError: NIXL is missing, or has no such plug-in here; the message names the choices. Or the
            plug-in refuses its parameters.
    """

    def __init__(self, root: str, options: Mapping[str, Any], fsync: bool, access: Access) -> None:
        super().__init__(root, fsync, access)
        parameters = {name: _text(value) for name, value in options.items()}
        self._plugin = parameters.pop("plugin", "POSIX")
        api = import_nixl()
        strict = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        self._name = f"kvkit-{os.getpid()}-{id(self)}"
        self._agent: Any = api.nixl_agent(self._name, api.nixl_agent_config(backends=[], sync_mode=strict))
        if not self._moves_files():
            raise ValueError(
                f"options.plugin={self._plugin!r}: want a plug-in of NIXL that moves host memory to files; "
                f"of {', '.join(self._agent.plugin_list)}"
            )
        known = self._agent.get_plugin_params(self._plugin)
        unknown = ", ".join(name for name in parameters if name not in known)
        if unknown:
            raise ValueError(
                f"options: {unknown}: the plug-in {self._plugin} has only plugin, {', '.join(known)}"
            )
        try:
            with translated():
                self._agent.create_backend(self._plugin, parameters)
        except OSError as error:
            raise ValueError(f"options.plugin={self._plugin!r}: it does not start: {error}") from error

    def _moves_files(self) -> bool:
        if self._plugin not in self._agent.plugin_list:
            return False
        kinds = self._agent.get_plugin_mem_types(self._plugin)  # none if it lacks a library of the system
        return all(kind in kinds for kind in _MEMORIES)

    def _read_bytes(self, file: int, buffer: memoryview, offset: int) -> int:
        count = max(0, min(len(buffer), os.fstat(file).st_size - offset))
        self._move("READ", file, buffer[:count], offset)
        return count

    def _write_bytes(self, file: int, data: memoryview) -> None:
        self._move("WRITE", file, data, 0)

    def _move(self, operation: str, file: int, memory: memoryview, offset: int) -> None:
        """Move bytes between memory and the file from `offset` on. Returns when they are there.

        Raises:
            OSError: the plug-in failed.
        """
        if not len(memory):
            return
        address = np.frombuffer(memory, np.uint8).ctypes.data
        sides = (
            ("DRAM", (address, len(memory), 0)),
            ("FILE", (offset, len(memory), file)),
        )
        with ExitStack() as stack, translated():
            descriptions = []
            for kind, region in sides:
                registered = self._agent.register_memory([(*region, "")], kind)
                stack.callback(self._agent.deregister_memory, registered)
                descriptions.append(self._agent.get_xfer_descs([region], kind))
            transfer = self._agent.initialize_xfer(operation, *descriptions, self._name)
            stack.callback(self._agent.release_xfer_handle, transfer)
            state = self._agent.transfer(transfer)
            began, pause = time.monotonic(), _SLEEP_S
            while state == "PROC":  # never given up: the plug-in would go on writing to this memory
                if time.monotonic() - began > _SPIN_S:
                    time.sleep(pause)
                    pause = min(2 * pause, _LONGEST_SLEEP_S)
                state = self._agent.check_xfer_state(transfer)
        if state != "DONE":
            raise OSError(
                f"NIXL: the plug-in {self._plugin} failed to {operation.lower()} {len(memory)} bytes"
            )


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
