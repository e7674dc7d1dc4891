"""Run an engine's own tests of its storage backend with kvkit's in the backend's place.

    python tests/tools/own_tests.py vllm 0.33.0 ~/.cache/kvkit/own-tests

The tests come from the source distribution, where pip finds it, and are kept in the folder. What asks for the
insides of the engine's backend is left out.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import subprocess
import sys
import tarfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path

SUPPORT = Path(__file__).parent.parent / "support"


@dataclass(frozen=True)
class Suite:
    """An engine's test file, the plug-in that puts kvkit there, and the tests that are left out, with why."""

    file: str
    plugin: str
    left_out: dict[str, str]


SUITES = {
    "vllm": Suite(
        "tests/v1/kv_offload/tiering/test_fs_tier.py",
        "kvkit_as_file_tier",
        {
            "test_store_accepts_block_published_by_another_writer": "replaces functions of vLLM's fs.io",
            "test_invalid_path_raises_at_construction": "kvkit opens a folder that may come later",
            "test_invalid_locality_raises_at_construction": "asks for vLLM's words",
            "test_shutdown_discards_pending_tasks": "looks into vLLM's pool of threads",
            "test_store_load_data_integrity": "replaces vLLM's extension",
            "test_store_load_roundtrip_without_o_direct": "asks for a private field",
            "test_batched_partial_load_failure_keeps_loaded_blocks": "cuts a file as vLLM lays it out",
            "test_partially_failed_store_emits_no_event": "replaces functions of vLLM's fs.io",
            "test_failed_load_after_abort_does_not_break_newer_probe": "a lookup may believe kvkit's index",
            "test_transient_load_failure_leaves_file": "a record that is no file any more is deleted",
            "test_store_event_uses_configured_locality[None-None]": "kvkit's tiers know their locality",
            "test_mixed_job_results_emit_event_only_for_successful_job": "replaces functions of vLLM's fs.io",
            "test_events_disabled_by_default": "asks for a private field",
            "test_events_require_global_kv_events_flag": "asks for a private field",
        },
    ),
    "lmcache": Suite(
        "tests/v1/distributed/test_mock_l2_adapter.py",
        "kvkit_as_mock_l2",
        {
            "TestBandwidthSimulation": "is of the mock alone",
            "test_get_usage_empty_adapter_is_zero": "kvkit evicts by itself, and tells no capacity",
            "test_get_usage_increases_after_store": "as above",
            "test_get_usage_decreases_after_delete": "as above",
        },
    ),
}


def fetched(package: str, version: str, folder: Path) -> Path:
    """The suite's test file, which is fetched once.

    Raises:
        SystemExit: pip finds no source distribution.
    """
    suite = SUITES[package]
    path = folder / f"{package}-{version}" / Path(suite.file).name
    if not path.exists():
        command = [sys.executable, "-m", "pip", "download", "-vv", "--no-deps", "--no-binary", ":all:"]
        with subprocess.Popen(
            [*command, f"{package}=={version}", "-d", folder],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as pip:  # it would go on to build it
            assert pip.stdout is not None
            link = rf"https?://\S+/{package}-{re.escape(version)}\.tar\.gz\S*"
            found = next((match for line in pip.stdout if (match := re.search(link, line))), None)
            pip.kill()
        if found is None:
            sys.exit(f"pip finds no source distribution of {package} {version}")
        url, _, digest = found[0].partition("#sha256=")
        with urllib.request.urlopen(url) as reply:
            data = reply.read()
        if digest and hashlib.sha256(data).hexdigest() != digest:
            sys.exit(f"{package} {version}: its digest is not what the index says")
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            member = archive.extractfile(f"{package}-{version}/{suite.file}")
            assert member is not None
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(member.read())
    return path


def main(package: str, version: str, folder: Path) -> int:
    """Run the suite; returns pytest's exit status."""
    suite, path = SUITES[package], fetched(package, version, folder)
    names = " and ".join(f"not ({name})" for name in suite.left_out if "[" not in name)
    command = [sys.executable, "-m", "pytest", "-q", "-p", suite.plugin, "-p", "no:cacheprovider"]
    command += ["--rootdir", str(path.parent), "-k", names, str(path)]
    command += [f"--deselect={path.name}::{name}" for name in suite.left_out if "[" in name]
    inherited = os.environ.get("PYTHONPATH")
    found = os.pathsep.join(filter(None, [str(SUPPORT), str(SUPPORT.parent.parent), inherited]))
    environment = os.environ | {"PYTHONPATH": found}
    return subprocess.run(command, cwd=path.parent, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], Path(sys.argv[3]).expanduser()))
