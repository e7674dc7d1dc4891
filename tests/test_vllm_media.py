"""Media count by what they hold: no name that a client gives stands for another one's KV."""

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
from vllm.config import KVTransferConfig
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
from kvkit.adapters.vllm.media import Media, identity

Medium = tuple[str, int, int]
media = st.lists(
    st.tuples(st.sampled_from(["cat", "dog"]), st.integers(0, 12), st.integers(0, 8)), max_size=2
)
CAT, DOG = torch.ones(4, 6), torch.zeros(4, 6)
PLACEHOLDER = 9


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
    """The scheduler's side of kvkit."""
    transfer = KVTransferConfig(**connector({"tiers": {"memory": {"capacity": "1MiB"}}}))
    config = EngineArgs(
        model=str(model), skip_tokenizer_init=True, max_model_len=1024, kv_transfer_config=transfer
    ).create_engine_config()
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32)
    caches = KVCacheConfig(
        num_blocks=4, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layers.0"], spec)]
    )
    return KVKitConnector(config, KVConnectorRole.SCHEDULER, caches)


def asked(served: KVKitConnector, given: Request) -> list[int] | None:
    """The ids that kvkit looks up for a request; None where it looks up nothing."""
    assert served._scheduler is not None
    found = served.get_num_new_matched_tokens(given, 0)
    step = served._scheduler.plan({}, lambda name: None)
    served.request_finished_all_groups(given, ([],))
    if found == (0, False):
        assert not step.asks
        return None
    (ask,) = step.asks
    return ask.sequence.tokens.tolist()


def test_media_count_by_what_they_hold_not_by_their_name(served: KVKitConnector) -> None:
    cat = asked(served, request(CAT, "cat"))
    assert cat is not None
    assert asked(served, request(CAT, "my-uuid")) == cat
    assert asked(served, request(CAT.clone(), "cat")) == cat
    others = [request(DOG, "dog"), request(CAT.to(torch.bfloat16), "half"), request(CAT.T, "turned")]
    found = [asked(served, other) for other in others]
    assert len({tuple(ids) for ids in (cat, *found) if ids is not None}) == 4
    assert all(ids is not None and ids[23:] == [PLACEHOLDER] * len(ids[23:]) for ids in found)


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
    monkeypatch.setattr(module, "KEPT", 3)
    remembered = Media()
    for i in range(10):
        assert remembered.of(request(CAT, str(i))) is not None
    gc.collect()
    assert (list(remembered._digests), len(remembered._known)) == (["7", "8", "9"], 0)


def test_a_session_that_gets_more_media_is_asked_about_them() -> None:
    remembered, session = Media(), request(CAT, "cat")
    first = remembered.of(session)
    session.mm_features += request(DOG, "dog").mm_features
    found = remembered.of(session)
    assert first is not None
    assert found is not None
    assert (found[:1], len(found)) == (first, 2)


@given(st.lists(st.integers(0, 1000), max_size=16), media)
def test_tokens_outside_of_media_stand_for_themselves(tokens: list[int], media: list[Medium]) -> None:
    ids = identity(tokens, media)
    inside = {i for _, offset, length in media for i in range(offset, offset + length)}
    for i, token in enumerate(tokens):
        assert ids[i] < 0 if i in inside else ids[i] == token


@given(st.integers(1, 16), st.integers(0, 16), st.integers(1, 8))
def test_a_prefix_has_the_ids_of_the_whole(cut: int, offset: int, length: int) -> None:
    tokens = list(range(24))
    whole = identity(tokens, [("cat", offset, length)])
    assert identity(tokens[:cut], [("cat", offset, length)]).tolist() == whole[:cut].tolist()


def test_media_at_the_same_place_all_count() -> None:
    """As the pictures and the sound of a film."""
    tokens = [PLACEHOLDER] * 8
    places = [
        [("cat", 0, 8)],
        [("cat", 0, 8), ("dog", 0, 8)],
        [("dog", 0, 8)],
        [("dog", 0, 8), ("mew", 0, 8)],
    ]
    found = [identity(tokens, place).tolist() for place in places]
    assert all(not set(one) & set(two) for i, one in enumerate(found) for two in found[:i])


def test_the_tokens_among_media_count() -> None:
    """Such as the times of a film's frames."""
    one, two = (identity([token] * 8, [("cat", 0, 8)]) for token in (1, 2))
    assert not set(one.tolist()) & set(two.tolist())


def test_ids_stay_what_they_are() -> None:
    """Other processes and machines must come to the same: the bytes are defined, not just equal here."""
    ids = identity([0, 0, 0, 5], [("cat", 0, 4)])
    assert ids.dtype == np.int32
    assert ids.tolist() == [-1153993923, -642916710, -395137554, -419016296]
