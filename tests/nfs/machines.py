"""The NFS server and the client machines of the tests, all within one network namespace."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from guest import PORT
from run import KERNEL

from kvkit.lab.testbed.waiting import wait_until

BOOT_S, CALL_S = 60.0, 60.0
NFS_PORT = 2049
OPTIONS = "vers=4.2,soft,timeo=15,retrans=1"
"""How the clients mount: caching as by default; each request to a dead server is an error after 4.5 s."""
LEASE_S = 30
"""The server gives up on a client it does not hear of for so long. A client that does not hear of its server
for as long lets calls wait for minutes, whatever its timeouts: the tests' outages are shorter."""

IN_TURN = ["taskset", "--cpu-list", str(min(os.sched_getaffinity(0))), "chrt", "--fifo", "1"]
"""Runs the server's threads on one processor, each until it waits. Linux frees a lock while it closes the
file, and NFS-Ganesha 4.3 dies if a thread does the latter while another is halfway through the former:
https://github.com/nfs-ganesha/nfs-ganesha/issues/1151."""

CONFIG = """
NFS_CORE_PARAM {{
    Protocols = 4; Enable_NLM = false; Enable_RQUOTA = false; Enable_UDP = false;
}}
NFS_KRB5 {{ Active_krb5 = false; CCacheDir = "{folder}/credentials"; }}
NFSv4 {{
    Lease_Lifetime = {lease_s}; Grace_Period = 15; RecoveryRoot = "{folder}/recovery"; Minor_Versions = 2;
}}
EXPORT {{
    Export_Id = 1; Path = "{export}"; Pseudo = /store; Access_Type = RW; Squash = none; Protocols = 4;
    Transports = TCP; SecType = sys; Filesystem_Id = 1.1; Attr_Expiration_Time = 0; FSAL {{ Name = VFS; }}
}}
"""


class Server:
    """An NFS server that exports a small disk of its own.

    Attributes:
        export: the folder that it exports.
    """

    def __init__(self, folder: Path, disk_bytes: int) -> None:
        self.export = folder / "export"
        for name in ("export", "recovery", "credentials"):
            (folder / name).mkdir()
        run("mount", "-t", "tmpfs", "-o", f"size={disk_bytes}", "tmpfs", self.export)
        run("ip", "link", "set", "lo", "up")
        self._folder, self._log = folder, folder / "ganesha.log"
        config = CONFIG.format(folder=folder, export=self.export, lease_s=LEASE_S)
        (folder / "ganesha.conf").write_text(config)
        self.start()

    def start(self) -> None:
        """Start it; returns when it can be reached."""
        files = {"-f": self._folder / "ganesha.conf", "-L": self._log, "-p": self._folder / "ganesha.pid"}
        files["-p"].unlink(missing_ok=True)
        self._log.touch()
        arguments = [part for file in files.items() for part in file]
        self._process = subprocess.Popen([*IN_TURN, "ganesha.nfsd", "-F", "-N", "NIV_WARN", *arguments])
        wait_until(_listens, self._process, self._log)

    def kill(self) -> None:
        """End it with -9."""
        self._process.kill()
        self._process.wait()

    def check_alive(self) -> None:
        """The server runs.

        Raises:
            AssertionError: it ended by itself; how, and its log.
        """
        status = self._process.poll()
        assert status is None, f"the NFS server ended with {status}\n{self._log.read_text()}"

    def fill(self) -> Path:
        """Fill its disk; returns the file to remove when there is to be room again."""
        filler = self.export / "filler"
        with filler.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(1 << 16))
            except OSError:
                return filler


class Call:
    """A call that runs on a client machine. Every wait is `CALL_S` long at most."""

    def __init__(self, address: str, name: str, arguments: dict[str, Any]) -> None:
        self._socket = socket.create_connection((address, PORT), timeout=CALL_S)
        self._stream = self._socket.makefile("rw")
        self.tell([name, arguments])

    def tell(self, message: Any = None) -> None:
        """Send it a message."""
        self._stream.write(json.dumps(message) + "\n")
        self._stream.flush()

    def heard(self) -> Any:
        """Its next message."""
        line = self._stream.readline()
        assert line, "the call was killed"
        message = json.loads(line)
        assert not isinstance(message, dict) or "error" not in message, message["error"]
        return message

    def result(self) -> Any:
        """What it returned, once it did.

        Raises:
            AssertionError: it raised, with its traceback.
        """
        with self._socket:
            return self.heard()["result"]


class Client:
    """A Linux of its own, number 1 to 254, that mounts the server's export."""

    def __init__(self, number: int, folder: Path) -> None:
        self.address, server = f"10.77.{number}.2", f"10.77.{number}.1"
        tap = f"tap{number}"
        run("ip", "tuntap", "add", tap, "mode", "tap")
        run("ip", "address", "add", f"{server}/24", "dev", tap)
        run("ip", "link", "set", tap, "up")
        self._log = folder / f"client{number}.log"
        self._ready = socket.create_server((server, PORT))
        kernel = [
            *(*KERNEL, "mem=320M", f"uml_dir={folder}", f"eth0=tuntap,{tap}"),
            *(
                f"init={sys.executable}",
                f"PYTHONPATH={os.environ['PYTHONPATH']}",
                "PYTHONDONTWRITEBYTECODE=1",
            ),
        ]
        guest = [str(Path(__file__).parent / "guest.py"), self.address, server, OPTIONS]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*kernel, "--", *guest], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def wait(self) -> None:
        """Return when it is up.

        Raises:
            AssertionError: it is not within `BOOT_S`.
        """
        deadline = time.monotonic() + BOOT_S
        self._ready.settimeout(0.1)
        with self._ready:
            while True:
                try:
                    self._ready.accept()[0].close()
                    return
                except TimeoutError:
                    assert self._process.poll() is None, self._log.read_text()
                    assert time.monotonic() < deadline, self._log.read_text()

    def kill(self) -> None:
        """End it as if its power went."""
        self._process.kill()
        self._process.wait()

    def start(self, function: str, /, **arguments: Any) -> Call:
        """Call a function of `actions` there."""
        return Call(self.address, function, arguments)

    def call(self, function: str, /, **arguments: Any) -> Any:
        """Call a function of `actions` there; returns its result."""
        return self.start(function, **arguments).result()


def _listens() -> bool:
    try:
        socket.create_connection(("127.0.0.1", NFS_PORT), timeout=1).close()
    except OSError:
        return False
    return True


def run(*command: str | Path) -> None:
    """Run a program that must succeed."""
    subprocess.run(command, check=True)
