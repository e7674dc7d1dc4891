"""Run the tests of folders on a real NFSv4.2 mount: `make test-nfs`.

A server (NFS-Ganesha) and two clients (user-mode Linux) meet in a network of their own, which nothing outside
can reach. They live in a process namespace of their own too, and so end with this program, however it ends.

Where that cannot be, it says so and passes; with KVKIT_NFS=required it fails.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

LIMIT_S = 300.0
PROGRAMS = {
    "linux.uml": "user-mode-linux",
    "ganesha.nfsd": "nfs-ganesha nfs-ganesha-vfs",
    "ip": "iproute2",
    "mount": "mount",
    "unshare": "util-linux",
    "taskset": "util-linux",
    "chrt": "util-linux",
}
KERNEL = ["linux.uml", "root=/dev/root", "rootfstype=hostfs", "rootflags=/", "rw", "quiet"]
KERNEL += ["con0=null,fd:1", "con=null", "ssl=null"]
"""A Linux in a process, on the files that are here."""
NAMESPACES = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]


def missing() -> str | None:
    """What this machine lacks for the tests, None if nothing."""
    if os.geteuid() != 0:
        return "they take root"
    packages = [package for program, package in PROGRAMS.items() if shutil.which(program) is None]
    if not packages and not list(Path("/usr/lib").glob("**/ganesha/libfsalvfs.so")):
        packages = ["nfs-ganesha-vfs"]
    if packages:
        return f"apt-get install {' '.join(dict.fromkeys(packages))}"
    if not os.path.exists("/dev/net/tun"):
        return "/dev/net/tun is missing"
    command = [*NAMESPACES, "chrt", "--fifo", "1", "ip", "tuntap", "add", "probe", "mode", "tap"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"{' '.join(command)}: {' '.join(done.stderr.split())}" if done.returncode else no_machine()


def no_machine() -> str | None:
    """Why user-mode Linux runs no program on this CPU, None if it does; that of Linux 6.1 fails on AMX."""
    with tempfile.TemporaryDirectory(prefix="kvkit-nfs-") as scratch:
        options = [*KERNEL, "mem=64M", f"uml_dir={scratch}", "init=/bin/true"]
        done = subprocess.run(
            options, capture_output=True, stdin=subprocess.DEVNULL, text=True, timeout=LIMIT_S
        )
    found = [line for line in done.stdout.splitlines() if "set fp regs failed" in line]
    return f"user-mode Linux does not run on this CPU ({found[0]})" if found else None


def main() -> int:
    why = missing()
    if why is not None:
        print(f"NFS is not tested here: {why}")
        return int(os.environ.get("KVKIT_NFS") == "required")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    here = Path(__file__).parent
    with tempfile.TemporaryDirectory(prefix="kvkit-nfs-") as scratch:
        # the package's own conftest.py would bring all of PyTorch into the machines
        options = ["-q", "-p", "no:cacheprovider", f"--confcutdir={here}", f"--basetemp={scratch}/tests"]
        command = [*NAMESPACES, sys.executable, "-m", "pytest", *options, str(here / "suite.py")]
        environment = os.environ | {"PYTHONPATH": str(here.parent.parent), "TMPDIR": scratch}
        with subprocess.Popen([*command, *sys.argv[1:]], env=environment, cwd=here.parent.parent) as tests:
            try:
                return tests.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                print(f"NFS tests: not done within {LIMIT_S:.0f} s")
                return 1
            finally:
                tests.kill()


if __name__ == "__main__":
    sys.exit(main())
