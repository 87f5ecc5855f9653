"""best_of and suffix of /v1/completions."""

from __future__ import annotations

import dataclasses

import pytest

from headrace.core.events import TokenEvent
from headrace.server.ranking import Ranking
from headrace.text.fill_in import FillIn
from tests.server.conftest import RunningServer
from tests.server.fakes import BOS, EOS, TURN, FakeEngine, Running
from tests.server.test_extras import error_of

SAYS = {0: (b"aa", -1.0), 1: (b"bbbbbb", -0.5), 2: (b"", -0.75), 3: (b"dd", -0.25)}
"""Choice -> what it says, and the logprob of each of its tokens, the end token included."""


class Candidates(FakeEngine):
    """Every choice says something else."""

    def _next(self, run: Running) -> TokenEvent:
        words, logprob = SAYS[run.choice]
        run.script = [*words, EOS]
        event = super()._next(run)
        scored = tuple(dataclasses.replace(entry, logprob=logprob) for entry in event.logprobs)
        return event._replace(logprobs=scored)


@pytest.fixture
def server(start) -> RunningServer:
    return start(Candidates())


def complete(server: RunningServer, **body: object) -> dict:
    response = server.post("/v1/completions", json={"prompt": "x"} | body)
    assert response.status_code == 200, response.text
    return response.json()


def test_the_likeliest_per_token_come_first(server: RunningServer):
    reply = complete(server, best_of=3, n=2)
    assert [(c["index"], c["text"]) for c in reply["choices"]] == [(0, "bbbbbb"), (1, "")], "of sums, '' would be first"
    assert all(c["logprobs"] is None for c in reply["choices"]), "nobody asked for them"
    assert reply["usage"]["completion_tokens"] == 3 + 7 + 1, "all that was computed"
    assert server.engine.requests[0].num_choices == 3
    assert [c["text"] for c in complete(server, best_of=4)["choices"]] == ["dd"]


def test_each_prompt_has_its_own_candidates(server: RunningServer):
    reply = complete(server, prompt=["x", "y"], best_of=3, n=2, echo=True, logprobs=1)
    texts = [(c["index"], c["text"]) for c in reply["choices"]]
    assert texts == [(0, "xbbbbbb"), (1, "x"), (2, "ybbbbbb"), (3, "y")]
    assert reply["choices"][0]["logprobs"]["token_logprobs"][-6:] == [-0.5] * 6


def test_a_stop_string_ends_what_counts(server: RunningServer):
    """Cut at the stop, choice 0 has one token of -1.0 and choice 1 six of -0.5."""
    reply = complete(server, best_of=2, stop="a")
    assert reply["choices"][0]["text"] == "bbbbbb"
    assert reply["usage"]["completion_tokens"] == 1 + 7


def test_as_many_as_are_returned_is_no_ranking(server: RunningServer):
    reply = complete(server, best_of=2, n=2)
    assert [c["text"] for c in reply["choices"]] == ["aa", "bbbbbb"]
    assert server.engine.requests[0].sampling.num_logprobs is None
    assert server.post("/v1/completions", json={"prompt": "x", "best_of": 1, "stream": True}).status_code == 200


def test_of_equals_the_first():
    assert Ranking(3, 2).best({0: "a", 1: "b", 2: "c"}, {0: -1.0, 1: -0.5, 2: -0.5}) == {0: "b", 1: "c"}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"best_of": 2, "n": 3}, "between n and 16"),
        ({"best_of": 0}, "between n and 16"),
        ({"best_of": 17}, "between n and 16"),
        ({"best_of": 2, "stream": True}, "stream"),
        ({"best_of": 2, "echo": True, "max_tokens": 0}, "best_of is 2"),
        ({"best_of": "3"}, "integer"),
    ],
)
def test_refusals(server: RunningServer, body: dict, words: str):
    error = error_of(server, "/v1/completions", {"prompt": "x"} | body)
    assert error["param"] == "best_of"
    assert words in error["message"]


def test_the_engines_refusal_speaks_of_best_of(start):
    error = error_of(start(FakeEngine(max_running=2)), "/v1/completions", {"prompt": "x", "best_of": 3})
    assert error["param"] == "best_of"


def test_a_suffix_goes_behind_the_gap(start):
    server = start()
    server.service.deployment.tokenizer.fill_in = FillIn(1, 2, 3)
    complete(server, prompt="say:hi", suffix="<turn>é")
    complete(server, prompt=list(b"ab"), suffix="c")
    complete(server, prompt="x", suffix="")
    prompts = [request.prompt for request in server.engine.requests]
    assert prompts[0] == (BOS, 1, *b"say:hi", 2, TURN, *"é".encode(), 3)
    assert prompts[1] == (1, *b"ab", 2, *b"c", 3)
    assert prompts[2] == (BOS, *b"x"), "an empty one asks for nothing"
    assert error_of(server, "/v1/completions", {"prompt": "x", "suffix": "y", "echo": True})["param"] == "suffix"
    assert error_of(server, "/v1/completions", {"prompt": "x", "suffix": "y" * 4000})["param"] == "suffix"


def test_a_model_without_fill_in_tokens_says_so(shared: RunningServer):
    error = error_of(shared, "/v1/completions", {"prompt": "x", "suffix": "y"})
    assert (error["code"], error["param"]) == ("unsupported_parameter", "suffix")
    assert "no fill-in tokens" in error["message"]
