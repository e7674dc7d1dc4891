"""Traces of a few short chains, and simulated tiers of a few chunks."""

from __future__ import annotations

from hypothesis import strategies as st

from kvkit.lab.simulate.config import SimulationConfig
from kvkit.lab.simulate.traces import Request, Trace

CHUNK = 1000  # bytes of a simulated chunk: 10 tokens of 100 bytes


@st.composite
def traces(draw: st.DrawFn, requests: int = 20, kinds: str = "ab", longest: int = 3) -> Trace:
    """Short chains of a few kinds of chunks, which share beginnings; some end in an answer."""
    made = []
    for chain in draw(st.lists(st.text(kinds, min_size=1, max_size=longest), min_size=1, max_size=requests)):
        prompt = draw(st.integers(0, len(chain)))
        names = tuple(chain[: i + 1] for i in range(len(chain)))
        made.append(Request(0.0, "s", 10 * prompt + 5, 10 * (len(chain) - prompt), names, prompt))
    return Trace(10, tuple(made))


def configured(*capacities: int | None, nodes: int = 1, eviction: str = "lru") -> SimulationConfig:
    """A tier for each capacity, in chunks: the first of each node, others shared."""
    tiers = {
        f"tier{i}": {
            "scope": "shared" if i else "node",
            "capacity": None if chunks is None else chunks * CHUNK + 1,
            "eviction": eviction,
        }
        for i, chunks in enumerate(capacities)
    }
    model = {"kv_bytes_per_token": 100}
    return SimulationConfig.model_validate({"model": model, "tiers": tiers, "nodes": {"both": nodes}})
