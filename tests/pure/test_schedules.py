"""Random schedules: every request ends with the tokens it would get alone, and no block is lost."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.core.cache import NO_BLOCK, CacheGroup, CacheKind
from headrace.core.clock import ManualClock
from headrace.core.errors import RequestError
from headrace.core.events import TokenEvent
from headrace.core.request import Pooling, Request
from headrace.core.sampling import SamplingParams
from headrace.core.sequence import FinishReason, Sequence
from headrace.core.work import StepWork
from headrace.engine.composition import (
    BATCHING,
    ORDERS,
    PREDICTORS,
    WRAPPERS,
    SchedulingConfig,
    make_scheduler,
    parse_policy,
)
from headrace.engine.costs import GivenCosts, StepCosts
from headrace.engine.engine import Engine
from headrace.engine.gates import Verdict
from headrace.engine.gates.prefix import PrefixGate
from headrace.engine.limits import Limits
from headrace.engine.speculative.speculation import Speculation
from headrace.memory.manager import MemoryManager

from .checking_executor import (
    VOCABULARY,
    CheckingExecutor,
    KnowingDrafter,
    Pattern,
    hidden,
    next_token,
    prefix_hash,
    score,
)

FULL, WINDOW, STATE = CacheKind.FULL, CacheKind.WINDOW, CacheKind.STATE


@dataclass(frozen=True)
class Setup:
    kinds: tuple[CacheKind, ...]
    block_size: int
    window: int
    interval: int
    spare: int
    budget: int
    max_running: int
    depth: int
    scheduling: SchedulingConfig
    drafts: str
    """What its drafter is like; empty: no speculation."""
    is_rash: bool

    def groups(self) -> tuple[CacheGroup, ...]:
        return tuple(
            CacheGroup(
                kind.value,
                kind,
                self.block_size,
                1,
                window=self.window if kind is WINDOW else 0,
                checkpoint_interval=self.interval * self.block_size if kind is STATE else 0,
            )
            for kind in self.kinds
        )

    def engine(self, longest: int, prefix_gate: PrefixGate) -> tuple[Engine, CheckingExecutor]:
        groups = self.groups()
        sizes = {
            FULL: -(-longest // self.block_size),
            WINDOW: -(-(self.window + self.depth * self.budget) // self.block_size) + 2,
            STATE: self.depth + 1,
        }
        # Pools hold one longest sequence and `spare` blocks more: preemption is the rule here.
        memory = MemoryManager(groups, tuple(sizes[group.kind] + self.spare for group in groups))
        limits = Limits(
            context_length=longest,
            capacity_tokens=memory.capacity_tokens(self.budget, self.depth),
            max_queue=6,
            max_running=min(self.max_running, self.budget),
            vocab_size=VOCABULARY,
        )
        scheduler = make_scheduler(self.scheduling, memory, limits, self.budget, costs=GivenCosts(LinearTimes()))
        scheduler.speculation = self.speculation(scheduler.state.ledger.costs)
        gates = scheduler.gates
        gates._gates = tuple(prefix_gate if isinstance(gate, PrefixGate) else gate for gate in gates._gates)
        executor = CheckingExecutor(groups)
        return Engine(scheduler, executor, ManualClock(), self.depth), executor

    def speculation(self, costs: StepCosts) -> Speculation | None:
        if not self.drafts:
            return None
        return (RashSpeculation if self.is_rash else Speculation)(KnowingDrafter(self.drafts), costs)


class LinearTimes:
    """A step takes `STEP_S`, whatever it does, as this test's do; a prompt token a tenth of that."""

    def seconds(self, work: StepWork) -> float:
        return STEP_S * (work.num_prompt / 10 + (work.num_streams > 0))


STEP_S = 0.01
# Half of all schedules are those of the default, in which what is rare otherwise is still met.
schedulings = st.one_of(
    st.just(SchedulingConfig(policy="fcfs", budget="fixed")),
    st.builds(
        SchedulingConfig,
        policy=st.builds(
            lambda wrappers, order: "(".join([*wrappers, order]) + ")" * len(wrappers),
            st.lists(st.sampled_from(["fair", "dlpm", "ageing", "priority", "lpf"]), unique=True, max_size=3).filter(
                lambda wrappers: not {"fair", "dlpm"} <= set(wrappers)
            ),
            st.sampled_from(list(ORDERS)),
        ),
        max_wait_s=st.sampled_from([0.0, 3 * STEP_S, 10 * STEP_S]),
        batching=st.sampled_from(["continuous", *BATCHING]),
        batch_window_ms=st.sampled_from([1e3 * STEP_S, 5e3 * STEP_S]),
        batch_size=st.integers(1, 4),
        predictor=st.sampled_from(PREDICTORS),
        predictor_sigma=st.sampled_from([0.0, 1.0]),
        budget=st.just("fixed"),
        reserve_replies=st.booleans(),
        tenant_running_tokens=st.sampled_from([None, 20, 60]),
        tenant_queued_tokens=st.sampled_from([None, 60]),
        refuse_late=st.booleans(),
        ttft_ms=st.sampled_from([None, None, 2e4 * STEP_S]),
        drop_late=st.booleans(),
    ),
)

setups = st.builds(
    Setup,
    kinds=st.sampled_from(
        [(FULL,), (FULL,), (WINDOW,), (STATE,), (FULL, WINDOW), (FULL, STATE), (FULL, WINDOW, STATE)]
    ),
    block_size=st.sampled_from([1, 2, 4]),
    window=st.integers(2, 9),
    interval=st.integers(1, 4),
    spare=st.integers(0, 6),
    budget=st.integers(4, 16),
    max_running=st.integers(1, 4),
    depth=st.integers(1, 2),
    scheduling=schedulings,
    drafts=st.sampled_from(["", "right", "mixed", "mixed", "wrong"]),
    is_rash=st.booleans(),
)

# Prompts are cut from two texts, so that many share a prefix and some are equal.
STOPS = {1: range(10), 4: range(25), 7: range(6)}  # of 50 ids: one in five, one in two, one in eight
PATTERNS = {6: Pattern(), 7: Pattern(), 8: Pattern(fails_at=4), 9: Pattern(max_tokens=5)}
TEXTS = ([n * 7 % 50 for n in range(40)], [n * n % 50 for n in range(40)])

actions = st.one_of(
    st.tuples(
        st.just("submit"),
        st.integers(0, 1),  # which text
        st.integers(1, 24),  # prompt length
        st.integers(0, 12),  # max_tokens
        st.integers(1, 4),  # choices
        st.integers(0, 3),  # seed
        st.integers(0, 16),  # rarer wishes: see `Run.submit`
    ),
    st.tuples(st.just("step"), st.integers(1, 4)),
    st.tuples(st.just("abort"), st.integers(1, 3), st.integers(-1, 2)),
    st.tuples(st.just("fork"), st.integers(1, 3), st.integers(0, 1)),  # (which request from the end, which choice)
)


class CountingPrefixGate(PrefixGate):
    num_skips = 0

    def ask(self, sequence, state, now) -> Verdict:
        verdict = super().ask(sequence, state, now)
        self.num_skips += verdict is Verdict.SKIP
        return verdict


class RashSpeculation(Speculation):
    """Drafts whether they pay or not, down to the last block: shedding them is the rule here."""

    def _num_spare_blocks(self, memory) -> int:
        return 1000

    def _num_that_pay(self, num_decoding, num_keys, chances) -> int:
        return len(chances)


class Run:
    """Carries out the actions on an engine and keeps what each choice received."""

    def __init__(self, setup: Setup) -> None:
        self.prefix_gate = CountingPrefixGate()
        self.engine, self.executor = setup.engine(40, self.prefix_gate)
        self.requests: list[Request] = []
        self.received: dict[tuple[str, int], list[int]] = {}
        self.pooled: dict[str, tuple[float, ...]] = {}
        self.prompt_logprobs: dict[str, list[float]] = {}
        self.reasons: dict[tuple[str, int], FinishReason] = {}
        self.num_forced = 0
        self.drafts: Counter[str] = Counter()
        self.aborted: set[tuple[str, int]] = set()
        self.prefixes: dict[tuple[str, int], list[int] | Sequence] = {}

    def check(self) -> None:
        self.engine.scheduler.check()
        self._check_held()

    def _check_held(self) -> None:
        """Blocks are given back only after the last plan that names them has returned."""
        memory = self.engine.scheduler.state.memory
        for pending in self.executor.pending:
            for span, tables in zip(pending.plan.spans, pending.tables, strict=True):
                for group, table in zip(memory.groups, tables, strict=True):
                    first = max(0, span.start - group.group.window + 1) // group.group.block_size
                    named = table if group.group.kind is STATE else table[0 if group.is_plain else first :]
                    for block in named:
                        assert block == NO_BLOCK or group.pool.references[block], "a launched plan names a free block"

    def submit(self, text, length, max_tokens, choices, seed, wish) -> None:
        """Wishes: 0 score the prompt, 1 and 4 stop tokens, 2 another salt, 3 resumed, 5 embedding, 6 to 9 a grammar,
        10 and 11 batch class, 12 a deadline, 13 another tenant, 14 urgent."""
        request = Request(
            id=f"r{len(self.requests)}",
            prompt=tuple(TEXTS[text][:length]),
            sampling=SamplingParams(
                max_tokens=0 if wish == 5 else max_tokens, seed=seed, stop_token_ids=frozenset(STOPS.get(wish, ()))
            ),
            num_choices=1 if wish in (3, 5) else choices,
            pooling=(Pooling.MEAN if seed % 2 else Pooling.LAST) if wish == 5 else None,
            score_prompt=wish == 0,
            cache_salt="other" if wish == 2 else "",
            resumed=(5, 6)[: max(0, max_tokens - 1)] if wish == 3 else (),
            grammar=PATTERNS.get(wish),
            is_batch=wish in (10, 11),
            deadline_s=self.engine.clock.now() + 5 * STEP_S if wish == 12 else None,
            tenant="other" if wish == 13 else "",
            priority=-1 if wish == 14 else 0,
        )
        try:
            self.engine.submit(request)
        except RequestError:
            return
        self.requests.append(request)
        for choice in range(request.num_choices):
            self.received[request.id, choice] = []
            self.prefixes[request.id, choice] = [*request.prompt, *request.resumed]

    def step(self, count: int) -> None:
        for _ in range(count):
            self.engine.clock.advance(STEP_S)
            for event in self.engine.step():
                key = (event.request_id, event.choice)
                assert key not in self.aborted and key not in self.reasons, "an ended choice got an event"
                assert event.queued_s >= 0
                self.received[key] += event.tokens
                if event.num_drafts:
                    self._count_drafts(event)
                else:
                    self.num_forced += len(event.tokens[1:])
                assert (event.error is not None) == (event.finish_reason in (FinishReason.ERROR, FinishReason.LATE))
                if event.prompt_logprobs:
                    logprobs = self.prompt_logprobs.setdefault(event.request_id, [])
                    logprobs += [entry.logprob for entry in event.prompt_logprobs]
                if event.pooled is not None:
                    before = self.pooled.get(event.request_id, (0.0, 0.0))
                    self.pooled[event.request_id] = tuple(a + b for a, b in zip(before, event.pooled, strict=True))
                if event.finish_reason:
                    self.reasons[key] = event.finish_reason
            self.check()

    def _count_drafts(self, event: TokenEvent) -> None:
        num_accepted, end = len(event.tokens) - 1, len(self.received[event.request_id, event.choice])
        self.drafts["drafts accepted"] += num_accepted
        self.drafts["drafts rejected"] += event.num_drafts - num_accepted
        self.drafts["drafts accepted in part"] += 0 < num_accepted < event.num_drafts
        self.drafts["drafts that ended a reply"] += num_accepted > 0 and event.finish_reason is FinishReason.STOP
        request = next(request for request in self.requests if request.id == event.request_id)
        if not isinstance(self.prefixes[event.request_id, event.choice], Sequence):
            end += len(request.prompt) + len(request.resumed)
            size = self.engine.scheduler.state.memory.block_size
            first = (end - len(event.tokens)) // size
            self.drafts["accepted drafts in another block"] += (end - 1) // size > first

    def abort(self, index: int, choice: int) -> None:
        if index > len(self.requests):
            return
        id = self.requests[-index].id
        self.engine.abort(id, None if choice < 0 else choice)
        self.aborted |= {
            key for key in self.received if key[0] == id and choice in (-1, key[1]) and key not in self.reasons
        }
        self.check()

    def fork(self, index: int, choice: int) -> None:
        if index > len(self.requests) or self.requests[-index].sampling.max_tokens == 0:
            return
        id = self.requests[-index].id
        try:
            new = self.engine.fork(id, choice)
        except RequestError:
            return
        self.received[id, new] = []
        # The parent's tokens when the fork happens: read off the sequence at the end.
        self.prefixes[id, new] = self.engine.scheduler._requests[id].live[new]

    def finish(self) -> None:
        steps = 0
        while self.engine.has_work:
            self.step(1)
            steps += 1
            assert steps < 5000, "no progress"

    def verify(self) -> None:
        for request in self.requests:
            for (id, choice), tokens in self.received.items():
                if id == request.id:
                    self._verify_choice(request, choice, tokens)
            if request.score_prompt and any((request.id, n) in self.reasons for n in range(request.num_choices)):
                expected = [
                    score(prefix_hash(request.prompt[:n]), request.prompt[n]) for n in range(1, len(request.prompt))
                ]
                assert self.prompt_logprobs.get(request.id, []) == expected
            if request.pooling and (request.id, 0) in self.reasons:
                states = [hidden(prefix_hash(request.prompt[: n + 1])) for n in range(len(request.prompt))]
                states = states[-1:] if request.pooling is Pooling.LAST else states
                assert self.pooled[request.id] == (sum(states), len(states)), "each once, whatever the schedule"
        stats = self.engine.stats()
        assert stats.prompt_tokens <= sum(len(request.prompt) for request in self.requests), "a prompt counted twice"

    def _verify_choice(self, request: Request, choice: int, received: list[int]) -> None:
        key = (request.id, choice)
        prefix = self.prefixes[key]
        if not isinstance(prefix, list):  # a forked sequence: its tokens before its own first one
            tokens = prefix.tokens
            prefix = tokens[: len(tokens) - len(received)]
        text = list(prefix)
        for token in received:
            expected = next_token(prefix_hash(text), request.sampling.seed, choice, len(text))
            if (pattern := request.grammar) is not None:
                forced = pattern.forced_at(len(text) - len(request.prompt))
                expected = expected if forced is None else forced
            assert token == expected, f"{key} differs from running alone at position {len(text)}"
            text.append(token)
        if key in self.aborted:
            return
        reason = self.reasons[key]
        wanted = request.sampling.max_tokens
        reply = text[len(request.prompt) :]
        assert request.sampling.stop_token_ids.isdisjoint(reply[:-1]), f"{key} went on after its end"
        pattern = request.grammar
        if reason is FinishReason.STOP:
            assert text[-1] in request.sampling.stop_token_ids
        elif reason is FinishReason.LATE:
            assert request.deadline_s is not None and not received
        elif reason is FinishReason.ERROR:
            assert pattern.fails_at is not None and len(reply) >= pattern.fails_at
        else:
            most = wanted if pattern is None or pattern.max_tokens is None else min(wanted, pattern.max_tokens)
            assert len(reply) == most


LEAST = {
    "forks that ended with their parent": 2,
    "dropped for being late": 2,
    "displacements": 10,
    "errors": 50,
    **dict.fromkeys([*ORDERS, *WRAPPERS, *BATCHING], 40),
    "preemptions beside drafts": 5,  # tests/pure/test_speculation.py has more of them
    "drafts that ended a reply": 5,
    "drafts accepted in part": 50,
}
seen: Counter[str] = Counter()
"""How often what the test is about has happened."""


@settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))
@given(setup=setups, script=st.lists(actions, min_size=8, max_size=40))
def run_schedule(setup: Setup, script: list) -> None:
    run = Run(setup)
    for name, *arguments in script:
        getattr(run, name)(*arguments)
    run.finish()
    run.verify()
    run.check()
    stats = run.engine.stats()
    for group in stats.groups:
        assert group.num_used == 0, "blocks leaked"
        assert group.num_free + group.num_cached == group.num_blocks
    policy = run.engine.scheduler.policy
    while policy is not None:
        spells = getattr(policy, "_spells", None)
        kept = [getattr(policy, name, ()) for name in ("_places", "_holds_to", "_aged")]
        assert not any(kept) and not (spells and spells._latest), "a policy remembers who has ended"
        policy = getattr(policy, "inner", None)
    seen.update(
        {
            "schedules": 1,
            "preemptions": stats.preemptions,
            "evictions": stats.evictions,
            "cached tokens": stats.cached_tokens,
            "copies on write": run.executor.num_copies,
            "overlapped steps": run.executor.max_unfinished > 1,
            "aborts": len(run.aborted),
            "forks": sum(isinstance(prefix, Sequence) for prefix in run.prefixes.values()),
            "forks that ended with their parent": sum(
                isinstance(prefix, Sequence) and key in run.reasons and not run.received[key]
                for key, prefix in run.prefixes.items()
            ),
            "waits for a prefix": run.prefix_gate.num_skips,
            "stops": sum(reason is FinishReason.STOP for reason in run.reasons.values()),
            "forced tokens": run.num_forced,
            "errors": sum(reason is FinishReason.ERROR for reason in run.reasons.values()),
            "scored prompts": len(run.prompt_logprobs),
            "mixed groups": len(setup.kinds) > 1,
            "displacements": stats.displacements,
            "batch class": sum(request.is_batch for request in run.requests),
            "dropped for being late": sum(reason is FinishReason.LATE for reason in run.reasons.values()),
            "preemptions beside drafts": stats.preemptions if run.drafts else 0,
            "drafts at depth 2": run.drafts["drafts accepted"] if setup.depth > 1 else 0,
            **run.drafts,
        }
    )
    seen.update([*parse_policy(setup.scheduling.policy), setup.scheduling.batching])


def test_any_schedule_gives_the_tokens_of_running_alone() -> None:
    seen.clear()
    run_schedule()
    print(dict(seen))
    assert seen["schedules"] >= 2000
    rare = {name: count for name, count in seen.items() if count < LEAST.get(name, 120)}
    assert not rare and set(LEAST) <= set(seen), f"the schedules hardly ever get there: {rare}"
