"""All checks, and what runs them: one after the other, because many look at times."""

from __future__ import annotations

import asyncio
import fnmatch
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.conformance import api, cpu, features, fields, prefix_cache, sampling, scheduling, streaming, structure
from headrace.conformance.check import Chapter, Check
from headrace.conformance.client import Server, Target
from headrace.conformance.outcome import Failed, NotApplicable, Status
from headrace.core.errors import ConfigurationError

CHAPTERS: Sequence[Chapter] = tuple(
    module.CHAPTER for module in (cpu, scheduling, prefix_cache, streaming, structure, sampling, api, features, fields)
)


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


def run_suite(target: Target, checks: Sequence[Check], report: Report = lambda check, result: None) -> list[Result]:
    """Raises `ConfigurationError` if the server does not answer at all."""
    return asyncio.run(_run_all(target, checks, report))


async def _run_all(target: Target, checks: Sequence[Check], report: Report) -> list[Result]:
    server = Server(target)
    await server.probe()
    results = []
    for check in checks:
        report(check, None)
        results.append(await run_check(server, check))
        report(check, results[-1])
    return results


async def run_check(server: Server, check: Check) -> Result:
    """Never raises: whatever a server does is a result."""
    if check.ask is None:
        return Result(check, Status.NOT_APPLICABLE, check.note, 0.0)
    start_s = time.monotonic()
    timeout_s = 1.5 * server.target.timeout_s  # some ask several times in turn
    try:
        async with asyncio.timeout(timeout_s):
            seen = await check.ask(server)
        status, reason = Status.PASS, seen + (f" (in part: {check.note})" if check.note else "")
    except NotApplicable as why:
        status, reason = Status.NOT_APPLICABLE, str(why)
    except Failed as why:
        status, reason = Status.FAIL, str(why)
    except TimeoutError:
        status, reason = Status.FAIL, f"expected an end within {timeout_s:.0f} s; came none"
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        status = Status.FAIL
        reason = f"expected a reply of OpenAI's shape; reading what came ended in {type(error).__name__}: {error}"
    seconds = time.monotonic() - start_s
    await _end_requests()
    return Result(check, status, reason, seconds)


async def _end_requests() -> None:
    """A check that failed may have left requests behind, which would slow the next one down."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
