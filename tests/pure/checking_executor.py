"""An executor without a model: its 'cache' holds hashes of prefixes, so any misplaced block is found at once.

The content of token i is a hash of tokens [0, i]; the next token is a function of that hash and of the request's
randomness. A wrong block, a missing copy, a block freed too early or a stale state changes what comes out, and reading
anything that was not written is an assertion.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass

from headrace.core.cache import NO_BLOCK, CacheGroup, CacheKind
from headrace.core.plan import ReadoutKind, StepPlan
from headrace.core.randomness import mix, uniform
from headrace.core.result import StepResult, TokenLogprob

START = 7
VOCABULARY = 50


def extend(prefix: int, token: int) -> int:
    return mix((prefix * 0x9E3779B97F4A7C15 + token + 1) & ((1 << 64) - 1))


def prefix_hash(tokens) -> int:
    value = START
    for token in tokens:
        value = extend(value, token)
    return value


def next_token(prefix: int, seed: int, choice: int, position: int) -> int:
    return (prefix + int(uniform(seed, choice, position) * 1000)) % VOCABULARY


def hidden(prefix: int) -> float:
    """The hidden state after a prefix: one number, small enough that sums are exact."""
    return float(prefix % 1009)


def score(prefix: int, token: int) -> float:
    return -float((prefix ^ token) % 1000)


class KnowingDrafter:
    """Knows what comes next and says it never, often or always. As many drafts as it may make, or any number."""

    def __init__(self, mode: str, *, is_steady: bool = False) -> None:
        self.wrong = {"right": 0.0, "mixed": 0.3, "wrong": 1.0}[mode]
        self.is_steady = is_steady

    def propose(self, sequence, max_tokens: int) -> tuple[int, ...]:
        tokens, value, drafts = sequence.tokens, prefix_hash(sequence.tokens), []
        seed, choice = sequence.request.sampling.seed, sequence.choice
        count = max_tokens if self.is_steady else mix(value) % (max_tokens + 1)
        for position in range(len(tokens), len(tokens) + count):
            draft = next_token(value, seed, choice, position)
            if uniform(seed + 1, choice, position) < self.wrong:
                draft = (draft + 1) % VOCABULARY
            drafts.append(draft)
            value = extend(value, draft)
        return tuple(drafts)

    def forget(self, sequence) -> None:
        pass


@dataclass(frozen=True)
class Pattern:
    """Stands for a grammar: some tokens of a reply are forced, and it may fail at one of them."""

    fails_at: int | None = None
    max_tokens: int | None = None

    def forced_at(self, index: int) -> int | None:
        return index * 3 % VOCABULARY if index % 7 in (1, 2, 3, 5) else None

    def run_from(self, index: int) -> tuple[int, ...]:
        run: list[int] = []
        while (token := self.forced_at(index + len(run))) is not None:
            run.append(token)
        return tuple(run)


class CheckingExecutor:
    """With depth 2 a plan runs only when its result is asked for, so everything it names must still be there."""

    def __init__(self, groups: tuple[CacheGroup, ...]) -> None:
        self.groups = groups
        self.blocks: list[dict[int, dict[int, int] | int]] = [{} for _ in groups]
        self.pending: deque = deque()
        self.last_tokens: list[int] = []
        self.num_steps = 0
        self.num_copies = 0
        self.max_unfinished = 0

    def launch(self, plan: StepPlan) -> _Pending:
        tables = [[table.tolist() for table in span.tables] for span in plan.spans]
        pending = _Pending(self, plan, tables)
        self.pending.append(pending)
        self.max_unfinished = max(self.max_unfinished, len(self.pending))
        return pending

    def run(self, plan: StepPlan, tables) -> StepResult:
        assert len(plan.token_ids) == len(plan.positions) == len(plan.parents)
        for copy in plan.copies:
            source = self.blocks[copy.group][copy.source]
            self.blocks[copy.group][copy.target] = dict(source) if isinstance(source, dict) else source
            self.num_copies += 1
        ids = [token if token >= 0 else self.last_tokens[-1 - token] for token in plan.token_ids]
        hashes = [0] * len(ids)
        for span, table in zip(plan.spans, tables, strict=True):
            self._run_span(plan, span, table, ids, hashes)
        tokens, logprobs = [], []
        forced: dict[int, tuple[int, ...]] = {}
        errors: dict[int, str] = {}
        for row, kind, target, sequence in zip(
            plan.readout_rows, plan.readout_kinds, plan.readout_targets, plan.readout_sequences, strict=True
        ):
            if kind == ReadoutKind.SAMPLE:
                position = plan.positions[row] + 1
                token = next_token(hashes[row], sequence.request.sampling.seed, sequence.choice, position)
                if (pattern := sequence.request.grammar) is not None:
                    index, readout = position - sequence.num_prompt, len(tokens)
                    token = token if pattern.forced_at(index) is None else pattern.forced_at(index)
                    forced[readout] = pattern.run_from(index + 1)
                    if pattern.fails_at is not None and index >= pattern.fails_at:
                        errors[readout] = "too complex"
                tokens.append(token)
                logprobs.append(None)
            else:
                tokens.append(target)
                logprobs.append(TokenLogprob(target, score(hashes[row], target)))
        self.last_tokens = tokens
        self.num_steps += 1
        pooled = [
            array("d", (sum(map(hidden, hashes[pool.first_row : pool.first_row + pool.count])), pool.count))
            for pool in plan.pools
        ]
        return StepResult(tokens, logprobs, forced=forced, errors=errors, pooled=pooled)

    def _run_span(self, plan, span, tables, ids, hashes) -> None:
        rows = range(span.first_row, span.first_row + span.count)
        assert [plan.positions[row] for row in rows] == list(range(span.start, span.start + span.count))
        assert [plan.parents[row] for row in rows] == [-1, *rows[:-1]]
        before = {self._prefix(g, t, span.start) for g, t in enumerate(tables)}
        assert len(before) == 1, "the cache groups disagree about the prefix"
        value = before.pop()
        for row in rows:
            value = hashes[row] = extend(value, ids[row])
            for index, (group, table) in enumerate(zip(self.groups, tables, strict=True)):
                self._write(index, group, table, plan.positions[row], value)
        for index, (group, table) in enumerate(zip(self.groups, tables, strict=True)):
            if group.kind is not CacheKind.STATE:
                self._check_window(index, group, table, span, hashes)

    def _prefix(self, index: int, table: list[int], start: int) -> int:
        """Hash of tokens [0, start) as this group remembers it."""
        if start == 0:
            return START
        group = self.groups[index]
        if group.kind is CacheKind.STATE:
            state = self.blocks[index][table[0]]
            assert isinstance(state, int)
            return state
        return self._read(index, group, table, start - 1)

    def _read(self, index: int, group: CacheGroup, table: list[int], position: int) -> int:
        block = table[position // group.block_size]
        assert block != NO_BLOCK, "read behind what was kept"
        content = self.blocks[index][block]
        assert isinstance(content, dict)
        return content[position % group.block_size]

    def _write(self, index: int, group: CacheGroup, table: list[int], position: int, value: int) -> None:
        if group.kind is CacheKind.STATE:
            self.blocks[index][table[1]] = value
            return
        content = self.blocks[index].setdefault(table[position // group.block_size], {})
        assert isinstance(content, dict)
        content[position % group.block_size] = value

    def _check_window(self, index, group, table, span, hashes) -> None:
        """Everything the span's queries may read is what this sequence's own tokens wrote."""
        first = max(0, span.start - group.window + 1) if group.window else 0
        tokens = span.sequence.tokens
        value = prefix_hash(tokens[:first])
        for position in range(first, span.start):
            value = extend(value, tokens[position]) if position < len(tokens) else None
            if value is None:
                break  # a token in flight: known to the executor only
            assert self._read(index, group, table, position) == value, "a block holds another sequence's tokens"
        for offset in range(span.count):
            assert self._read(index, group, table, span.start + offset) == hashes[span.first_row + offset]


class _Pending:
    def __init__(self, executor: CheckingExecutor, plan: StepPlan, tables) -> None:
        self.executor, self.plan, self.tables = executor, plan, tables

    def result(self) -> StepResult:
        assert self.executor.pending.popleft() is self, "plans end in the order of their launch"
        return self.executor.run(self.plan, self.tables)
