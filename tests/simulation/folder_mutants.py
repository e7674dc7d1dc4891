"""Defects of folders that processes share, planted one at a time."""

from __future__ import annotations

from simulation.mutant import Mutant

FOLDER = "kvkit/tiers/folder.py"

FOLDER_MUTANTS = (
    Mutant(
        "a file has its name before what is in it is synced",
        FOLDER,
        """\
                self._write_bytes(file, data)
                if self._fsync:
                    os.fsync(file)
                else:
""",
        """\
                self._write_bytes(file, data)
                if not self._fsync:
""",
        "folder",
    ),
    Mutant(
        "a file has its name before it is written",
        FOLDER,
        """\
                self._write_bytes(file, data)
                if self._fsync:
""",
        """\
                os.rename(temporary, path)
                self._write_bytes(file, data)
                temporary = path
                if self._fsync:
""",
        "folder",
    ),
    Mutant(
        "the folder that a name is in is not synced",
        FOLDER,
        "            _sync_folder(folder)\n            if folder",
        "            if folder",
        "folder",
    ),
    Mutant(
        "the names of new folders are not synced",
        FOLDER,
        "            if folder not in self._synced:",
        "            if False:",
        "folder",
    ),
    Mutant(
        "a write that the system cut short is taken for whole",
        FOLDER,
        """\
        while remaining:
            try:
                remaining = remaining[os.write(file, remaining) :]
""",
        """\
        if remaining:
            try:
                os.write(file, remaining)
""",
        "folder",
    ),
    Mutant(
        "a read that the system cut short is taken for whole",
        FOLDER,
        "    while done < len(buffer) and (count := os.preadv(file, [buffer[done:]], offset + done)):\n",
        "    if count := os.preadv(file, [buffer[done:]], offset + done):\n",
        "folder",
    ),
    Mutant(
        "a write that fails leaves its file",
        FOLDER,
        """\
            # after the close, as in _remove_if_dead
            with suppress(OSError):
                os.unlink(temporary)
            raise
""",
        """\
            raise
""",
        "folder",
    ),
    Mutant(
        "a file that was read stays open",
        FOLDER,
        """\
                yield file
            finally:
                os.close(file)
""",
        """\
                yield file
            finally:
                pass
""",
        "folder",
    ),
)
