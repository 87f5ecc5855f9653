"""What is streamed is what a decode of the whole gives, however the ids arrive."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.text.detokenizer import IncrementalDetokenizer
from headrace.text.matcher import TokenMatcher
from headrace.text.tokenizer import Tokenizer

BYTES = list(range(256))  # ids of the toy vocabulary below


def toy(*, drops_first_space: bool = False) -> Tokenizer:
    """One token per byte, then whole words and a control token: every way to break a character."""
    pieces = [bytes((b,)) for b in BYTES] + [b" a", "é好".encode(), "🙂".encode()[:3], b"<end>"]
    return Tokenizer(
        encode_ordinary=lambda text, at_start: list(text.encode()),
        ids={},
        pieces=pieces,
        control=TokenMatcher({"<end>": 259}),
        drops_first_space=drops_first_space,
    )


TOYS = {space: toy(drops_first_space=space) for space in (False, True)}


def stream(detokenizer: IncrementalDetokenizer, pushes: list[list[int]]) -> list[str]:
    return [*(detokenizer.push(ids) for ids in pushes), detokenizer.finish()]


@st.composite
def pushes(draw: st.DrawFn, ids: st.SearchStrategy[int]) -> list[list[int]]:
    return draw(st.lists(st.lists(ids, max_size=4), max_size=30))


@settings(max_examples=400, deadline=None)
@given(
    cut=pushes(st.sampled_from([0x20, 0xE5, 0xA5, 0xBD, 0xF0, 0x9F, 0x99, 0x82, 0xC3, 0xFF, 0xED, 256, 257, 258, 259])),
    skip=st.booleans(),
    space=st.booleans(),
)
def test_concatenation_is_the_whole_decode(cut: list[list[int]], skip: bool, space: bool):
    tokenizer = TOYS[space]
    whole = [token for ids in cut for token in ids]
    pieces = stream(IncrementalDetokenizer(tokenizer, skip_special_tokens=skip), cut)
    assert "".join(pieces) == tokenizer.decode(whole, skip_special_tokens=skip)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), skip=st.booleans())
@pytest.mark.parametrize("name", ["smollm2", "gemma"])
def test_real_vocabularies(request: pytest.FixtureRequest, name: str, data: st.DataObject, skip: bool):
    tokenizer: Tokenizer = request.getfixturevalue(name)
    # Byte tokens lie at the front of both vocabularies (Gemma 238-493; SmolLM2's single characters up to 273).
    cut = data.draw(pushes(st.integers(0, tokenizer.vocab_size - 1) | st.integers(0, 500)))
    whole = [token for ids in cut for token in ids]
    pieces = stream(IncrementalDetokenizer(tokenizer, skip_special_tokens=skip), cut)
    assert "".join(pieces) == tokenizer.decode(whole, skip_special_tokens=skip)


@settings(max_examples=150, deadline=None)
@given(text=st.text("a🌶ď好 \n\u0301👩\u200d👧"), step=st.integers(1, 8))
@pytest.mark.parametrize("name", ["smollm2", "gemma"])
def test_no_half_characters(request: pytest.FixtureRequest, name: str, text: str, step: int):
    """Of a text that is all there, no piece ever shows a U+FFFD, whatever the interval."""
    tokenizer: Tokenizer = request.getfixturevalue(name)
    ids = tokenizer.encode(text)
    pieces = stream(IncrementalDetokenizer(tokenizer), [ids[i : i + step] for i in range(0, len(ids), step)])
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


def test_text_is_not_held_longer_than_needed():
    """A piece holds back at most an incomplete character; what cannot become one is given out at once."""
    detokenizer = IncrementalDetokenizer(TOYS[False])
    euro = "€".encode()
    assert detokenizer.push([ord("a"), euro[0]]) == "a"
    assert detokenizer.push([euro[1]]) == ""
    assert detokenizer.push([euro[2]]) == "€"
    assert detokenizer.push([euro[0]]) == ""
    assert detokenizer.push([ord("b")]) == "\ufffdb"
    assert detokenizer.push([0xFF]) == "\ufffd"
    assert detokenizer.push([euro[0], 259]) == "", "a skipped control token does not end a character"
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_first_space():
    """SentencePiece drops the first space of a text, not of a text that goes on."""
    assert stream(IncrementalDetokenizer(TOYS[True]), [[], [256], [256]]) == ["", "a", " a", ""]
    assert stream(IncrementalDetokenizer(TOYS[True], continues_text=True), [[256], [256]]) == [" a", " a", ""]
    assert stream(IncrementalDetokenizer(TOYS[False]), [[256]]) == [" a", ""]


def test_ids_outside_the_vocabulary_are_refused():
    for token in (260, -1):
        with pytest.raises(ValueError, match=f"token id {token} is outside of the vocabulary of 260 tokens"):
            IncrementalDetokenizer(TOYS[False]).push([token])


def test_cost_per_token(smollm2: Tokenizer):
    """About a microsecond; the budget of a streamed token is 50 us for everything. Best of several: others work too."""
    ids = smollm2.encode("The quick brown fox jumps over the lazy dog. 你好 🙂 " * 500)
    best = 1.0
    for _ in range(5):
        detokenizer = IncrementalDetokenizer(smollm2)
        start = time.process_time()
        for token in ids:
            detokenizer.push((token,))
        best = min(best, (time.process_time() - start) / len(ids))
    assert best < 5e-6
