"""The first process of a client machine: sets it up, mounts the server, then runs what the tests ask for.

The machine is a user-mode Linux that sees the host's files by hostfs: the same Python and the same packages.
Each call runs in a thread of its own, and has a connection of its own to the tests.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path

MOUNT = "/mnt/store"
PORT = 7000
LIBC = ctypes.CDLL(None, use_errno=True)


def insert_modules(names: list[str]) -> None:
    """Load kernel modules and what they need, in the order of modules.dep: modprobe may not be at hand."""
    folder = Path("/usr/lib/uml/modules") / os.uname().release
    needs = {}
    for line in (folder / "modules.dep").read_text().splitlines():
        path, _, below = line.partition(":")
        needs[Path(path).stem] = [*reversed(below.split()), path]
    for name in names:
        for path in needs[name]:
            with (folder / path).open("rb") as file:
                if LIBC.syscall(313, file.fileno(), b"", 0):  # finit_module
                    error = ctypes.get_errno()
                    assert error == 17, f"{path}: {os.strerror(error)}"


def set_up(address: str, server: str, options: str) -> None:
    """Mount what a Linux needs, bring the network up and mount the server's export at `MOUNT`."""
    for kind, folder in (("proc", "/proc"), ("sysfs", "/sys"), ("tmpfs", "/mnt")):
        subprocess.run(["mount", "-n", "-t", kind, kind, folder], check=True)
    os.environ["PATH"] = "/usr/sbin:/usr/bin:/sbin:/bin"
    for command in ("ip link set lo up", f"ip address add {address}/24 dev eth0", "ip link set eth0 up"):
        subprocess.run(command.split(), check=True)
    insert_modules(["nfsv4"])
    os.mkdir(MOUNT)
    mount = ["mount", "-n", "-i", "-t", "nfs4", f"{server}:/store", MOUNT]
    subprocess.run([*mount, "-o", f"addr={server},clientaddr={address},{options}"], check=True)


def answer(connection: socket.socket) -> None:
    """Run one call and send its outcome: {"result": ...} or {"error": traceback}."""
    import actions

    stream = connection.makefile("rw")
    name, arguments = json.loads(stream.readline())
    try:
        outcome = {"result": getattr(actions, name)(**arguments, stream=stream)}
    except BaseException:
        outcome = {"error": traceback.format_exc()}
    with suppress(OSError):
        stream.write(json.dumps(outcome) + "\n")
        stream.flush()
    stream.close()
    connection.close()


def main(address: str, server: str, options: str) -> None:
    set_up(address, server, options)
    import actions  # noqa: F401 - takes its time once

    listener = socket.create_server(("", PORT))
    socket.create_connection((server, PORT)).close()  # tells the tests that all is ready
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=answer, args=(connection,)).start()


if __name__ == "__main__":
    try:
        main(*sys.argv[1:4])
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        LIBC.reboot(0x4321FEDC)  # power off
