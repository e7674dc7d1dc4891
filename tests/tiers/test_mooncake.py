"""The tier on Mooncake Store checks its settings, and passes its suite in a network of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from mooncake_libraries import library_path
from repository import ROOT, SUPPORT

from kvkit.staging import Staging
from kvkit.tiers.mooncake import MooncakeTier
from kvkit.tiers.settings import TierConfig, open_tier

TOOLS = ("ip", "unshare")


@pytest.mark.nightly
def test_in_a_network_of_its_own(tmp_path: Path) -> None:
    """tests/support/mooncake_suite.py, in a process of its own. It takes root and iproute2."""
    if find_spec("mooncake") is None:
        assert not os.environ.get("CI"), "Mooncake is missing: `make test` installs it"
        pytest.skip("Mooncake is missing: pip install 'kvkit-llm[dev]'")
    missing = [name for name in TOOLS if shutil.which(name) is None]
    if os.geteuid() or missing:
        pytest.skip(f"a network namespace takes root and {', '.join(TOOLS)}; missing: {missing or 'root'}")
    alone = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this kernel, or its container, makes no network namespace")
    libraries = library_path(tmp_path)
    for _ in range(2):  # its library aborts, rarely, once a stranger's connection is gone: not ours to mend
        done = subprocess.run(
            [
                *alone,
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-p",
                "no:cacheprovider",
                SUPPORT / "mooncake_suite.py",
            ],
            cwd=ROOT,
            env=os.environ | {"LD_LIBRARY_PATH": libraries, "MC_LOG_LEVEL": "ERROR"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode != -signal.SIGABRT:
            break
    assert done.returncode == 0, done.stdout[-20_000:]


@pytest.mark.parametrize(
    ("url", "settings", "words"),
    [
        ("mooncake://", {}, "url='mooncake://': want mooncake://"),
        ("http://host", {}, "want mooncake://"),
        ("mooncake://host:port", {}, "want mooncake://"),
        ("mooncake://host:50051/pool", {}, "want mooncake://"),
        ("mooncake://h", {"options": {"protocol": "udp"}}, "protocol = 'udp': .*'tcp' or 'rdma'"),
        (
            "mooncake://h",
            {"options": {"segment": 1}},
            "options.segment: unknown setting; the settings here are protocol, rdma_devices, ",
        ),
        (
            "mooncake://h",
            {"options": {"global_segment_size": "1MB"}},
            "global_segment_size = .*1000000 bytes: want 0 or at least 16777216",
        ),
        ("mooncake://h", {"options": {"global_segment_size": "much"}}, "global_segment_size = 'much': "),
        ("mooncake://h", {"options": {"metrics_port": 0}}, "metrics_port = 0: .*greater than or equal to 1"),
    ],
)
def test_wrong_settings(url: str, settings: dict[str, Any], words: str, staging: Staging) -> None:
    with pytest.raises(ValueError, match=f"tier 'far': .*{words}"):
        MooncakeTier(TierConfig(url=url, **settings), staging, "far")
    staging.close()


def test_the_package_is_missing(staging: Staging, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(
        ValueError, match=r"tier 'far': mooncake.store is missing: pip install 'kvkit-llm\[mooncake\]'"
    ):
        open_tier("far", TierConfig(url="mooncake://h"), staging)
    staging.close()
