"""A Ceph cluster of one monitor, one OSD in memory and one S3 gateway, on 127.0.0.1; of Debian's packages."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any, Self
from urllib.error import URLError
from urllib.request import Request, urlopen

import obstore
from obstore.store import from_url

from kvkit.lab.testbed.servers import free_ports
from kvkit.lab.testbed.waiting import wait_until

PACKAGES = "ceph-mon ceph-osd radosgw"
PROGRAMS = ("ceph-mon", "ceph-osd", "radosgw", "radosgw-admin", "monmaptool", "ceph-authtool", "ceph")
SETTINGS = """[global]
fsid = {fsid}
mon host = v2:127.0.0.1:{monitor}
mon initial members = a
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
mon allow pool size one = true
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd crush chooseleaf type = 0
public addr = 127.0.0.1
cluster addr = 127.0.0.1
ms bind msgr1 = false
run dir = {folder}
admin socket = {folder}/$name.$pid.asok
pid file = {folder}/$name.pid
log file = {folder}/$name.log
keyring = {folder}/keyring
mon data = {folder}/mon
mon data avail warn = 1
mon data avail crit = 1
osd data = {folder}/osd
osd objectstore = memstore
memstore device bytes = 1073741824
rgw data = {folder}/gateway
rgw frontends = beast endpoint=127.0.0.1:{gateway}
"""


def missing() -> str | None:
    """Return what this machine lacks for a cluster, None if nothing."""
    if os.geteuid() != 0:
        return "it takes root"
    absent = [program for program in PROGRAMS if shutil.which(program) is None]
    return f"apt-get install {PACKAGES}" if absent else None


class Ceph:
    """A cluster with one user, who may make buckets; a context manager.

    Attributes:
        options: what `TierConfig(options=...)` needs to reach its gateway.
        gateway: process of the gateway.
    """

    gateway: subprocess.Popen[bytes]

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        monitor, self.port = free_ports(2)
        self._monitor, self._fsid = f"[v2:127.0.0.1:{monitor}]", str(uuid.uuid4())
        for name in ("mon", "osd", "gateway"):
            (folder / name).mkdir(parents=True)
        text = SETTINGS.format(folder=folder, fsid=self._fsid, monitor=monitor, gateway=self.port)
        (folder / "ceph.conf").write_text(text)
        self.options = {
            "endpoint": f"http://127.0.0.1:{self.port}",
            "access_key_id": "kvkit",
            "secret_access_key": secrets.token_hex(8),
        }

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        for process in reversed(self._processes):
            process.kill()
            process.wait()

    def _start(self) -> None:
        keyring, identity = self.folder / "keyring", str(uuid.uuid4())
        all_rights = ["--cap", "mon", "allow *", "--cap", "osd", "allow *"]
        self._run("ceph-authtool", "--create-keyring", keyring, "--gen-key", "-n", "mon.", *all_rights[:3])
        for name in ("client.admin", "osd.0"):
            self._run("ceph-authtool", keyring, "--gen-key", "-n", name, *all_rights)
        monitors = self.folder / "monitors"
        self._run("monmaptool", "--create", "--addv", "a", self._monitor, "--fsid", self._fsid, monitors)
        self._run("ceph-mon", "--mkfs", "-i", "a", "--monmap", monitors, "--keyring", keyring)
        self._serve("ceph-mon", "-f", "-i", "a")
        self._run("ceph", "auth", "import", "-i", keyring)
        self._run("ceph", "osd", "new", identity, "0")
        self._run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", identity)
        self._serve("ceph-osd", "-f", "-i", "0")
        self.start_gateway()
        user = ["user", "create", "--uid", "kvkit", "--display-name", "kvkit"]
        keys = ["--access-key", "kvkit", "--secret-key", self.options["secret_access_key"]]
        self._run("radosgw-admin", "-n", "client.admin", *user, *keys)

    def start_gateway(self) -> None:
        """Start the gateway, again if it was killed; returns when it answers."""
        self.gateway = self._serve("radosgw", "-f", "-n", "client.admin")
        wait_until(self._answers, self.gateway, self.folder / "radosgw.out")

    def make_bucket(self, name: str) -> None:
        """Make a bucket of the user's."""
        store = from_url(f"s3://{name}", config=self.options, client_options={"allow_http": True})
        with urlopen(Request(obstore.sign(store, "PUT", "", timedelta(minutes=5)), method="PUT"), timeout=60):
            pass

    def _answers(self) -> bool:
        try:
            with urlopen(self.options["endpoint"], timeout=5):
                return True
        except (URLError, OSError):
            return False

    def _run(self, *command: object) -> None:
        environment = os.environ | {"CEPH_CONF": str(self.folder / "ceph.conf")}
        done = subprocess.run(
            [*map(str, command)], env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr

    def _serve(self, *command: str) -> subprocess.Popen[bytes]:
        environment = os.environ | {"CEPH_CONF": str(self.folder / "ceph.conf")}
        with (self.folder / f"{command[0]}.out").open("ab") as out:
            process = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
        self._processes.append(process)
        return process
