"""Media are identified by their content, not by the names that clients give them."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from hypothesis import given
from hypothesis import strategies as st
from small_models import QWEN, save
from vllm.config import KVTransferConfig, MultiModalConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request
from vllm_engine import BLOCK, connector

from kvkit.adapters.vllm import media as module
from kvkit.adapters.vllm.connector import KVKitConnector
from kvkit.adapters.vllm.media import Media, ids_in_keys
from kvkit.format.keys import chunk_keys
from kvkit.format.layout import KVLayout, LayerGroup, Namespace
from kvkit.handoff.prompt import tail_of
from kvkit.settings import ConfigError
from kvkit.transfer.sequence import Chunks

Medium = tuple[str, int, int]
media = st.lists(
    st.tuples(st.sampled_from(["cat", "dog"]), st.integers(0, 80), st.integers(0, 40)), max_size=2
)
CAT, DOG = torch.ones(4, 6), torch.zeros(4, 6)
PLACEHOLDER, CHUNK = 9, 16
LAYOUT = KVLayout((LayerGroup((0,), kv_heads=1, k_size=1, v_size=1, dtype="float32", block_tokens=CHUNK),))
SPACE = Namespace("model", LAYOUT.fingerprint(), "float32", chunk_tokens=CHUNK)


def item(pixels: Any, **more: Any) -> MultiModalKwargsItem:
    field = MultiModalBatchedField()
    data = {"pixel_values": pixels, "image_grid_thw": torch.tensor([1, 2, 2])} | more
    return MultiModalKwargsItem({name: MultiModalFieldElem(value, field) for name, value in data.items()})


def request(pixels: Any, uuid: str, name: str = "r", tokens: int = 2 * BLOCK + 5, data: Any = ...) -> Request:
    """A prompt with an image, under the name that vLLM or a client gave it."""
    feature = MultiModalFeatureSpec(
        data=item(pixels) if data is ... else data,
        modality="image",
        identifier=uuid,
        mm_position=PlaceholderRange(offset=3, length=20),
        mm_hash=uuid,
    )
    return Request(name, [PLACEHOLDER] * tokens, SamplingParams(max_tokens=4), None, mm_features=[feature])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(QWEN, tmp_path_factory.mktemp("model"))


@pytest.fixture
def served(model: Path) -> KVKitConnector:
    return scheduler_of(model)


def scheduler_of(
    model: Path, tokens: int = BLOCK, multimodal: MultiModalConfig | None = None
) -> KVKitConnector:
    """The scheduler's side of kvkit, with chunks and blocks of so many tokens."""
    settings = {"tiers": {"memory": {"capacity": "1MiB"}}, "chunk_tokens": tokens}
    transfer = KVTransferConfig(**connector(settings))
    config = EngineArgs(
        model=str(model), skip_tokenizer_init=True, max_model_len=1024, kv_transfer_config=transfer
    ).create_engine_config()
    config.model_config.multimodal_config = multimodal
    spec = FullAttentionSpec(block_size=tokens, num_kv_heads=2, head_size=32, dtype=torch.float32)
    caches = KVCacheConfig(
        num_blocks=4, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layers.0"], spec)]
    )
    return KVKitConnector(config, KVConnectorRole.SCHEDULER, caches)


def asked(served: KVKitConnector, given: Request) -> list[int] | None:
    """The ids that kvkit looks up for a request; None where it looks up nothing."""
    found = served.get_num_new_matched_tokens(given, 0)
    step = served._scheduler_side.scheduler.plan({}, lambda name: None)
    served.request_finished_all_groups(given, ([],))
    if found == (0, False):
        assert not step.lookups
        return None
    (ask,) = step.lookups
    return ask.sequence.tokens.tolist()


def test_media_count_by_what_they_hold_not_by_their_name(served: KVKitConnector) -> None:
    cat = asked(served, request(CAT, "cat"))
    assert cat is not None
    assert asked(served, request(CAT, "my-uuid")) == cat
    assert asked(served, request(CAT.clone(), "cat")) == cat
    others = [request(DOG, "dog"), request(CAT.to(torch.bfloat16), "half"), request(CAT.T, "turned")]
    found = [asked(served, other) for other in others]
    assert len({tuple(ids) for ids in (cat, *found) if ids is not None}) == 4
    assert all(ids is not None and ids[BLOCK:] == [PLACEHOLDER] * len(ids[BLOCK:]) for ids in found)


def test_any_value_of_a_medium_counts(served: KVKitConnector) -> None:
    found = set()
    for i in range(CAT.numel()):
        pixels = CAT.clone()
        pixels.view(-1)[i] += 1e-3
        found.add(tuple(asked(served, request(pixels, str(i))) or ()))
    assert len(found - {()}) == CAT.numel()


def test_a_guessed_name_finds_nothing_and_spoils_nothing(served: KVKitConnector) -> None:
    """vLLM may use what it keeps under a name for whatever comes under it: nobody knows whose KV that is."""
    assert asked(served, request(CAT, "victim")) is not None
    assert asked(served, request(DOG, "victim")) is None
    assert asked(served, request(CAT, "victim")) is None
    assert asked(served, request(CAT, "another")) is not None


def test_a_name_counts_also_where_nothing_is_looked_up(served: KVKitConnector) -> None:
    """A prompt too short to be cached has its image encoded, too, and kept under that name."""
    short = request(DOG, "shared", tokens=24)
    assert served.get_num_new_matched_tokens(short, 0) == (0, False)
    served.update_state_after_alloc(short, Blocks(), 0)
    assert asked(served, request(CAT, "shared")) is None


class Blocks:
    """vLLM's, of a request that has one."""

    def get_block_ids(self) -> tuple[list[int], ...]:
        return ([1],)


@pytest.mark.parametrize("data", [None, item(12, address=12), item(None)], ids=["none", "address", "empty"])
def test_media_that_are_not_here_are_not_cached(served: KVKitConnector, data: Any) -> None:
    """vLLM keeps them in the encoder's cache, or in memory that only workers read."""
    assert asked(served, request(CAT, "x", data=data)) is None
    assert asked(served, request(CAT, "x")) is None, "and nobody knows what it stands for"


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_REMEMBERED", 3)
    remembered = Media()
    for i in range(10):
        assert remembered.of_request(request(CAT, str(i))) is not None
    gc.collect()
    assert (list(remembered._digests), len(remembered._known)) == (["7", "8", "9"], 0)


def test_a_session_that_gets_more_media_is_asked_about_them() -> None:
    remembered, session = Media(), request(CAT, "cat")
    first = remembered.of_request(session)
    session.mm_features += request(DOG, "dog").mm_features
    found = remembered.of_request(session)
    assert first is not None
    assert found is not None
    assert (found[:1], len(found)) == (first, 2)


def ids_of(tokens: list[int], media: list[Medium]) -> np.ndarray:
    return ids_in_keys(tokens, media, chunk_tokens=CHUNK)[0]


@given(st.lists(st.integers(0, 1000), max_size=5 * CHUNK), media)
def test_chunks_without_media_stand_for_themselves(tokens: list[int], media: list[Medium]) -> None:
    ids = ids_of(tokens, media)
    inside = {
        i // CHUNK for _, offset, length in media for i in range(offset, min(offset + length, len(ids)))
    }
    for i, token in enumerate(tokens):
        assert ids[i] < 0 if i // CHUNK in inside else ids[i] == token


@given(st.integers(1, 5), st.integers(0, 5 * CHUNK), st.integers(1, 2 * CHUNK))
def test_whole_chunks_of_a_prefix_have_the_ids_of_the_whole(cut: int, offset: int, length: int) -> None:
    tokens, places = list(range(5 * CHUNK)), [("cat", offset, length)]
    whole, part = (ids_of(tokens[:stop], places) for stop in (None, cut * CHUNK))
    assert part.tolist() == whole[: cut * CHUNK].tolist()


COLLIDING = ("67997", "73157"), ("52838", "81052"), ("52279", "92582")
"""Digests whose SHAKE-128 begin with the same 31 bits."""


@pytest.mark.parametrize("offset", [0, 7, CHUNK - 1])
def test_media_are_told_apart_by_all_ids_of_a_chunk(offset: int) -> None:
    """However little of them lies there: 31 bits, which one id holds, soon agree."""
    for names in COLLIDING:
        one, two = (ids_of([9] * CHUNK, [(name, offset, 1)]) for name in names)
        assert (one != two).all()
        assert chunk_keys(one, CHUNK, bytes(16)) != chunk_keys(two, CHUNK, bytes(16))


@pytest.mark.parametrize("whole", [0, 2])
def test_media_in_an_unfilled_chunk_are_told_apart_by_more_than_its_ids(whole: int) -> None:
    """One engine sends it to another by name, and there may be a single id in it."""
    tokens = [PLACEHOLDER] * (whole * CHUNK + 1)
    chunks = Chunks.of(tokens, LAYOUT, SPACE)
    tails = set()
    for names in COLLIDING:
        for name in names:
            ids, rest = ids_in_keys(tokens, [(name, whole * CHUNK, 1)], chunk_tokens=CHUNK)
            assert len(rest) == 32
            tail = tail_of(chunks, ids, CHUNK, rest)
            assert tail is not None
            tails.add(tail[1].salt)
    assert len(tails) == 2 * len(COLLIDING)
    assert ids_in_keys(tokens, [("cat", 0, whole * CHUNK)], chunk_tokens=CHUNK)[1] == "", "none lies there"


def test_where_a_medium_lies_counts() -> None:
    tokens = [PLACEHOLDER] * 2 * CHUNK
    places = [(0, 4), (1, 4), (0, 5), (CHUNK - 1, 4), (CHUNK, 4), (CHUNK - 4, 4)]
    found = [ids_of(tokens, [("cat", *place)]).tobytes() for place in places]
    assert len(set(found)) == len(places)


def test_media_at_the_same_place_all_count() -> None:
    """As the pictures and the sound of a film."""
    cat, dog, mew = ((name, 0, 8) for name in ("cat", "dog", "mew"))
    places = [[cat], [cat, dog], [dog], [dog, mew]]
    found = [set(ids_of([PLACEHOLDER] * 8, place).tolist()) for place in places]
    assert all(not one & two for i, one in enumerate(found) for two in found[:i])


def test_the_tokens_among_media_count() -> None:
    """Such as the times of a film's frames."""
    one, two = (ids_of([token] * 8, [("cat", 0, 8)]) for token in (1, 2))
    assert not set(one.tolist()) & set(two.tolist())


def test_ids_stay_what_they_are() -> None:
    """Other processes and machines must come to the same: the bytes are defined, not just equal here."""
    ids = ids_of([0, 0, 0, 5], [("cat", 0, 4)])
    assert ids.dtype == np.int32
    assert ids.tolist() == [-1430456424, -1438545972, -485772448, -1274929120]


def test_chunks_too_small_for_a_digest_are_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="chunk_tokens = 8: want at least 16 for a model that takes images"):
        scheduler_of(model, tokens=8, multimodal=MultiModalConfig())


def test_a_handoff_without_settings_is_told_once(
    served: KVKitConnector, caplog: pytest.LogCaptureFixture
) -> None:
    for number, side in enumerate(("decode", "decode", "prefill", "prefill")):
        params = SamplingParams(max_tokens=4)
        params.extra_args = {"kv_transfer_params": {f"do_remote_{side}": True, "transfer_id": "t"}}
        served.get_num_new_matched_tokens(Request(str(number), [1] * 40, params, None), 0)
    told = [record.getMessage() for record in caplog.records if "handed off" in record.getMessage()]
    assert [line.partition(":")[0] for line in told] == ["0", "2"]
    assert all("there is no [handoff] in this engine's settings" in line for line in told)
    stats = served.get_kv_connector_stats()
    assert stats is not None
    assert stats.data == {"0": {"handoffs_refused": 4}}
