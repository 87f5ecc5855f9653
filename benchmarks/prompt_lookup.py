"""What speculation by prompt lookup brings: tokens per second of one stream with and without it, in turn.

`python -m benchmarks.prompt_lookup` prints it and writes the section `prompt-lookup` of docs/benchmarks.md. Both sides
say the same tokens, which is checked.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path

import typer
from rich.console import Console

from benchmarks.peers.report import machine_text, replace_section, table
from headrace.bench.machine import inspect_machine
from headrace.core.request import Request
from headrace.core.sampling import SamplingParams
from headrace.core.sequence import Sequence
from headrace.engine.speculative.prompt_lookup import PromptLookup
from headrace.engine.speculative.speculation import Speculation
from headrace.server.build import Deployment, ServeConfig, build
from headrace.text.chat import encode_chat

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
MAX_TOKENS = 256
NUM_STEPS = 40  # of each number of rows, in each round
ROWS = (1, 2, 3, 5, 9, 13)
CODE = '''def mean(values):
    """The arithmetic mean of a list of numbers."""
    if not values:
        raise ValueError("no values")
    total = 0.0
    for value in values:
        total += value
    return total / len(values)


def variance(values):
    """The population variance of a list of numbers."""
    center = mean(values)
    total = 0.0
    for value in values:
        total += (value - center) ** 2
    return total / len(values)
'''
TEXT = (
    "The lighthouse at Cape Wrath was built in 1828 by Robert Stevenson, and it was manned until 1998, when it became "
    "automatic. It stands 20 metres tall, on a cliff 122 metres above the sea, and its light can be seen from 22 miles "
    "away. The station was supplied by boat from the slip at Clais Charnach, three miles to the east, which had been "
    "built for its construction. The last keeper, David Anderson, left on 31 March 1998 and later wrote a book about "
    "his years at the station."
)
LIST = """1. Anna Schmidt, Berlin, 34 years old
2. Luca Rossi, Milan, 41 years old
3. Marie Dupont, Lyon, 29 years old
4. Jan Kowalski, Krakow, 55 years old
5. Sofia Garcia, Seville, 38 years old"""
TASKS = {
    "copy": (
        f"Repeat the following text exactly, word for word:\n\n{TEXT}",
        f"Copy this list exactly:\n\n{LIST}",
    ),
    "rewrite code": (
        "Rewrite this Python code with the name `total` changed to `result`. Answer with the code only.\n\n"
        f"```python\n{CODE}```",
        f"Add type hints to this Python code. Answer with the whole code.\n\n```python\n{CODE}```",
    ),
    "extract": (
        f"{TEXT}\n\nQuote the sentences of the text above that contain a year, one per line.",
        f"{LIST}\n\nFrom the list above, write for each person a line `name: city`.",
        f"{TEXT}\n\nSummarize the text above in the words of the text.",
    ),
    "free text": (
        "Write a short story about a fox who wants to learn to swim.",
        "Explain how photosynthesis works.",
        "What are the advantages and disadvantages of living in a big city?",
        "Write a letter to a friend about your holiday in the mountains.",
        "Tell me about the history of bread.",
    ),
}
KINDS = (("copy", 0.0), ("rewrite code", 0.0), ("extract", 0.0), ("free text", 0.0), ("free text", 0.8))


class WrongDrafts:
    """As many drafts as may be, of one token."""

    def propose(self, sequence: Sequence, max_tokens: int) -> tuple[int, ...]:
        return (sequence.tokens[0],) * max_tokens

    def forget(self, sequence: Sequence) -> None:
        pass


class Unsparing(Speculation):
    """Verifies all drafts, whether that pays or not."""

    def _num_that_pay(self, num_decoding: int, num_keys: int, chances: SequenceOf[tuple[float, int]]) -> int:
        return len(chances)


@dataclass(frozen=True)
class Decoded:
    """One reply, from its first token on."""

    tokens: tuple[int, ...]
    seconds: float
    num_drafts: int
    num_accepted: int
    num_steps: int
    """Those that decoded it: its tokens are as many without drafts."""

    @property
    def rate(self) -> float:
        return (len(self.tokens) - 1) / self.seconds


class Stream:
    """One stream of an engine, with or without speculation."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self._numbers = count()

    def decode(self, prompt: SequenceOf[int], temperature: float, speculation: Speculation | None) -> Decoded:
        engine, id = self.deployment.engine, str(next(self._numbers))
        engine.scheduler.speculation = speculation
        params = SamplingParams(
            max_tokens=MAX_TOKENS, temperature=temperature, seed=1, stop_token_ids=self.deployment.eos_ids
        )
        engine.submit(Request(id, tuple(prompt), params, cache_salt=id))  # no prefix of the last run's
        tokens: list[int] = []
        num_drafts = num_accepted = num_steps = 0
        start_s = 0.0
        while engine.has_work:
            for event in engine.step():
                if not tokens:
                    start_s = time.perf_counter()
                num_steps += bool(tokens)
                tokens += event.tokens
                num_drafts += event.num_drafts
                num_accepted += len(event.tokens) - 1 if event.num_drafts else 0
        return Decoded(tuple(tokens), time.perf_counter() - start_s, num_drafts, num_accepted, num_steps)

    def step_s(self, num_rows: int) -> float:
        """Median seconds of a step of so many rows after a prompt of 256 tokens."""
        engine, id = self.deployment.engine, str(next(self._numbers))
        costs = engine.scheduler.state.ledger.costs
        engine.scheduler.speculation = Unsparing(WrongDrafts(), costs, num_rows - 1) if num_rows > 1 else None
        params = SamplingParams(max_tokens=10 * NUM_STEPS, temperature=0)
        engine.submit(Request(id, tuple(range(100, 356)), params, cache_salt=id))
        while not engine.step():
            pass
        times = []
        for _ in range(NUM_STEPS):
            start_s = time.perf_counter()
            engine.step()
            times.append(time.perf_counter() - start_s)
        engine.abort(id)
        return statistics.median(times)


def name_of(kind: str, temperature: float) -> str:
    return kind if temperature == 0 else f"{kind}, temperature {temperature}"


def prompts_of(kind: str, deployment: Deployment) -> list[SequenceOf[int]]:
    assert deployment.template is not None
    return [
        encode_chat(deployment.tokenizer, deployment.template, [{"role": "user", "content": text}]).ids
        for text in TASKS[kind]
    ]


def measure_rows(stream: Stream, num_rounds: int, all_rows: SequenceOf[int]) -> tuple[dict[int, float], float]:
    """What a step of so many rows takes, in steps of one, the medians over the rounds; and the seconds of that one."""
    ratios, alone_s = defaultdict(list), []
    for _ in range(num_rounds):
        seconds = {rows: stream.step_s(rows) for rows in all_rows}
        alone_s.append(seconds[1])
        for rows in all_rows:
            ratios[rows].append(seconds[rows] / seconds[1])
    return {rows: statistics.median(ratios[rows]) for rows in all_rows}, statistics.median(alone_s)


def row_costs(stream: Stream, num_rounds: int) -> str:
    medians, alone_s = measure_rows(stream, num_rounds, ROWS)
    columns = ("rows of a step", *map(str, ROWS))
    body = [
        (
            f"time, of a step of one row ({1e3 * alone_s:.1f} ms)",
            *(f"{medians[r]:.2f}x" for r in ROWS),
        ),
        ("tokens per second if all drafts are right", *(f"{r / medians[r]:.2f}x" for r in ROWS)),
    ]
    return table(columns, body)


def rates(stream: Stream, num_rounds: int, console: Console) -> str:
    deployment = stream.deployment
    speculation = Speculation(PromptLookup(), deployment.engine.scheduler.state.ledger.costs)
    rows = []
    for kind, temperature in KINDS:
        prompts = prompts_of(kind, deployment)
        ratios, off_rates, on_rates = [], [], []
        drafts = accepted = steps = tokens = 0
        for round in range(num_rounds):
            off_s = on_s = 0.0
            num_tokens = 0
            for prompt in prompts:
                sides = (None, speculation) if round % 2 else (speculation, None)
                by_side = {side is not None: stream.decode(prompt, temperature, side) for side in sides}
                off, on = by_side[False], by_side[True]
                assert off.tokens == on.tokens, "speculation has changed a reply"
                off_s, on_s = off_s + off.seconds, on_s + on.seconds
                num_tokens += len(off.tokens) - 1
                drafts, accepted = drafts + on.num_drafts, accepted + on.num_accepted
                steps, tokens = steps + on.num_steps, tokens + len(on.tokens) - 1
            ratios.append(off_s / on_s)
            off_rates.append(num_tokens / off_s)
            on_rates.append(num_tokens / on_s)
            console.print(f"{kind}: {off_rates[-1]:.0f} tokens/s, with drafts {on_rates[-1]:.0f}: {ratios[-1]:.2f}x")
        rows.append(
            (
                name_of(kind, temperature),
                f"{statistics.median(off_rates):.0f}",
                f"{statistics.median(on_rates):.0f}",
                f"**{statistics.median(ratios):.2f}x** ({min(ratios):.2f}-{max(ratios):.2f})",
                f"{tokens / steps:.2f}",
                f"{accepted / max(drafts, 1):.0%} of {drafts / steps:.1f}",
            )
        )
    columns = ("", "tokens/s, off", "on", "ratio", "tokens a step", "drafts accepted, of those in a step")
    return table(columns, rows)


def main(rounds: int = 9, threads: int | None = None, write: bool = True) -> None:
    console = Console(stderr=True)
    config = ServeConfig(kv_memory_bytes=256 << 20, max_running=16)
    machine = machine_text(asdict(inspect_machine(measure=False)))
    with console.status("loading"):
        deployment = build(replace(config, threads=threads))
    stream = Stream(deployment)
    costs = row_costs(stream, rounds)
    gains = rates(stream, rounds, console)
    option = "" if threads is None else f" --threads {threads}"
    body = (
        "## Speculation by prompt lookup\n\n"
        f"Made by `python -m benchmarks.prompt_lookup --rounds {rounds}{option}` on {time.strftime('%Y-%m-%d')}: "
        f"SmolLM2-135M-Instruct Q4_1, one stream, decoding only, up to {MAX_TOKENS} tokens a reply, {rounds} rounds of "
        "both sides in turn; medians of the rounds' ratios, and their range. Both sides say the same tokens.\n\n"
        f"{machine}\n\n{gains}\n\n"
        f"What a step takes that verifies drafts is the floor under all this:\n\n{costs}"
    )
    print(body)
    if write:
        PAGE.write_text(replace_section(PAGE.read_text("utf-8"), "prompt-lookup", body), "utf-8")


if __name__ == "__main__":
    typer.run(main)
