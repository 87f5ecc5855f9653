"""What a second branch of drafts would bring to speculation by prompt lookup: replies decoded once, then replayed.

    python -m benchmarks.draft_trees [--rounds 3]

A step's drafts are a chain as long as should pay, as `Speculation` chooses it; a tree has beside it what followed at
the next best place whose first token differs, in as many tokens as should pay, by how often that has been right where
the chain's first draft was wrong. What a step costs by its rows is measured first. The ratios of the chain can be held
against those that `benchmarks.prompt_lookup` measures.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import typer
from rich.progress import track

from benchmarks.peers.report import table
from benchmarks.prompt_lookup import KINDS, Stream, measure_rows, name_of, prompts_of
from headrace.engine.speculative.prompt_lookup import MOST_COMPARED, MOST_PLACES, PAIR
from headrace.engine.speculative.speculation import Speculation
from headrace.server.build import ServeConfig, build

CHAIN, BRANCH = 12, 6
ROWS = (1, 2, 3, 5, 9, 13, 19)
FIRST_BRANCH_ACCURACY = 0.3

Cost = Callable[[int], float]


@dataclass
class Replay:
    """One reply, step by step. Costs are in steps of one row."""

    cost: Cost
    has_branch: bool
    accuracy: float = Speculation.FIRST_ACCURACY
    branch_accuracy: float = FIRST_BRANCH_ACCURACY
    total: float = 0.0
    tokens: list[int] = field(default_factory=list)

    def run(self, prompt: list[int], reply: list[int]) -> float:
        self.tokens, position = [*prompt, reply[0]], 1
        while position < len(reply):
            chain, branch = self._guesses()
            num_chain, num_branch = self._num_that_pay(len(chain), len(branch))
            self.total += self.cost(1 + num_chain + num_branch)
            rest = reply[position:]
            num_right = max(_agree(chain[:num_chain], rest), _agree(branch[:num_branch], rest))
            num_new = min(num_right + 1, len(rest))
            self._learn(chain, branch, rest[:num_new])
            self.tokens += rest[:num_new]
            position += num_new
        return self.total

    def _guesses(self) -> tuple[list[int], list[int]]:
        """What `PromptLookup` proposes, and the best that begins otherwise."""
        tokens, end = self.tokens, len(self.tokens)
        places: list[tuple[int, int]] = []
        for place in range(end - 1, PAIR - 1, -1):
            if tokens[place - PAIR : place] == tokens[-PAIR:]:
                length = PAIR
                while length < min(MOST_COMPARED, place) and tokens[place - length - 1] == tokens[end - length - 1]:
                    length += 1
                places.append((length, place))
                if len(places) == MOST_PLACES:
                    break
        if not places:
            return [], []
        chain = self._after(max(places)[1], CHAIN)
        others = [each for each in places if tokens[each[1]] != chain[0]] if self.has_branch else []
        return chain, self._after(max(others)[1], BRANCH) if others else []

    def _after(self, place: int, count: int) -> list[int]:
        drafts = self.tokens[place : place + count]
        while len(drafts) < count:
            drafts.append(drafts[place - len(self.tokens)])
        return drafts

    def _num_that_pay(self, most_chain: int, most_branch: int) -> tuple[int, int]:
        best, chosen, chain_tokens = Speculation.LEAST_GAIN / self.cost(1), (0, 0), 1.0
        for num_chain in range(1, most_chain + 1):
            chain_tokens += self.accuracy**num_chain
            branch_tokens = 0.0
            for num_branch in range(most_branch + 1):
                rate = (chain_tokens + branch_tokens) / self.cost(1 + num_chain + num_branch)
                if rate > best:
                    best, chosen = rate, (num_chain, num_branch)
                branch_tokens += (1.0 - self.accuracy) * self.branch_accuracy * self.accuracy**num_branch
        return chosen

    def _learn(self, chain: list[int], branch: list[int], told: list[int]) -> None:
        for draft, token in zip(chain, told, strict=False):
            self.accuracy += Speculation.MOVE * ((draft == token) - self.accuracy)
            if draft != token:
                break
        self.accuracy = min(self.accuracy, Speculation.MOST_ACCURACY)
        if branch and chain[0] != told[0]:
            self.branch_accuracy += Speculation.MOVE * ((branch[0] == told[0]) - self.branch_accuracy)


def _agree(drafts: list[int], tokens: list[int]) -> int:
    """How many of the first drafts are right."""
    num = 0
    while num < min(len(drafts), len(tokens)) and drafts[num] == tokens[num]:
        num += 1
    return num


def _row_costs(stream: Stream, rounds: int) -> Cost:
    """Of a step by its rows, in steps of one; between measured ones on a line."""
    of, _ = measure_rows(stream, rounds, ROWS)

    def cost(rows: int) -> float:
        above = next(known for known in ROWS if known >= rows)
        below = max((known for known in ROWS if known < rows), default=above)
        share = (rows - below) / max(1, above - below)
        return of[below] + share * (of[above] - of[below])

    return cost


def main(rounds: int = 3) -> None:
    deployment = build(ServeConfig(kv_memory_bytes=256 << 20, max_running=20))
    stream = Stream(deployment)
    cost = _row_costs(stream, rounds)
    steps: dict[str, int] = defaultdict(int)
    costs: dict[tuple[str, bool], float] = defaultdict(float)
    for kind, temperature in track(KINDS, "replies"):
        name = name_of(kind, temperature)
        for prompt in prompts_of(kind, deployment):
            reply = list(stream.decode(prompt, temperature, None).tokens)
            steps[name] += len(reply) - 1
            for has_branch in (False, True):
                costs[name, has_branch] += Replay(cost, has_branch).run(list(prompt), reply)
    rows = [
        (name, *(f"{num / costs[name, has_branch]:.2f}x" for has_branch in (False, True)))
        for name, num in steps.items()
    ]
    print(f"cost of a step of {', '.join(map(str, ROWS))} rows: {', '.join(f'{cost(rows):.2f}' for rows in ROWS)}")
    print(table(("", "chain", "with a second branch"), rows))


if __name__ == "__main__":
    typer.run(main)
