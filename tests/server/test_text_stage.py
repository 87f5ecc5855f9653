"""The text stage alone: tokens in, deltas out."""

from __future__ import annotations

import itertools
import random

import pytest

from headrace.core.events import TokenEvent
from headrace.core.request import Request
from headrace.core.sampling import SamplingParams
from headrace.core.sequence import FinishReason
from headrace.server.generation import Delta, TextOptions, TextStage
from tests.server.fakes import EOS, TURN_END, logprob_of, make_tokenizer

TOKENIZER = make_tokenizer()


def stage(options: TextOptions = TextOptions(), **request: object) -> TextStage:
    return TextStage(Request("r", (1, 2, 3), SamplingParams(), **request), TOKENIZER, options)


def run(
    text_stage: TextStage, tokens: list[int], cuts: list[int], finish: FinishReason = FinishReason.LENGTH
) -> list[Delta]:
    """Push `tokens` cut into events; stops when the choice is over, as a server's abort would."""
    deltas = []
    edges = [0, *cuts, len(tokens)]
    for begin, end in itertools.pairwise(edges):
        part = tuple(tokens[begin:end])
        last = end == len(tokens)
        event = TokenEvent("r", 0, part, tuple(logprob_of(t, 0) for t in part), (), finish if last else None)
        delta = text_stage.push(event)
        if delta is not None:
            deltas.append(delta)
    return deltas


def joined(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def test_a_partial_stop_never_leaks():
    deltas = run(stage(TextOptions(stops=("DEFGHIJ",))), list(b"ABCDEFGHIJKL"), list(range(1, 12)))
    assert joined(deltas) == "ABC"
    assert deltas[-1].finish_reason == "stop"
    assert deltas[-1].stop == "DEFGHIJ"
    assert deltas[-1].cut, "the engine has to be told"
    assert sum(len(d.tokens) for d in deltas) == 10, "the tokens that were needed to see the stop"


def test_what_a_stop_cuts_does_not_depend_on_how_tokens_come():
    """Found in thought: an event of several tokens would count the ones behind the stop."""
    tokens = list("One, two, ∴ thrée, fourSTOPfive".encode())
    alone = run(stage(TextOptions(stops=("STOP",), logprobs=True)), tokens, list(range(1, len(tokens))))
    expected = (joined(alone), [t for d in alone for t in d.tokens], [s for d in alone for s in d.scored])
    rng = random.Random(1)
    for _ in range(100):
        cuts = sorted(rng.sample(range(1, len(tokens)), rng.randrange(len(tokens) - 1)))
        deltas = run(stage(TextOptions(stops=("STOP",), logprobs=True)), tokens, cuts)
        assert (
            joined(deltas),
            [t for d in deltas for t in d.tokens],
            [s for d in deltas for s in d.scored],
        ) == expected
    assert expected[0] == "One, two, ∴ thrée, four"


def test_a_held_tail_is_flushed_when_nothing_matched():
    deltas = run(stage(TextOptions(stops=("STOP",))), list(b"to be ST"), [3, 7])
    assert joined(deltas) == "to be ST"
    assert deltas[-1].finish_reason == "length"


@pytest.mark.parametrize("interval", [1, 3, 8])
def test_deltas_join_to_the_whole_text(interval: int):
    text = "naïve 🌶️ ď好 — ok"
    tokens = list(text.encode())
    deltas = run(stage(), tokens, list(range(interval, len(tokens), interval)))
    assert joined(deltas) == text
    assert "�" not in joined(deltas)


def test_the_token_that_ends_a_reply_is_counted_and_not_shown():
    deltas = run(stage(TextOptions(logprobs=True)), [*b"ok", EOS], [1, 2], FinishReason.STOP)
    assert joined(deltas) == "ok"
    assert [s.token for d in deltas for s in d.scored] == list(b"ok")
    assert sum(len(d.tokens) for d in deltas) == 3
    assert deltas[-1].stop == EOS
    assert not deltas[-1].cut


def test_control_tokens_in_the_middle_have_no_text():
    assert joined(run(stage(), [*b"a", TURN_END, *b"b"], [1, 2])) == "ab"


def test_a_stop_before_min_tokens_is_text():
    deltas = run(stage(TextOptions(stops=("a",), min_tokens=4)), list(b"aaaabaab"), [])
    assert joined(deltas) == "aaa"
    assert sum(len(d.tokens) for d in deltas) == 4


def test_logprobs_come_with_the_text_they_belong_to():
    text_stage = stage(TextOptions(stops=("xyz",), logprobs=True))
    deltas = run(text_stage, list(b"abxyq"), [1, 2, 3, 4])
    assert [(d.text, [chr(s.token) for s in d.scored]) for d in deltas] == [
        ("a", ["a"]),
        ("b", ["b"]),
        ("", []),
        ("", []),
        ("xyq", ["x", "y", "q"]),
    ]
    assert [s.offset for d in deltas for s in d.scored] == [0, 1, 2, 3, 4]


def test_echo_comes_first_with_the_prompts_logprobs_for_every_choice():
    request = Request("r", tuple(b"hey"), SamplingParams(num_logprobs=0), num_choices=2, score_prompt=True)
    text_stage = TextStage(request, TOKENIZER, TextOptions(logprobs=True, echo="hey"), first_choice=4)
    for piece in (b"e", b"y"):
        scores = tuple(logprob_of(token, 0) for token in piece)
        assert text_stage.push(TokenEvent("r", 0, prompt_logprobs=scores)) is None
    for choice in (0, 1):
        delta = text_stage.push(TokenEvent("r", choice, (33,), (logprob_of(33, 0),)))
        assert delta is not None
        assert (delta.choice, delta.text) == (4 + choice, "hey!")
        assert [(s.token, s.offset) for s in delta.scored] == [(104, 0), (101, 1), (121, 2), (33, 3)]
        assert [s.logprob and s.logprob.logprob for s in delta.scored] == [None, -0.25, -0.25, -0.25]


def test_nothing_follows_the_end():
    text_stage = stage(TextOptions(stops=("b",)))
    assert run(text_stage, list(b"abc"), [1, 2])[-1].finish_reason == "stop"
    assert text_stage.push(TokenEvent("r", 0, tuple(b"zz"))) is None
    assert text_stage.num_open == 0
    assert text_stage.num_generated == 2
