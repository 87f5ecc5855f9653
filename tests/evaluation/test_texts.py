"""Windows: every token is scored once."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import ConfigurationError
from headrace.evaluation.texts import first_token, read_tokens, windows
from tests.server.fakes import BOS, make_tokenizer


@given(st.integers(2, 200), st.integers(3, 40), st.data())
def test_each_token_is_scored_once_with_enough_before_it(count, context, data):
    head = data.draw(st.sampled_from([(), (-1,)]))
    overlap = data.draw(st.integers(1, context - len(head) - 1)) if context - len(head) > 1 else 1
    tokens = tuple(range(count))
    scored = []
    for number, window in enumerate(windows(tokens, context, overlap, head)):
        assert len(window.tokens) <= context
        assert window.tokens[: len(head)] == head
        assert 1 <= window.num_known < len(window.tokens)
        assert number == 0 or window.num_known - len(head) >= overlap
        scored += window.tokens[window.num_known :]
    assert scored == list(tokens[0 if head else 1 :])


@pytest.mark.parametrize("overlap", [0, 8, 9])
def test_overlaps_that_cannot_be(overlap):
    with pytest.raises(ConfigurationError, match=f"overlap is {overlap}"):
        list(windows(range(100), 8, overlap))


def test_files(tmp_path):
    tokenizer = make_tokenizer()
    assert first_token(tokenizer) == (BOS,)
    text = tmp_path / "a.txt"
    text.write_text("héllo")
    assert read_tokens(text, tokenizer) == tuple("héllo".encode())
    ids = tmp_path / "b.json"
    for value, message in (([1, 2, 999], "names token 999"), ({"a": 1}, "list of token ids"), ([1], "at least 2")):
        ids.write_text(json.dumps(value))
        with pytest.raises(ConfigurationError, match=message):
            read_tokens(ids, tokenizer)
    ids.write_text("[1, 2, 3]")
    assert read_tokens(ids, tokenizer) == (1, 2, 3)
