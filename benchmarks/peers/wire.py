"""The runner's half of the conversation with the harness: JSON lines over stdin and stdout.

    {"do": "load", "model": PATH, "threads": 2, "options": {}}             -> {"facts": {"engine": "...", ...}}
    {"do": "prompt", "prompts": [[ids]], "limit_s": 2, "settings": {}}     -> {"num_tokens": 1024, "seconds": 2.1}
    {"do": "decode", "prompts": [[ids]], "num_steps": 128, "limit_s": 20, "settings": {}}
                                                       -> {"num_tokens": 2048, "seconds": 9.7, "num_steps": 128}
    {"do": "quit"}

A failure is answered by {"error": "..."} and ends nothing. Standard library only, because this is imported in the
environment of every peer.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any, Protocol

WARM_UP_STEPS = 2  # of a decode, untimed: the first steps of a batch size build graphs and touch new memory

Settings = dict[str, Any]


class Engine(Protocol):
    """One engine with one model. Token ids come in; nothing is detokenized, nobody stops at an end of sequence."""

    def load(self, model: str, threads: int, options: Settings) -> dict[str, Any]:
        """Facts worth a line in the report."""

    def prompt(self, tokens: list[int], settings: Settings) -> None:
        """Compute a prompt up to and including its first sampled token, forgetting what was cached before."""

    def decode(self, prompts: list[list[int]], num_steps: int, settings: Settings) -> Iterator[int]:
        """All prompts together. The first `next` computes the prompts; each further one yields the number of tokens
        that a step sampled, greedily. At most `num_steps` steps are asked for. Closing it ends the sequences."""


def serve(engine: Engine) -> None:
    """Answer until "quit" or the end of input."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not be taken for an answer
    for line in sys.stdin:
        message = json.loads(line)
        if message["do"] == "quit":
            break
        try:
            answer = _answer(engine, message)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


def _answer(engine: Engine, message: dict[str, Any]) -> dict[str, Any]:
    match message["do"]:
        case "load":
            begin = time.perf_counter()
            facts = engine.load(message["model"], message["threads"], message["options"])
            return {"facts": facts, "seconds": time.perf_counter() - begin}
        case "prompt":
            return time_prompts(engine, message["prompts"], message["limit_s"], message["settings"])
        case "decode":
            return time_decode(
                engine, message["prompts"], message["num_steps"], message["limit_s"], message["settings"]
            )
        case other:
            raise ValueError(f"the harness asks for {other!r}, which no runner knows")


def time_prompts(engine: Engine, prompts: list[list[int]], limit_s: float, settings: Settings) -> dict[str, Any]:
    """The first prompt warms up; the others are timed, one by one, until `limit_s` seconds are over."""
    warm_up, *timed = prompts
    engine.prompt(warm_up, settings)
    num_tokens, seconds = 0, 0.0
    for tokens in timed:
        begin = time.perf_counter()
        engine.prompt(tokens, settings)
        seconds += time.perf_counter() - begin
        num_tokens += len(tokens)
        if seconds >= limit_s:
            break
    return {"num_tokens": num_tokens, "seconds": seconds}


def time_decode(
    engine: Engine, prompts: list[list[int]], num_steps: int, limit_s: float, settings: Settings
) -> dict[str, Any]:
    """Only steps in which every sequence decodes are timed, `num_steps` of them or as many as fit into `limit_s`."""
    steps = engine.decode(prompts, WARM_UP_STEPS + num_steps, settings)
    try:
        for _ in range(1 + WARM_UP_STEPS):  # the prompts, then the warm-up
            next(steps)
        num_tokens, num_done = 0, 0
        begin = time.perf_counter()
        while num_done < num_steps and time.perf_counter() - begin < limit_s:
            num_tokens += next(steps)
            num_done += 1
        seconds = time.perf_counter() - begin
    finally:
        steps.close()  # type: ignore[attr-defined]  # a generator
    return {"num_tokens": num_tokens, "seconds": seconds, "num_steps": num_done}
