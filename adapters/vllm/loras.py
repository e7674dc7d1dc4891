"""Which LoRA adapter computes KV: known by what its files held when vLLM read them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvkit.adapters.engine.lookup_request import Lora
from kvkit.adapters.vllm import compat
from kvkit.adapters.vllm.contents import Stamp
from kvkit.adapters.vllm.identity import adapter_files, adapter_fingerprint

log = logging.getLogger(__name__)


class Loras:
    """The adapters of one worker. For the thread that runs steps.

    vLLM reads an adapter when it is first wanted, keeps it in memory whatever becomes of its files, and reads
    it again if it had to make room, or is told to. What it computed in between bears the adapter's name and
    path in its own cache. So KV of one path has one identity as long as the engine runs: if vLLM has read
    something else from there, or would, nothing with that adapter is looked up or stored any more.

    Args:
        settings: of vLLM's that decide KV with an adapter, as `identity.lora_settings` tells them.
    """

    def __init__(self, settings: str) -> None:
        self._settings = settings
        self._manager: Any = None
        self._loaded: dict[int, str | None] = {}
        self._named: dict[str, str | None] = {}
        self._read: dict[str, tuple[dict[Path, Stamp], str]] = {}
        self.close: Callable[[], None] = lambda: None

    @staticmethod
    def watched(settings: str) -> Loras | None:
        """Return the adapters of this process, watched; None, with a warning, where vLLM cannot be seen."""
        loras = Loras(settings)
        try:
            loras.watch()
        except compat.MissingName as error:
            log.warning("%s", error)
            return None
        return loras

    def watch(self) -> None:
        """Note which adapters vLLM reads in this process from now on, until `close` is called.

        Raises:
            MissingName: this vLLM reads them in a way that cannot be seen.
        """

        def load_and_note(manager: Any, request: Any, load: Callable[[Any, Any], Any]) -> Any:
            before = self._held(request.lora_path)
            adapter = load(manager, request)
            held = self._held(request.lora_path)
            self._manager = manager
            self._loaded[request.lora_int_id] = held if held == before else None
            self._named_as(request.lora_path, self._loaded[request.lora_int_id])
            return adapter

        self.close = compat.watch_adapters(load_and_note)

    def identity(self, lora: Lora) -> str | None:
        """What stands for an adapter in a namespace; None: no KV of it is to be looked up or stored.

        Reads the adapter's files where vLLM has not yet, or no longer, read them.
        """
        kept = self._manager is not None and lora.number in self._manager.list_adapters()
        held = self._loaded.get(lora.number) if kept and not lora.read_anew else self._held(lora.path)
        named = self._named_as(lora.path, held)
        return None if named is None else f"{named}/{self._settings}" + ("/3d" if lora.fused_experts else "")

    def _named_as(self, path: str, held: str | None) -> str | None:
        """The one identity of a path, if that is what is `held`. Notes it, or that there is none."""
        named = self._named.setdefault(path, held)
        if named is not None and named != held:
            log.warning(
                "LoRA adapter %s: it does not hold what it did, so nothing with it is reused as long as this "
                "engine runs; load changed weights from a new path",
                path,
            )
            named = self._named[path] = None
        return named

    def _held(self, path: str) -> str | None:
        """What the files of an adapter hold now; None where they cannot be read."""
        try:
            folder = Path(os.path.expanduser(path))  # as vLLM does: a user that nobody knows is no error
            stamps = {file: Stamp.of(file) for file in adapter_files(folder)}
            read = self._read.get(path)
            if read is not None and read[0] == stamps:
                return read[1]
            settled = all(stamp.settled for stamp in stamps.values())
            held = adapter_fingerprint(folder)
        except (OSError, ValueError) as error:  # ValueError: a path with a null byte
            if path not in self._named:
                log.warning("LoRA adapter %s: nothing with it is reused: %s", path, error)
            return None
        if settled:  # else a change from now on may not show
            self._read[path] = stamps, held
        return held
