"""Every metric of a cache changes when the thing that it counts happens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from caches import CHUNK, new_cache, new_staging, sequence
from metric_names import Samples, documented, moved, samples
from prometheus_client import generate_latest
from random_models import random_model

from kvkit.adapters.huggingface.blended import BlendedModel
from kvkit.cache import Cache
from kvkit.config import load_config
from kvkit.handoff.endpoint import Endpoint
from kvkit.handoff.protocol.states import Limits
from kvkit.handoff.receiver import Receiver
from kvkit.handoff.sender import Sender
from kvkit.handoff.tier import HandoffTier
from kvkit.handoff.transport.handshake import Identity
from kvkit.lab.testbed.engine_stub import Engine, small_layout, small_namespace
from kvkit.lab.testbed.waiting import wait_for
from kvkit.observe import metrics
from kvkit.staging import Staging
from kvkit.tiers.base import Tier
from kvkit.tiers.memory import MemoryTier
from kvkit.tiers.objects import ObjectTier
from kvkit.tiers.settings import TierConfig
from kvkit.tiers.testing.contract import DEADLINE_S, SLOT_BYTES, record_names
from kvkit.tiers.testing.faulty import Fault, FaultyTier

LAYOUT = small_layout()
ENGINE = Engine(LAYOUT, small_namespace(LAYOUT, CHUNK))
TOKENS = sequence(4)
TABLE = ENGINE.table(len(TOKENS))


def scrape(cache: Cache) -> Samples:
    return samples(generate_latest(metrics.register(cache)).decode())


def store(cache: Cache) -> None:
    cache.store(TOKENS, ENGINE.places(TABLE))
    cache.flush()


def load(cache: Cache) -> None:
    cache.load(cache.lookup(TOKENS), ENGINE.places(TABLE))
    cache.flush()


def opened(folder: Path, *tiers: Tier, slots: int = 32, **policy: Sequence[str]) -> Cache:
    found = tiers or (ObjectTier(str(folder)),)
    return new_cache(ENGINE, new_staging(ENGINE, slots), found, **policy)


def reuse(folder: Path) -> set[str]:
    """Stored, hit, written back into memory that has room for two chunks, and at last not worth it."""
    staging = new_staging(ENGINE, 32)
    memory = MemoryTier(staging, 2 * staging.slot_bytes)
    policy = {"store_to": ("disk",), "write_back_to": ("memory",)}
    with new_cache(ENGINE, staging, [memory, ObjectTier(str(folder))], **policy) as cache:
        before = scrape(cache)
        store(cache)
        load(cache)
        cache.query(TOKENS)
        cache.lookup(TOKENS, prefill_tokens_per_s=1e12)
        cache.store(sequence(1, seed=4), ENGINE.places(TABLE), to=("memory",))
        found = moved(before, scrape(cache))
        cache.pin(TOKENS, 60)
        pinned = scrape(cache)
        cache.store(sequence(1, seed=5), ENGINE.places(TABLE), to=("memory",))
        return found | moved(pinned, scrape(cache))


def faults(folder: Path) -> set[str]:
    """A record is damaged, one cannot be read, one cannot be written; a tier hangs; a load is called off."""
    fault: list[Fault | None] = [None]
    tier = FaultyTier(
        ObjectTier(str(folder)), lambda operation, _: fault[0] if operation != "count" else None
    )
    with opened(folder, tier) as cache:
        before = scrape(cache)
        store(cache)
        for fault[0] in (Fault.FLIP, Fault.FAIL):
            load(cache)
        store(cache)
        fault[0] = Fault.HANG
        store_ = cache.store_async(sequence(2, seed=9), ENGINE.places(TABLE))
        wait_for(lambda: cache.pending_writes() > 0 or store_.done())
        hanging = scrape(cache)
        tier.release()
        cache.flush()
        return moved(before, hanging) | moved(hanging, scrape(cache))


def lateness(folder: Path) -> set[str]:
    """A tier does not answer in time; a load that would wait for it is called off."""
    tier = FaultyTier(
        ObjectTier(str(folder)), lambda operation, _: Fault.HANG if operation == "get" else None
    )
    with opened(folder, tier) as cache:
        store(cache)
        before = scrape(cache)
        late = cache.load_async(cache.lookup(TOKENS), ENGINE.places(TABLE))
        wait_for(lambda: tier.hanging > 0)
        late.cancel()
        wait_for(late.done)
        found = moved(before, scrape(cache))
        cache.timeout_s = cache.tier_set.timeout_s = 0.05
        cache.load(cache.lookup(TOKENS), ENGINE.places(TABLE))
        return found | moved(before, scrape(cache))


def queues(folder: Path) -> set[str]:
    """A tier with one thread, which is busy."""
    gate = threading.Event()

    class Busy(ObjectTier):
        def write(self, name: str, record: memoryview) -> None:
            gate.wait(DEADLINE_S)
            super().write(name, record)

    tier = Busy(TierConfig(url=str(folder), threads=1))
    with opened(folder, tier) as cache:
        before = scrape(cache)
        cache.store(TOKENS, ENGINE.places(TABLE))
        wait_for(lambda: tier.waiting() > 0)
        found = moved(before, scrape(cache))
        gate.set()
        return found


def another(folder: Path) -> set[str]:
    """What is the same as long as a cache lives differs from one to the next."""
    shown = []
    for rank, slots in ((0, 8), (1, 16)):
        engine = Engine(LAYOUT, small_namespace(LAYOUT, CHUNK, rank=rank, world=2))
        with new_cache(engine, new_staging(engine, slots), [ObjectTier(str(folder / str(rank)))]) as cache:
            shown.append(scrape(cache))
    return moved(*shown)


def handoff(folder: Path) -> set[str]:
    """A transfer to this node itself."""
    identity = Identity("node", namespace="n", layout="l", slot_bytes=SLOT_BYTES)
    sender = Sender(identity, timeout_s=DEADLINE_S, transfer_s=DEADLINE_S)
    limits = Limits(DEADLINE_S, DEADLINE_S, DEADLINE_S)
    receiver = Receiver(Staging(SLOT_BYTES, 4, shared=True), limits)
    listen = [f"unix://{folder}/sockets/x"]
    endpoint = Endpoint(receiver, (), identity, listen, timeout_s=DEADLINE_S, pin_s=1.0)
    tier = HandoffTier(receiver, sender, endpoint)
    with opened(folder) as without, opened(folder / "b", tier, ObjectTier(str(folder / "b"))) as cache:
        shown = [scrape(without), scrape(cache)]
        transfer = sender.open("a", endpoint.addresses[0], record_names(3), DEADLINE_S)
        transfer.admitted.result(DEADLINE_S)
        shown.append(scrape(cache))
        sender.finish("a")
        transfer.done.result(DEADLINE_S)
        return moved(*shown, scrape(cache))


def blending(folder: Path) -> set[str]:
    """A document behind other text."""
    tokens = torch.arange(64, dtype=torch.int32).numpy() % 50
    config = load_config(chunk_tokens=8, staging="64MiB", tiers={"disk": {"url": str(folder)}})
    with BlendedModel.open(random_model("gqa"), config, unchecked=True) as model:
        before = scrape(model.cache)
        model.precompute(tokens[16:48])
        model.flush()
        model.prefill(tokens, [(16, 48)])
        return moved(before, scrape(model.cache))


def fewer_bits(folder: Path) -> set[str]:
    """A hit in a tier that holds records in 8 bits."""
    with opened(folder, ObjectTier(TierConfig(url=str(folder), precision="int8"))) as cache:
        before = scrape(cache)
        store(cache)
        load(cache)
        return moved(before, scrape(cache))


SCENARIOS: tuple[Callable[[Path], set[str]], ...] = (
    *(reuse, faults, lateness, queues, another, handoff, blending, fewer_bits),
)


@pytest.fixture(scope="module")
def moving(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names that moved in any scenario."""
    return set().union(*(scenario(tmp_path_factory.mktemp(scenario.__name__)) for scenario in SCENARIOS))


@pytest.mark.parametrize("name", sorted(documented(metrics.METRICS)))
def test_a_metric_moves(name: str, moving: set[str]) -> None:
    assert name in moving, "no scenario makes it move: give it one"
