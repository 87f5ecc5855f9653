"""All checks, and what runs them: one after the other, because many look at times."""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

from headrace.conformance import api, cpu, features, fields, prefix_cache, sampling, scheduling, streaming, structure
from headrace.conformance.check import Chapter, Check
from headrace.conformance.client import Server, Target
from headrace.conformance.launcher import Command, Launcher
from headrace.conformance.outcome import Failed, NotApplicable, Status
from headrace.core.errors import ConfigurationError

CHAPTERS: Sequence[Chapter] = tuple(
    module.CHAPTER for module in (cpu, scheduling, prefix_cache, streaming, structure, sampling, api, features, fields)
)

NEEDS_COMMAND = "needs --command"
"""Of rows about the server's process, where only its URL is known."""


@dataclass(frozen=True, slots=True)
class Result:
    check: Check
    status: Status
    reason: str
    seconds: float


Report = Callable[[Check, Result | None], None]
"""Told of each check before it begins (None) and after."""


def select(pattern: str | None) -> list[Check]:
    """The checks whose number, name or title match; `2` is chapter 2. Raises `ConfigurationError`."""
    checks = [check for chapter in CHAPTERS for check in chapter.checks]
    if pattern is None:
        return checks
    wanted = pattern.lower()
    found = [
        check
        for check in checks
        if check.id.split(".")[0] == wanted
        or any(fnmatch.fnmatchcase(text.lower(), wanted) for text in (check.id, check.name, check.title))
    ]
    if not found:
        raise ConfigurationError(
            f"no check matches {pattern!r}; give a number (4.3), a chapter (4) or a name (stop_*)."
        )
    return found


def run_suite(
    target: Target,
    checks: Sequence[Check],
    report: Report = lambda check, result: None,
    command: Command | None = None,
) -> list[Result]:
    """The rows about processes run first, alone on the machine; then the others ask the target, or, if it has no URL,
    a server of the command. Raises `ConfigurationError` if that does not answer at all."""
    if not target.url and command is None:
        raise ConfigurationError("give --url, or --command to have servers started.")
    launcher = None if command is None else Launcher(command, target)
    with launcher or contextlib.nullcontext():
        return asyncio.run(_run_all(target, checks, report, launcher))


async def _run_all(target: Target, checks: Sequence[Check], report: Report, launcher: Launcher | None) -> list[Result]:
    results: dict[str, Result] = {}

    async def run(check: Check, server: Server | None = None) -> None:
        report(check, None)
        results[check.id] = await run_check(server, check, launcher)
        report(check, results[check.id])

    for check in checks:
        if check.ask is None:
            await run(check)
    asking = [check for check in checks if check.ask is not None]
    if asking:
        async with _answering(target, launcher) as server:
            for check in asking:
                await run(check, server)
    return [results[check.id] for check in checks]


@contextlib.asynccontextmanager
async def _answering(target: Target, launcher: Launcher | None) -> AsyncIterator[Server]:
    """The target, or a server in its place."""
    if target.url:
        server = Server(target)
        await server.probe()
        yield server
        return
    assert launcher is not None
    async with contextlib.AsyncExitStack() as stack:
        try:
            started = await stack.enter_async_context(launcher.start())
        except Failed as error:
            raise ConfigurationError(f"the command starts no server: {error}") from None
        yield started.server


async def _seen(check: Check, server: Server | None, launcher: Launcher | None) -> str:
    if check.ask is not None:
        assert server is not None
        try:
            return await _within(check.ask(server), 1.5 * server.target.timeout_s)  # some ask several times in turn
        except NotApplicable:
            if check.start is None or launcher is None:
                raise
    assert check.start is not None and launcher is not None
    return await _within(check.start(launcher), 6 * launcher.target.timeout_s)  # and start several servers


async def run_check(server: Server | None, check: Check, launcher: Launcher | None = None) -> Result:
    """Never raises: whatever a server does is a result. `server`: for checks that ask one; `launcher`: for those that
    start some, without which they do not apply."""
    if check.is_unseen:
        return Result(check, Status.NOT_APPLICABLE, check.note, 0.0)
    if check.ask is None and launcher is None:
        return Result(check, Status.NOT_APPLICABLE, NEEDS_COMMAND, 0.0)
    start_s = time.monotonic()
    try:
        seen = await _seen(check, server, launcher)
        status, reason = Status.PASS, seen + (f" (in part: {check.note})" if check.note else "")
    except NotApplicable as why:
        status, reason = Status.NOT_APPLICABLE, str(why)
    except (Failed, ConfigurationError) as why:  # the latter of a started server that answers no request
        status, reason = Status.FAIL, str(why)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        status = Status.FAIL
        reason = f"expected a reply of OpenAI's shape; reading what came ended in {type(error).__name__}: {error}"
    seconds = time.monotonic() - start_s
    await _end_requests()
    return Result(check, status, reason, seconds)


async def _within(asking: Awaitable[str], timeout_s: float) -> str:
    try:
        async with asyncio.timeout(timeout_s):
            return await asking
    except TimeoutError:
        raise Failed(f"expected an end within {timeout_s:.0f} s; came none") from None


async def _end_requests() -> None:
    """A check that failed may have left requests behind, which would slow the next one down."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
