"""A document's span in a prompt has the document's tokens, whatever text is around it."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from kvkit.adapters.huggingface import smollm2
from kvkit.router import spans
from kvkit.router.spans import CONTEXTS, MIN_TOKENS, TokenArray, common_end, find_spans

WORDS = " ".join(f"Word {n} of this document is as good as any other, isn't it?" for n in range(12))
STRANGE = st.sampled_from(
    [
        *(
            "",
            " ",
            "  ",
            "\n",
            "\n\n",
            "\t",
            "a",
            "The",
            " the",
            "ing",
            "'s",
            "123",
            "4",
            ".",
            "...",
            "<",
            ">",
        ),
        *(
            "日本語の文書",
            "é",
            "e\u0301",
            "😀",
            "👩‍👩‍👧",
            "\u200b",
            "\ufeff",
            "ß",
            "ﬁ",
            "<|im_end|>",
            "<doc>",
            "\r\n",
        ),
        WORDS,
    ]
)
CHARACTERS = st.characters(exclude_categories=["Cs", "Cc"])  # SmolLM2 has no tokens for some of Cc
TEXTS = st.lists(STRANGE | st.text(CHARACTERS, max_size=12), max_size=6).map("".join)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(smollm2.fetch() / "tokenizer.json"))


def document_of(tokenizer: Tokenizer, text: str) -> TokenArray:
    """As `Tokenizer.document_tokens` of the router has it."""
    return common_end([tokenizer.encode(before + text).ids for before in CONTEXTS])


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=4), TEXTS)
def test_a_spans_tokens_are_the_documents(
    tokenizer: Tokenizer, parts: list[tuple[str, str]], after: str
) -> None:
    """Of any documents between any texts: one that is twice there, empty, or within another one, too."""
    documents = [document_of(tokenizer, text) for _, text in parts]
    text = "".join(before + text for before, text in parts) + after
    prompt = tokenizer.encode(text)
    found = find_spans(prompt.ids, documents)
    left = zip(parts, documents, strict=True)
    end = 0
    for span, ((_, document), tokens) in zip(found, left, strict=True):
        if span is None:
            continue
        start, stop = span
        assert end <= start < stop <= len(prompt.ids)
        end = stop
        own = prompt.ids[start:stop]
        assert tokens[: len(own)].tolist() == own
        assert len(tokens) - len(own) <= spans._UNSTABLE_TOKENS
        assert len(own) >= MIN_TOKENS // 2
        covered = text[prompt.offsets[start][0] : prompt.offsets[stop - 1][1]]
        assert covered[2:-1] in document, "but for tokens that are parts of characters"


@settings(max_examples=40, deadline=None)
@example(["", "...", "!?"], "")
@given(st.lists(TEXTS, min_size=3, max_size=3), st.sampled_from(["", " ", "\n", "\n\n", "The ", "日"]))
def test_a_document_of_words_is_found_but_for_its_edges(
    tokenizer: Tokenizer, around: list[str], opening: str
) -> None:
    text = opening + WORDS
    documents = [document_of(tokenizer, text)] * 2
    assert len(documents[0]) >= len(tokenizer.encode(text).ids) - 4
    prompt = tokenizer.encode(text.join(around)).ids
    found = find_spans(prompt, documents)
    for span in found:
        assert span is not None
        assert span[1] - span[0] >= len(documents[0]) - 4


def test_what_is_short_or_not_there_is_left_out(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("Read this.\n" + WORDS).ids
    absent = document_of(tokenizer, WORDS.replace("document", "paper"))
    short = document_of(tokenizer, WORDS[:40])
    whole = document_of(tokenizer, WORDS)
    assert [span is None for span in find_spans(prompt, [absent, short, whole])] == [True, True, False]
    assert find_spans(prompt, [whole], first=len(prompt) - 5) == [None]


def test_tokens_are_found_at_tokens_alone() -> None:
    """Not where the bytes of two of them make another one."""
    shifted = [256] * 40  # within its bytes stand many tokens 1
    assert find_spans(shifted, [spans.tokens_of([1] * 20)]) == [None]
    assert find_spans([*shifted, *[1] * 20], [spans.tokens_of([1] * 20)]) == [(40, 60)]
    assert find_spans([0] * 40, [spans.tokens_of([0] * 30)], 3) == [(3, 33)]
