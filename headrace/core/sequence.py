"""One token stream of a request."""

from __future__ import annotations

from enum import Enum

from headrace.core.grammar import Matcher
from headrace.core.request import Request


class Status(Enum):
    WAITING = "waiting"
    """Holds no blocks; in the queue."""
    RUNNING = "running"
    """Holds blocks; each step may give it tokens."""
    PREEMPTING = "preempting"
    """Chosen as a victim while in flight: gives its blocks back when its last launched plan returns."""
    FINISHED = "finished"
    """Done; if still in flight, its blocks go when its last launched plan returns."""


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    """The executor could not go on with it; the event says why."""
    LATE = "late"
    """It never started, and can no longer meet its deadline."""


class Sequence:
    """The tokens of one choice of a request, and how far they are computed.

    The tokens, as half-open intervals:

        [0, num_cached)                                  found in the prefix tree at admission, shared, read only
        [num_cached, num_computed)                       computed by this sequence; their KV is valid
        [num_computed, num_computed + num_in_flight)     being computed by launched plans
        [num_computed + num_in_flight, num_tokens)       known, waiting for a step
        [num_tokens, num_tokens + num_sampling)          being sampled by launched plans; known when they return

    A span with drafts reaches past `num_tokens`: `num_in_flight` counts its drafts, which are nowhere in `tokens`,
    while `num_sampling` counts the one token that is sure to come; commit adds those that the drafts were right about.

    There is no prefill phase and no decode phase: a step gives the sequence some tokens so that `num_computed`
    catches up with `num_tokens`.
    """

    __slots__ = (
        "arrival_s",
        "choice",
        "id",
        "is_plain",
        "last",
        "limit",
        "matcher",
        "num_cached",
        "num_computed",
        "num_in_flight",
        "num_prompt",
        "num_safe",
        "num_sampling",
        "num_scored",
        "num_to_score",
        "queued_s",
        "readout",
        "request",
        "request_id",
        "sort_key",
        "status",
        "stop_ids",
        "tokens",
        "unborn",
    )

    def __init__(self, id: int, request: Request, choice: int, arrival_s: float, limit: int) -> None:
        self.id = id
        self.request = request
        # What every token asks of its request: here, since each object more is a wait for memory after a native step.
        self.request_id = request.id
        self.stop_ids = request.sampling.stop_token_ids
        self.is_plain = request.sampling.is_plain and request.grammar is None
        """Its tokens are those with the largest logits, and nothing else is wanted of them."""
        self.choice = choice
        self.arrival_s = arrival_s
        self.tokens: list[int] = [*request.prompt, *request.resumed]  # append-only
        self.num_prompt = len(request.prompt)
        self.num_cached = 0
        self.num_computed = 0
        self.num_in_flight = 0
        self.num_sampling = 0
        self.limit = limit
        """Most tokens, prompt included; the last one is never computed, unless it is for its hidden state."""
        self.last = limit if request.pooling else limit - 1
        """Tokens that are computed at most."""
        self.matcher: Matcher | None = None
        """The executor's: where the reply stands in the request's grammar. Begun when first needed."""
        self.unborn: list[int] = []
        """Choices that will fork off in the step that computes the last known token."""
        self.readout = -1
        """Index of its SAMPLE readout in the last plan that has one: what a token in flight is called by."""
        self.num_scored = 0
        """Prompt tokens at which a score or a hidden state has been asked for: not again after a preemption."""
        self.num_to_score = self.num_prompt - 1 if request.score_prompt else self.num_prompt if request.pooling else 0
        self.queued_s: float | None = None
        """From arrival to first admission; a fork has its parent's."""
        self.num_safe = 0
        """Tokens before which no policy displaces it: what its last restoring cost has come back by then."""
        self.status = Status.WAITING
        self.sort_key: tuple = ()
        """The policy's key while the sequence lies in a queue; changes only on events."""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_generated(self) -> int:
        """Tokens of the reply so far, resumed ones included."""
        return len(self.tokens) - self.num_prompt

    @property
    def num_scheduled(self) -> int:
        """Tokens computed or being computed: where the next span starts."""
        return self.num_computed + self.num_in_flight

    @property
    def num_remaining(self) -> int:
        """Tokens a step could take up now, those being sampled included."""
        known, last = len(self.tokens) + self.num_sampling, self.last
        return (known if known < last else last) - self.num_computed - self.num_in_flight

    @property
    def needs_scores(self) -> bool:
        """It reads its prompt's logits or hidden states, and has not read them all."""
        return self.num_scored < self.num_to_score

    @property
    def num_places(self) -> int:
        """Places it takes among the running sequences: its own, and those of the choices that will fork off."""
        return 1 + len(self.unborn)

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request.id}/{self.choice} {self.status.value}: {self.num_tokens} tokens, "
            f"{self.num_cached} cached, {self.num_computed} computed, {self.num_in_flight} in flight)"
        )
