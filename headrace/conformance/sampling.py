"""Chapter 6: sampling, logprobs, determinism, speculation."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

from headrace.conformance import toy_model
from headrace.conformance.check import Chapter
from headrace.conformance.client import Server
from headrace.conformance.launcher import Launcher
from headrace.conformance.outcome import Failed, NotApplicable, require
from headrace.conformance.replies import Choice, Generation, show
from headrace.conformance.streaming import token_ids

CHAPTER = Chapter(6, "Sampling, logprobs, determinism, speculation")

_TEXTS = (
    "Hello, world!",
    "  two  spaces   and three",
    "tabs\tand\nlines\r\n\n\nend",
    "123 4567 89012 3.14159 -42 1e-9",
    "naïve café Größe Ångström",
    "你好，世界。こんにちは 안녕하세요",
    "Привет, мир! Γειά σου שלום مرحبا",
    "🌶️ 👩‍👩‍👧‍👦 🇫🇷 e\u0301",
    "def f(x):\n    return {'a': [x ** 2 for x in range(10)]}  # comment",
    "don't DON'T it's I'll we'Ve",
    "https://example.com/a?b=c&d=%20e#f",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
)

_ROPE_TOLERANCE = 0.05
"""Keys and values in 16 bits move the toy model's logprobs by up to 0.02."""


@CHAPTER.check("Logprobs are of the model's own distribution, whatever the temperature")
async def raw_logprobs(server: Server) -> str:
    cold, hot = [
        await server.complete("The weather today is", max_tokens=1, temperature=temperature, seed=3, logprobs=5)
        for temperature in (0.1, 1.5)
    ]
    first, second = _top(cold), _top(hot)
    common = first.keys() & second.keys()
    require(len(common) >= 4, f"the same most probable tokens, {show(first)}", show(second))
    distance = max(abs(first[token] - second[token]) for token in common)
    require(distance < 1e-2, f"the same logprobs at temperature 0.1 and 1.5, {show(first)}", show(second))
    require(max(first.values()) < -1e-4, "logprobs of a model that is not certain", show(first))
    return f"{len(common)} tokens differ by at most {distance:.1g} between temperature 0.1 and 1.5"


@CHAPTER.check("Greedy tokens and logprobs do not depend on the batch")
async def batch_invariance(server: Server) -> str:
    prompt = f"{server.words(24)}. Once upon a time"
    fields = server.exactly(24) | {"logprobs": 1}
    alone = (await server.complete(prompt, **fields)).choice
    count = min(15, (server.target.capacity or 16) - 1)
    mates = [server.complete(server.words(10 + 7 * i), **server.exactly(12 + i)) for i in range(count)]
    together, *_ = await asyncio.gather(server.complete(prompt, **fields), *mates, return_exceptions=True)
    if isinstance(together, BaseException):
        raise together
    same = together.choice
    require(same.text == alone.text, f"the text {show(alone.text)!r} beside {count} others", repr(show(same.text)))
    distance = _distance(alone, same)
    require(distance == 0, f"the same logprobs beside {count} others", f"differences of up to {distance:.2g}")
    return f"the same {len(alone.logprobs)} tokens and logprobs beside {count} others"


@CHAPTER.check(
    "Speculation changes neither greedy text nor logprobs",
    part="text of one request against one request per token, where nothing can be speculated",
)
async def speculation(server: Server) -> str:
    prompt = (
        "one two three four five six seven eight nine ten" + " one two three four five six seven eight nine ten" * 3
    )
    whole = await server.complete(prompt, **server.exactly(10), logprobs=1)
    texts, values = [""], whole.choice.logprobs
    require(len(values) == 10, "10 logprobs", len(values))
    require(any(value != 0 for value in values), "logprobs that are not all 0", values)
    distance = 0.0
    for i in range(10):
        step = await server.complete(prompt + texts[-1], **server.exactly(1), logprobs=1)
        if step.num_prompt != whole.num_prompt + i:
            break  # this text is not cut into the tokens that were generated
        texts.append(texts[-1] + step.text)
        require(whole.text.startswith(texts[-1]), f"the text {texts[-1]!r}, which single tokens give", repr(whole.text))
        distance = max(distance, abs((step.choice.logprobs[0] or 0) - (values[i] or 0)))
    num_steps = len(texts) - 1
    if num_steps < 3:
        raise NotApplicable(f"the text {whole.text!r} is not cut into the tokens that were generated")
    require(distance < 1e-3, "logprobs as of single tokens", f"differences of up to {distance:.2g}")
    return f"the same {num_steps} tokens; logprobs differ by at most {distance:.1g}"


@CHAPTER.check(
    "The tokenizer is the model's",
    part="what is tokenized comes back; right ids would have to be known for each model",
)
async def tokenizer(server: Server) -> str:
    num_tokens = 0
    for text in _TEXTS:
        ids = await token_ids(server, text)
        require(ids, "token ids of /tokenize", "none: the server has no such path")
        reply = await server.post("/detokenize", {"tokens": ids})
        require(reply.status == 200, "status 200 of /detokenize", reply)
        body = reply.json()
        back = body.get("prompt", body.get("content", body.get("text")))
        require(isinstance(back, str), "a text of /detokenize", show(body))
        # A start token and a space before the text belong to some models.
        require(back.removeprefix("<s>").removeprefix("<bos>").lstrip(" ") == text.lstrip(" "), repr(text), repr(back))
        num_tokens += len(ids)
    return f"{len(_TEXTS)} texts of {num_tokens} tokens"


@CHAPTER.process_check("Rope's base and scaling are those of the file")
async def rope_scaling(launcher: Launcher) -> str:
    """A toy model whose right logprobs are known; beyond its first context a wrong scaling moves them by 0.5."""
    largest, lengths = 0.0, []
    with tempfile.TemporaryDirectory() as folder:
        for name, rope in toy_model.ROPES.items():
            file = Path(folder) / f"toy-{name}.gguf"
            toy_model.write(file, rope)
            right = toy_model.logprobs(name)
            async with launcher.start(model=file) as started:
                context = started.server.context_length or toy_model.CONTEXT_LENGTH
                lengths = [length for length in right if length < context]
                if max(lengths) <= toy_model.ORIGINAL_LENGTH:
                    raise NotApplicable(f"needs a server whose context is longer than {min(set(right) - set(lengths))}")
                for length in lengths:
                    distance = await _rope_distance(started.server, name, length, right[length])
                    largest = max(largest, distance)
    return f"{', '.join(toy_model.ROPES)} at positions {', '.join(map(str, lengths))}: off by at most {largest:.2g}"


async def _rope_distance(server: Server, name: str, length: int, right: Sequence[float]) -> float:
    ids = toy_model.token_ids(length)
    reply = await server.complete(ids, max_tokens=1, temperature=0, logprobs=len(right))
    require(reply.num_prompt == length, f"a prompt of {length} token ids to be read as it is", reply.num_prompt)
    found = sorted(_top(reply).values(), reverse=True)
    require(len(found) == len(right), f"{len(right)} top_logprobs", len(found))
    distance = max(abs(one - other) for one, other in zip(found, right, strict=True))
    require(
        distance <= _ROPE_TOLERANCE,
        f"logprobs {show(right)} with rope's {name} after {length} tokens",
        f"{show([round(value, 3) for value in found])}",
    )
    return distance


def _top(reply: Generation) -> dict[str, float]:
    if not reply.choice.top or not reply.choice.top[0]:
        raise Failed(f"expected top_logprobs; came {show(reply.body)}")
    return reply.choice.top[0]


def _distance(one: Choice, other: Choice) -> float:
    if not one.logprobs:
        raise Failed("expected logprobs; came none")
    return max(abs((a or 0) - (b or 0)) for a, b in zip_longest(one.logprobs, other.logprobs, fillvalue=9.0))
