"""Caches hand off from P to D and from D to P as their configuration says."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import trustme
from handoff_nodes import LONG_S, Speaker
from page_blocks import on_page

from kvkit.cache import Cache, CacheTimeout
from kvkit.config import load_config, open_cache
from kvkit.format import record
from kvkit.format.layout import KVLayout, LayerGroup, Namespace
from kvkit.handoff.chunk_sender import ChunkSender
from kvkit.handoff.protocol.messages import Admit, Commit, Data, Done, Reserve
from kvkit.handoff.receiver import Receiver
from kvkit.handoff.sender import HandoffError, Sender
from kvkit.handoff.settings import HandoffConfig, buffer_size, identify, slots_of
from kvkit.handoff.tier import HandoffTier
from kvkit.handoff.transport.channel import ChannelError
from kvkit.lab.testbed.engine_stub import Engine, small_layout, small_namespace
from kvkit.tiers.base import Tier, TierError
from kvkit.transfer.policy import Policy
from kvkit.transfer.sequence import AllPages, Chunks

CHUNK = 8
TOKENS = np.arange(5 * CHUNK, dtype=np.int32)
SECRET = "0123456789abcdef"


def new_engine(groups: int = 2, **fields: Any) -> Engine:
    layout = small_layout(groups)
    return Engine(layout, small_namespace(layout, **fields))


def open_node(
    engine: Engine, folder: Path, role: str, peers: dict[str, str] | None = None, **more: object
) -> Cache:
    settings: dict[str, object] = {
        "role": role,
        "listen": [f"unix://{folder}/sockets/{role}"],
        "peers": peers or {},
        "buffer": "256KiB",
        "secret": SECRET,
        **more,
    }
    config = load_config(
        chunk_tokens=CHUNK,
        staging="256KiB",
        precision=engine.layout.groups[0].precision,
        tiers={"memory": {"capacity": "256KiB"}},
        handoff=settings,
    )
    return open_cache(config, engine.layout, engine.namespace)


def handoff(cache: Cache) -> HandoffTier:
    tier = cache.tiers["handoff"]
    assert isinstance(tier, HandoffTier)
    return tier


def sender(cache: Cache) -> Sender:
    found = handoff(cache).sender
    assert found is not None
    return found


def receiver(cache: Cache) -> Receiver:
    found = handoff(cache).receiver
    assert found is not None
    return found


def send(
    cache: Cache, tokens: npt.NDArray[np.int32], pages: AllPages, namespace: Namespace | None = None
) -> int:
    """Chunks that are sent to the transfers that wait for them."""
    return ChunkSender(sender(cache), cache.layout, cache.writes).send(cache.chunks(tokens, namespace), pages)


def address(cache: Cache) -> str:
    endpoint = handoff(cache).endpoint
    assert endpoint is not None
    return endpoint.addresses[0]


def names(engine: Engine, tokens: npt.NDArray[np.int32] = TOKENS) -> list[str]:
    return Chunks.of(tokens, engine.layout, engine.namespace).names


@pytest.fixture
def engine() -> Engine:
    return new_engine()


@pytest.fixture
def decode(engine: Engine, tmp_path: Path) -> Iterator[Cache]:
    with open_node(engine, tmp_path, "decode") as cache:
        yield cache
    receiver(cache).check_integrity()


@pytest.fixture
def prefill(engine: Engine, decode: Cache, tmp_path: Path) -> Iterator[Cache]:
    with open_node(engine, tmp_path, "prefill", {"D": address(decode)}) as cache:
        yield cache


def test_roles(prefill: Cache, decode: Cache) -> None:
    assert prefill.policy == Policy(("memory", "D"), ("memory",), ("memory",)), "nothing is stored to handoff"
    assert decode.policy == Policy(("handoff", "memory"), ("memory",), ("memory",))
    assert handoff(prefill).receiver is None
    assert handoff(decode).sender is None


def test_prefill_to_decode(engine: Engine, prefill: Cache, decode: Cache) -> None:
    table = engine.table(len(TOKENS))
    engine.compute(TOKENS, table)
    transfer = sender(prefill).open("t", address(decode), names(engine), LONG_S)
    assert transfer.admitted.result(LONG_S) == 10
    send(prefill, TOKENS, engine.places(table))
    assert transfer.done.result(LONG_S) == 0
    engine.wipe()
    hit = decode.lookup(TOKENS)
    assert hit.by_tier == {"handoff": len(TOKENS)}
    loaded = decode.load(hit, engine.places(table))
    assert loaded.by_tier == {"handoff": len(TOKENS)}
    engine.assert_loaded(TOKENS, table, 5)
    decode.flush()
    assert decode.tiers["memory"].match_prefix(names(engine)) == 0, "nothing is written back from handoff"
    receiver(decode).release("t")
    assert decode.lookup(TOKENS).tokens == 0


def test_the_example_of_the_page_runs(engine: Engine, prefill: Cache, decode: Cache) -> None:
    code = on_page("docs/reference/protocol.md", "from kvkit.handoff")
    table = engine.table(len(TOKENS))
    engine.compute(TOKENS, table)
    given: dict[str, Any] = {"prefill": prefill, "decode": decode, "tokens": TOKENS}
    given |= {"names": names(engine), "address": address(decode), "pages": engine.places(table)}
    exec(code, given)
    assert given["hit"].by_tier == {"handoff": len(TOKENS)}
    assert receiver(decode).arena.free == receiver(decode).arena.slots


class Hostile:
    """A sender that has the secret, sends what is right, and then writes wherever it still can."""

    def __init__(self, engine: Engine, source: Tier, to: str, shared: bool) -> None:
        self.speaker = Speaker(to)
        self.speaker.hello(identify(engine.layout, engine.namespace, SECRET.encode()))
        wanted = names(engine)
        self.speaker.say(Reserve("t", tuple(wanted), LONG_S))
        admit = self.speaker.hear()
        assert isinstance(admit, Admit)
        assert self.speaker.channel.one_sided == shared
        self.slots, self.data = admit.slots, []
        for index, name in enumerate(wanted):
            lease = source.borrow(name)
            assert lease is not None
            with lease:
                self.data.append(Data("t", index, lease.used))
                self.speaker.say(self.data[-1], lease.record.tobytes(), self.slots[index])
        self.speaker.say(Commit("t"))
        assert self.speaker.hear() == Done("t")

    def write(self) -> None:
        """Over all records: into memory that it still maps, or once more by the protocol."""
        junk = bytes(self.data[0].size)
        for data, slot in zip(self.data, self.slots, strict=True):
            with suppress(ChannelError):
                self.speaker.say(data, junk, slot)
        assert "is not expected" in str(self.speaker.hear_all()[-1])


@pytest.mark.parametrize("shared", [True, False])
def test_what_was_verified_stays_so_where_memory_is_not_shared(
    engine: Engine, tmp_path: Path, shared: bool
) -> None:
    """A sender that goes on writing when its transfer is done: docs/reference/protocol.md says who is
    trusted."""
    gc.collect()  # mappings of earlier tests end with what maps them
    before = shared_arenas()
    with (
        open_node(engine, tmp_path, "decode", shared_memory=shared) as decode,
        open_node(engine, tmp_path, "prefill") as prefill,
    ):
        table = engine.table(len(TOKENS))
        engine.compute(TOKENS, table)
        prefill.store(TOKENS, engine.places(table), to=["memory"])
        prefill.flush()
        hostile = Hostile(engine, prefill.tiers["memory"], address(decode), shared)
        assert shared_arenas() == before + 2 * shared, "the receiver's, and the sender's mapping of it"
        chunks = Chunks.of(TOKENS, engine.layout, engine.namespace)
        lent = handoff(decode).borrow(chunks.names[0])
        assert lent is not None
        assert record.verify(chunks.formats[0], lent.buffer[: lent.used], *chunks.identity(0)) is None
        verified = lent.record.tobytes()
        hostile.write()
        assert (lent.record.tobytes() == verified) != shared
        lent.release()
        hit = decode.lookup(TOKENS)
        engine.wipe()
        loaded = decode.load(hit, engine.places(table))
        assert loaded.tokens == (0 if shared else len(TOKENS)), (
            "what was changed before it is verified is a miss"
        )
        engine.assert_loaded(TOKENS, table, loaded.tokens // CHUNK)
        hostile.speaker.close()


def shared_arenas() -> int:
    """Mappings of memory that processes share."""
    return Path("/proc/self/maps").read_text().count("kvkit-staging")


def test_chunks_are_sent_as_they_are_computed(engine: Engine, prefill: Cache, decode: Cache) -> None:
    """A long prompt is prefilled in steps; what the engine has of it already is sent, too."""
    table = engine.table(len(TOKENS))
    engine.compute(TOKENS, table)
    prefill.store(TOKENS[: 3 * CHUNK], engine.places(table))
    prefill.flush()
    transfer = sender(prefill).open("t", address(decode), names(engine), LONG_S)
    transfer.admitted.result(LONG_S)
    for chunks in (2, 4, 5):
        prefill.store(TOKENS[: chunks * CHUNK], engine.places(table))
        send(prefill, TOKENS[: chunks * CHUNK], engine.places(table))
    assert transfer.done.result(LONG_S) == 0
    assert decode.lookup(TOKENS).tokens == len(TOKENS)
    counted = prefill.counts()
    assert counted.stored_records["memory"] == 10, "a chunk was stored twice"


def test_nothing_is_packed_that_nobody_waits_for(engine: Engine, prefill: Cache) -> None:
    table = engine.table(len(TOKENS))
    engine.compute(TOKENS, table)
    assert send(prefill, TOKENS, engine.places(table)) == 0
    assert prefill.counts().stored_records["handoff"] == 0


def test_decode_to_prefill(engine: Engine, prefill: Cache, decode: Cache) -> None:
    """The next turn: what decode generated is read from its memory, and kept here."""
    table = engine.table(len(TOKENS))
    engine.compute(TOKENS, table)
    decode.store(TOKENS, engine.places(table))
    decode.flush()
    engine.wipe()
    hit = prefill.lookup(TOKENS)
    assert hit.by_tier == {"D": len(TOKENS)}
    assert prefill.load(hit, engine.places(table)).by_tier == {"D": len(TOKENS)}
    engine.assert_loaded(TOKENS, table, 5)
    prefill.flush()
    assert prefill.lookup(TOKENS).by_tier == {"memory": len(TOKENS)}
    layers = prefill.load_layers(hit, engine.places(table))
    for _ in layers:
        pass
    assert layers.loaded.tokens == len(TOKENS)


def test_what_decode_holds_is_not_sent(engine: Engine, prefill: Cache, decode: Cache) -> None:
    table = engine.table(len(TOKENS))
    engine.compute(TOKENS, table)
    decode.store(TOKENS[: 2 * CHUNK], engine.places(table))
    decode.flush()
    transfer = sender(prefill).open("t", address(decode), names(engine), LONG_S)
    assert transfer.admitted.result(LONG_S) == 6
    send(prefill, TOKENS, engine.places(table))
    assert transfer.done.result(LONG_S) == 0
    hit = decode.lookup(TOKENS)
    assert hit.by_tier == {"memory": 2 * CHUNK, "handoff": 3 * CHUNK}
    engine.wipe()
    decode.load(hit, engine.places(table))
    engine.assert_loaded(TOKENS, table, 5)


def test_a_damaged_record_is_a_miss_and_its_slot_comes_back(
    engine: Engine, prefill: Cache, decode: Cache
) -> None:
    table = engine.table(len(TOKENS))
    engine.compute(TOKENS, table)
    transfer = sender(prefill).open("t", address(decode), names(engine), LONG_S)
    transfer.admitted.result(LONG_S)
    send(prefill, TOKENS, engine.places(table))
    transfer.done.result(LONG_S)
    lease = handoff(decode).borrow(names(engine)[7])
    assert lease is not None
    with lease:
        lease.array[record.ALIGN] ^= 1
    engine.wipe()
    hit = decode.lookup(TOKENS)
    loaded = decode.load(hit, engine.places(table))
    assert loaded.tokens == 3 * CHUNK
    engine.assert_loaded(TOKENS, table, 3)
    receiver(decode).check_integrity()
    assert receiver(decode).arena.free == receiver(decode).arena.slots - 9


def test_another_model_is_refused(prefill: Cache, tmp_path: Path) -> None:
    other = new_engine(revision="another")
    with open_node(other, tmp_path, "both") as node:
        transfer = sender(prefill).open("t", address(node), names(other), LONG_S)
        with pytest.raises(
            HandoffError, match=r"namespace: node .* has '[0-9a-f]{32}', .* has '[0-9a-f]{32}'"
        ):
            transfer.admitted.result(LONG_S)


def test_another_precision_is_refused_by_name(prefill: Cache, tmp_path: Path) -> None:
    """P's KV is exact, D wants fp8: neither's records are of use to the other."""
    exact = small_layout()
    layout = KVLayout(tuple(replace(group, precision="fp8") for group in exact.groups))
    other = Engine(layout, small_namespace(layout))
    with open_node(other, tmp_path, "both") as node:
        transfer = sender(prefill).open("t", address(node), names(other), LONG_S)
        with pytest.raises(HandoffError, match=r"layout: node .*'[0-9a-f]{32}'") as refused:
            transfer.admitted.result(LONG_S)
        assert re.search(r"'[0-9a-f]{32}-fp8'", str(refused.value))  # either side says so


def test_adapters_and_salts_share_a_node(
    engine: Engine, prefill: Cache, decode: Cache, tmp_path: Path
) -> None:
    """They differ between requests: records have other names, nodes are the same."""
    mine = small_namespace(engine.layout, lora="a", salt="tenant")
    table = engine.table(len(TOKENS))
    engine.compute(TOKENS, table)
    wanted = Chunks.of(TOKENS, engine.layout, mine).names
    transfer = sender(prefill).open("t", address(decode), wanted, LONG_S)
    transfer.admitted.result(LONG_S)
    send(prefill, TOKENS, engine.places(table), mine)
    transfer.done.result(LONG_S)
    assert decode.lookup(TOKENS, mine).tokens == len(TOKENS)
    assert decode.lookup(TOKENS).tokens == 0


def test_staging_only_leaves_handoff_alone(engine: Engine, tmp_path: Path) -> None:
    config = load_config(
        chunk_tokens=CHUNK,
        tiers={"memory": {"capacity": "256KiB"}},
        handoff={"role": "prefill"},
        policy={"staging_only": True},
    )
    with open_cache(config, engine.layout, engine.namespace) as cache:
        assert cache.policy == Policy((), (), (), staging_only=True)


def test_staging_only_reads_what_was_handed_off(engine: Engine, tmp_path: Path) -> None:
    config = load_config(
        chunk_tokens=CHUNK,
        tiers={"memory": {"capacity": "256KiB"}},
        handoff={"role": "decode", "listen": [f"unix://{tmp_path}/sockets/d"], "buffer": "256KiB"},
        policy={"staging_only": True},
    )
    with open_cache(config, engine.layout, engine.namespace) as cache:
        assert cache.policy == Policy(("handoff",), (), (), staging_only=True)


def test_what_is_sent_counts_as_stored_and_a_flush_waits_for_it(
    engine: Engine, prefill: Cache, decode: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = engine.table(len(TOKENS))
    engine.compute(TOKENS, table)
    transfer = sender(prefill).open("t", address(decode), names(engine), LONG_S)
    transfer.admitted.result(LONG_S)
    given: list[Any] = []
    monkeypatch.setattr(Sender, "put", lambda self, *arguments: given.append(arguments))
    assert send(prefill, TOKENS, engine.places(table)) == 5
    monkeypatch.undo()
    ((sent, _, on_complete),) = given
    assert sent == names(engine)
    with pytest.raises(CacheTimeout, match="10 puts are still in flight"):
        prefill.flush(0.0)
    on_complete(sent[0], TierError("not sent"))
    for name in sent[1:]:
        on_complete(name, None)
    prefill.flush(0.0)
    counts = prefill.counts()
    assert (counts.stored_records["handoff"], counts.write_errors["handoff"]) == (9, 1)
    assert counts.seconds["handoff", "put"].count == 1


@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 6, 15, 16, 17, 18, 31, 32, 49, 100])
def test_a_buffer_holds_the_requests_it_is_made_for(tokens: int) -> None:
    """Whole chunks, then single blocks of the last part, but for one that holds the last token alone."""
    layout = KVLayout(
        (LayerGroup(layers=(0,), kv_heads=1, k_size=8, v_size=8, dtype="float32", block_tokens=4),) * 1
    )
    namespace = Namespace("m", layout.fingerprint(), "float32", chunk_tokens=16)
    sent = [t - 1 if t % 4 == 1 else t for t in range(tokens + 1)]
    taken = [t // 16 + -(-(t % 16) // 4) for t in sent]
    assert slots_of(tokens, layout, namespace) == max(taken)
    config = HandoffConfig(listen=("unix:///d",), buffer=max(1, max(taken)) * 8192)
    slots, _ = buffer_size(config.model_copy(update={"max_prefill_tokens": tokens}), layout, namespace)
    assert slots >= max(taken)


def test_nodes_of_several_hosts_use_tls(engine: Engine, tmp_path: Path) -> None:
    authority, stranger = trustme.CA(), trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "certificate")
    certificate.private_key_pem.write_to_path(tmp_path / "key")
    authority.cert_pem.write_to_path(tmp_path / "ca")
    stranger.cert_pem.write_to_path(tmp_path / "stranger")
    (tmp_path / "secret").write_text("0123456789abcdef")
    (tmp_path / "secret").chmod(0o600)
    common = {"secret_file": tmp_path / "secret", "buffer": "1MiB"}
    mine = {"tls_certificate": tmp_path / "certificate", "tls_key": tmp_path / "key"}

    def node(role: str, ca: str, **more: object) -> Cache:
        settings = common | mine | {"role": role, "tls_ca": tmp_path / ca} | more
        config = load_config(chunk_tokens=CHUNK, handoff=settings)
        return open_cache(config, engine.layout, engine.namespace)

    with node("decode", "ca", listen=["tcp://127.0.0.1:0"]) as decode, node("prefill", "ca") as prefill:
        table = engine.table(len(TOKENS))
        engine.compute(TOKENS, table)
        transfer = sender(prefill).open("t", address(decode), names(engine), LONG_S)
        transfer.admitted.result(LONG_S)
        send(prefill, TOKENS, engine.places(table))
        transfer.done.result(LONG_S)
        assert decode.lookup(TOKENS).tokens == len(TOKENS)
        with node("prefill", "stranger") as other:
            transfer = sender(other).open("u", address(decode), names(engine), LONG_S)
            with pytest.raises(HandoffError, match="certificate verify failed"):
                transfer.admitted.result(LONG_S)
