"""Streams as servers write them, cut anywhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.bench.sse import events, read_stream

CHAT = (
    b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
    b': a comment\n\ndata: {"choices":[{"index":0,"delta":{"content":"Hel"},"finish_reason":null}],"error":null}\n\n'
    b'data: {"choices":[{"index":0,"delta":{"content":"lo \xc3\xa9"}}]}\r\n\r\n'
    b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3,'
    b'"prompt_tokens_details":{"cached_tokens":5}},"timings":{"cache_n":4}}\n\n'
    b"data: [DONE]\n\n"
)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60))
def test_any_cut_gives_the_same_events(sizes):
    pieces, at = [], 0
    for number, size in enumerate(sizes):
        pieces.append((float(number), CHAT[at : at + size]))
        at += size
    pieces.append((float(len(sizes)), CHAT[at:]))
    found = list(events(pieces))
    assert [data for _, data in found] == [data for _, data in events([(0.0, CHAT)])]
    of_byte = [time_s for time_s, data in pieces for _ in data]
    line_ends = [i for i in range(len(CHAT)) if CHAT[i : i + 1] == b"\n"]
    starts = [0, *(end + 1 for end in line_ends)]
    expected = [
        of_byte[end] for start, end in zip(starts, line_ends, strict=False) if CHAT[start:].startswith(b"data:")
    ]
    assert [time_s for time_s, _ in found] == expected, "an event is there when the end of its line is"


def test_what_a_stream_says():
    reply = read_stream([(1.0, CHAT[:100]), (2.0, CHAT[100:])])
    assert (reply.text, reply.num_prompt, reply.num_output, reply.num_cached) == ("Hello é", 7, 3, 5)
    assert reply.is_complete and reply.error is None
    assert reply.token_times_s == (2.0, 2.0)


def test_llama_cpp_tells_its_cache_in_timings():
    data = b'data: {"choices":[{"text":"a","finish_reason":"length"}],"timings":{"cache_n":9}}\n\n'
    reply = read_stream([(1.0, data)])
    assert (reply.num_cached, reply.num_output, reply.is_complete) == (9, None, True)


def test_an_error_in_the_stream():
    reply = read_stream([(1.0, b'data: {"error": {"message": "it died"}}\n\n')])
    assert "it died" in (reply.error or "")
    with pytest.raises(ValueError, match="cannot be read"):
        read_stream([(1.0, b"data: {\n\n")])
