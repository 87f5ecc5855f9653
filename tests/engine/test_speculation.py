"""Speculation in whole engines: what comes out is what comes out without it. (Bits: test_same_bits.py.)"""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace import LLM, SamplingParams
from headrace.core.request import Request
from headrace.core.sequence import Sequence
from headrace.engine.speculative.speculation import Speculation
from tests.pure.build import RowsOnly

from .loaded import Loaded, run

LIST = "1. Anna Schmidt, Berlin\n2. Luca Rossi, Milan\n3. Marie Dupont, Lyon\n4. Jan Kowalski, Krakow"
COPY = [{"role": "user", "content": f"Copy this list exactly:\n\n{LIST}"}]
SHAPES: tuple[dict, ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 0.7, "presence_penalty": 0.5, "frequency_penalty": 0.5, "seed": 4},
    {"temperature": 0.0, "dry_multiplier": 2.0, "dry_allowed_length": 1},
    {"temperature": 0.0, "min_tokens": 20, "stop_token_ids": frozenset(range(0, 200, 3))},
    {"temperature": 1.0, "logit_bias": ((5, 3.0), (7, 4.0)), "seed": 5},
)


class Known:
    """Proposes a reply known beforehand, every fifth token of it wrong."""

    def __init__(self, reply: list[int]) -> None:
        self.reply = reply

    def propose(self, sequence: Sequence, max_tokens: int) -> tuple[int, ...]:
        begin = sequence.num_tokens - sequence.num_prompt
        places = range(begin, min(begin + max_tokens, len(self.reply)))
        return tuple(self.reply[i] ^ (i % 5 == 4) for i in places)

    def forget(self, sequence: Sequence) -> None:
        pass


@pytest.mark.parametrize("name", ["llama", "mistral-window", "mamba"])
@pytest.mark.parametrize("shape", SHAPES, ids=",".join)
def test_the_reference_samples_the_same_tokens(shape: dict, name: str, data_path: Path):
    """Each row's penalties count the drafts before it, and each row has its own position's randomness."""
    folder = data_path / "tiny" / name
    loaded = Loaded.open(folder, folder / "expected.json")
    params = SamplingParams(max_tokens=40, num_logprobs=2, **shape)
    request = Request("r", tuple(loaded.expected["ids"][:20]), params)
    alone = run(loaded.engine(), request)["r"]
    engine = loaded.engine()
    engine.scheduler.speculation = Speculation(Known(alone.tokens), RowsOnly(0.01), 7)
    reply = run(engine, request)["r"]
    assert reply.tokens == alone.tokens
    for entry, expected in zip(reply.logprobs, alone.logprobs, strict=True):
        assert (entry.token, entry.rank) == (expected.token, expected.rank)
        assert abs(entry.logprob - expected.logprob) < 1e-4
    stats = engine.stats()
    assert stats.accepted_drafts >= len(alone.tokens) // 2 and stats.accepted_drafts < stats.proposed_drafts


def test_prompt_lookup_on_a_real_model(smollm2_path: Path):
    """A copied list takes a fraction of the steps and says the same: text, tokens, logprobs, where a stop ends it."""
    params = SamplingParams(max_tokens=64, temperature=0, num_logprobs=2)
    asked = [((), params), (("Lyon", "Paris"), params), ((), SamplingParams(max_tokens=40, temperature=0.8, seed=2))]

    def replies(speculate: str | None):
        with LLM(smollm2_path, kv_memory_bytes=64 << 20, max_running=2, speculate=speculate) as llm:
            if speculate:
                llm._deployment.engine.scheduler.speculation.times = RowsOnly(0.1)  # whatever else the machine does
            found = [llm.chat(COPY, each, stop=stop) for stop, each in asked]
            return found, llm._deployment.engine.stats()

    plain, before = replies(None)
    drafted, after = replies("prompt-lookup")
    assert LIST in plain[0].text and plain[1].finish_reason == "stop" and plain[1].text.endswith("Dupont, ")
    assert drafted == plain
    assert before.verifications == 0 and after.accepted_drafts >= 60
    assert after.steps < 0.6 * before.steps
