"""Fingerprints of a model's weights: the names and contents of the files that an engine loads."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import uuid
from collections.abc import Sequence
from pathlib import Path

from kvkit.adapters.engine.contents import default_folder, digests

log = logging.getLogger(__name__)

_OTHER_FOLDERS = re.compile(r"\..*|__pycache__|original|runs|checkpoint-\d+")
"""Folders within a model's folder from which engines load nothing."""
_OTHER_FILES = re.compile(
    r"\..*|(generation_)?config\.json|tokenizer\.model|.*\.(md|txt|jinja|png|jpe?g|gif|svg|pdf|ipynb)"
    r"|(tokenizer|tokenizer_config|vocab|chat_template|special_tokens_map|added_tokens|trainer_state)\.json"
    r"|training_args\.bin|rng_state.*\.pth|(optimizer|scheduler|scaler)\.(pt|bin)|LICENSE|NOTICE"
)
"""Files of a model's folder that do not determine the KV of given tokens, and the config: a namespace has the
config as the engine uses it."""


def folder_fingerprint(folder: Path) -> str:
    """Return 32 hex digits of the names and contents of a model folder's files that may determine KV.

    Raises:
        OSError: a file cannot be read, or a folder cannot be listed.
    """

    def raise_error(error: OSError) -> None:
        # an engine loads nothing from folders that it may not list either, such as lost+found
        if not isinstance(error, PermissionError) or Path(error.filename) == folder:
            raise error

    paths: list[Path] = []
    seen: set[Path] = set()
    for directory, folders, files in os.walk(folder, onerror=raise_error, followlinks=True):
        real = Path(directory).resolve()
        # links to visited folders would recur without end; sorted, as the order of visits must not vary
        subfolders = [] if real in seen else [name for name in folders if not _OTHER_FOLDERS.fullmatch(name)]
        folders[:] = sorted(subfolders)
        if real not in seen:
            paths += [Path(directory, name) for name in files if not _OTHER_FILES.fullmatch(name)]
        seen.add(real)
    return fingerprint(folder, [path for path in paths if path.is_file()])


def fingerprint(folder: Path, files: Sequence[Path]) -> str:
    """Return 32 hex digits of the names within `folder` and the contents of `files`.

    Raises:
        OSError: a file cannot be read.
    """
    names = sorted((str(path.relative_to(folder)), path) for path in files)
    contents = digests([path for _, path in names], default_folder())
    digest = hashlib.blake2b(digest_size=16)
    for (name, _), content in zip(names, contents, strict=True):
        digest.update(json.dumps([name, content]).encode())
    return digest.hexdigest()


def weights_of(model: str, option: str) -> str:
    """Return the identity of a model's weights, by its folder's files or its commit in the hub's cache.

    If neither is there, no other engine has the result, and a warning names the setting to give.

    Args:
        model: folder, or hub id.
        option: the engine's option that has kvkit's settings, for the warning.
    """
    from huggingface_hub import snapshot_download

    try:
        if Path(model).is_dir():
            return folder_fingerprint(Path(model))
        return Path(snapshot_download(model, local_files_only=True)).name
    except (OSError, ValueError) as error:
        log.warning(
            "%s: its weights are not known, so pages do not outlive this engine; give `identity` in %s: %s",
            model,
            option.rstrip(": "),
            error,
        )
        return f"unknown-{uuid.uuid4().hex}"
