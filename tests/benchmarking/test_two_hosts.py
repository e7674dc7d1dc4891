"""Stand-ins for engines on two hosts hit what their sessions share, as often as simulated."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from repository import ROOT

from benchmarks.link import TOOLS
from benchmarks.research.fleet import traffic
from benchmarks.serving import two_hosts
from kvkit.lab.simulate.config import SimulationConfig
from kvkit.lab.simulate.model import Simulator


def test_equal_chunks_are_equal_tokens() -> None:
    requests = traffic(two_hosts.ENGINES).requests[:40]
    seen: dict[bytes, str] = {}
    for request in requests:
        tokens = two_hosts.tokens_of(request)
        assert len(tokens) == len(request.chunks) * two_hosts.CHUNK_TOKENS
        assert request.prompt_chunks <= len(request.chunks) <= two_hosts.LONGEST
        for chunk, part in zip(request.chunks, np.split(tokens, max(1, len(request.chunks))), strict=False):
            assert seen.setdefault(part.tobytes(), chunk) == chunk


def test_sessions_go_where_the_simulator_sends_them() -> None:
    simulator = Simulator(SimulationConfig.model_validate({"nodes": {"both": two_hosts.ENGINES}}), 256)
    for request in traffic(two_hosts.ENGINES).requests:
        node = simulator._route(simulator._entry_nodes, request, ())
        assert simulator._entry_nodes.index(node) == two_hosts.engine_of(request)


def test_a_faster_link_is_simulated_as_sooner() -> None:
    slow, fast = (two_hosts.simulated(two_hosts.ENGINES, 1.0, speed) for speed in (1e7, 1e9))
    assert slow["hit_rate"] == fast["hit_rate"] > 0.5
    assert slow["ttft_mean_s"] > fast["ttft_mean_s"]


@pytest.mark.nightly
@pytest.mark.skipif(
    os.geteuid() != 0 or any(shutil.which(tool) is None for tool in TOOLS),
    reason=f"network namespaces take root and {', '.join(TOOLS)}",
)
def test_a_store_that_dies_costs_hits_and_no_request(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "benchmarks.serving.two_hosts", "--json", str(out)]
    done = subprocess.run([*command, "--stores", "redis cluster", "--speeds", "2"], cwd=ROOT, text=True)
    assert done.returncode == 0
    document = json.loads(out.read_text())
    plain, killed = document["rows"]
    assert plain["requests"] == killed["requests"] == 150
    assert plain["hits"]["store"] > 0
    assert plain["damaged"] == killed["damaged"] == 0
    assert set(killed["spans"]) == {"before", "while", "after"}
    (simulated, _) = document["simulated"]
    # a busy machine loads less, as far as to load takes longer than to compute; nothing can hit more
    assert 0.1 < plain["hit_rate"] < simulated["hit_rate"] + 0.02
