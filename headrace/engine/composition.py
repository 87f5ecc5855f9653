"""From a configuration to a scheduler: the one list of policies, gates, predictors and batching modes by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from headrace.core.errors import ConfigurationError
from headrace.core.protocols import Drafter, LengthPredictor
from headrace.engine.batching import Alike, Batches, TwoQueues, cache_kind, length_kind
from headrace.engine.budget import FixedBudget, PacedBudget, TokenBudget
from headrace.engine.costs import StepCosts
from headrace.engine.gates import EntryGate, Gate, Gates, Timer, Turns
from headrace.engine.gates.deadline import DeadlineGate
from headrace.engine.gates.memory import PredictedMemoryGate
from headrace.engine.gates.prefix import PrefixGate
from headrace.engine.gates.quota import QuotaGate
from headrace.engine.gates.running import RunningGate
from headrace.engine.lateness import Lateness
from headrace.engine.ledger import Ledger
from headrace.engine.limits import Limits
from headrace.engine.policies import Policy
from headrace.engine.policies.ageing import Ageing
from headrace.engine.policies.deadline import EarliestDeadline, LeastSlack
from headrace.engine.policies.deficit import DeficitFair
from headrace.engine.policies.fair import Fair
from headrace.engine.policies.fcfs import FirstComeFirstServed
from headrace.engine.policies.longest_prefix import LongestPrefixFirst
from headrace.engine.policies.multi_level import MultiLevel
from headrace.engine.policies.priority import ByPriority
from headrace.engine.policies.shortest import ShortestFirst, ShortestRemainingFirst
from headrace.engine.predict.bound import BoundPredictor
from headrace.engine.predict.history import HistoryPredictor
from headrace.engine.predict.noise import NoisyPredictor
from headrace.engine.predict.oracle import OraclePredictor
from headrace.engine.scheduler import Scheduler
from headrace.engine.speculative.speculation import Speculation
from headrace.engine.state import EngineState
from headrace.memory.manager import MemoryManager

DEFAULT_POLICY = "fair(priority(fcfs))"
ORDERS: Mapping[str, Callable[[SchedulingConfig, EngineState], Policy]] = {
    "fcfs": lambda config, state: FirstComeFirstServed(),
    "sjf": lambda config, state: ShortestFirst(state.ledger),
    "srpt": lambda config, state: ShortestRemainingFirst(state.ledger),
    "mlfq": lambda config, state: MultiLevel(),
    "edf": lambda config, state: EarliestDeadline(state),
    "slack": lambda config, state: LeastSlack(state),
}
WRAPPERS: Mapping[str, Callable[[Policy, SchedulingConfig, EngineState], Policy]] = {
    "ageing": lambda inner, config, state: Ageing(inner, config.max_wait_s),
    "dlpm": lambda inner, config, state: DeficitFair(inner, config.weights),
    "fair": lambda inner, config, state: Fair(inner, config.weights),
    "lpf": lambda inner, config, state: LongestPrefixFirst(inner, state.memory),
    "priority": lambda inner, config, state: ByPriority(inner),
}
"""Around another policy; by themselves around fcfs, and dlpm around lpf."""
BATCHING = ("continuous", "static", "window", "alike-length", "alike-cache", "two-queues")
PREDICTORS = ("bound", "history", "oracle")
BUDGETS = ("paced", "fixed")


@dataclass(frozen=True, slots=True)
class SchedulingConfig:
    """Who is served when. Raises `ConfigurationError` for values that are not known or make no sense."""

    policy: str = DEFAULT_POLICY
    """An order (`ORDERS`), or wrappers (`WRAPPERS`) around one: "fair(ageing(srpt))"."""
    max_wait_s: float = 30.0
    """Of "ageing": who has waited so long goes first."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Of tenants, for "fair" and "dlpm"; 1 where none is given."""
    batching: str = "continuous"
    """One of `BATCHING`."""
    batch_window_ms: float = 50.0
    """Of "window": how long the first of a batch waits for more."""
    batch_size: int = 8
    """Of "window": so many do not wait for more."""
    predictor: str = "bound"
    """Of reply lengths: one of `PREDICTORS`."""
    predictor_sigma: float = 0.0
    """Log-normal noise on what it predicts, for experiments."""
    budget: str = "paced"
    """Of a step: "paced", computed from what steps take; or "fixed", the most a step may take."""
    inter_token_ms: float | None = None
    """Of "paced": what a step may take that reads prompts beside streams. None: 2.5 times one without, and 20 ms
    at least."""
    reserve_replies: bool = False
    """Start who fits with its whole predicted reply, not with its prompt only."""
    tenant_running_tokens: int | None = None
    """Prompts and predicted replies that may run for one tenant. Goes with "fair" or "dlpm", which look past a tenant
    that has used it up; without them its requests hold up those behind them, once more wait than a step looks at."""
    tenant_queued_tokens: int | None = None
    """The same, that may wait: more are refused."""
    refuse_late: bool = False
    """At submit, who is predicted to miss its deadline."""
    ttft_ms: float | None = None
    """At submit, refuse who is predicted to wait longer than this for its first token."""
    drop_late: bool = False
    """Who waits and can no longer meet its deadline."""

    def __post_init__(self) -> None:
        parse_policy(self.policy)
        for name, allowed in (("batching", BATCHING), ("predictor", PREDICTORS), ("budget", BUDGETS)):
            if getattr(self, name) not in allowed:
                raise ConfigurationError(
                    f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(map(repr, allowed))}."
                )
        for name in ("max_wait_s", "batch_window_ms", "predictor_sigma"):
            if not getattr(self, name) >= 0:
                raise ConfigurationError(f"{name} is {getattr(self, name)}; it must be 0 or more.")
        for name in ("batch_size", "inter_token_ms", "tenant_running_tokens", "tenant_queued_tokens", "ttft_ms"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigurationError(f"{name} is {value}; it must be more than 0.")
        for tenant, weight in self.weights.items():
            if not weight > 0:
                raise ConfigurationError(f"the weight of tenant {tenant!r} is {weight}; it must be more than 0.")


def parse_policy(text: str) -> tuple[str, ...]:
    """ "fair(priority(srpt))" -> ("fair", "priority", "srpt"), outermost first, with what a name alone stands for.

    Raises `ConfigurationError` for anything else than wrappers around one order.
    """
    if not re.fullmatch(r"\s*[\w-]+\s*(\(\s*[\w-]+\s*)*(\)\s*)*", text) or text.count("(") != text.count(")"):
        raise ConfigurationError(f"policy is {text!r}; it must look like 'fcfs' or 'fair(priority(srpt))'.")
    names = [name.strip() for name in re.split(r"[()]", text) if name.strip()]
    if names[-1] == "dlpm":
        names.append("lpf")
    if names[-1] in WRAPPERS:
        names.append("fcfs")
    *wrappers, order = names
    if order not in ORDERS:
        raise ConfigurationError(
            f"policy has {order!r}; it must be one of {', '.join(ORDERS)}, or such within {', '.join(WRAPPERS)}."
        )
    for name in wrappers:
        if name not in WRAPPERS:
            raise ConfigurationError(f"policy has {name!r} around another; it must be one of {', '.join(WRAPPERS)}.")
    repeated = [name for name in WRAPPERS if names.count(name) > 1]
    if repeated or {"fair", "dlpm"} <= set(names):
        raise ConfigurationError(f"policy is {text!r}; a wrapper goes around once, and of 'fair' and 'dlpm' one.")
    return tuple(names)


def make_policy(config: SchedulingConfig, state: EngineState) -> Policy:
    *wrappers, order = parse_policy(config.policy)
    policy = ORDERS[order](config, state)
    for name in reversed(wrappers):
        policy = WRAPPERS[name](policy, config, state)
    return policy


def make_predictor(config: SchedulingConfig, lengths: Mapping[str, int] | None = None) -> LengthPredictor:
    """`lengths`: true ones by request id, for "oracle"."""
    predictor: LengthPredictor
    if config.predictor == "history":
        predictor = HistoryPredictor()
    elif config.predictor == "oracle":
        predictor = OraclePredictor(lengths)
    else:
        predictor = BoundPredictor()
    return NoisyPredictor(predictor, config.predictor_sigma) if config.predictor_sigma else predictor


def make_gates(config: SchedulingConfig, max_running: int) -> Gates:
    gates: list[Gate] = []
    entry: list[EntryGate] = []
    turns: Turns | None = None
    timer: Timer | None = None
    if config.batching in ("static", "window"):
        is_window = config.batching == "window"
        batches = Batches(max_running, *((config.batch_window_ms / 1e3, config.batch_size) if is_window else ()))
        timer = batches
        gates.append(batches)
    elif config.batching in ("alike-length", "alike-cache"):
        gates.append(Alike(length_kind if config.batching == "alike-length" else cache_kind))
    elif config.batching == "two-queues":
        turns = two_queues = TwoQueues(max_running)
        gates.append(two_queues)
    if config.tenant_running_tokens is not None or config.tenant_queued_tokens is not None:
        quota = QuotaGate(config.tenant_running_tokens, config.tenant_queued_tokens, max_running)
        gates.append(quota)
        entry.append(quota)
    gates += [RunningGate(max_running), PrefixGate()]
    if config.reserve_replies:
        gates.append(PredictedMemoryGate())
    if config.refuse_late or config.ttft_ms is not None:
        ttft_s = None if config.ttft_ms is None else config.ttft_ms / 1e3
        entry.append(DeadlineGate(max_running, ttft_s, deadlines=config.refuse_late))
    return Gates(gates, entry, turns, timer)


def make_scheduler(
    config: SchedulingConfig,
    memory: MemoryManager,
    limits: Limits,
    max_step_tokens: int,
    *,
    costs: StepCosts | None = None,
    lengths: Mapping[str, int] | None = None,
    drafter: Drafter | None = None,
) -> Scheduler:
    """`costs`: of steps; None: they are learnt, from nothing. `lengths`: see `make_predictor`. `drafter`: of drafts to
    verify; None: no speculation."""
    state = EngineState(memory, Ledger(make_predictor(config, lengths), costs))
    costs = state.ledger.costs
    target_s = None if config.inter_token_ms is None else config.inter_token_ms / 1e3
    budget: TokenBudget = FixedBudget(max_step_tokens)
    if config.budget == "paced":
        budget = PacedBudget(max_step_tokens, costs, target_s)
    speculation = None if drafter is None else Speculation(drafter, costs)
    gates = make_gates(config, limits.max_running)
    lateness = Lateness() if config.drop_late else None
    policy = make_policy(config, state)
    return Scheduler(state, policy, gates, budget, limits, lateness=lateness, speculation=speculation)
