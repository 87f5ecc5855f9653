"""How fast a server writes."""

from __future__ import annotations

from headrace.conformance.client import Server
from headrace.conformance.outcome import Failed


async def decode_tokens_per_s(server: Server, num_tokens: int = 24) -> float:
    """Of one stream, after its first token."""
    stream = await server.stream(server.words(12), **server.exactly(num_tokens))
    if len(stream.times_s) < 2:
        raise Failed(f"expected a stream of many chunks; came {len(stream.times_s)}")
    return (stream.num_output - 1) / (stream.times_s[-1] - stream.times_s[0])
