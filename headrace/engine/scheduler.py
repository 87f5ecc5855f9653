"""The scheduler: who gets tokens in the next step, and what became of the last one.

Pure: time is an argument, and nothing here knows what computes the plans.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import takewhile

from headrace.core.errors import ConfigurationError, InvalidRequest
from headrace.core.events import TokenEvent
from headrace.core.plan import Pool, ReadoutKind, Span, StepPlan
from headrace.core.request import Pooling, Request
from headrace.core.result import StepResult, TokenLogprob
from headrace.core.sequence import FinishReason, Sequence, Status
from headrace.engine.budget import TokenBudget
from headrace.engine.gates import Gates, Verdict
from headrace.engine.jump import look_ahead, take_earlier
from headrace.engine.lateness import Lateness
from headrace.engine.limits import Limits
from headrace.engine.policies import Policy
from headrace.engine.queue import WaitingQueue
from headrace.engine.speculative.speculation import Speculation
from headrace.engine.state import Counters, EngineState, EngineStats, TenantStats
from headrace.memory.manager import Room

# A member of an enum takes 0.1 us to look up (Python 3.11), and these are needed for every sequence of every step.
RUNNING, FINISHED, PREEMPTING, SAMPLE = Status.RUNNING, Status.FINISHED, Status.PREEMPTING, ReadoutKind.SAMPLE
NO_DRAFTS: Mapping[int, tuple[int, ...]] = {}
MAX_CANDIDATES = 64  # waiting sequences looked at in one step: bounds the step's time, not the queue


@dataclass(slots=True)
class _Choices:
    """The choices of one request that have not ended."""

    live: dict[int, Sequence] = field(default_factory=dict)
    next_choice: int = 0
    is_counted: bool = False
    """Its prompt's tokens are among those of `Counters`."""


class Scheduler:
    """Continuous batching over one token budget: running sequences first, then waiting ones.

    A sequence is in `state.waiting` (holding nothing), or in `state.running` until nothing of it is in flight.
    """

    def __init__(
        self,
        state: EngineState,
        policy: Policy,
        gates: Gates,
        budget: TokenBudget,
        limits: Limits,
        *,
        lateness: Lateness | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        """`lateness`: drop those who wait and will be late; None: serve them all."""
        if limits.max_running > budget.max_tokens:
            raise ConfigurationError(
                f"a step of {budget.max_tokens} tokens cannot serve {limits.max_running} choices; "
                "raise max_step_tokens or lower max_running."
            )
        self.state = state
        self.policy = policy
        self.gates = gates
        self.budget = budget
        self.limits = limits
        self.lateness = lateness
        self.speculation = speculation
        self.counters = Counters()
        self.max_horizon = 1
        """Steps that one plan may stand for; more than one for an executor that can jump."""
        self._requests: dict[str, _Choices] = {}
        self._forks: list[tuple[Sequence, Sequence]] = []  # (parent, child), until nothing of the parent is in flight
        self._next_id = 0
        self._is_short = False  # memory ended for somebody in the step being planned: nobody is to start
        self._step_budget = 0
        self._counts_tokens = False  # by the policy, in the step being committed

    # --- messages, read between steps ------------------------------------------------------------------------------

    def submit(self, request: Request, now: float) -> None:
        """Raises `InvalidRequest` for what can never be served, `Overloaded` when the queue is full."""
        if request.id in self._requests:
            raise InvalidRequest("duplicate_id", f"A request with id {request.id!r} is running already.")
        limit = self.limits.sequence_limit(request)
        self.limits.check_queue(self._num_places(is_batch=request.is_batch))
        sequence = self._new_sequence(request, 0, now, limit)
        sequence.unborn = list(range(1, request.num_choices))
        self.gates.check(sequence, self.state, now)
        choices = self._requests[request.id] = _Choices(next_choice=request.num_choices)
        choices.live[0] = sequence
        self.counters.requests += 1
        self.state.ledger.arrived(sequence)
        self.policy.arrived(sequence, self.state.waiting)
        if self.lateness is not None:
            self.lateness.arrived(sequence, self.state)
        self._enqueue(sequence, now)

    def drop_late(self, now: float) -> list[TokenEvent]:
        """End the requests that have not started and can no longer meet their deadline, if the engine does so."""
        events = []
        for sequence in self.lateness.found(now) if self.lateness is not None else ():
            if sequence.status is Status.WAITING and sequence.queued_s is None:
                for choice in (sequence.choice, *sequence.unborn):
                    queued_s, error = now - sequence.arrival_s, "its deadline cannot be met any more"
                    event = TokenEvent(
                        sequence.request.id,
                        choice,
                        finish_reason=FinishReason.LATE,
                        time_s=now,
                        queued_s=queued_s,
                        error=error,
                    )
                    events.append(event)
                self._finish(sequence)
        return events

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """Unknown ids are ignored: the request may just have ended."""
        choices = self._requests.get(request_id)
        if choices is None:
            return
        for sequence in list(choices.live.values()):
            if choice is None or sequence.choice == choice:
                if choice is not None and sequence.unborn:
                    self._hand_over(choices, sequence)
                else:
                    is_running = sequence.status is not Status.WAITING
                    self._finish(sequence)
                    if is_running and not sequence.num_in_flight:
                        self._retire(sequence)
            elif choice in sequence.unborn:
                sequence.unborn.remove(choice)

    def fork(self, request_id: str, choice: int) -> int:
        """A new choice with the parent's tokens so far, those of steps under way included: should one of these end the
        parent, it ends the child too. Raises `InvalidRequest` if the parent has ended."""
        choices = self._requests.get(request_id)
        parent = choices.live.get(choice) if choices else None
        if choices is None or parent is None:
            raise InvalidRequest("unknown_choice", f"Choice {choice} of request {request_id!r} is not running.")
        parent = next((origin for origin, pending in self._forks if pending is parent), parent)
        child = self._new_sequence(parent.request, choices.next_choice, parent.arrival_s, parent.limit)
        child.num_scored = child.num_prompt
        choices.live[child.choice] = child
        choices.next_choice += 1
        self._forks.append((parent, child))
        self.state.memory.expect(child)
        return child.choice

    # --- the step --------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan:
        """Give tokens to sequences, running ones first, until budget or memory ends; batch ones get what is left."""
        state, plan = self.state, StepPlan(self.counters.steps, self.budget.tokens(self.state, now))
        self._step_budget = plan.budget
        self._fork_settled(now)
        self._rekey(now)
        running, batch = self.gates.running(state), []
        while running and running[-1].request.is_batch:
            batch.append(running.pop())
        self._is_short = any(
            sequence.status is PREEMPTING and not sequence.request.is_batch for sequence in state.running
        )
        num_behind = len(running)
        speculation = self.speculation
        drafts = speculation.drafts(running, state.memory, plan.budget) if speculation else NO_DRAFTS
        for sequence in running:
            num_behind -= 1
            if sequence.status is RUNNING and plan.budget > 0:
                # One token is kept for everybody behind, so that a long prompt delays nobody's next token.
                spare = plan.budget - num_behind
                self._extend(plan, sequence, spare if spare > 1 else 1, now, drafts.get(sequence.id))
        has_idle = not self._is_short
        for sequence in self.policy.candidates(state.waiting, MAX_CANDIDATES) if has_idle else ():
            if plan.budget <= 0 or not self._start(plan, sequence, now):
                has_idle = False
                break
        if batch or state.batch:
            self._fill(plan, batch, now, may_start=has_idle)
        self.counters.steps += not plan.is_empty
        if self.max_horizon > 1 and self._is_steady:
            may_start = bool(state.waiting or state.batch) and state.num_taken < self.limits.max_running
            look_ahead(plan, state, self.budget, self.max_horizon, may_start=may_start)
        return plan

    @property
    def _is_steady(self) -> bool:
        """Whatever is decided in one step is decided in the next, as long as nobody comes, starts or leaves."""
        if self._forks or self.lateness is not None or self.speculation is not None:
            return False
        return self.policy.is_steady and self.gates.is_steady and not self.state.ledger.costs.learns

    def _extend(
        self,
        plan: StepPlan,
        sequence: Sequence,
        max_tokens: int,
        now: float,
        drafts: tuple[int, ...] | None = None,
    ) -> None:
        """Give a running sequence up to `max_tokens`, preempting from the tail of the order if memory ends, and the
        drafts if there is room for them beside. No drafts (), not None: it waits for its token in flight."""
        count = sequence.num_remaining
        count = min(count, max_tokens)
        if count <= 0 or (self._forks and any(parent is sequence for parent, _ in self._forks)):
            return
        if drafts is not None:
            if drafts and (room := self.state.memory.grow_for_drafts(sequence, count + len(drafts))) is not None:
                self._place(plan, sequence, room, drafts[: room[0] - count])
                return
            if not drafts:
                return
        while (room := self.state.memory.grow(sequence, count)) is None:
            victim = self._victim_behind(sequence)
            if victim is None:
                return  # those ahead go on and make room; the first in the order always finds a victim or fits
            is_yielding = victim.request.is_batch and not sequence.request.is_batch
            self.counters.displacements += is_yielding
            self._is_short = self._is_short or not is_yielding
            if victim.num_in_flight:
                victim.status = Status.PREEMPTING
                return
            self._preempt(victim, now)
        self._place(plan, sequence, room)

    def _victim_behind(self, sequence: Sequence) -> Sequence | None:
        """The last running sequence, if it stands behind `sequence` and none is giving its blocks back already."""
        for victim in reversed(self.state.running.snapshot()):
            if victim is sequence or victim.status is PREEMPTING:
                return None
            if victim.status is RUNNING:
                return victim
        return None

    def _fill(self, plan: StepPlan, running: list[Sequence], now: float, *, may_start: bool) -> None:
        """What the others have left of the step goes to those of batch class, the last of whose order comes first in
        `running`. They start, first come first served, when everybody else who could start has."""
        for sequence in reversed(running):
            if sequence.status is RUNNING and plan.budget > 0:
                self._extend(plan, sequence, plan.budget, now)
        if not may_start or self._is_short or any(sequence.status is PREEMPTING for sequence in running):
            return
        for sequence in self.state.batch.head(MAX_CANDIDATES):
            if plan.budget <= 0 or not self._start(plan, sequence, now):
                break

    def _start(self, plan: StepPlan, sequence: Sequence, now: float) -> bool:
        """Admit a candidate, if the gates and memory let it in. False: nobody behind it may start in this step."""
        while (verdict := self.gates.ask(sequence, self.state, now)) is not Verdict.SKIP:
            if verdict is Verdict.STOP:
                return False
            if verdict is Verdict.ADMIT and self._admit(plan, sequence, now):
                return True
            if not self._displace(sequence, now, lacks_memory=verdict is Verdict.ADMIT):
                return False
        return True

    def _displace(self, sequence: Sequence, now: float, *, lacks_memory: bool) -> bool:
        """Make a running sequence give way to a waiting one, if the policy finds it worth that or if it is of batch
        class and the waiting one is not. True: its place is free now, and not only when its step returns.

        No livelock: of two of the same class, the victim has advanced since it was last preempted by what restoring
        it cost then. So restoring is at most as much work as generating, and one restoring of each request, whatever
        policies and predictions do.
        """
        victims: list[Sequence] = []
        is_batch = sequence.request.is_batch
        for victim in reversed(self.state.running.snapshot()):
            if victim.status is not RUNNING:
                continue
            if victim.request.is_batch == is_batch:
                if not self.policy.displaces(sequence, victim, now):
                    break
                if victim.num_tokens < victim.num_safe:
                    continue
            elif is_batch:
                break
            victims.append(victim)
            if not lacks_memory:
                break
        headroom = len(self.state.running) - len(victims)
        if not victims or (lacks_memory and not self.state.memory.has_room_after(sequence, victims, headroom)):
            return False
        victim = victims[0]
        self.counters.displacements += 1
        if victim.num_in_flight:
            victim.status = PREEMPTING
            return False
        self._preempt(victim, now)
        return True

    def _admit(self, plan: StepPlan, sequence: Sequence, now: float) -> bool:
        """Start a waiting sequence: its prefix hit and room for its whole prompt, or nothing."""
        headroom = len(self.state.running)  # a block for each running sequence: admission must not cause a preemption
        room = self.state.memory.admit(sequence, plan.budget, headroom)
        if room is None:
            return False
        self._queue_of(sequence).remove(sequence)
        sequence.status = Status.RUNNING
        self.state.running.insert(sequence, self._key(sequence, now))
        self.state.ledger.admitted(sequence)
        self.policy.served(sequence, sequence.num_tokens - sequence.num_computed, 0)
        if sequence.queued_s is None:
            sequence.queued_s = now - sequence.arrival_s
            sequence.num_cached = min(sequence.num_computed, sequence.num_prompt)
            choices = self._requests[sequence.request.id]
            if not choices.is_counted:
                choices.is_counted = True
                self.counters.prompt_tokens += sequence.num_prompt
                self.counters.cached_tokens += sequence.num_cached
        self._place(plan, sequence, room)
        return True

    def _place(self, plan: StepPlan, sequence: Sequence, room: Room, drafts: tuple[int, ...] = ()) -> None:
        """Put the sequence's next tokens, for which there is room, into the plan, and drafts behind the last one."""
        count, copies, tables = room
        count -= len(drafts)
        start, first_row = sequence.num_computed + sequence.num_in_flight, len(plan.token_ids)
        end, tokens = start + count, sequence.tokens
        num_known = len(tokens)
        span = Span(sequence, start, count, first_row, tables, len(plan.readout_rows))
        plan.spans.append(span)
        if copies:
            plan.copies += copies
        plan.parents.append(StepPlan.IN_CACHE)
        if end > num_known:
            plan.has_unknown = True
        if count == 1:  # most spans: no slices, no ranges
            plan.token_ids.append(tokens[start] if end <= num_known else -1 - sequence.readout)
            plan.positions.append(start)
        else:
            plan.token_ids.extend(tokens[start:end])
            if end > num_known:
                plan.token_ids.append(-1 - sequence.readout)
            plan.positions.extend(range(start, end))
            plan.parents.extend(range(first_row, first_row + count - 1))
        plan.budget -= count
        sequence.num_in_flight += count
        if sequence.num_scored < sequence.num_to_score:
            self._read_prompt(plan, span, end)
        if end == num_known + sequence.num_sampling < sequence.limit:
            span.is_sampled = True
            if sequence.unborn:
                span.riders = self._bear_unborn(sequence, span)
            for sampled in (sequence, *span.riders) if span.riders else (sequence,):
                sampled.readout = plan.add_readout(first_row + count - 1, SAMPLE, sampled)
                sampled.num_sampling += 1
        if drafts:
            self._place_drafts(plan, span, drafts)

    @staticmethod
    def _place_drafts(plan: StepPlan, span: Span, drafts: tuple[int, ...]) -> None:
        """Lengthen the span, the last in the plan, which samples at its last token."""
        first, position, count = len(plan.token_ids), span.start + span.count, len(drafts)
        plan.token_ids.extend(drafts)
        plan.positions.extend(range(position, position + count))
        plan.parents.extend(range(first - 1, first - 1 + count))
        for row in range(first, first + count):
            plan.add_readout(row, SAMPLE, span.sequence)
        span.count += count
        span.num_drafts = count
        span.sequence.num_in_flight += count
        plan.num_drafts += count
        plan.budget -= count

    @staticmethod
    def _read_prompt(plan: StepPlan, span: Span, end: int) -> None:
        """Ask for the scores, or the hidden states, of the span's prompt tokens that have not been asked for."""
        sequence, start = span.sequence, span.start
        begin, end_read = max(start, sequence.num_scored), min(end, sequence.num_to_score)
        if sequence.request.pooling is None:
            for position in range(begin, end_read):
                target = sequence.tokens[position + 1]
                plan.add_readout(span.first_row + position - start, ReadoutKind.SCORE, sequence, target)
                span.num_scores += 1
        else:
            if sequence.request.pooling is Pooling.LAST:
                begin = max(begin, sequence.num_prompt - 1)
            if begin < end_read:
                plan.pools.append(Pool(sequence, span.first_row + begin - start, end_read - begin))
        sequence.num_scored = max(sequence.num_scored, end)

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[TokenEvent]:
        """Advance the plan's sequences, append what was sampled, finish and release."""
        events = self._pooled(plan, result, now) if plan.pools else []
        if result.earlier:
            events += take_earlier(
                plan,
                result.earlier,
                state=self.state,
                policy=self.policy,
                counters=self.counters,
            )
            step_budget = None if plan.chunks is None else plan.chunks.step_budget
            self._step_budget = self.budget.tokens(self.state, now) if step_budget is None else step_budget
        memory, num_sampled = self.state.memory, 0
        self._counts_tokens = self.policy.counts_tokens
        self.counters.computed_tokens += plan.num_tokens
        for span in plan.spans:
            readout = span.first_readout + span.num_scores
            scores = tuple(result.logprobs[span.first_readout : readout]) if span.num_scores else ()
            for sequence in (span.sequence, *span.riders) if span.riders else (span.sequence,):
                sequence.num_in_flight -= span.count
                sequence.num_computed += span.count - span.num_drafts
                if sequence.status is not FINISHED:
                    event = self._advance(sequence, readout if span.is_sampled else -1, result, scores, now)
                    if span.num_drafts and event is not None:
                        event = self._verify(plan, span, event, result, now)
                    scores = ()  # told once: by the sequence, or by a rider if it was aborted meanwhile
                    if event is not None:
                        events.append(event)
                        num_sampled += len(event.tokens)
                        if event.finish_reason is not None and self._forks:
                            events += self._end_forks(sequence, event)
                readout += 1  # each has a sample of its own
                if span.num_drafts and sequence.num_computed < span.start + span.count and memory.take_back(sequence):
                    sequence.num_computed = span.start
                else:
                    memory.computed(sequence)
                if sequence.status is not RUNNING:
                    self._settle(sequence, now)
        self.counters.generated_tokens += num_sampled
        self.state.ledger.costs.observe(plan, result.compute_s)
        plan.chunks = None  # which knows the plan: without the cycle both go at once
        return events

    @staticmethod
    def _pooled(plan: StepPlan, result: StepResult, now: float) -> list[TokenEvent]:
        events = []
        for pool, pooled in zip(plan.pools, result.pooled, strict=True):
            sequence = pool.sequence
            if sequence.status is not FINISHED:
                queued_s = sequence.queued_s or 0.0
                event = TokenEvent(sequence.request.id, sequence.choice, time_s=now, queued_s=queued_s, pooled=pooled)
                events.append(event)
        return events

    def _advance(
        self,
        sequence: Sequence,
        readout: int,
        result: StepResult,
        scores: tuple[TokenLogprob | None, ...],
        now: float,
    ) -> TokenEvent | None:
        """Append the token sampled at `readout` (-1: none) and see whether that was the last."""
        tokens: tuple[int, ...] = ()
        logprobs: tuple[TokenLogprob, ...] = ()
        reason: FinishReason | None = None
        error: str | None = None
        if readout >= 0:
            sequence.num_sampling -= 1
            if result.errors and readout in result.errors:
                reason, error = FinishReason.ERROR, result.errors[readout]
            else:
                token, logprob = result.tokens[readout], result.logprobs[readout]
                sequence.tokens.append(token)
                tokens, logprobs = (token,), () if logprob is None else (logprob,)
                if token in sequence.stop_ids:
                    reason = FinishReason.STOP
                elif result.forced and readout in result.forced:
                    forced, reason = self._take_forced(sequence, result.forced[readout])
                    tokens += forced
        if reason is None and len(sequence.tokens) >= sequence.limit and sequence.num_computed >= sequence.last:
            reason = FinishReason.LENGTH
        if tokens and self._counts_tokens:
            self.policy.served(sequence, 0, len(tokens))
        if reason is not None:
            self._finish(sequence, is_complete=reason is not FinishReason.ERROR)
        elif readout < 0 and not scores:
            return None
        assert sequence.queued_s is not None, "in a step, so admitted"
        prompt_logprobs = tuple([score for score in scores if score is not None]) if scores else ()
        fields = (
            sequence.request_id,
            sequence.choice,
            tokens,
            logprobs,
            prompt_logprobs,
            reason,
            sequence.num_cached,
            now,
            sequence.queued_s,
            error,
            None,
            0,
        )
        return tuple.__new__(TokenEvent, fields)  # what TokenEvent(*fields) does, at half the price

    def _verify(self, plan: StepPlan, span: Span, event: TokenEvent, result: StepResult, now: float) -> TokenEvent:
        """Accept drafts from the first on: what is sampled before one is what it guessed, so its row has read the token
        that a step of its own would have read. `event` has the token sampled before them all."""
        sequence, first = span.sequence, span.first_row + span.count - span.num_drafts
        tokens, logprobs = event.tokens, event.logprobs
        for number, draft in enumerate(plan.token_ids[first : first + span.num_drafts], 1):
            if event.finish_reason is not None or sequence.tokens[-1] != draft:
                break
            sequence.num_computed += 1
            sequence.num_sampling += 1
            sampled = self._advance(sequence, span.first_readout + number, result, (), now)
            assert sampled is not None, "it has sampled"
            event = sampled
            tokens += event.tokens
            logprobs += event.logprobs
        self.counters.verifications += 1
        self.counters.proposed_drafts += span.num_drafts
        self.counters.accepted_drafts += max(0, len(tokens) - 1)
        return event._replace(tokens=tokens, logprobs=logprobs, num_drafts=span.num_drafts)

    @staticmethod
    def _take_forced(sequence: Sequence, forced: tuple[int, ...]) -> tuple[tuple[int, ...], FinishReason | None]:
        """Append what a grammar forces, as far as the sequence may go; the next step computes all of it.

        Nothing if a step under way samples the next token already (depth 2): it will find the same one.
        """
        if sequence.num_in_flight:
            return (), None
        stops = sequence.stop_ids
        taken = forced[: sequence.limit - len(sequence.tokens)]
        for i, token in enumerate(taken):
            if token in stops:
                sequence.tokens.extend(taken[: i + 1])
                return taken[: i + 1], FinishReason.STOP
        sequence.tokens.extend(taken)
        return taken, FinishReason.LENGTH if len(sequence.tokens) >= sequence.limit else None

    # --- how sequences come and go ---------------------------------------------------------------------------------

    def _new_sequence(self, request: Request, choice: int, now: float, limit: int) -> Sequence:
        sequence = Sequence(self._next_id, request, choice, now, limit)
        self._next_id += 1
        return sequence

    def _enqueue(self, sequence: Sequence, now: float) -> None:
        sequence.status = Status.WAITING
        self.state.memory.expect(sequence)
        self.policy.queued(sequence, now)
        self._queue_of(sequence).insert(sequence, self._key(sequence, now))

    def _queue_of(self, sequence: Sequence) -> WaitingQueue:
        """Where it waits."""
        return self.state.batch if sequence.request.is_batch else self.state.waiting

    def _key(self, sequence: Sequence, now: float) -> tuple:
        return (sequence.request.is_batch, *self.policy.key(sequence, now))

    def _rekey(self, now: float) -> None:
        """Move the sequences whose keys have changed to their new places."""
        for sequence in self.policy.rekeyed(now):
            if sequence.status is not FINISHED:
                is_waiting = sequence.status is Status.WAITING
                queue = self._queue_of(sequence) if is_waiting else self.state.running
                queue.remove(sequence)
                queue.insert(sequence, self._key(sequence, now))

    def _bear_unborn(self, parent: Sequence, span: Span) -> tuple[Sequence, ...]:
        """The choices of a request become sequences in the step that computes its prompt's last token."""
        children = []
        for choice in parent.unborn:
            child = self._new_sequence(parent.request, choice, parent.arrival_s, parent.limit)
            child.num_computed, child.num_in_flight = span.start, span.count
            child.num_cached, child.queued_s = parent.num_cached, parent.queued_s
            child.num_scored = parent.num_scored
            self.state.memory.fork(parent, child, num_spans=1)
            self._start_child(child, parent.sort_key)
            self._requests[parent.request.id].live[choice] = child
            children.append(child)
        parent.unborn = []
        return tuple(children)

    def _start_child(self, child: Sequence, parent_key: tuple) -> None:
        child.status = Status.RUNNING
        self.state.running.insert(child, (*parent_key, child.id))  # right behind its parent

    def _fork_settled(self, now: float) -> None:
        """Carry out the forks whose parent has nothing in flight; the others' parents wait for it."""
        unsettled = []
        for parent, child in self._forks:
            if parent.num_in_flight:
                unsettled.append((parent, child))
                continue
            child.tokens[:] = parent.tokens
            if self.state.memory.holds(parent) and parent.status is Status.RUNNING:
                child.num_computed, child.num_cached = parent.num_computed, parent.num_cached
                child.queued_s = parent.queued_s
                self.state.memory.fork(parent, child, num_spans=0)
                self._start_child(child, parent.sort_key)
            else:
                self._enqueue(child, now)
        self._forks = unsettled

    def _end_forks(self, parent: Sequence, end: TokenEvent) -> list[TokenEvent]:
        """The parent has come to its end while forks waited for it to settle: it is their end too."""
        events: list[TokenEvent] = []
        for child in [child for origin, child in self._forks if origin is parent]:
            child.tokens[:] = parent.tokens
            self._finish(child)
            events.append(end._replace(choice=child.choice, tokens=(), logprobs=(), prompt_logprobs=()))
        return events

    @staticmethod
    def _hand_over(choices: _Choices, sequence: Sequence) -> None:
        """The sequence's choice is aborted before the prompt is computed: it goes on as the next choice."""
        del choices.live[sequence.choice]
        sequence.choice, *sequence.unborn = sequence.unborn
        choices.live[sequence.choice] = sequence

    def _preempt(self, sequence: Sequence, now: float) -> None:
        """Give the blocks back and recompute later; what is published may still be found then."""
        self.state.running.remove(sequence)
        self.state.memory.release(sequence)
        num_paid = self.state.ledger.restoring_tokens(sequence.num_computed, len(self.state.running))
        sequence.num_safe = max(sequence.num_safe, sequence.num_tokens + num_paid)
        sequence.num_computed = 0
        self.counters.preemptions += 1
        self._enqueue(sequence, now)

    def _finish(self, sequence: Sequence, *, is_complete: bool = False) -> None:
        """The sequence gets no more tokens and events. If it waits it leaves; if it runs it leaves when it settles."""
        ledger = self.state.ledger
        ledger.ended(sequence, is_complete=is_complete)
        self.policy.ended(sequence)
        if self.lateness is not None:
            self.lateness.ended(sequence)
        is_waiting = sequence.status is Status.WAITING
        sequence.status = Status.FINISHED
        choices = self._requests[sequence.request.id]
        del choices.live[sequence.choice]
        if not choices.live:
            del self._requests[sequence.request.id]
            ledger.closed(sequence.request)
        if self.speculation is not None:
            self.speculation.forget(sequence)
        if is_waiting:
            forks = [fork for fork in self._forks if fork[1] is not sequence]
            if len(forks) == len(self._forks):  # else it is a fork that has not begun, and in no queue
                self._queue_of(sequence).remove(sequence)
            self._forks = forks
            self.state.memory.forget(sequence)

    def _settle(self, sequence: Sequence, now: float) -> None:
        """After its last launched plan has returned, a finished or preempted sequence lets go of its blocks."""
        if sequence.num_in_flight:
            return
        if sequence.status is Status.FINISHED:
            self._retire(sequence)
        elif sequence.status is Status.PREEMPTING:
            self._preempt(sequence, now)

    def _retire(self, sequence: Sequence) -> None:
        self.state.running.remove(sequence)
        self.state.memory.release(sequence)
        self.state.memory.forget(sequence)

    # --- seen from outside -----------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        state = self.state
        return bool(state.waiting) or bool(state.batch) or bool(state.running) or bool(self._forks)

    @property
    def num_places(self) -> int:
        """Requests of one choice that may be submitted now: the free places to run in, and those to wait in. Who waits
        and will run in the next step, memory permitting, waits in no place. Those of batch class take none of these;
        as many of them may wait."""
        return self._num_places(is_batch=False)

    def _num_places(self, *, is_batch: bool) -> int:
        state, num_free = self.state, self.limits.max_running - self.state.num_taken
        if is_batch:
            num_free -= sum([sequence.num_places for sequence in state.waiting])
        else:  # of these places they will be given those that batch ones have, which come last in the order
            of_batch = takewhile(lambda sequence: sequence.request.is_batch, reversed(state.running.snapshot()))
            num_free += sum([sequence.num_places for sequence in of_batch])
        queue = state.batch if is_batch else state.waiting
        num_waiting = len(queue)
        for sequence in queue:
            num_free -= sequence.num_places
            if num_free < 0:
                return max(0, self.limits.max_queue - num_waiting)
            num_waiting -= 1
        return self.limits.max_queue + max(0, num_free)

    @property
    def wake_s(self) -> float | None:
        """Where nothing can be launched, when a gate will open by itself; None: it waits for an event."""
        return self.gates.wake_s

    def describe_work(self) -> str:
        """For a bug report."""
        state = self.state
        heads = [*state.running.snapshot()[:2], *state.waiting.head(2), *state.batch.head(2)]
        return (
            f"{len(state.running)} running, {len(state.waiting) + len(state.batch)} waiting, "
            f"{len(self._forks)} forking: "
            f"{', '.join(map(repr, heads))}"
        )

    def stats(self) -> EngineStats:
        c, state = self.counters, self.state
        return EngineStats(
            num_running=len(state.running),
            num_waiting=len(state.waiting) + len(state.batch),
            steps=c.steps,
            requests=c.requests,
            prompt_tokens=c.prompt_tokens,
            cached_tokens=c.cached_tokens,
            computed_tokens=c.computed_tokens,
            generated_tokens=c.generated_tokens,
            preemptions=c.preemptions,
            displacements=c.displacements,
            evictions=state.memory.tree.num_evictions,
            groups=state.memory.stats(),
            num_places=self.num_places,
            step_budget=self._step_budget,
            calibration=state.ledger.calibration.report,
            cost_errors=state.ledger.costs.errors,
            tenants=tuple(
                [
                    TenantStats(name, use.num_queued, use.num_running, use.prompt_tokens, use.generated_tokens)
                    for name, use in state.ledger.tenants.items()
                ]
            ),
            verifications=c.verifications,
            proposed_drafts=c.proposed_drafts,
            accepted_drafts=c.accepted_drafts,
        )

    def check(self) -> None:
        """Assert every invariant; tests call it after each step. O(everything)."""
        state = self.state
        for queue in (state.waiting, state.batch, state.running):
            queue.check()
        assert not any(sequence.request.is_batch for sequence in state.waiting)
        assert all(sequence.request.is_batch for sequence in state.batch)
        state.ledger.check(set(self._requests))
        waiting = [*state.waiting, *state.batch]
        for sequence in waiting:
            assert sequence.status is Status.WAITING and sequence.num_scheduled == 0
            assert sequence.num_sampling == 0
        for sequence in state.running:
            assert sequence.status is not Status.WAITING
            assert sequence.status in (Status.RUNNING,) or sequence.num_in_flight, f"{sequence} keeps its blocks"
            assert 0 <= sequence.num_computed <= sequence.num_tokens <= sequence.limit
            assert sequence.num_sampling >= 0
        live = {s.id for choices in self._requests.values() for s in choices.live.values()}
        queued = {s.id for s in (*waiting, *state.running) if s.status is not Status.FINISHED}
        pending = {child.id for _, child in self._forks}
        assert live == queued | pending, "a live sequence is in no queue"
        assert not queued & pending
        if self.speculation is not None:
            self.speculation.check(live)
        state.memory.check(state.running, [*waiting, *(child for _, child in self._forks)])
