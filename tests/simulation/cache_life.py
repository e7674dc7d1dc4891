"""Lives of a cache: requests side by side over memory and stores, with faults; what must hold all the while.

A few threads store, look up, load, prefetch and clear the same few sequences through few slots. What was
loaded is compared byte by byte with what belongs to its keys, pages that may be used again are overwritten at
once, and at the end, when nothing is wrong any more, the cache has to work, and to end, as a new one does.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from kvkit.cache import Cache, CacheTimeout
from kvkit.format.layout import KVLayout, LayerGroup, Namespace
from kvkit.format.record import RecordFormat
from kvkit.staging import Staging, StagingError, release_all
from kvkit.tiers.base import Tier, TierError
from kvkit.tiers.memory import MemoryTier
from kvkit.tiers.objects import ObjectTier
from kvkit.tiers.settings import TierConfig
from kvkit.transfer.policy import Policy
from kvkit.transfer.sequence import Chunks, Hit, SequencePages, formats_of, largest_record_bytes
from kvkit.workers import Closed, Transfer
from simulation.scheduler import START_S
from simulation.world import SimulatedKernels, SimulatedPages, SimulatedStore, World, short

CHUNK, BLOCKS, POISON, TIMEOUT_S, SHUTDOWN_S = 2, 5, 0xA5, 5.0, 6.0
SEQUENCES = {"A": (0, 0, 0), "B": (0, 0, 1), "C": (0, 1), "D": (2,), "E": (2, 2, 2, 2)}
"""Chunks by what their tokens are: they share prefixes, and chunks come again after others."""
LONGEST_S = 100.0
"""No step takes longer, whatever hangs: it has a deadline for each of its few waits."""
SETTLED_S = 1000.0
"""What hangs has gone on by then, and tiers that failed are tried again."""


@functools.cache
def layout_of(groups: int) -> tuple[KVLayout, list[Namespace]]:
    """Groups of one or two small layers, and the namespaces of two tenants."""
    layers = [(0, 1), (2,)][:groups]
    made = (LayerGroup(n, kv_heads=1, k_size=8, v_size=8, dtype="uint8", block_tokens=CHUNK) for n in layers)
    layout = KVLayout(tuple(made))
    spaces = [
        Namespace("m", layout=layout.fingerprint(), dtype="uint8", chunk_tokens=CHUNK, salt=salt)
        for salt in ("", "other")
    ]
    return layout, spaces


@functools.cache
def content(key: bytes, group: int, size: int) -> bytes:
    """The KV that belongs to a key."""
    return bytes(byte ^ (37 * group + i) & 0xFF for i, byte in zip(range(size), key * size, strict=False))


@functools.cache
def tokens_of(name: str) -> Any:
    return np.repeat(np.array(SEQUENCES[name], np.int32), CHUNK)


@functools.cache
def config_of(name: str, capacity: int | None, policy: str) -> TierConfig:
    return TierConfig.model_validate(
        {"url": f"file:///{name}", "capacity": capacity, "eviction": policy, "threads": 2}
    )


@dataclass
class Plan:
    """What a seed makes of a life.

    Attributes:
        calm: nothing goes wrong, nothing is evicted, deleted or called off: what is stored is found.
        closes_early: the cache is closed while it is used.
    """

    groups: int
    memory: int
    stores: dict[str, int | None]
    spare: int
    calm: bool
    closes_early: bool
    clients: int
    steps: int
    eviction: str

    @staticmethod
    def of(world: World) -> Plan:
        r, faults = world.random, world.faults
        groups = r.choice((1, 1, 2))
        calm = r.random() < 0.25
        names = ["disk", "far"][: r.choice((1, 1, 1, 2))]
        stores = {n: None if calm or r.random() < 0.5 else r.randint(2, 6) * groups for n in names}
        if not calm:
            kind = r.choice(("none", "slow", "hangs", "fails", "damages", "all"))
            faults.slow = 0.3 if kind in ("slow", "hangs", "all") else 0.0
            faults.hangs = 0.1 if kind in ("hangs", "all") else 0.0
            faults.fails = r.choice((0.1, 0.5)) if kind in ("fails", "all") else 0.0
            faults.damages = 0.1 if kind in ("damages", "all") else 0.0
            faults.loses = 0.05 if kind in ("damages", "all") else 0.0
            faults.threads = r.choice((0.0, 0.0, 0.0, 0.3))
            world.scheduler.haste = r.choice((0.0, 0.0, 0.02, 0.2))
        memory = 0 if r.random() < 0.3 else r.randint(1, 4) * groups
        return Plan(
            groups=groups,
            memory=8 * groups + 16 if calm and memory else memory,
            stores=stores,
            spare=groups * r.randint(1, 4),
            calm=calm,
            closes_early=not calm and r.random() < 0.15,
            clients=r.choice((1, 2, 2, 3)),
            steps=r.randint(1, 4),
            eviction=r.choice(("lru", "s3fifo", "sessions")),
        )


class CacheLife:
    """One cache, its tiers, and who uses it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.scheduler = world.scheduler
        self.check = world.scheduler.check
        kernels = SimulatedKernels(world.scheduler)
        world.instead |= {
            ("kvkit.cache", "warm_up_cpu"): lambda: None,
            ("kvkit.format.arrays", "metadata"): lambda *_: b"{}",  # Zarr has threads of its own
            ("kvkit.transfer.store", "pack"): kernels.pack,
            ("kvkit.transfer.layer_store", "pack"): kernels.pack,
            ("kvkit.transfer.layer_load", "unpack"): kernels.unpack,
            ("kvkit.transfer.sequence", "unpack"): kernels.unpack,
            ("kvkit.tiers.objects", "open_store"): lambda name, url, config: self.stores[name],
        }
        self.plan = plan = Plan.of(world)
        self.layout, self.spaces = layout_of(plan.groups)
        self.record_bytes = largest_record_bytes(self.layout, self.spaces[0])
        sizes = {n: None if c is None else c * self.record_bytes for n, c in plan.stores.items()}
        self.stores: dict[str, SimulatedStore] = {
            name: SimulatedStore(world.scheduler, name, world.faults) for name in sizes
        }
        # what is remembered of earlier seeds must not count as steps
        self.configs = {n: config_of(n, size, plan.eviction) for n, size in sizes.items()}
        for space in self.spaces:
            formats_of(self.layout, space)
        self.told: dict[tuple[str, str], bool] = {}
        self.hits: list[Hit] = []
        self.closing = False
        self.looks = 0
        self.records: dict[str, tuple[RecordFormat, bytes]] = {}
        self.cache: Cache
        self.memory: MemoryTier | None = None

    def open(self) -> None:
        plan, r = self.plan, self.world.random
        self.staging = Staging(self.record_bytes, plan.memory + plan.groups + plan.spare)
        tiers: list[Tier] = []
        if plan.memory:
            size = plan.memory * self.staging.slot_bytes
            self.memory = MemoryTier(self.staging, size, policy=plan.eviction)
            tiers.append(self.memory)
        tiers += [ObjectTier(config, n) for n, config in self.configs.items()]
        for tier in tiers:
            if tier.name in self.stores:
                self.stores[tier.name].room = partial(self.room, tier)
                self.stores[tier.name].expect = self.expect
        names = tuple(tier.name for tier in tiers)
        sought = names if plan.calm or r.random() < 0.7 else tuple(reversed(names))
        back = names[:-1] if plan.calm or r.random() < 0.8 else ()
        stored = names if plan.calm or r.random() < 0.5 else names[-1:]
        policy = Policy(sought, stored, back)
        limits = {"timeout_s": TIMEOUT_S, "shutdown_timeout_s": SHUTDOWN_S}
        self.cache = Cache(self.layout, self.spaces[0], tiers, staging=self.staging, policy=policy, **limits)
        self.cache.tier_set.subscribe(names, self.hear)
        self.scheduler.observe = self.look

    def hear(self, tier: str, names: Sequence[str], held: bool) -> None:
        for name in names:
            self.told[tier, name] = held

    def room(self, tier: Any) -> float:
        """Bytes that a store may hold: what its tier counts, and what is about to be deleted there."""
        index, objects = tier._index, self.stores[tier.name].objects
        if index.capacity_bytes is None:
            return math.inf
        leaving = sum(len(objects.get(name, b"")) for name in index._deleting)
        return float(max(index.capacity_bytes, index.used_bytes) + leaving)

    def expect(self, name: str, data: Any) -> None:
        """What is put is what belongs to the key, whatever became of pages and slots meanwhile."""
        if not self.records:
            for tokens, space in itertools.product(map(tokens_of, SEQUENCES), self.spaces):
                chunks = Chunks.of(tokens, self.layout, space)
                forms = itertools.product(chunks.keys, enumerate(chunks.formats))
                for record, (key, (g, form)) in zip(chunks.names, forms, strict=True):
                    self.records[record] = form, content(key, g, form.layers_end - form.header_bytes)
        if name in self.records:
            form, right = self.records[name]
            found = bytes(data[form.header_bytes : form.layers_end])
            self.check(found == right, "{} is written as another's record", short(name))

    def look(self) -> None:
        """What holds whenever nobody is within the lock that protects it; now and then, as it takes time."""
        self.looks += 1
        if self.looks % 4:
            return
        for part in (self.staging, self.memory, self.cache.tier_set.prefetched):
            if part is not None:
                self.scheduler.check_unlocked(part.check_integrity)

    def live(self) -> None:
        """The whole of it, as the first thread."""
        threads = self.world.threading
        with self.world.faults.threads_start():
            self.open()
            clients = [Client(self, i) for i in range(self.plan.clients)]
            started = [threads.Thread(target=c.live, name=c.name) for c in clients]
            for thread in started:
                thread.start()
        if self.plan.closes_early:
            self.scheduler.sleep(self.world.random.choice((0.0, 0.01, 3.0)))
            self.closing, self.world.faults.threads = True, 0.0  # who cannot ask a tier cannot close it
            self.scheduler.say("closes the cache while it is used")
            self.close()
        for thread in started:
            thread.join()
        waited = self.scheduler.now - START_S
        self.check(not (self.plan.calm and waited), "somebody was told of nothing for {} s", waited)
        self.scheduler.say("the faults are over")
        self.world.faults.stop()
        self.scheduler.sleep(SETTLED_S)
        if not self.closing:
            self.settled()
            self.reset()
            self.works()
            self.closing = True
            self.scheduler.say("closes the cache")
            self.close()
        self.scheduler.sleep(SETTLED_S)
        self.ended(clients)

    def close(self) -> None:
        """Close the cache: within the one deadline, whatever hangs."""
        began = self.scheduler.now
        self.cache.close()
        took = self.scheduler.now - began
        late = took > SHUTDOWN_S and not self.scheduler.haste  # with haste time passes while threads run
        self.check(not late, "closing took {} s", took)

    def settled(self) -> None:
        """Nothing is under way any more, and whoever was told knows what is held."""
        writes, tiers = self.cache.writes, self.cache.tier_set
        self.check(not writes.outstanding.count, "{} puts never end", writes.outstanding.count)
        self.check(not tiers.pending_stores.stores_of, "pending for ever: {}", tiers.pending_stores.stores_of)
        for tier, queue in writes.queues.items():
            left = queue._in_flight, len(queue.cancel())
            self.check(left == (0, 0), "puts into {}: {} under way, {} wait", tier, *left)
        reads = {tier: len(gets) for tier, gets in tiers.reads_began.items() if gets}
        self.check(not reads, "reads never end: {}", reads)
        memory: Any = self.memory
        held = [] if memory is None else [name for name, _ in memory.scan()]
        for name in held:
            with memory.borrow(name) as lease:
                self.expect(name, lease.buffer)
        tiers.prefetched.release(tiers.prefetched.slots)
        want = self.staging.slots - len(held)
        self.check(self.staging.free == want, "{} slots are free, {} should be", self.staging.free, want)
        for name, tier in self.cache.tiers.items():
            served = partial(tiers.quarantine.before, name, now=-math.inf)  # not what could not be deleted
            there = {record for record, _ in tier.scan() if served([record])}
            told = {record for (of, record), held in self.told.items() if held and of == name}
            self.check(there <= told, "{} holds {}, which nobody was told", name, sorted(there - told))
            if name in self.stores:
                lost = {record for record in there if not tier.pin([record], 0.0)}
                self.check(not lost, "{} holds {}, and counts it no more", name, sorted(lost))
            else:
                self.check(told <= there, "{} is said to hold {}", name, sorted(told - there))

    def reset(self) -> None:
        """What is cleared is served no more."""
        for tier in self.cache.tiers:
            self.cache.clear(tier)
        for name in "ACE":  # their first chunks begin all sequences
            found = self.cache.lookup(tokens_of(name)).tokens
            self.check(not found, "{} tokens of {} are found after all is cleared", found, name)

    def works(self) -> None:
        """A store is found by a lookup, and loaded, as soon as no tier is passed over any more."""
        tokens, client = tokens_of("D"), Client(self, 9)
        for _ in range(4):
            client.store("D", self.spaces[0])
            self.cache.flush()
            hit = self.cache.lookup(tokens)
            if hit.tokens == len(tokens) and client.load(hit) == len(hit.chunks):
                return
            self.scheduler.sleep(SETTLED_S)
        self.check(False, "what is stored now is not found: {}", self.cache.tier_states())

    def ended(self, clients: Sequence[Client]) -> None:
        """Every slot is back, every future done, and no thread of the cache's is left."""
        self.staging.check_integrity()
        free, slots = self.staging.free, self.staging.slots
        self.check(free == slots, "{} of {} slots are free at the end", free, slots)
        for client in clients:
            for what, transfer in client.transfers:
                self.check(transfer.done(), "{}: its {} never ends", client.name, what)
            for what, count in client.done.items():
                self.check(count == 1, "{}: {} was told {} times that it is done", client.name, what, count)
        left = [t.name for t in self.scheduler.tasks if not t.done and t.name.startswith("kvkit-")]
        self.check(not left, "threads are left: {}", ", ".join(left))


@dataclass
class Client:
    """Who uses the cache: a thread, with pages of its own."""

    life: CacheLife
    number: int
    transfers: list[tuple[str, Any]] = field(default_factory=list)
    done: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.name = f"client-{self.number}"
        self.scheduler = self.life.scheduler
        self.random = self.life.world.random
        self.check = self.life.check

    def live(self) -> None:
        steps: list[tuple[int, Callable[[str, Namespace], object]]] = [
            (4, self.store),
            (3, self.store_in_background),
            (4, self.look_up_and_load),
            (3, self.load_in_background),
            (1, self.load_by_layers),
            (1, self.store_by_layers),
            (2, self.prefetch),
            (1, self.get),
            (1, self.pin),
            (1, self.flush),
            (0 if self.life.plan.calm else 1, self.clear),
        ]
        weights = [weight for weight, _ in steps]
        for _ in range(self.life.plan.steps):
            ((_, step),) = self.random.choices(steps, weights)
            name = self.random.choice("ABCDE")
            space = self.life.spaces[self.random.random() < 0.15]
            began = self.scheduler.now
            try:
                step(name, space)
            except (Closed, StagingError, TierError, CancelledError) as error:
                refused = isinstance(error, Closed) and self.life.world.faults.threads
                if not (self.life.closing or refused):
                    raise
            took = self.scheduler.now - began
            self.check(took < LONGEST_S or self.scheduler.haste, "{} took {} s", step.__name__, took)
            if not self.life.plan.calm and self.random.random() < 0.2:
                self.scheduler.sleep(self.random.choice((0.001, 2.0, 30.0)))

    # steps

    def store(self, name: str, space: Namespace) -> None:
        self.say("stores {}", name)
        chunks, pages = self.computed(name, space)
        self.life.cache.store(tokens_of(name), self.places(pages), space)
        self.use_again(pages)
        self.found_if_calm(name, space, chunks)

    def store_in_background(self, name: str, space: Namespace) -> None:
        chunks, pages = self.computed(name, space)
        told: list[tuple[str, int]] = []
        number = f"store {len(self.transfers)}"
        self.done[number] = 0

        def done() -> None:
            self.done[number] += 1

        def stored(tier: str, chunk: int) -> None:
            told.append((tier, chunk))
            records = chunks.records(chunk, chunk + 1)
            store = self.life.stores.get(tier)
            there = store is None or store.complete.issuperset(records)
            self.check(there, "chunk {} is said to be in {} before it is", chunk, tier)

        later = self.random.random() < 0.4
        self.say("stores {} in the background{}", name, ", asking later" if later else "")
        try:
            transfer = self.life.cache.store_chunks(
                chunks, self.places(pages), on_stored=stored, on_done=done, copy_first=later
            )
        except BaseException:
            self.done[number] = 1
            raise
        self.transfers.append((number, transfer))
        if self.life.plan.calm or self.random.random() < 0.4:
            if self.life.plan.calm and self.random.random() < 0.5:
                hit = self.life.cache.lookup(tokens_of(name), space, wait_s=TIMEOUT_S)
                self.check(hit.plan.complete, "of {}, which is being stored, {} is found", name, hit.by_tier)
            self.wait(transfer)
            self.use_again(pages)
            self.found_if_calm(name, space, chunks)
            return
        self.scheduler.sleep(self.random.choice((0.0, 0.001, 1.0)))
        self.say("wants its pages back")
        transfer.release_pages()
        self.use_again(pages)

    def look_up_and_load(self, name: str, space: Namespace) -> None:
        wait_s = self.random.choice((0.0, 0.0, 1.0))
        hit = self.life.cache.lookup(tokens_of(name), space, wait_s=wait_s)
        self.say("finds {} of {}, and loads it", hit.by_tier, name)
        self.check_hit(hit)
        self.load(hit)

    def load_in_background(self, name: str, space: Namespace) -> None:
        looking = self.life.cache.lookup_async(tokens_of(name), space)
        self.transfers.append(("lookup", looking))
        hit = self.wait(looking)
        if hit is None:
            return
        self.check_hit(hit)
        self.say("finds {} of {}, and loads it in the background", hit.by_tier, name)
        pages = self.blank()
        transfer = self.life.cache.load_async(hit, self.places(pages))
        self.transfers.append(("load", transfer))
        if not self.life.plan.calm and self.random.random() < 0.4:
            self.scheduler.sleep(self.random.choice((0.0, 0.001, 1.0)))
            self.say("calls it off")
            transfer.cancel()
        loaded = self.wait(transfer)
        self.check_pages(hit, pages, 0 if loaded is None else loaded.tokens // CHUNK)

    def load_by_layers(self, name: str, space: Namespace) -> None:
        hit = self.life.cache.lookup(tokens_of(name), space)
        self.say("finds {} of {}, and loads it layer by layer", hit.by_tier, name)
        if not hit.tokens:
            return
        pages = self.blank()
        load = self.life.cache.load_layers(hit, self.places(pages))
        for _ in load:
            self.scheduler.pause()
        self.check_pages(hit, pages, load.loaded.tokens // CHUNK, others=False)

    def store_by_layers(self, name: str, space: Namespace) -> None:
        self.say("stores {} layer by layer", name)
        _, pages = self.computed(name, space)
        with self.life.cache.store_layers(tokens_of(name), self.places(pages), space) as store:
            for layer in list(store.left):
                store.layer(layer)
        self.use_again(pages)  # chunks that found no slot are left out

    def prefetch(self, name: str, space: Namespace) -> None:
        self.say("prefetches {}", name)
        transfer = self.life.cache.prefetch(tokens_of(name), space)
        self.transfers.append(("prefetch", transfer))
        if not self.life.plan.calm and self.random.random() < 0.3:
            self.scheduler.sleep(self.random.choice((0.0, 0.001, 1.0)))
            self.say("calls it off")
            transfer.cancel()
        elif self.random.random() < 0.5:
            hit = self.wait(transfer)
            if hit is not None:
                self.check_hit(hit)

    def get(self, name: str, space: Namespace) -> None:
        chunk = self.random.randrange(len(SEQUENCES[name]))
        self.say("gets chunk {} of {}", chunk, name)
        transfer = self.life.cache.get_non_blocking(tokens_of(name), chunk, space)
        self.transfers.append(("get", transfer))
        leases = self.wait(transfer) or []
        chunks = self.life.cache.chunks(tokens_of(name), space)
        for g, lease in enumerate(leases):
            form = chunks.formats[g]
            found = lease.buffer[form.header_bytes : form.layers_end]
            same = bytes(found) == content(chunks.keys[chunk], g, len(found))
            self.check(same, "the record of chunk {} of {} is another's", chunk, name)
            self.scheduler.pause()
        release_all(leases)

    def pin(self, name: str, space: Namespace) -> None:
        self.say("pins {}", name)
        self.life.cache.pin(tokens_of(name), 20.0, space)

    def flush(self, name: str, space: Namespace) -> None:
        limit = self.random.choice((0.0, 1.0, None))
        try:
            self.life.cache.flush(limit)
        except CacheTimeout:
            self.check(limit == 0.0 or not self.life.plan.calm, "puts do not end, and nothing is slow")

    def clear(self, name: str, space: Namespace) -> None:
        tier = self.random.choice(list(self.life.cache.tiers))
        self.say("clears {}", tier)
        try:
            self.life.cache.clear(tier)
        except OSError:
            self.check(self.life.world.faults.any or self.life.closing, "{} cannot be cleared", tier)

    # what is used and checked

    def say(self, what: str, *values: object) -> None:
        if self.scheduler.trace is not None:
            self.scheduler.say(what.format(*values))

    def blank(self) -> list[SimulatedPages]:
        return [
            SimulatedPages(
                group,
                np.full((BLOCKS, len(group.layers), group.layer_bytes(CHUNK)), POISON, np.uint8),
            )
            for group in self.life.layout.groups
        ]

    def computed(self, name: str, space: Namespace) -> tuple[Chunks, list[SimulatedPages]]:
        """Pages that hold a sequence."""
        chunks, pages = self.life.cache.chunks(tokens_of(name), space), self.blank()
        for g, group in enumerate(pages):
            for chunk, key in enumerate(chunks.keys):
                place = group.data[chunk].reshape(-1)
                place[:] = np.frombuffer(content(key, g, len(place)), np.uint8)
        return chunks, pages

    @staticmethod
    def use_again(pages: Sequence[SimulatedPages]) -> None:
        """The pages are another sequence's from now on."""
        for group in pages:
            group.data[:] = POISON

    @staticmethod
    def places(pages: Sequence[SimulatedPages]) -> Any:
        return [SequencePages(group, blocks=np.arange(BLOCKS)) for group in pages]  # type: ignore[arg-type]

    def wait(self, transfer: Transfer[Any]) -> Any:
        """What comes of it; None if it is called off. It has to end by itself."""
        try:
            return transfer.result()
        except CancelledError:
            return None

    def load(self, hit: Hit) -> int:
        """Chunks that are loaded of a hit, checked."""
        pages = self.blank()
        loaded = self.life.cache.load(hit, self.places(pages))
        self.check_pages(hit, pages, loaded.tokens // CHUNK)
        if self.life.plan.calm:
            self.check(loaded.tokens == hit.tokens, "{} of {} tokens are loaded", loaded.tokens, hit.tokens)
        return loaded.tokens // CHUNK

    def check_pages(
        self, hit: Hit, pages: Sequence[SimulatedPages], chunks: int, others: bool = True
    ) -> None:
        """The first chunks are in place; without `others`, nothing else is looked at."""
        self.check(chunks <= hit.plan.chunks, "{} chunks are loaded of {}", chunks, hit.plan.chunks)
        for g, group in enumerate(pages):
            for i in range(BLOCKS):
                found = group.data[i].tobytes()
                if i < chunks:
                    same = found == content(hit.chunks.keys[i], g, len(found))
                    self.check(same, "chunk {} of group {} is loaded wrongly", i, g)
                elif others:
                    self.check(found == bytes([POISON]) * len(found), "page {} was not to be written", i)

    def check_hit(self, hit: Hit) -> None:
        """It has no gap, and tiers hold what it says, or did."""
        end = 0
        for segment in hit.plan.segments:
            self.check(segment.start == end and segment.stop > end, "a gap in {}", hit.plan)
            end = segment.stop
            store = self.life.stores.get(segment.tier)
            if store is not None:
                early = set(hit.chunks.records(segment.start, end)) - store.complete
                self.check(not early, "{} is said to hold {} before it does", segment.tier, early)

    def found_if_calm(self, name: str, space: Namespace, chunks: Chunks) -> None:
        if not self.life.plan.calm or self.random.random() < 0.5:
            return
        self.life.cache.flush()
        hit = self.life.cache.lookup(tokens_of(name), space)
        self.check(hit.plan.complete, "{} is stored, and {} is found of it", name, hit.by_tier)


def cache_life(world: World) -> Callable[[], None]:
    """What the first thread of a simulation is to do."""
    return CacheLife(world).live
