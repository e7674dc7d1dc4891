"""Hosts for processes: network namespaces with a link to a common one that can be cut. Root and iproute2.

The process that makes them enters a namespace of its own first, the common one; whatever it starts is there.
All of it ends with it.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

_NEW_NETWORK = 0x40000000


class Host:
    """A namespace behind a link of its own.

    Attributes:
        address: its own.
        gateway: of the common namespace, as this host reaches it.
        cut: whether nothing passes.
    """

    def __init__(self, number: int) -> None:
        self.gateway, self.address = f"10.99.{number}.1", f"10.99.{number}.2"
        self.cut = False
        self._near, self._far = f"near{number}", f"far{number}"
        self._home = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        _leave()
        self.namespace = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        _enter(self._home)
        other = f"/proc/{os.getpid()}/fd/{self.namespace}"
        _ip("link", "add", self._near, "type", "veth", "peer", "name", self._far, "netns", other)
        _ip("address", "add", f"{self.gateway}/24", "dev", self._near)
        _ip("link", "set", self._near, "up")
        with self.inside():
            _ip("link", "set", "lo", "up")
            _ip("address", "add", f"{self.address}/24", "dev", self._far)
            _ip("link", "set", self._far, "up")

    @contextmanager
    def inside(self) -> Iterator[None]:
        """What the calling thread does meanwhile, and starts, is on this host."""
        _enter(self.namespace)
        try:
            yield
        finally:
            _enter(self._home)

    def move_in(self) -> None:
        """Have the calling process, which has one thread, live on this host."""
        _enter(self.namespace)

    def set_cut(self, cut: bool, seen_here: bool = False) -> None:
        """Have nothing pass, or all. `seen_here`: this host's own end goes down, so that it knows at once;
        else packets vanish."""
        if not cut:
            _ip("link", "set", self._near, "up")
            with self.inside():
                _ip("link", "set", self._far, "up")
        elif seen_here:
            with self.inside():
                _ip("link", "set", self._far, "down")
        else:
            _ip("link", "set", self._near, "down")
        self.cut = cut


def lacking() -> str | None:
    """Why there can be no hosts here, None if there can. Takes this process into a namespace of its own."""
    if shutil.which("ip") is None:
        return "there is no ip: apt-get install iproute2"
    try:
        _leave()
        _ip("link", "set", "lo", "up")
        _ip("link", "add", "probe", "type", "veth", "peer", "name", "probed")
        _ip("link", "delete", "probe")
    except OSError as error:
        return str(error)
    return None


def _leave() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_NETWORK):
        raise OSError(ctypes.get_errno(), "no network namespace")


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _NEW_NETWORK):
        raise OSError(ctypes.get_errno(), "the network namespace cannot be entered")


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
