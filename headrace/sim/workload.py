"""What is sent: planned requests, complete and exact before the first of them leaves.

A plan is a pure function of its spec, its tokenizer and its seed, and the same for every target. Requests hang in
chains: a conversation's next turn is sent when the one before it has ended. Its prompt resends the history with a
*planned* reply in place of the target's own, so that targets that answer differently still read the same tokens.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Protocol

from headrace.core.errors import ConfigurationError
from headrace.sim.arrivals import poisson
from headrace.sim.traces import TraceRow

Chain = tuple["PlannedRequest", ...]


class TokenMaker(Protocol):
    """Where a workload's tokens come from: a tokenizer's words for a real target, plain numbers for a simulated one."""

    def make(self, seed: int, kind: str, number: int, count: int) -> tuple[int, ...]:
        """`count` tokens, a pure function of the arguments; rows that differ in `kind` or `number` share no prefix."""
        ...


class Numbers:
    """Token ids without a meaning, for a target that never looks at them."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def make(self, seed: int, kind: str, number: int, count: int) -> tuple[int, ...]:
        if count <= 0:
            return ()
        # Mostly one id, repeated: it is the first ones that tell rows apart.
        digest = blake2b(f"{seed} {kind} {number}".encode(), digest_size=12).digest()
        first, second, third = (int.from_bytes(digest[i : i + 4], "big") % self._vocab_size for i in (0, 4, 8))
        return (first, second, third, *(first,) * (count - 3)) if count > 3 else (first, second, third)[:count]


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request of a workload. `prompt` are token ids whose text encodes to these ids again."""

    index: int
    prompt: tuple[int, ...] = field(repr=False)
    num_output: int
    """Tokens to generate: neither fewer nor more, where the target can be told to ignore its end tokens."""
    arrival_s: float | None = None
    """When it is due, from the start of the run; None: as soon as a place is free (closed loop)."""
    tenant: str = ""
    session: int = 0
    turn: int = 0
    think_s: float = 0.0
    """Later turns: how long after the end of the turn before."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Chains in the order of their start."""

    chains: tuple[Chain, ...]
    concurrency: int | None
    """Closed loop: requests in flight at once, each chain on one place. None: open loop, by `arrival_s`."""
    warmup: tuple[PlannedRequest, ...] = ()
    """Sent before the clock starts, as many at once as fit; they share nothing with what is measured."""
    notes: tuple[str, ...] = ()
    """What had to be bent, to be shown with the results."""

    @property
    def requests(self) -> tuple[PlannedRequest, ...]:
        return tuple(request for chain in self.chains for request in chain)


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """A workload before its tokens are chosen. Lengths in tokens."""

    num_requests: int = 64
    """Conversations count once per turn, and the last one may be cut short. Of a trace: its first so many rows."""
    num_prompt: int = 128
    """Of a first turn: the shared prefix and what is the request's own."""
    num_output: int = 64
    num_prefix: int = 0
    """Tokens at the head of a prompt that it shares with others."""
    num_prefixes: int = 1
    """Different shared prefixes, dealt round robin."""
    num_turns: int = 1
    num_turn: int = 32
    """New tokens of a later turn."""
    think_s: float = 0.0
    num_tenants: int = 0
    zipf: float = 1.1
    """Tenant i gets a share of requests proportional to (i + 1) ** -zipf."""
    concurrency: int | None = 1
    rate_per_s: float | None = None
    """Open loop: chains started per second, as a Poisson process."""
    trace: tuple[TraceRow, ...] | None = field(default=None, repr=False)
    """Open loop: lengths, arrivals and shared blocks of a trace, scaled already; takes the place of all lengths."""
    num_warmup: int = 2
    max_tokens: int | None = None
    """The context of the smallest target. A trace's requests are clipped to it, which is noted; others must fit."""

    def __post_init__(self) -> None:
        def require(ok: bool, name: str, allowed: str) -> None:
            if not ok:
                raise ConfigurationError(f"{name} is {getattr(self, name)!r}; it must be {allowed}.")

        require(self.num_requests >= 1, "num_requests", "at least 1")
        require(self.num_output >= 1, "num_output", "at least 1")
        require(0 <= self.num_prefix < self.num_prompt, "num_prefix", f"less than num_prompt ({self.num_prompt})")
        require(self.num_prefixes >= 1, "num_prefixes", "at least 1")
        require(self.num_turns >= 1, "num_turns", "at least 1")
        require(self.num_turn >= 1, "num_turn", "at least 1")
        require(self.num_tenants >= 0, "num_tenants", "at least 0")
        require(self.num_warmup >= 0, "num_warmup", "at least 0")
        require(self.concurrency is None or self.concurrency >= 1, "concurrency", "at least 1")
        require(self.rate_per_s is None or self.rate_per_s > 0, "rate_per_s", "above 0")
        if sum(given is not None for given in (self.concurrency, self.rate_per_s, self.trace)) != 1:
            raise ConfigurationError("a workload is driven by one of concurrency, rate_per_s and trace.")
        longest = self.num_prompt + (self.num_turns - 1) * (self.num_output + self.num_turn) + self.num_output
        if self.trace is None and self.max_tokens is not None and longest > self.max_tokens:
            raise ConfigurationError(
                f"the longest request has {longest} tokens, prompt and reply together; the target reads at most "
                f"{self.max_tokens}. Lower the prompt, the output or the turns."
            )


def plan(spec: WorkloadSpec, maker: TokenMaker, seed: int) -> Workload:
    """Choose every token of a workload. The same arguments give the same workload, on every machine."""
    notes: tuple[str, ...] = ()
    if spec.trace is not None:
        chains, notes = _from_trace(spec, spec.trace, maker, seed)
    else:
        chains = _conversations(spec, maker, seed)
    chains = _with_tenants(spec, chains, seed)
    warmup = []
    for i in range(spec.num_warmup):
        like = chains[i % len(chains)][0]
        prompt = maker.make(seed, "warmup", i, len(like.prompt))
        warmup.append(PlannedRequest(-1 - i, prompt, like.num_output))
    return Workload(chains, spec.concurrency, tuple(warmup), notes)


def _conversations(spec: WorkloadSpec, maker: TokenMaker, seed: int) -> tuple[Chain, ...]:
    num_chains = -(-spec.num_requests // spec.num_turns)
    starts = poisson(spec.rate_per_s, num_chains, seed) if spec.rate_per_s is not None else None
    chains = []
    for session in range(num_chains):
        prefix = maker.make(seed, "prefix", session % spec.num_prefixes, spec.num_prefix)
        own = maker.make(seed, "own", session, spec.num_prompt - spec.num_prefix)
        prompt = prefix + own
        first = session * spec.num_turns
        turns = []
        for turn in range(min(spec.num_turns, spec.num_requests - first)):
            if turn:
                reply = maker.make(seed, f"reply {turn}", session, spec.num_output)
                prompt = prompt + reply + maker.make(seed, f"turn {turn}", session, spec.num_turn)
            turns.append(
                PlannedRequest(
                    index=first + turn,
                    prompt=prompt,
                    num_output=spec.num_output,
                    arrival_s=starts[session] if starts is not None and turn == 0 else None,
                    session=session,
                    turn=turn,
                    think_s=spec.think_s if turn else 0.0,
                )
            )
        chains.append(tuple(turns))
    return tuple(chains)


def _from_trace(
    spec: WorkloadSpec, rows: tuple[TraceRow, ...], maker: TokenMaker, seed: int
) -> tuple[tuple[Chain, ...], tuple[str, ...]]:
    """A trace's block ids become blocks of tokens: the same id, the same tokens."""
    chains: list[Chain] = []
    num_clipped = 0
    for index, row in enumerate(rows[: spec.num_requests]):
        num_prompt, num_output = row.num_prompt, row.num_output
        if spec.max_tokens is not None and num_prompt + num_output > spec.max_tokens:
            num_output = min(num_output, max(1, spec.max_tokens // 2))
            num_prompt = min(num_prompt, spec.max_tokens - num_output)
            num_clipped += 1
        tokens: list[int] = []
        for block in row.block_ids:
            tokens += maker.make(seed, "block", block, row.block_tokens)
        del tokens[num_prompt:]
        tokens += maker.make(seed, "own", index, num_prompt - len(tokens))
        chains.append((PlannedRequest(index, tuple(tokens), num_output, row.arrival_s, session=index),))
    if not chains:
        raise ConfigurationError("the trace has no requests; nothing can be replayed.")
    notes: tuple[str, ...] = ()
    if num_clipped:
        notes = (f"{num_clipped} of {len(chains)} requests were clipped to the context of {spec.max_tokens} tokens",)
    return tuple(chains), notes


def _with_tenants(spec: WorkloadSpec, chains: tuple[Chain, ...], seed: int) -> tuple[Chain, ...]:
    if not spec.num_tenants:
        return chains
    weights = [(i + 1) ** -spec.zipf for i in range(spec.num_tenants)]
    chosen = random.Random(f"{seed} tenants").choices(range(spec.num_tenants), weights, k=len(chains))
    return tuple(
        tuple(replace(request, tenant=f"tenant-{tenant}") for request in chain)
        for chain, tenant in zip(chains, chosen, strict=True)
    )
