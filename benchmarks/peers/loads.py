"""What is measured: the loads, and the models they are measured on."""

from __future__ import annotations

import random
from dataclasses import dataclass

PROMPT_TOKENS = 512
DECODE_PROMPT_TOKENS = 128
DECODE_STEPS = 128
NUM_SEQUENCES = (1, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class Load:
    """A load in process. Tokens per second are over all sequences."""

    name: str
    title: str
    num_sequences: int
    num_prompt_tokens: int
    num_steps: int
    """Timed decode steps, one token per sequence each; 0: the prompt itself is timed."""

    @property
    def is_prompt(self) -> bool:
        return self.num_steps == 0


@dataclass(frozen=True, slots=True)
class HttpLoad:
    """A load over HTTP: a preset of `headrace bench`."""

    name: str
    title: str
    preset: str
    concurrency: int


@dataclass(frozen=True, slots=True)
class Subject:
    """A model file, and in which other formats peers may run the same model."""

    name: str
    title: str
    model: str
    """For `headrace.models.fetch.resolve`."""
    format: str
    """Of the file that all share; `other` than as shipped, it is made by llama.cpp's quantizer first."""
    is_shipped: bool
    other_formats: tuple[str, ...]
    loads: tuple[str, ...]


def _decode(num_sequences: int) -> Load:
    title = "one stream" if num_sequences == 1 else f"{num_sequences} streams"
    return Load(f"decode-{num_sequences}", title, num_sequences, DECODE_PROMPT_TOKENS, DECODE_STEPS)


LOADS: dict[str, Load] = {
    load.name: load
    for load in (
        Load("prompt-512", "prompt of 512", 1, PROMPT_TOKENS, 0),
        *(_decode(num_sequences) for num_sequences in NUM_SEQUENCES),
    )
}

HTTP_LOADS: dict[str, HttpLoad] = {
    load.name: load
    for load in (
        HttpLoad("http-16", "128 in, 64 out, concurrency 16", "http-128-64", 16),
        HttpLoad("http-8", "128 in, 64 out, concurrency 8", "http-128-64", 8),
        HttpLoad("http-1", "128 in, 64 out, concurrency 1", "http-128-64", 1),
        HttpLoad("shared-prefix", "1000 tokens in common + 30, 32 out, concurrency 8", "shared-prefix", 8),
    )
}

SUBJECTS: dict[str, Subject] = {
    subject.name: subject
    for subject in (
        Subject(
            "smollm2",
            "SmolLM2-135M-Instruct Q4_1",
            "smollm2-135m-instruct",
            "Q4_1",
            True,
            ("Q4_0", "Q8_0", "F16"),
            tuple(LOADS),
        ),
        Subject(
            "gemma",
            "Gemma 3 270M Q4_K_M",
            "gemma-3-270m",
            "Q4_K_M",
            True,
            (),
            ("prompt-512", "decode-1", "decode-4", "decode-16", "decode-64"),
        ),
        Subject(
            "smollm2-f16",
            "SmolLM2-135M-Instruct F16 (the Q4_1 file unpacked)",
            "smollm2-135m-instruct",
            "F16",
            False,
            (),
            ("prompt-512", "decode-1"),
        ),
    )
}

QUICK_LOADS = ("prompt-512", "decode-1", "decode-16", "http-16", "shared-prefix")
QUICK_SUBJECTS = ("smollm2", "gemma")


def prompts(load: Load, seed: str, count: int) -> list[list[int]]:
    """`count` prompts of token ids that every vocabulary here has, the same for every engine of a round."""
    draw = random.Random(f"{load.name}/{seed}")
    return [[draw.randrange(1000, 40000) for _ in range(load.num_prompt_tokens)] for _ in range(count)]
