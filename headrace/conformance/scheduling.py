"""Chapter 2: scheduling, fairness, memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from statistics import mean, median

from headrace.conformance.check import Chapter
from headrace.conformance.client import COMPLETIONS, Refused, Server, after_events, begins
from headrace.conformance.gauges import KV_USED
from headrace.conformance.launcher import usable_cores
from headrace.conformance.outcome import Failed, NotApplicable, require
from headrace.conformance.replies import Generation, Reply
from headrace.conformance.speed import decode_tokens_per_s
from headrace.conformance.threads import stolen_seconds

CHAPTER = Chapter(2, "Scheduling, fairness, memory")

LONG_TOKENS = 1800
"""Most that a check makes a server read at once: more would take minutes on a small machine."""
RECOVERY_S = 5.0
_READINGS = 6
_MOST_STOLEN = 0.01
"""Of the processor time of this machine, taken by its host: what gaps of a few steps can be told through."""


@CHAPTER.check(
    "Short requests do not wait for a long one to end",
    part="one policy is seen, the one that the server runs with",
)
async def short_behind_long(server: Server) -> str:
    begun = asyncio.Event()
    start_s = time.monotonic()
    long = asyncio.create_task(server.stream(server.words(20), until=after_events(1, begun.set), **server.exactly(100)))
    try:
        await begins(begun, long)
        shorts = await asyncio.gather(*(server.complete(server.words(10), max_tokens=2) for _ in range(4)))
        await long
    finally:
        long.cancel()
    whole_s, short_s = time.monotonic() - start_s, mean(each.seconds for each in shorts)
    require(
        short_s <= 0.5 * whole_s,
        "short requests in at most half the time of the long one before them",
        f"{short_s:.2f} s on average, the long one took {whole_s:.2f} s",
    )
    return f"{short_s:.2f} s on average beside one of {whole_s:.2f} s"


@CHAPTER.check(
    "A tenant's backlog does not delay another tenant",
    part="latencies of two tenants under one backlog; token counts are the server's own",
)
async def fair_tenants(server: Server) -> str:
    if server.target.other_api_key is None or server.target.capacity is None:
        raise NotApplicable("needs a second tenant and a backlog: give --other-api-key and --capacity")
    num_many = max(1, server.target.capacity - 4)
    fields = server.exactly(12)
    many = [asyncio.create_task(server.complete(server.words(16), **fields)) for _ in range(num_many)]
    try:
        await asyncio.sleep(0.1)
        other = server.target.other_api_key
        few = await asyncio.gather(*(server.complete(server.words(16), key=other, **fields) for _ in range(3)))
        lasted = sorted(each.seconds for each in await asyncio.gather(*many))
    finally:
        for task in many:
            task.cancel()
    if lasted[0] > 0.6 * lasted[-1]:
        raise NotApplicable(f"{num_many} requests at once made no backlog; give a larger --capacity")
    few_s = mean(each.seconds for each in few)
    require(
        few_s <= 0.75 * lasted[-1],
        f"3 requests of a second tenant to be answered before the end of a backlog of {num_many} of the first",
        f"{few_s:.2f} s on average, where the backlog lasted {lasted[-1]:.2f} s",
    )
    return f"{few_s:.2f} s on average behind a backlog of {lasted[-1]:.2f} s"


@CHAPTER.check("A long prompt does not slow a stream down: no gap of more than three times the median")
async def stream_beside_prefill(server: Server) -> str:
    """A reading that fails is no evidence if the host took processor time meanwhile, and is done again."""
    for _ in range(_READINGS - 1):
        stolen_s, begin_s = stolen_seconds(), time.monotonic()
        try:
            return await _stream_beside_prompt(server)
        except Failed:
            if stolen_seconds() - stolen_s <= _MOST_STOLEN * len(usable_cores()) * (time.monotonic() - begin_s):
                raise
    return await _stream_beside_prompt(server)


async def _stream_beside_prompt(server: Server) -> str:
    num_tokens = min(LONG_TOKENS, 0.7 * server.known_context())
    num_before = 30
    begun, is_read = asyncio.Event(), asyncio.Event()
    begin = after_events(num_before, begun.set)
    stream = asyncio.create_task(
        server.stream(server.words(20), until=lambda seen: begin(seen) or is_read.is_set(), **server.exactly(600))
    )
    try:
        await begins(begun, stream)
        start_s = time.monotonic()
        prompt = await server.stream(server.words(num_tokens), max_tokens=1)
        read_s = time.monotonic() - start_s
        is_read.set()
        gaps = (await stream).gaps_s
    finally:
        stream.cancel()
    before = gaps[: num_before - 2]
    if not before or len(gaps) == len(before):
        raise Failed(f"expected a stream of many chunks; came {len(gaps)}")
    # A machine with other work has gaps of its own.
    bound_s = max(3 * median(gaps), 1.5 * max(before))
    require(
        max(gaps) <= bound_s,
        f"gaps of at most {bound_s * 1000:.0f} ms (median {median(gaps) * 1000:.0f}, longest before the prompt "
        f"{max(before) * 1000:.0f})",
        f"one of {max(gaps) * 1000:.0f} ms while {prompt.num_prompt} tokens were read in {read_s:.2f} s",
    )
    return f"longest gap {max(gaps) * 1000:.0f} ms while {prompt.num_prompt} tokens were read in {read_s:.2f} s"


@CHAPTER.check("The queue has a bound: more is refused at once, with Retry-After")
async def queue_bound(server: Server) -> str:
    if server.target.capacity is None:
        raise NotApplicable("the bound is a setting of the server; give it as --capacity")
    count = 2 * server.target.capacity
    fields = {"prompt": server.words(12), **server.exactly(24)}
    replies = await asyncio.gather(*(server.post(COMPLETIONS, fields) for _ in range(count)))
    refused = [reply for reply in replies if reply.status in (429, 503)]
    done = [reply for reply in replies if reply.status == 200]
    require(
        len(refused) >= count // 4 and len(refused) + len(done) == count and done,
        f"some of {count} requests to be answered and the rest refused with 429 or 503",
        f"statuses {_counted(replies)}",
    )
    _require_retry_after(refused)
    slowest, last = max(reply.seconds for reply in refused), max(reply.seconds for reply in done)
    require(slowest <= max(1.0, last / 2), "refusals at once", f"one after {slowest:.2f} s")
    return f"{len(done)} answered, {len(refused)} refused within {slowest:.2f} s"


@CHAPTER.check(
    "Concurrent requests share one pool: none is cut to a part of the context",
    part="four requests with a common start, so that any size of pool holds them",
)
async def shared_pool(server: Server) -> str:
    num_tokens = 0.85 * min(LONG_TOKENS / 0.85, server.known_context())
    prefix = server.words(0.95 * num_tokens)
    prompts = [f"{prefix} {server.words(0.05 * num_tokens)}" for _ in range(4)]
    replies = await asyncio.gather(*(server.complete(prompt, **server.exactly(4)) for prompt in prompts))
    return _all_read(replies, num_tokens)


@CHAPTER.check(
    "One request may fill the context that the server tells",
    part=f"with a prompt of up to {LONG_TOKENS} tokens",
)
async def whole_context(server: Server) -> str:
    num_tokens = 0.85 * min(LONG_TOKENS / 0.85, server.known_context())
    return _all_read([await server.complete(server.words(num_tokens), **server.exactly(4))], num_tokens)


@CHAPTER.check(
    "Under pressure every request comes to its end",
    part="30 requests at once; a client cannot make the pool small",
)
async def progress(server: Server) -> str:
    count = min(30, server.target.capacity or 30)
    fields = server.exactly(24)
    replies = await asyncio.gather(
        *(server.stream(server.words(80), **fields) for _ in range(count)), return_exceptions=True
    )
    ended = [each for each in replies if isinstance(each, Generation) and each.choice.finish_reason]
    turned_away = [each for each in replies if isinstance(each, Refused) and each.reply.status in (429, 503)]
    other = [each for each in replies if each not in ended and each not in turned_away]
    require(
        not other and ended,
        f"{count} streams that all end with a finish reason",
        f"{len(ended)} that did, {len(turned_away)} refused for load, {len(other)} others, such as {other[:1]}",
    )
    return f"{len(ended)} ended, {len(turned_away)} refused for load"


@CHAPTER.check("What can never fit is refused at once, or ends cleanly at the context's end")
async def too_large(server: Server) -> str:
    context = server.known_context()
    reply = (
        await server.post(
            COMPLETIONS,
            {"prompt": server.words(16), "stream": False, **server.exactly(context + 64)},
            timeout_s=5,
        )
        if context > LONG_TOKENS * 2
        else None
    )
    if reply is None:
        reply = await server.post(COMPLETIONS, {"prompt": server.words(0.9 * context), **server.exactly(context)})
    if reply.status == 400:
        require(reply.seconds <= 5, "a refusal at once", f"one after {reply.seconds:.1f} s")
        return f"refused: {reply}"
    require(reply.status == 200, "status 400, or a reply that ends at the context's end", reply)
    choice = reply.json()["choices"][0]
    require(choice.get("finish_reason") == "length", "finish_reason length", choice.get("finish_reason"))
    return "ended with finish_reason length"


@CHAPTER.check(
    "After pressure it is as fast as before",
    part="the pressure is 16 requests at once; the bound is 0.7, as one machine's noise is larger than 10 %",
)
async def recovery(server: Server) -> str:
    before = await _tokens_per_s(server)
    await _load(server, 16)
    await server.quiet()
    after, end_s = 0.0, time.monotonic() + RECOVERY_S
    while after < 0.7 * before and time.monotonic() < end_s:
        after = max(after, await _tokens_per_s(server))
    require(
        after >= 0.7 * before,
        f"at least {0.7 * before:.0f} tokens/s within {RECOVERY_S:.0f} s after pressure",
        f"{after:.0f}",
    )
    return f"{before:.0f} tokens/s before, {after:.0f} after"


@CHAPTER.check(
    "No cache stays in use when all requests have ended",
    part="24 requests, half of them left by their client; flushing cannot be asked for",
)
async def cache_leak(server: Server) -> str:
    await server.quiet()
    before = await server.gauge(KV_USED)
    await asyncio.gather(*(_stay_or_leave(server, leave=i % 2 == 0) for i in range(24)))
    end_s = time.monotonic() + 3
    while (after := await server.gauge(KV_USED)) > before and time.monotonic() < end_s:
        await asyncio.sleep(0.1)
    require(after <= before, f"{before:g} of the cache in use by requests, as before", f"{after:g}")
    return f"in use before {before:g}, after {after:g}"


@CHAPTER.check("New requests get their first token while another one runs without end")
async def prefill_progress(server: Server) -> str:
    alone = min([(await server.stream(server.words(12), max_tokens=1)).ttft_s for _ in range(2)])
    bound_s = 1.0 + 10 * alone
    begun = asyncio.Event()
    endless = asyncio.create_task(
        server.stream(server.words(12), until=after_events(1, begun.set), **server.exactly(600))
    )
    try:
        await begins(begun, endless)
        waited = []
        for _ in range(4):
            waited.append((await server.stream(server.words(12), max_tokens=1)).ttft_s)
        require(not endless.done(), "the first stream still running", "its end")
    finally:
        endless.cancel()
        await asyncio.gather(endless, return_exceptions=True)
        await server.quiet()
    require(max(waited) <= bound_s, f"first tokens within {bound_s:.2f} s", f"one after {max(waited):.2f} s")
    return f"slowest first token {max(waited) * 1000:.0f} ms, {alone * 1000:.0f} ms on an idle server"


async def _load(server: Server, count: int) -> None:
    """That many requests at once; what becomes of them is not looked at."""
    fields = server.exactly(16)
    await asyncio.gather(*(server.stream(server.words(80), **fields) for _ in range(count)), return_exceptions=True)


async def _stay_or_leave(server: Server, leave: bool) -> None:
    try:
        await server.stream(server.words(48), until=after_events(3) if leave else None, **server.exactly(16))
    except Refused as refused:
        if refused.reply.status not in (429, 503):
            raise


async def _tokens_per_s(server: Server) -> float:
    """Of one stream; the better of two."""
    return max([await decode_tokens_per_s(server) for _ in range(2)])


def _all_read(replies: Sequence[Generation], num_tokens: float) -> str:
    counts = [reply.num_prompt for reply in replies]
    require(min(counts) >= 0.8 * num_tokens, f"prompts of about {num_tokens:.0f} tokens to be read whole", counts)
    return f"read prompts of {', '.join(map(str, counts))} tokens"


def _counted(replies: Sequence[Reply]) -> dict[int, int]:
    statuses = [reply.status for reply in replies]
    return {status: statuses.count(status) for status in sorted(set(statuses))}


def _require_retry_after(refused: Sequence[Reply]) -> None:
    without = [reply for reply in refused if not reply.headers.get("retry-after", "").isdigit()]
    require(not without, "Retry-After with every refusal", f"{len(without)} of {len(refused)} without it")
