"""A request's blend settings are read, and errors name the field, the value and the choices."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from kvkit.adapters.vllm.blending.requests import BlendRequest, Marks, read
from kvkit.adapters.vllm.settings import BlendSettings
from kvkit.blend.plan import Selection, split
from kvkit.settings import ConfigError

PROMPT = list(range(10, 50))
MARKS = Marks.of(("<d>", "</d>"), {"<d>": [1, 2], "</d>": [3]}.__getitem__)


def request(blend: Any = None, prompt: list[int] | None = None, **fields: Any) -> SimpleNamespace:
    """What vLLM's request has of it."""
    plain = {
        "kv_transfer_params": None if blend is None else {"blend": blend},
        "prompt_token_ids": prompt or PROMPT,
        "prompt_embeds": None,
        "mm_features": [],
        "pooling_params": None,
        "resumable": False,
        "skip_reading_prefix_cache": False,
    }
    return SimpleNamespace(**plain | fields)


def test_a_request_says_where_its_documents_stand_and_what_is_computed_again() -> None:
    asked = {"documents": [[4, 9], [9, 20]], "prefix": 4, "ratio": 0.3, "method": "first_n"}
    found = read(request(asked), BlendSettings())
    assert found == BlendRequest(((4, 9), (9, 20)), 4, Selection("first_n", 0.3))
    found = read(request(asked | {"joints": [[], [7, 8]]}), BlendSettings())
    assert found == BlendRequest(((4, 9), (9, 20)), 4, Selection("first_n", 0.3), ((), (7, 8)))


def test_what_it_leaves_out_is_as_the_settings_say() -> None:
    settings = BlendSettings(ratio=0.25, methods=("first_n",), coverage=0.8)
    assert read(request({"documents": [[0, 9]]}), settings) == BlendRequest(
        ((0, 9),), 0, Selection("first_n", 0.25, coverage=0.8)
    )


@pytest.mark.parametrize(
    ("asked", "first_n"),
    [({}, 8), ({"ratio": 0.0}, 0), ({"first_n": 3}, 3), ({"ratio": 0.0, "first_n": 3}, 3)],
)
def test_of_a_ratio_of_nothing_no_token_is_computed_again_that_is_not_asked_for(
    asked: dict[str, Any], first_n: int
) -> None:
    found = read(request({"documents": [[0, 9]], **asked}), BlendSettings())
    assert found is not None
    assert (found.selection.ratio, found.selection.first_n) == (asked.get("ratio", 0.15), first_n)


@pytest.mark.parametrize(
    ("blend", "told"),
    [
        (3, r"blend = 3: want false, or an object of documents, joints, prefix, ratio, method"),
        ({"document": [[0, 9]]}, r"blend\.document: unknown setting; did you mean 'documents'\?"),
        ({}, r"blend\.documents: want \[\[start, stop\], \.\.\.\]: .* has no marks"),
        ({"documents": [[0, 9, 11]]}, r"blend\.documents: \[0, 9, 11\]: want \[start, stop\]"),
        ({"documents": [[0, 9.5]]}, r"blend\.documents\.0\.1 = 9\.5: .*integer"),
        ({"documents": [[0, True]]}, r"blend\.documents\.0\.1 = True: .*integer"),
        ({"documents": [[9, 9]]}, r"\[9, 9\]: want \[start, stop\] in order, apart, not empty"),
        ({"documents": [[4, 9], [8, 12]]}, r"\[8, 12\]: want \[start, stop\] in order"),
        ({"documents": [[4, 41]]}, r"\[4, 41\]: want .* within 40 tokens"),
        ({"documents": [[4, 9]], "prefix": 5}, r"\[4, 9\]: want .* after the prefix of 5"),
        ({"documents": [[4, 9]], "prefix": -1}, r"blend\.prefix = -1: .*greater than or equal to 0"),
        ({"documents": [[4, 9]], "ratio": 2}, r"blend\.ratio = 2: .*less than or equal to 1"),
        ({"documents": [[4, 9]], "ratio": 0.05}, r"blend\.ratio = 0\.05: want at least 0\.1"),
        ({"joints": [[1]]}, r"blend\.joints: want kv_transfer_params\.blend\.documents with them"),
        ({"documents": [[4, 9]], "joints": [[1], [2]]}, r"blend\.joints: 2, want one for each of 1 docum"),
        (
            {"documents": [[4, 9]], "joints": [[-1]]},
            r"blend\.joints\.0\.0 = -1: .*greater than or equal to 0",
        ),
        ({"documents": [[4, 9]], "joints": [[1] * 41]}, r"blend\.joints: want fewer tokens than the 40 of"),
        (
            {"documents": [[i, i + 1] for i in range(4)]},
            r"blend: 4 documents: want at most kv_connector_extra_config\.blend\.max_documents = 3",
        ),
        (
            {"documents": [[4, 9]], "method": "k_deviation"},
            r"method = 'k_deviation': want one of question_att",
        ),
    ],
)
def test_every_mistake_is_named(blend: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read(request(blend), BlendSettings(least_ratio=0.1, max_documents=3))


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"mm_features": [object()]}, "media"),
        ({"prompt_embeds": object()}, "embeddings"),
        ({"pooling_params": object()}, "pooling"),
        ({"resumable": True}, "streamed"),
        ({"skip_reading_prefix_cache": True}, "logprobs of the prompt"),
        ({"kv_transfer_params": {"blend": {}, "do_remote_decode": True}}, "a handoff"),
    ],
)
def test_what_cannot_be_blended_is_refused_only_if_it_asks(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=f"blend: not with .*{told}"):
        read(request(**{"blend": {}} | fields), BlendSettings())
    params = {
        "kv_transfer_params": {k: v for k, v in fields.get("kv_transfer_params", {}).items() if k != "blend"}
    }
    assert read(request(**fields | params), BlendSettings(split=True), MARKS) is None


def test_documents_are_what_stands_between_marks() -> None:
    prompt = [9, 1, 2, 50, 51, 3, 7, 1, 2, 60, 3, 1, 2, 70]
    found = read(request(prompt=prompt), BlendSettings(), MARKS)
    assert found is not None
    assert [prompt[start:stop] for start, stop in found.documents] == [[50, 51], [60]]
    assert found.prefix == 3, "what stands before the first"
    after = read(request({"prefix": 4}, prompt), BlendSettings(), MARKS)
    assert after is not None
    assert (after.documents, after.prefix) == (((9, 10),), 4)
    assert read(request(False, prompt), BlendSettings(), MARKS) is None
    assert read(request(prompt=[5, 6, 7]), BlendSettings(), MARKS) is None


def test_documents_between_marks_may_have_been_computed_alone() -> None:
    """Behind what the tokenizer puts before every text; a request may say otherwise."""
    prompt = [9, 1, 2, 50, 51, 3]
    for lead, prefix in (([9], 1), ([], 0), ([8], 0), ([9, 2], 0), (None, 3)):
        found = read(request(prompt=prompt), BlendSettings(), MARKS, lead)
        assert found is not None
        assert (found.documents, found.prefix) == (((3, 5),), prefix)
    found = read(request({"prefix": 2}, prompt), BlendSettings(), MARKS, [9])
    assert found is not None
    assert found.prefix == 2


def test_marks_are_whole_tokens() -> None:
    """No part of an id, or of two, is taken for one."""
    assert not list(MARKS.documents([1 << 8, 2 << 8, 3 << 8, 1, 2 << 16, 3]))
    with pytest.raises(ConfigError, match=r"marks = \('a', ''\): want two texts that have tokens"):
        Marks.of(("a", ""), lambda text: [5] * len(text))


def test_without_marks_a_prompt_is_cut_by_its_content_where_the_settings_say_so() -> None:
    prompt = np.random.default_rng(0).integers(0, 1000, 700).tolist()
    found = read(request(prompt=prompt), BlendSettings(split=True))
    assert found is not None
    assert [start for start, _ in found.documents] == split(prompt).tolist()[:-1]
    assert read(request(prompt=prompt), BlendSettings()) is None
