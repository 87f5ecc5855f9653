"""What steps take, as the engine knows it: for its budget, its predictions of waiting, its speculation."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from headrace.core.cost_model import CostModel
from headrace.core.plan import StepPlan
from headrace.core.work import StepTimes, StepWork


class StepCosts(StepTimes, Protocol):
    """Step times, and how far to trust them."""

    learns: bool
    """Steps change it."""

    @property
    def errors(self) -> tuple[float, float]:
        """Mean absolute relative error of late, of steps without prompts and with."""
        ...

    def observe(self, plan: StepPlan, compute_s: float) -> None:
        """A step has taken so long."""
        ...


class GivenCosts:
    """Known beforehand: of a simulation, whose steps take exactly what the model says."""

    learns = False
    errors = (0.0, 0.0)

    def __init__(self, times: StepTimes) -> None:
        self.seconds = times.seconds

    def observe(self, plan: StepPlan, compute_s: float) -> None:
        pass


class LearntCosts:
    """A cost model that learns from the steps of a real engine, times how much slower than it the machine is of late.

    The model knows the shape: what a row, a prompt, a cached key costs. It forgets slowly. The *pace* is the time that
    the latest steps took over what the model says of them, for steps with prompts and for those without: a machine
    with other work is slow for seconds. A step counts as at most twice what was expected, and its error as 1.
    """

    learns = True
    NUM_FIRST = 32
    """Steps that are all looked at; later those with prompts, and every `EVERY`th without, which are most and alike."""
    EVERY = 4

    def __init__(self, model: CostModel) -> None:
        self.model = model
        self._num_steps = 0
        self._paces = (_Pace(), _Pace())
        """Of steps without prompts and with."""

    def seconds(self, work: StepWork) -> float:
        return self._paces[work.num_prompt > 0].factor * self.model.seconds(work)

    @property
    def errors(self) -> tuple[float, float]:
        alone, beside = self._paces
        return alone.error, beside.error

    def observe(self, plan: StepPlan, compute_s: float) -> None:
        self._num_steps += 1
        is_prompt = len(plan.token_ids) > len(plan.spans) + plan.num_drafts
        is_due = is_prompt or self._num_steps <= self.NUM_FIRST or self._num_steps % self.EVERY == 0
        if compute_s <= 0.0 or not is_due:
            return
        work = StepWork.of(plan)
        self._paces[work.num_prompt > 0].observe(work, compute_s, self.model.seconds(work))
        if self.model.observe(work, compute_s):
            for pace in self._paces:  # what the model has learnt is no matter of pace any more
                pace.refer_to(self.model)


class _Pace:
    MOVE = 0.1
    NUM_KEPT = 20

    def __init__(self) -> None:
        self.factor = 1.0
        self.error = 0.0
        """Mean absolute relative error of predictions made before their step was seen."""
        self._seconds = 0.0
        self._modelled_s = 0.0
        self._latest: deque[tuple[StepWork, float]] = deque(maxlen=self.NUM_KEPT)

    def observe(self, work: StepWork, seconds: float, modelled_s: float) -> None:
        if modelled_s > 0.0:
            ratio = seconds / (self.factor * modelled_s)
            self.error += self.MOVE * (min(abs(ratio - 1.0), 1.0) - self.error)
            seconds = min(ratio, 2.0) * self.factor * modelled_s
        self._latest.append((work, seconds))
        self._add(seconds, modelled_s)

    def refer_to(self, model: CostModel) -> None:
        self._seconds = self._modelled_s = 0.0
        for work, seconds in self._latest:
            self._add(seconds, model.seconds(work))

    def _add(self, seconds: float, modelled_s: float) -> None:
        self._seconds += self.MOVE * (seconds - self._seconds)
        self._modelled_s += self.MOVE * (modelled_s - self._modelled_s)
        if self._modelled_s > 0.0:
            self.factor = self._seconds / self._modelled_s
