"""Identity of LoRA adapters, by the contents of their files when vLLM read them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvkit.adapters.engine.contents import Stamp
from kvkit.adapters.engine.lookup_request import Lora
from kvkit.adapters.vllm import compat
from kvkit.adapters.vllm.identity import adapter_files, adapter_fingerprint

log = logging.getLogger(__name__)


class Loras:
    """The adapters of one worker. For the thread that runs steps.

    vLLM reads an adapter at its first request and keeps it in memory even if its files change. It reads the
    files again after it evicted the adapter, or when a request asks for it. Its own cache names KV by the
    adapter's name and path only. So a path has one identity as long as the engine runs: once vLLM reads, or
    would read, other contents from the path, no KV with that adapter is looked up or stored any more.

    Args:
        settings: vLLM's settings that determine KV with an adapter, as returned by `identity.lora_settings`.
    """

    def __init__(self, settings: str) -> None:
        self._settings = settings
        self._manager: Any = None
        self._loaded: dict[int, str | None] = {}  # fingerprints when vLLM read them, by vLLM's id
        self._by_path: dict[str, str | None] = {}  # the only fingerprint that each path may have
        self._remembered: dict[str, tuple[dict[Path, Stamp], str]] = {}  # by path
        self.close: Callable[[], None] = lambda: None

    @staticmethod
    def watched(settings: str) -> Loras | None:
        """Return a watching instance; None, with a warning, if this vLLM's reads cannot be watched."""
        loras = Loras(settings)
        try:
            loras.watch()
        except compat.MissingName as error:
            log.warning("%s", error)
            return None
        return loras

    def watch(self) -> None:
        """Note the adapters that vLLM reads in this process, from now until `close` is called.

        Raises:
            MissingName: the reads of this vLLM cannot be watched.
        """

        def load_and_note(manager: Any, request: Any, load: Callable[[Any, Any], Any]) -> Any:
            before = self._fingerprint(request.lora_path)
            adapter = load(manager, request)
            after = self._fingerprint(request.lora_path)
            self._manager = manager
            self._loaded[request.lora_int_id] = after if after == before else None
            self._check_path(request.lora_path, self._loaded[request.lora_int_id])
            return adapter

        self.close = compat.watch_adapters(load_and_note)

    def identity(self, lora: Lora) -> str | None:
        """Return an adapter's identity in namespaces; None: no KV with it is to be looked up or stored.

        Reads the adapter's files if vLLM does not have it in memory, or will read it again.
        """
        in_memory = self._manager is not None and lora.number in self._manager.list_adapters()
        stays = in_memory and not lora.load_inplace
        fingerprint = self._loaded.get(lora.number) if stays else self._fingerprint(lora.path)
        if self._check_path(lora.path, fingerprint) is None:
            return None
        return f"{fingerprint}/{self._settings}" + ("/3d" if lora.fused_experts else "")

    def _check_path(self, path: str, fingerprint: str | None) -> str | None:
        """Return `fingerprint` if the path had no other one before, else None. Mutates."""
        known = self._by_path.setdefault(path, fingerprint)
        if known is not None and known != fingerprint:
            log.warning(
                "LoRA adapter %s: its contents have changed, so nothing with it is reused as long as this "
                "engine runs; load changed weights from a new path",
                path,
            )
            known = self._by_path[path] = None
        return known

    def _fingerprint(self, path: str) -> str | None:
        """Return the fingerprint of an adapter's files as they are now; None if they cannot be read."""
        try:
            folder = Path(os.path.expanduser(path))  # as vLLM does: an unknown user is no error
            stamps = {file: Stamp.of(file) for file in adapter_files(folder)}
            remembered = self._remembered.get(path)
            if remembered is not None and remembered[0] == stamps:
                return remembered[1]
            settled = all(stamp.settled for stamp in stamps.values())
            fingerprint = adapter_fingerprint(folder)
        except (OSError, ValueError) as error:  # ValueError: a path with a null byte
            if path not in self._by_path:
                log.warning("LoRA adapter %s: nothing with it is reused: %s", path, error)
            return None
        if settled:  # else a later change might not show
            self._remembered[path] = stamps, fingerprint
        return fingerprint
