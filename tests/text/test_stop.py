"""Stop strings against a brute force over the whole text."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.text.stop import StopStrings


def brute_force(stops: list[str], text: str, include_stop: bool) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include_stop else end - len(stop)], stop
    return text, None


def must_hold(stops: list[str], text: str) -> int:
    """Length of the longest suffix that could still become a stop."""
    return max(
        (n for n in range(len(text) + 1) for stop in stops if text.endswith(stop[:n]) and n < len(stop)), default=0
    )


@settings(max_examples=600, deadline=None)
@given(
    stops=st.lists(st.text("abc", min_size=1, max_size=6), max_size=5),
    pieces=st.lists(st.text("abc", max_size=5), max_size=12),
    include_stop=st.booleans(),
)
def test_any_split(stops: list[str], pieces: list[str], include_stop: bool):
    stopper = StopStrings(stops, include_stop=include_stop)
    emitted, seen = "", ""
    for piece in pieces:
        seen += piece
        text, matched = stopper.push(piece)
        emitted += text
        if matched is None:
            assert len(emitted) == len(seen) - must_hold(stops, seen), "held back more, or less, than it must"
    if stopper.matched is None:
        emitted += stopper.finish()
    assert (emitted, stopper.matched) == brute_force(stops, "".join(pieces), include_stop)


def test_nothing_of_a_stop_leaks():
    """Found elsewhere: a stop cut by the stream showed its first half."""
    stopper = StopStrings(["DEFGHIJ"])
    assert [stopper.push(char) for char in "ABCDEFGHIJ"] == [
        *(("A", None), ("B", None), ("C", None)),
        *[("", None)] * 6,
        ("", "DEFGHIJ"),
    ]
    assert stopper.push("more") == ("", "DEFGHIJ")
    assert stopper.finish() == ""


def test_the_tail_is_flushed():
    """Found elsewhere: text that was held back was lost when generation ended without a match."""
    stopper = StopStrings(["\n\n"])
    assert stopper.push("Is it?\n") == ("Is it?", None)
    assert stopper.finish() == "\n"


def test_which_match_wins():
    """The one complete first; of those that end together the longest."""
    assert StopStrings(["abcd", "bc"]).push("xabcd") == ("xa", "bc")
    assert StopStrings(["bc", "abc"]).push("xabc") == ("x", "abc")
    assert StopStrings(["ab", "abc"]).push("xabc") == ("x", "ab")
    assert StopStrings(["abc"], include_stop=True).push("xabcd") == ("xabc", "abc")


def test_no_stops_and_empty_stops():
    assert StopStrings([]).push("text") == ("text", None)
    with pytest.raises(ValueError, match="stop string is empty"):
        StopStrings(["a", ""])


@pytest.mark.parametrize("text", ["a" * 200_000, "ab" * 100_000, "a" * 999 + "b"])
def test_cost_is_linear(text: str):
    """A thousand nearly matching characters at every place would be 2e8 comparisons for a rescan."""
    stopper = StopStrings(["a" * 1000, "a" * 500 + "c"])
    start = time.process_time()
    for i in range(0, len(text), 4):
        stopper.push(text[i : i + 4])
    assert time.process_time() - start < 1.0
