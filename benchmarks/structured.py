"""What following a schema costs: tokens per second of sixteen running sequences, free and constrained, in turn.

`python -m benchmarks.structured` prints it and writes the section `structured` of docs/benchmarks.md.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

from rich.console import Console

from benchmarks.peers.report import replace_section, table
from headrace.core.grammar import Grammar
from headrace.core.request import Request
from headrace.core.sampling import SamplingParams
from headrace.server.build import Deployment, ServeConfig, build
from headrace.text.grammar import constraint as constraints

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
NUM_RUNNING, NUM_REQUESTS, MAX_TOKENS, NUM_ROUNDS = 16, 64, 48, 9
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city": {"type": "string", "maxLength": 30},
        "is_member": {"type": "boolean"},
    },
    "required": ["name", "age", "city", "is_member"],
}


def run(deployment: Deployment, grammar: Grammar | None, number: int) -> tuple[float, float]:
    """(tokens per second, tokens per step and sequence). A request that ends makes room for the next."""
    engine, prompt = deployment.engine, deployment.tokenizer.encode("Describe a person as JSON, in one line.")
    stops = deployment.eos_ids if grammar is not None else frozenset[int]()
    for i in range(NUM_REQUESTS):
        params = SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, seed=i, stop_token_ids=stops)
        engine.submit(Request(f"{number}-{i}", (*prompt, i), params, grammar=grammar))
    num_tokens, num_steps, start_s = 0, 0, time.perf_counter()
    while engine.stats().num_waiting:  # what comes after has fewer than sixteen
        num_tokens += sum(len(event.tokens) for event in engine.step())
        num_steps += 1
    elapsed_s = time.perf_counter() - start_s
    while engine.has_work:
        engine.step()
    return num_tokens / elapsed_s, num_tokens / num_steps / NUM_RUNNING


def main() -> None:
    console = Console(stderr=True)
    config = ServeConfig(kv_memory_bytes=256 << 20, max_running=NUM_RUNNING)
    with console.status("loading"):
        deployment = build(config)
        grammar = deployment.grammars.compile(constraints.json_schema(SCHEMA, "schema"))
        deployment.grammars.close()
    free, bound, ratios, per_step = [], [], [], []
    for number in range(NUM_ROUNDS):
        free.append(run(deployment, None, 2 * number)[0])
        rate, share = run(deployment, grammar, 2 * number + 1)
        bound.append(rate)
        per_step.append(share)
        ratios.append(rate / free[-1])
        console.print(f"free {free[-1]:.0f} tokens/s, in a schema {rate:.0f}: {ratios[-1]:.2f}x")
    rows = [
        ("free", f"{statistics.median(free):.0f} tokens/s", ""),
        ("in the schema", f"{statistics.median(bound):.0f} tokens/s", f"{statistics.median(per_step):.2f} a step"),
        ("ratio, median of the rounds", f"{statistics.median(ratios):.2f}x", "at least 0.90x wanted"),
    ]
    body = (
        "## Structured output\n\n"
        f"Made by `python -m benchmarks.structured` on {time.strftime('%Y-%m-%d')}: SmolLM2-135M-Instruct Q4_1, "
        f"{NUM_RUNNING} running sequences, temperature 1.0, a schema of four properties, {NUM_ROUNDS} rounds of both "
        f"in turn. Forced tokens go through the model several at a time.\n\n{table(('', 'measured', ''), rows)}"
    )
    print(body)
    PAGE.write_text(replace_section(PAGE.read_text("utf-8"), "structured", body), "utf-8")


if __name__ == "__main__":
    main()
