"""What is known of the live requests beside their tokens: how long their replies will be, what that will cost, and
whose they are.

Work is measured in service units, those of virtual token counters (Sheng et al. 2024): `PROMPT_WORK` per prompt token
computed, `GENERATED_WORK` per token generated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from headrace.core.cost_model import CostModel
from headrace.core.protocols import LengthPrediction, LengthPredictor
from headrace.core.request import Request
from headrace.core.sequence import Sequence, Status
from headrace.core.work import StepWork
from headrace.engine.costs import LearntCosts, StepCosts
from headrace.engine.predict.bound import BoundPredictor
from headrace.engine.predict.calibration import Calibration

PROMPT_WORK, GENERATED_WORK = 1.0, 2.0


@dataclass(slots=True)
class TenantUse:
    """Tokens: prompts, and the replies predicted for them, of the requests that wait or run."""

    num_queued: int = 0
    num_running: int = 0
    prompt_tokens: int = 0
    """Of choices that have ended, since the start: a choice's prompt counts once."""
    generated_tokens: int = 0


@dataclass(slots=True)
class _Entry:
    """One live request."""

    prediction: LengthPrediction
    num_tokens: int
    """Prompt and predicted replies."""
    has_run: bool = False


class Ledger:
    """Written by the scheduler, read by policies and gates. O(1) per event of a request, nothing per token."""

    def __init__(self, predictor: LengthPredictor | None = None, costs: StepCosts | None = None) -> None:
        self.predictor = predictor or BoundPredictor()
        self.costs = costs or LearntCosts(CostModel())
        """Of steps."""
        self.calibration = Calibration()
        self.tenants: dict[str, TenantUse] = {}
        self._entries: dict[str, _Entry] = {}

    # --- events ----------------------------------------------------------------------------------------------------

    def arrived(self, sequence: Sequence) -> None:
        """The first sequence of a request, which waits."""
        request = sequence.request
        prediction = self.predict(sequence)
        num_tokens = sequence.num_prompt + round(prediction.expected) * request.num_choices
        self._entries[request.id] = _Entry(prediction, num_tokens)
        self.tenants.setdefault(request.tenant, TenantUse()).num_queued += num_tokens

    def admitted(self, sequence: Sequence) -> None:
        entry = self._entries[sequence.request.id]
        if not entry.has_run:  # a preempted request stays among those that run: it comes back
            entry.has_run = True
            use = self.tenants[sequence.request.tenant]
            use.num_queued -= entry.num_tokens
            use.num_running += entry.num_tokens

    def ended(self, sequence: Sequence, *, is_complete: bool) -> None:
        """A choice is over; `is_complete`: by itself, and nobody cut it off."""
        use = self.tenants[sequence.request.tenant]
        use.prompt_tokens += sequence.num_prompt if self._entries[sequence.request.id].has_run else 0
        use.generated_tokens += sequence.num_generated
        if is_complete and sequence.num_generated:
            self.predictor.observe(sequence.request, sequence.num_generated)
            predicted = self._entries[sequence.request.id].prediction.expected
            self.calibration.observe(predicted, sequence.num_generated)

    def closed(self, request: Request) -> None:
        """All its choices are over."""
        entry = self._entries.pop(request.id)
        use = self.tenants[request.tenant]
        if entry.has_run:
            use.num_running -= entry.num_tokens
        else:
            use.num_queued -= entry.num_tokens

    # --- predictions -----------------------------------------------------------------------------------------------

    def predict(self, sequence: Sequence) -> LengthPrediction:
        """For a sequence that is not in the books yet: within what its request allows."""
        bound = sequence.limit - sequence.num_prompt
        if bound <= 0:
            return LengthPrediction(0, 0)
        expected, high = self.predictor.predict(sequence.request, bound)
        expected = min(max(1.0, expected), bound)
        return LengthPrediction(expected, min(max(expected, high), bound))

    def has_run(self, request: Request) -> bool:
        return self._entries[request.id].has_run

    def num_tokens_of(self, request: Request) -> int:
        """Of its prompt and of the replies predicted for it, as its tenant's accounts have it."""
        return self._entries[request.id].num_tokens

    def expected(self, sequence: Sequence) -> float:
        """Tokens of the whole reply. A reply that outlives its prediction is expected to become twice as long, and
        again: the error of a prediction costs its logarithm."""
        return self._outlived(sequence, self._entries[sequence.request.id].prediction.expected)

    def remaining(self, sequence: Sequence) -> float:
        """Tokens of the reply yet to be generated; none for one that has ended and is still in flight."""
        if sequence.status is Status.FINISHED:
            return 0.0
        return self.expected(sequence) - sequence.num_generated

    def remaining_high(self, sequence: Sequence) -> float:
        """As many as nine in ten such replies have at most."""
        if sequence.status is Status.FINISHED:
            return 0.0
        high = self._entries[sequence.request.id].prediction.high
        return self._outlived(sequence, high) - sequence.num_generated

    def remaining_work(self, sequence: Sequence) -> float:
        """Service units to its end, recomputation of what it lost included."""
        to_compute = sequence.num_tokens - sequence.num_computed
        return PROMPT_WORK * to_compute + GENERATED_WORK * self.remaining(sequence)

    def remaining_s(self, sequence: Sequence, num_streams: int) -> float:
        """Seconds to its end, beside so many streams; 0 where nothing is known of seconds."""
        seconds, num_streams = self.costs.seconds, max(1, num_streams)
        to_compute, context = sequence.num_tokens - sequence.num_computed, sequence.num_tokens
        prompt_s = seconds(StepWork.of_prompt(to_compute, sequence.num_computed)) if to_compute > 1 else 0.0
        return prompt_s + self.remaining(sequence) * seconds(StepWork.of_streams(num_streams, context * num_streams))

    def restoring_tokens(self, num_computed: int, num_streams: int) -> int:
        """Tokens to generate, as one of so many streams, that cost as much as computing `num_computed` anew: by the
        cost model of steps, else by service units."""
        num_streams = max(1, num_streams)
        restoring_s = self.costs.seconds(StepWork.of_prompt(num_computed))
        step_s = self.costs.seconds(StepWork.of_streams(num_streams, num_computed * num_streams))
        if restoring_s <= 0 or step_s <= 0:
            return math.ceil(PROMPT_WORK / GENERATED_WORK * num_computed)
        return math.ceil(restoring_s * num_streams / step_s)

    @staticmethod
    def _outlived(sequence: Sequence, predicted: float) -> float:
        num_generated, bound = sequence.num_generated, sequence.limit - sequence.num_prompt
        while predicted <= num_generated and predicted < bound:
            predicted = 2 * predicted + 1
        return min(predicted, bound)

    # --- seen from outside -----------------------------------------------------------------------------------------

    def check(self, live: set[str]) -> None:
        """`live`: ids of the requests that have not ended."""
        assert set(self._entries) == live, "a request outlived its entry, or the other way round"
        entries = list(self._entries.values())
        queued = sum(entry.num_tokens for entry in entries if not entry.has_run)
        running = sum(entry.num_tokens for entry in entries if entry.has_run)
        assert sum(use.num_queued for use in self.tenants.values()) == queued
        assert sum(use.num_running for use in self.tenants.values()) == running
