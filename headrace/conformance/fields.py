"""Chapter 9: further fields of requests, for scheduling, caching and sampling.

Each is shown by what it changes, so that a server which ignores the field fails.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any

from headrace.conformance.check import Chapter
from headrace.conformance.client import COMPLETIONS, Server
from headrace.conformance.outcome import Failed, NotApplicable, require
from headrace.conformance.replies import show
from headrace.conformance.streaming import token_ids

CHAPTER = Chapter(9, "Further fields of requests")


@CHAPTER.check("priority: an integer is taken, anything else refused", part="its effect shows only under load")
async def priority(server: Server) -> str:
    await server.complete("Hello", max_tokens=1, priority=1)
    return await _refused(server, {"priority": "high"})


@CHAPTER.check(
    "deadline_ms: a time is taken, anything else refused",
    part="its effect shows only under load, with a policy that reads it",
)
async def deadline_ms(server: Server) -> str:
    await server.complete("Hello", max_tokens=1, deadline_ms=60_000)
    await _refused(server, {"deadline_ms": -5})
    return await _refused(server, {"deadline_ms": "soon"})


@CHAPTER.check("cache_salt: prefixes are shared only under the same salt")
async def cache_salt(server: Server) -> str:
    prompt = server.words(160)
    await server.complete(prompt, max_tokens=1, cache_salt="one")
    other = await server.complete(prompt, max_tokens=1, cache_salt="two")
    none = await server.complete(prompt, max_tokens=1)
    same = await server.complete(prompt, max_tokens=1, cache_salt="one")
    require(same.num_cached > 0, "cached_tokens > 0 with the same salt", same.num_cached)
    require(
        other.num_cached == none.num_cached == 0,
        "cached_tokens 0 with another and with none",
        f"{other.num_cached} and {none.num_cached}",
    )
    return f"{same.num_cached} of {same.num_prompt} cached with the same salt only"


@CHAPTER.check("seed: the same gives the same text, another one another")
async def seed(server: Server) -> str:
    fields: dict[str, Any] = server.exactly(16) | {"temperature": 1.2}
    texts = [(await server.complete("My favourite", seed=number, **fields)).text for number in (7, 7, 8, 9)]
    require(texts[0] == texts[1], f"{texts[0]!r} again with the same seed", repr(texts[1]))
    require(len(set(texts)) > 1, "other texts with other seeds", repr(texts[0]))
    return f"{show(texts[0])!r} twice"


@CHAPTER.check("logit_bias: a token can be forced and forbidden")
async def logit_bias(server: Server) -> str:
    prompt, fields = "The weather today is", server.exactly(1)
    first = await server.complete(prompt, logprobs=5, **fields)
    top = sorted(first.choice.top[0].items(), key=lambda pair: -pair[1]) if first.choice.top else []
    require(len(top) >= 2, "logprobs of the most probable tokens", show(first.body))
    ids = await token_ids(server, top[0][0])
    if len(ids) != 1:
        raise NotApplicable(f"needs the id of {top[0][0]!r}, which /tokenize does not give")
    banned = await server.complete(prompt, logit_bias={str(ids[0]): -100}, **fields)
    require(banned.text != first.text, f"another token than {first.text!r} when that is forbidden", repr(banned.text))
    forced = await server.complete("2 + 2 =", logit_bias={str(ids[0]): 100}, **fields)
    require(forced.text == top[0][0], f"the forced token {top[0][0]!r}", repr(forced.text))
    return f"{first.text!r} forbidden: {banned.text!r}; forced: {forced.text!r}"


@CHAPTER.check("typical_p: a small one leaves a single token; what is no probability is refused")
async def typical_p(server: Server) -> str:
    fields: dict[str, Any] = {"max_tokens": 1, "temperature": 1}
    prompt = "My favourite thing in the world is"
    free = {(await server.complete(prompt, seed=i, **fields)).text for i in range(6)}
    if len(free) < 2:
        raise NotApplicable(f"the model is certain of {free}, with and without")
    typical = {(await server.complete(prompt, seed=i, typical_p=1e-3, **fields)).text for i in range(6)}
    require(len(typical) == 1, "one token with typical_p 0.001 and 6 seeds", show(sorted(typical)))
    return f"{len(free)} different tokens without, 1 with; " + await _refused(server, {"typical_p": "many"})


@CHAPTER.check("DRY: dry_multiplier, dry_base and dry_allowed_length keep a text from repeating itself")
async def dry(server: Server) -> str:
    prompt = " red green blue white black" * 8
    fields = server.exactly(5)
    repeated = (await server.complete(prompt, **fields)).text
    if repeated.split()[:1] != ["red"]:
        raise NotApplicable(f"the model does not repeat the prompt, with or without: {repeated!r}")
    setting: dict[str, Any] = {"dry_base": 2.0, "dry_allowed_length": 2}
    fresh = (await server.complete(prompt, dry_multiplier=20.0, **setting, **fields)).text
    require(fresh.split()[:1] != ["red"], "another word than the repeated 'red'", repr(fresh))
    off = (await server.complete(prompt, dry_multiplier=0.0, **setting, **fields)).text
    require(off == repeated, f"dry_multiplier 0 to change nothing, {repeated!r}", repr(off))
    return f"{repeated!r} becomes {fresh!r}"


@CHAPTER.check("XTC: xtc_probability and xtc_threshold leave the most probable tokens out")
async def xtc(server: Server) -> str:
    prompt, best, share = await _prompt_of_two_ways(server)
    setting = {"xtc_probability": 1.0, "xtc_threshold": 0.04}
    fields: dict[str, Any] = {"max_tokens": 1, "temperature": 1, **setting}
    replies = await asyncio.gather(*(server.complete(prompt, seed=i, **fields) for i in range(16)))
    came = sum(reply.text == best for reply in replies)
    require(
        came == 0, f"the most probable token {best!r} to be left out in 16 replies to {prompt!r}", f"it {came} times"
    )
    return f"{best!r} (probability {share:.2f}) never came in 16 replies"


async def _prompt_of_two_ways(server: Server) -> tuple[str, str, float]:
    """A prompt with two tokens above XTC's threshold, the best of them probable enough to be missed: it, that token and
    its probability."""
    found = []
    for prompt in ("The", "I am a", "He said that", "Yes or no? The answer is", "Heads or tails?", "She was very"):
        reply = await server.complete(prompt, max_tokens=1, temperature=0, logprobs=2)
        if not reply.choice.top:
            raise Failed(f"expected top_logprobs; came {show(reply.body)}")
        first, second, *_ = [*sorted(reply.choice.top[0].values(), reverse=True), -math.inf, -math.inf]
        if math.exp(second) > 0.06:
            found.append((math.exp(first), prompt, reply.text))
    if not found or max(found)[0] < 0.2:
        raise NotApplicable("no prompt was found after which two tokens are probable")
    share, prompt, best = max(found)
    return prompt, best, share


async def _refused(server: Server, fields: dict[str, Any]) -> str:
    reply = await server.post(COMPLETIONS, {"prompt": "Hello", "max_tokens": 1, **fields})
    require(reply.status in (400, 422), f"status 400 for {show(fields)}", reply)
    return f"refused: {reply}"
