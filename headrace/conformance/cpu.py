"""Chapter 1: performance on CPUs, installation, start."""

from __future__ import annotations

import asyncio
import time

from headrace.conformance.check import Chapter
from headrace.conformance.client import Server
from headrace.conformance.outcome import Failed, require

CHAPTER = Chapter(1, "CPU performance, install, start-up")

_OF_THE_PROCESS = "about the server's process and its machine; a client sees neither"
_OF_ISA = "about instruction sets, which a client cannot choose"

CHAPTER.unseen("thread_count", "As many threads as usable cores, set before the BLAS library starts", _OF_THE_PROCESS)
CHAPTER.unseen("two_instances", "Two servers on one host keep to their own cores", _OF_THE_PROCESS)
CHAPTER.unseen("best_isa", "The best instruction set of the CPU is used and told", _OF_ISA)
CHAPTER.unseen("isa_tiers", "Without AMX it is slower by degrees, not by thirty times", _OF_ISA)
CHAPTER.unseen("portable", "CPUs without AVX are served too", _OF_ISA)
CHAPTER.unseen("default_threads", "The default number of threads is near the best one", _OF_THE_PROCESS)
CHAPTER.unseen("gguf", "GGUF files are served on a CPU", "an API does not tell which file is behind it")
CHAPTER.unseen(
    "quantized_speed", "Quantized weights are faster than f16", "needs the same model served twice, in two formats"
)
CHAPTER.unseen("start_up", "The first token comes seconds after the start", "the server has started already")

_POLL_S = 0.05


@CHAPTER.check("/health answers at once while a long prompt is read")
async def health_during_prefill(server: Server) -> str:
    num_tokens = min(3000, 0.7 * server.known_context())
    reading = asyncio.create_task(server.complete(server.words(num_tokens), max_tokens=1))
    times: list[float] = []
    try:
        while not reading.done() or not times:
            start_s = time.monotonic()
            reply = await server.get("/health", timeout_s=10)
            times.append(time.monotonic() - start_s)
            require(reply.status == 200, "status 200 of /health while a prompt is read", reply)
            await asyncio.sleep(max(0.0, _POLL_S - times[-1]))
        num_prompt = (await reading).num_prompt
    finally:
        reading.cancel()
    slow = sorted(times)[-1 - len(times) // 100]
    if slow > 0.25:
        raise Failed(f"expected answers of /health within 250 ms (99 %); came {slow * 1000:.0f} ms")
    return f"{len(times)} answers while {num_prompt} tokens were read, 99 % within {slow * 1000:.0f} ms"
