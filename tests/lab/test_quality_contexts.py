"""Documents' KV is that of the texts that a context names; baselines compute what they state."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from byte_tokens import decode, encode
from random_models import random_model

from kvkit.adapters.huggingface.growing import GrowingCache
from kvkit.kernels.pages import reference
from kvkit.lab.quality.contexts import context_texts
from kvkit.lab.quality.judge import Judge
from kvkit.lab.quality.methods import method_named
from kvkit.lab.quality.peers import (
    APE_SCALE,
    APE_TEMPERATURE,
    adaptive_parallel_encoding,
    fewer_documents,
)
from kvkit.lab.quality.tasks.registry import samples
from kvkit.lab.quality.tasks.sample import Sample

LEAD, SYSTEM = np.array([5, 6], np.int32), np.array([7, 8, 9], np.int32)
PREFIX = [5, 6, 7, 8, 9]


def sample_of(*documents: list[int]) -> Sample:
    """A sample of these documents and a question of two tokens, behind the prefix."""
    ends = np.cumsum([0, *map(len, documents)]).tolist()
    prompt = np.array([token for document in (*documents, [90, 91]) for token in document], np.int32)
    spans = tuple(itertools.pairwise(ends))
    return Sample(prompt, spans, np.array([92], np.int32), 1).behind(np.array(PREFIX, np.int32))


DOCUMENTS = [10, 11, 12], [10, 11, 20, 21], [20, 21, 30], [30, 31]


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        ("alone", [([5, 6], [i]) for i in range(4)]),
        ("prefix", [(PREFIX, [i]) for i in range(4)]),
        (
            "related",
            [
                ([*PREFIX, *DOCUMENTS[3], *DOCUMENTS[1]], [0]),
                ([*PREFIX, *DOCUMENTS[0], *DOCUMENTS[2]], [1]),
                ([*PREFIX, *DOCUMENTS[3], *DOCUMENTS[1]], [2]),
                ([*PREFIX, *DOCUMENTS[1], *DOCUMENTS[2]], [3]),
            ],
        ),
        ("anchored", [(PREFIX, [3, 0, 1, 2]), (PREFIX, [1, 2, 3, 0])]),
    ],
)
def test_a_context_is_the_text_before_a_document(context: Any, expected: list[Any]) -> None:
    texts = context_texts(sample_of(*DOCUMENTS), LEAD, SYSTEM, context)
    wanted = [[*before, *(token for i in order for token in DOCUMENTS[i])] for before, order in expected]
    assert [text.tokens.tolist() for text in texts] == wanted
    for text, (before, order) in zip(texts, expected, strict=True):
        assert list(text.starts) == order
        assert text.starts[order[0]] == len(before)
        for i, start in text.starts.items():
            assert text.tokens[start : start + len(DOCUMENTS[i])].tolist() == DOCUMENTS[i]


@pytest.fixture(scope="module")
def judge() -> Judge:
    made = Judge(random_model("deep"))
    made.lead, made.system = LEAD, SYSTEM
    return made


@pytest.mark.parametrize("context", ["alone", "prefix", "related", "anchored"])
def test_documents_are_moved_to_their_places(judge: Judge, context: Any) -> None:
    """Each document's K and V are the mean of what its texts give, K turned to the prompt's positions."""
    sample = sample_of(*DOCUMENTS)
    found, plan = judge.document_kv(sample, 40, context)
    expected = [[] for _ in DOCUMENTS]  # type: list[list[Any]]
    for text in context_texts(sample, LEAD, SYSTEM, context):
        kv = GrowingCache(judge.layout, len(text.tokens), torch.device("cpu"))
        with torch.inference_mode():
            judge.logits(text.tokens, kv)
        for i, first in text.starts.items():
            here, place = slice(first, first + len(DOCUMENTS[i])), sample.documents[i]
            shift = torch.from_numpy(judge.decoder.rope.delta_table(np.array([place[0] - first])))
            moved = [
                (
                    reference.rotate(layer.keys[:, :, here], shift, judge.decoder.rope),
                    layer.values[:, :, here],
                )
                for layer in kv.layers
            ]
            expected[i].append(moved)
    for (start, stop), moved in zip(sample.documents, expected, strict=True):
        for number, layer in enumerate(found.layers):
            for of, room in enumerate((layer.room_k, layer.room_v)):
                mean = torch.stack([each[number][of] for each in moved]).mean(0)
                torch.testing.assert_close(room[:, :, start:stop], mean, rtol=1e-4, atol=1e-5)
    assert plan.exact[: len(PREFIX)].all()
    first_is_exact = context == "prefix"
    assert plan.exact[sample.documents[0][0] : sample.documents[0][1]].all() == first_is_exact
    assert plan.reused.sum() == sum(map(len, DOCUMENTS)) - 3 * first_is_exact
    full = GrowingCache(judge.layout, 40, torch.device("cpu"))
    with torch.inference_mode():
        judge.logits(sample.prompt, full)
    stop = sample.documents[0][1] if first_is_exact else len(PREFIX)
    for ours, theirs in zip(found.layers, full.layers, strict=True):
        torch.testing.assert_close(ours.room_k[:, :, :stop], theirs.room_k[:, :, :stop], rtol=1e-4, atol=1e-5)


def test_fewer_documents_are_those_with_the_questions_rare_tokens() -> None:
    [sample] = samples("needle keys", encode, 1, 1024)
    fewer = fewer_documents(sample.behind(SYSTEM), 0.25)
    (start, stop), *others = fewer.documents
    assert (start, others) == (3, [])
    assert fewer.prompt[:3].tolist() == SYSTEM.tolist()
    assert fewer.prompt[stop:].tolist() == sample.prompt[sample.documents[-1][1] :].tolist()
    whole = decode(sample.prompt)
    assert decode(fewer.prompt[start:stop]) in whole
    small = sample_of([1, 2, 90], [3, 4], [90, 91], [5, 91])
    kept = fewer_documents(small, 0.5)
    assert kept.prompt.tolist() == [*PREFIX, 1, 2, 90, 90, 91, 90, 91]
    assert fewer_documents(small, 1.0).prompt.tolist() == small.prompt.tolist()
    assert fewer_documents(small, 0.0).prompt.tolist() == [*PREFIX, 90, 91, 90, 91]


def test_documents_in_full_have_the_figures_of_their_own_prompt(judge: Judge) -> None:
    [sample] = samples("needle", encode, 1, 512)
    found = judge.measure(sample, {name: method_named(name) for name in ("fewer documents .25",)})
    alone = judge.measure(fewer_documents(sample, 0.25), {})["full"]
    fewer = found["fewer documents .25"]
    assert fewer["nll"] == pytest.approx(alone["nll"], rel=1e-4)
    assert (fewer["kl"] > 0.01, fewer["rows"] < 0.6) == (True, True)
    assert judge.measure(sample, {"all": method_named("fewer documents 1")})["all"]["kl"] < 1e-5


def test_rescaled_attention_is_that_of_the_formula() -> None:
    """And of no other keys; the model's own attention is there again afterwards."""
    model, ids = random_model("deep", 1), torch.arange(1, 21)[None]
    heads: dict[str, Any] = {}
    with torch.inference_mode():
        plain = model(ids, use_cache=False).logits
        layer = model.model.layers[0].self_attn
        hook = layer.o_proj.register_forward_pre_hook(lambda _, given: heads.update(out=given[0]))
        with adaptive_parallel_encoding(model, 4, 12):
            model(ids, use_cache=False)
        hook.remove()
        assert torch.equal(model(ids, use_cache=False).logits, plain)
        x = model.model.layers[0].input_layernorm(model.model.embed_tokens(ids))
        cos, sin = model.model.rotary_emb(x, torch.arange(20)[None])
        q, k, v = (
            project(x).unflatten(-1, (-1, layer.head_dim))[0].double()
            for project in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
    half = layer.head_dim // 2

    def turned(rows: torch.Tensor) -> torch.Tensor:
        rotated = torch.cat([-rows[..., half:], rows[..., :half]], -1)
        return rows * cos[0, :, None] + rotated * sin[0, :, None]

    q, k = turned(q), turned(k)
    groups = q.shape[1] // k.shape[1]
    for head in range(q.shape[1]):
        for row in (3, 11, 19):
            scores = [float(q[row, head] @ k[j, head // groups]) * layer.scaling for j in range(row + 1)]
            inside = [score / APE_TEMPERATURE for score in scores[4:12]]
            scale = math.exp((APE_SCALE - 1) * math.log(sum(map(math.exp, inside)))) if inside else 1.0
            weights = [math.exp(score) for score in scores]
            weights[4:12] = [scale * math.exp(score) for score in inside]
            out = sum(weight * v[j, head // groups] for j, weight in enumerate(weights)) / sum(weights)
            shown = heads["out"][0, row, head * layer.head_dim : (head + 1) * layer.head_dim]
            np.testing.assert_allclose(shown, out, rtol=1e-3, atol=1e-4)


def test_a_method_without_rows_computes_the_question_alone(judge: Judge) -> None:
    [sample] = samples("retrieval", encode, 1, 512)
    names = "ape", "naive"
    found = judge.measure(sample, {name: method_named(name) for name in names})
    assert found["ape"]["rows"] == found["naive"]["rows"]
    assert found["ape"]["kl"] != pytest.approx(found["naive"]["kl"], rel=1e-3)
    again = judge.measure(sample, {"naive": method_named("naive")})["naive"]
    assert again["kl"] == found["naive"]["kl"], "attention is the model's own again"
