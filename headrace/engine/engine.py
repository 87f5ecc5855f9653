"""The loop: schedule, launch, result, commit."""

from __future__ import annotations

from collections import deque

from headrace.core.clock import Clock
from headrace.core.errors import ConfigurationError, InternalError
from headrace.core.events import TokenEvent
from headrace.core.plan import StepPlan
from headrace.core.protocols import Executor, Pending
from headrace.core.request import Request
from headrace.engine.scheduler import Scheduler
from headrace.engine.state import EngineStats

MAX_DEPTH = 2  # a token in flight is named by its readout in the previous plan, so no plan may lie between

MAX_STALLED_STEPS = 3  # one is too many, but a gate may be waiting for the clock to move on


class Engine:
    """A scheduler and an executor on one clock. Not thread-safe: one thread calls it.

    `depth` plans are kept launched: with 2, the next step is planned while one runs. `max_horizon` is the number of
    steps that the executor may take at once, if it can and they are alike (`jump`).
    """

    def __init__(
        self, scheduler: Scheduler, executor: Executor, clock: Clock, depth: int = 1, max_horizon: int = 1
    ) -> None:
        if not 1 <= depth <= MAX_DEPTH:
            raise ConfigurationError(f"depth is {depth}; it must be between 1 and {MAX_DEPTH}")
        if max_horizon > 1 and depth > 1:
            raise ConfigurationError("an executor that takes several steps at once has no step under way: depth is 1.")
        scheduler.max_horizon = max_horizon
        self.scheduler = scheduler
        self.executor = executor
        self.clock = clock
        self.depth = depth
        self._launched: deque[tuple[StepPlan, Pending]] = deque()
        self._num_stalled = 0

    def submit(self, request: Request) -> None:
        """Queue a request. Raises `InvalidRequest` or `Overloaded`; then nothing has changed."""
        self.scheduler.submit(request, self.clock.now())

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """End a request, or one choice of it. It gets no further events; unknown or ended ones are ignored."""
        self.scheduler.abort(request_id, choice)

    def fork(self, request_id: str, choice: int) -> int:
        """A new choice that continues a running one from where it stands. Returns its number."""
        return self.scheduler.fork(request_id, choice)

    def step(self) -> list[TokenEvent]:
        """Launch what may be launched, wait for the oldest step. Empty when there is nothing to do.

        Raises `InternalError` when there is something to do and yet, step after step, nothing of it can be launched.
        """
        events = self.scheduler.drop_late(self.clock.now())
        while len(self._launched) < self.depth:
            plan = self.scheduler.schedule(self.clock.now())
            if plan.is_empty:
                break
            self._launched.append((plan, self.executor.launch(plan)))
        if not self._launched:
            is_stalled = self.scheduler.has_work and self.wake_s is None and not events
            self._num_stalled = self._num_stalled + 1 if is_stalled else 0
            if self._num_stalled >= MAX_STALLED_STEPS:
                raise InternalError(f"nothing is launched and nothing can be: {self.scheduler.describe_work()}")
            return events
        self._num_stalled = 0
        plan, pending = self._launched.popleft()
        return events + self.scheduler.commit(plan, pending.result(), self.clock.now())

    @property
    def wake_s(self) -> float | None:
        """When `step` will have something to launch though nothing happens until then; None: now, or only after an
        event."""
        wake_s = None if self._launched else self.scheduler.wake_s
        return wake_s if wake_s is not None and wake_s > self.clock.now() else None

    @property
    def has_work(self) -> bool:
        return bool(self._launched) or self.scheduler.has_work

    def stats(self) -> EngineStats:
        return self.scheduler.stats()
