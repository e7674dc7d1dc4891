"""Mooncake's servers: the master, who knows what lies where, and processes that give memory to its pool."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from kvkit.lab.testbed.servers import Process, executable, free_ports
from kvkit.staging import Staging
from kvkit.tiers.mooncake import MooncakeTier
from kvkit.tiers.settings import TierConfig

GIVEN = 16 << 20
"""Bytes that a giver gives, unless told otherwise."""
_LIBRARY = "libibverbs.so.1"


def library_path(folder: Path) -> str:
    """Return what LD_LIBRARY_PATH must be for processes that import Mooncake, which loads libibverbs.

    Where the system has none, NIXL brings one, and `folder` gets a link to it.

    Raises:
        FileNotFoundError: neither has one.
    """
    given = os.environ.get("LD_LIBRARY_PATH", "")
    try:
        ctypes.CDLL(_LIBRARY)
    except OSError:
        spec = find_spec("nixl_cu12")
        if spec is None or spec.origin is None:
            raise FileNotFoundError(f"there is no {_LIBRARY}: apt-get install libibverbs1") from None
        libraries = Path(spec.origin).parent.with_name("nixl_cu12.libs")
        (found,) = libraries.glob("libibverbs-*.so*")
        (folder / _LIBRARY).symlink_to(found)
        return f"{folder}:{libraries}:{given}"
    return given


class Master(Process):
    """Knows what lies where.

    Args:
        address: where it is reached; it listens everywhere.
    """

    def __init__(self, folder: Path, address: str = "127.0.0.1") -> None:
        super().__init__(folder)
        self.address = address
        self.port, self.metrics_port = free_ports(2)
        self.url = f"mooncake://{address}:{self.port}"

    def command(self) -> list[str]:
        flags = {
            "rpc_port": self.port,
            "metrics_port": self.metrics_port,
            "allocation_strategy": "free_ratio_first",  # not at random
        }
        return [executable("mooncake_master"), *(f"--{name}={value}" for name, value in flags.items())]

    def answers(self) -> bool:
        return bool(json.loads(self.asked("health"))["service_ready"])

    def asked(self, path: str) -> str:
        """Return the answer of its metrics port."""
        with urlopen(f"http://{self.address}:{self.metrics_port}/{path}", timeout=5) as answer:
            return str(answer.read().decode())

    def tier(self, staging: Staging, given: int = 0, **settings: Any) -> MooncakeTier:
        """Return a tier on it, which gives so many bytes."""
        options = {"metrics_port": self.metrics_port, "global_segment_size": given}
        config = TierConfig.model_validate({"url": self.url, "options": options, **settings})
        return MooncakeTier(config, staging)


class Giver(Process):
    """Gives memory to the pool, and does nothing else.

    Args:
        given: bytes of memory.
        address: where other clients reach it.
        within: what begins its command, such as `ip netns exec <name>`.
    """

    def __init__(
        self,
        folder: Path,
        master: Master,
        given: int = GIVEN,
        address: str = "127.0.0.1",
        within: Sequence[str] = (),
    ) -> None:
        super().__init__(folder)
        self._master = master
        self._given, self._address, self._within = given, address, within
        self._before: set[str] = set()

    def command(self) -> list[str]:
        self._before = set(self._master.asked("get_all_segments").split())
        flags = {
            "host": self._address,
            "port": free_ports(1)[0],
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": f"{self._master.address}:{self._master.port}",
            "global_segment_size": self._given,
        }
        command = [executable("mooncake_client"), *(f"--{name}={value}" for name, value in flags.items())]
        return [*self._within, *command]

    def answers(self) -> bool:
        # not by their number: a dead giver's is dropped some time after its death
        return bool(set(self._master.asked("get_all_segments").split()) - self._before)
