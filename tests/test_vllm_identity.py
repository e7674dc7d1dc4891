"""Whose KV it is: tokens, media and models under names that agree exactly when the KV does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm")

from transformers import LlamaConfig

from kvkit.adapters.vllm.identity import folder_fingerprint, identity, model_identity, pseudo_tokens

Media = tuple[str, int, int]
media = st.lists(
    st.tuples(st.sampled_from(["cat", "dog"]), st.integers(0, 12), st.integers(0, 8)), max_size=2
)


@given(st.lists(st.integers(0, 1000), max_size=16), media)
def test_tokens_outside_of_media_stand_for_themselves(tokens: list[int], features: list[Media]) -> None:
    ids = identity(tokens, features)
    inside = {i for _, offset, length in features for i in range(offset, offset + length)}
    for i, token in enumerate(tokens):
        assert ids[i] < 0 if i in inside else ids[i] == token


@given(st.integers(1, 16), st.integers(0, 16), st.integers(1, 8))
def test_a_prefix_has_the_ids_of_the_whole(cut: int, offset: int, length: int) -> None:
    tokens = list(range(24))
    whole = identity(tokens, [("cat", offset, length)])
    assert identity(tokens[:cut], [("cat", offset, length)]).tolist() == whole[:cut].tolist()


def test_media_differ_and_stay_what_they_are() -> None:
    cat, dog = pseudo_tokens("cat", 64), pseudo_tokens("dog", 64)
    assert not set(cat.tolist()) & set(dog.tolist())
    assert cat.dtype == np.int32
    assert cat.max() < 0
    # other processes and machines must come to the same: the bytes are defined, not just equal here
    assert pseudo_tokens("cat", 3).tolist() == pseudo_tokens("cat", 64)[:3].tolist() == CAT


CAT = [-1153993923, -642916710, -395137554]


def test_a_model_is_its_weights_and_its_config(tmp_path: Path) -> None:
    def model(name: str, weights: bytes) -> str:
        folder = tmp_path / name / "model"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(weights)
        return str(folder)

    config = LlamaConfig()
    weights = b"\1" * 20000
    one = model_identity(model("here", weights), None, config, ())
    assert one[0] == "model"
    assert model_identity(model("elsewhere", weights), None, LlamaConfig(), ()) == one
    others = {
        model_identity(model("end", weights[:-1] + b"\2"), None, config, ()),
        model_identity(model("shorter", weights[:-1]), None, config, ()),
        model_identity(str(tmp_path / "here" / "model"), None, LlamaConfig(rope_theta=5e5), ()),
        model_identity(str(tmp_path / "here" / "model"), None, config, ("fp8",)),
        model_identity("model", None, config, ()),
        model_identity("model", "v2", config, ()),
    }
    assert len(others | {one}) == 7


def test_a_folder_without_weights_has_a_fingerprint(tmp_path: Path) -> None:
    assert folder_fingerprint(tmp_path) == folder_fingerprint(tmp_path)
