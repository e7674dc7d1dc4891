"""A link of limited bandwidth to another host: a network namespace behind a pair of virtual interfaces."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network

TOOLS = ("ip", "tc", "unshare", "nsenter")


class NoLink(RuntimeError):
    """Why this machine cannot make one."""


@dataclass(frozen=True, slots=True)
class Link:
    """The other end: its address, and what begins a command that is to run there.

    Attributes:
        near: address of this end.
        device: interface of this end.
    """

    address: str
    within: tuple[str, ...]
    near: str
    device: str


@contextmanager
def link(megabits: int) -> Iterator[Link]:
    """A link of so many Mbit/s in either direction. It is gone with this process, however that ends.

    Raises:
        NoLink: this is not root, a tool is missing, or the kernel lacks a part.
    """
    missing = [name for name in TOOLS if shutil.which(name) is None]
    if os.geteuid() or missing:
        raise NoLink(f"a network namespace takes root and {', '.join(TOOLS)}; missing: {missing or 'root'}")
    # a namespace lasts as long as a process in it, and this one as long as we keep its standard input open
    command = ["unshare", "--net", "sh", "-c", "echo made; exec cat"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        if not holder.stdout.readline():
            raise NoLink("this kernel, or its container, makes no network namespace")
        pid = holder.pid
        within = ("nsenter", f"--target={pid}", "--net")
        near, far = IPv4Network((int(IPv4Address("10.0.0.0")) + 4 * pid, 30)).hosts()  # as nobody else has
        run("ip", "link", "add", f"kv{pid}a", "type", "veth", "peer", "name", f"kv{pid}b", "netns", str(pid))
        for there, name, address in (((), f"kv{pid}a", near), (within, f"kv{pid}b", far)):
            run(*there, "ip", "addr", "add", f"{address}/30", "dev", name)
            run(*there, "ip", "link", "set", name, "up")
            shape = f"tc qdisc add dev {name} root tbf rate {megabits}mbit burst 512kb latency 50ms"
            run(*there, *shape.split())
        run(*within, "ip", "link", "set", "lo", "up")
        yield Link(str(far), within, str(near), f"kv{pid}a")


def run(*command: str) -> None:
    """Run a command. Raises `NoLink` if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoLink(f"{' '.join(command)}: {done.stderr.strip()}")
