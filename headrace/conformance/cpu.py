"""Chapter 1: performance on CPUs, installation, start."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from headrace.conformance.check import Chapter
from headrace.conformance.client import COMPLETIONS, Refused, Server
from headrace.conformance.launcher import Launcher, Started, usable_cores
from headrace.conformance.outcome import Failed, NotApplicable, require
from headrace.conformance.speed import decode_tokens_per_s
from headrace.conformance.threads import cores_of, halves, num_busy, seconds_queued, thread_seconds

CHAPTER = Chapter(1, "CPU performance, install, start-up")

_OF_ISA = "about instruction sets, which a client cannot choose"
_ROUNDS = 16
"""Most that a comparison of speeds takes: a machine with other work is slower now and then, never faster."""
_NUM_TOKENS = 64
"""Of a stream that is timed."""
_POLL_S = 0.05


@CHAPTER.process_check("As many threads as usable cores, set before the BLAS library starts")
async def thread_count(launcher: Launcher) -> str:
    """A server that may use half of the cores: its threads that compute are counted, and its speed is compared with
    that of one that has them all."""
    half, _ = halves()
    _leaves_threads_to_the_server(launcher)
    share = len(half) / len(usable_cores())
    async with launcher.start() as free, launcher.start(cores=half) as bound:
        _keeps_to(bound, half)
        rates = await _compare({"free": free, "bound": bound}, lambda rate: rate["bound"] >= 0.8 * share * rate["free"])
        num_good = 0
        for _ in range(_ROUNDS):  # until what a server still prepares after its start is done
            before = thread_seconds(bound.group)
            await bound.server.complete(bound.server.words(300), **bound.server.exactly(_NUM_TOKENS))
            busy, count = num_busy(before, after := thread_seconds(bound.group)), len(after)
            num_good = num_good + 1 if busy <= len(half) else 0
            if num_good == 3:
                break
        _keeps_to(bound, half)
    require(num_good == 3, f"at most {len(half)} threads that compute on {_cores(half)}", f"{busy} of {count}")
    least, told = 0.8 * share * rates["free"], f"{rates['bound']:.0f} tokens/s on {_cores(half)}"
    require(rates["bound"] >= least, f"at least {least:.0f} tokens/s, 0.8 of its part of {rates['free']:.0f}", told)
    return f"{busy} of {count} threads computed: {told}, {rates['free']:.0f} on {_cores(usable_cores())}"


@CHAPTER.process_check("Two servers on one host keep to their own cores")
async def two_instances(launcher: Launcher) -> str:
    first, second = halves()
    async with (
        launcher.start() as alone,
        launcher.start(cores=first) as one,
        launcher.start(cores=second) as other,
    ):
        best, pair = 0.0, (0.0, 0.0)
        alone_rate = 0.0
        for attempt in range(_ROUNDS):
            alone_rate = max(alone_rate, await decode_tokens_per_s(alone.server, _NUM_TOKENS))
            rates = await asyncio.gather(*(decode_tokens_per_s(each.server, _NUM_TOKENS) for each in (one, other)))
            if min(rates) / max(rates) >= best:
                best, pair = min(rates) / max(rates), (rates[0], rates[1])
            if attempt >= 2 and best >= 0.85 and sum(pair) >= 0.8 * alone_rate:
                break
        _keeps_to(one, first)
        _keeps_to(other, second)
    told = f"{pair[0]:.0f} and {pair[1]:.0f} tokens/s"
    require(best >= 0.85 or len(first) != len(second), "two servers at once to differ by at most 15 %", told)
    require(sum(pair) >= 0.8 * alone_rate, f"{0.8 * alone_rate:.0f} tokens/s of both (0.8 of one alone)", told)
    return f"{told} at once, {alone_rate:.0f} of one alone on all cores"


CHAPTER.unseen("best_isa", "The best instruction set of the CPU is used and told", _OF_ISA)
CHAPTER.unseen("isa_tiers", "Without AMX it is slower by degrees, not by thirty times", _OF_ISA)
CHAPTER.unseen("portable", "CPUs without AVX are served too", _OF_ISA)


@CHAPTER.process_check("The default number of threads is near the best one")
async def default_threads(launcher: Launcher) -> str:
    _leaves_threads_to_the_server(launcher)
    launcher.command.needs("{threads}", "'headrace serve --port {port} [--threads {threads}]'")
    cores = len(usable_cores())
    counts = sorted({1, max(1, cores // 2), cores, 2 * cores})
    async with AsyncExitStack() as stack:
        servers = {"default": await stack.enter_async_context(launcher.start())}
        for count in counts:
            servers[str(count)] = await stack.enter_async_context(launcher.start(threads=count))
        rates = await _compare(servers, lambda rate: rate["default"] >= 0.95 * max(rate.values()))
    told = ", ".join(f"{rates[str(count)]:.0f} with {count}" for count in counts)
    require(
        rates["default"] >= 0.95 * max(rates.values()),
        f"at least {0.95 * max(rates.values()):.0f} tokens/s with the default (0.95 of the best)",
        f"{rates['default']:.0f}, and {told}",
    )
    return f"{rates['default']:.0f} tokens/s with the default, {told}"


@CHAPTER.process_check("GGUF files are served on a CPU")
async def gguf(launcher: Launcher) -> str:
    command = launcher.command
    written = [word for word in command.words(0) if word.endswith(".gguf")]
    if command.gguf is None and not written:
        raise NotApplicable("needs a file: give --gguf")
    async with launcher.start(model=command.gguf) as started:
        reply = await started.server.complete("Once upon a time", **started.server.exactly(8))
    require(reply.text.strip(), "a text", repr(reply.text))
    return f"{Path(command.gguf or written[0]).name} answered {reply.num_output} tokens"


@CHAPTER.process_check("Quantized weights are faster than f16")
async def quantized_speed(launcher: Launcher) -> str:
    command = launcher.command
    if command.gguf is None or command.f16_gguf is None:
        raise NotApplicable("needs a model in two formats: give --gguf and --f16-gguf")
    async with launcher.start(model=command.gguf) as small, launcher.start(model=command.f16_gguf) as large:
        rates = await _compare({"small": small, "large": large}, lambda rate: rate["small"] >= 1.2 * rate["large"])
    told = f"{rates['small']:.0f} tokens/s from {command.gguf.name}, {rates['large']:.0f} from {command.f16_gguf.name}"
    require(rates["small"] >= 1.2 * rates["large"], "the quantized file to be 1.2 times as fast", told)
    return told


@CHAPTER.process_check("The first token comes seconds after the start")
async def start_up(launcher: Launcher) -> str:
    """Ready within 3 s and a first token within 5 s, the best of three starts, not counting what the process waited for
    a core that had other work; and the first request after `/health` said so is answered."""
    best = (math.inf, math.inf, 0.0)
    for _ in range(3):
        async with launcher.start(probe=False) as started:
            ready_s = _own_seconds(started)
            reply = await started.server.post(COMPLETIONS, {"prompt": "Hi.", "max_tokens": 1})
            token_s, queued_s = _own_seconds(started), seconds_queued(started.process.pid)
            if reply.status != 200:
                raise Refused("the first request to a server that said it was ready", reply)
        best = min(best, (token_s, ready_s, queued_s))
        if best[1] < 3 and best[0] < 5:
            break
    told = f"ready after {best[1]:.2f} s, a token after {best[0]:.2f} s"
    require(best[1] < 3 and best[0] < 5, "a server that is ready within 3 s and gives a token within 5 s", told)
    return told + (f" ({best[2]:.2f} s for want of a core not counted)" if best[2] > 0.1 else "")


def _own_seconds(started: Started) -> float:
    """Since the start, but for what it waited for a core."""
    return time.monotonic() - started.start_s - seconds_queued(started.process.pid)


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


def _leaves_threads_to_the_server(launcher: Launcher) -> None:
    if launcher.command.always_sets_threads:
        raise NotApplicable("the command always sets the number of threads: put that part in brackets, [-t {threads}]")


def _keeps_to(started: Started, cores: Sequence[int]) -> None:
    used = cores_of(started.group)
    require(used <= set(cores), f"threads that keep to {_cores(cores)}", f"some that may use {_cores(sorted(used))}")


async def _compare(
    servers: Mapping[str, Started], is_enough: Callable[[Mapping[str, float]], bool]
) -> Mapping[str, float]:
    """Tokens per second of each, the best of several rounds: three, or more until it is enough. Every other one goes
    backwards: whoever comes after a server that crowds the cores finds them busy for a while."""
    best, order = dict.fromkeys(servers, 0.0), list(servers.items())
    for attempt in range(_ROUNDS):
        for name, started in reversed(order) if attempt % 2 else order:
            best[name] = max(best[name], await decode_tokens_per_s(started.server, _NUM_TOKENS))
        if attempt >= 2 and is_enough(best):
            break
    return best


def _cores(cores: Sequence[int]) -> str:
    return f"core {cores[0]}" if len(cores) == 1 else f"{len(cores)} cores"
