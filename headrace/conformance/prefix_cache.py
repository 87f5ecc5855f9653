"""Chapter 3: reuse of prefixes."""

from __future__ import annotations

from headrace.conformance.check import Chapter
from headrace.conformance.client import Server
from headrace.conformance.outcome import NotApplicable, require

CHAPTER = Chapter(3, "Prefix cache")


@CHAPTER.check("A prompt that comes again is not computed again, and usage says so")
async def prefix_reuse(server: Server) -> str:
    prompt = server.words(min(500, 0.7 * (server.context_length or 2048)))
    first = await server.stream(prompt, max_tokens=2, temperature=0)
    again = [await server.stream(prompt, max_tokens=2, temperature=0) for _ in range(2)]
    cached = max(each.num_cached for each in again)
    require(
        cached >= 0.94 * first.num_prompt,
        f"nearly all of {first.num_prompt} prompt tokens in cached_tokens",
        cached,
    )
    ttft_s = min(each.ttft_s for each in again)
    require(
        ttft_s < 0.3 * first.ttft_s,
        f"the first token in less than 0.3 of the {first.ttft_s * 1000:.0f} ms of the first time",
        f"{ttft_s * 1000:.0f} ms",
    )
    return f"{cached} of {first.num_prompt} cached; first token {first.ttft_s * 1000:.0f} ms, then {ttft_s * 1000:.0f}"


CHAPTER.unseen(
    "recurrent_checkpoints",
    "Hybrid, sliding-window and recurrent models resume at the turns of a conversation",
    "about other kinds of models than the one served",
)


@CHAPTER.check("Tenants do not see each other's cached prefixes")
async def tenants_apart(server: Server) -> str:
    if server.target.other_api_key is None:
        raise NotApplicable("needs a second key: give --other-api-key")
    prompt = server.words(160)
    await server.complete(prompt, max_tokens=1)
    other = await server.complete(prompt, max_tokens=1, key=server.target.other_api_key)
    same = await server.complete(prompt, max_tokens=1)
    require(same.num_cached > 0, "cached_tokens > 0 for the same key", same.num_cached)
    require(other.num_cached == 0, "cached_tokens 0 for another key", other.num_cached)
    return f"{same.num_cached} of {same.num_prompt} cached for the same key, 0 for the other"
