"""The suite itself, against a server that is right and one that is wrong on purpose."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.cli import app
from headrace.conformance import scheduling
from headrace.conformance.check import Check
from headrace.conformance.client import Server, Target
from headrace.conformance.outcome import Failed, Status
from headrace.conformance.report import document, side_by_side
from headrace.conformance.suite import CHAPTERS, Result, run_check, run_suite, select
from headrace.core.errors import ConfigurationError
from tests.conformance.fake_server import faking

FAULTS = [
    ("blocks_health", "health_during_prefill"),
    ("freezes_streams", "stream_beside_prefill"),
    ("forgets_prefixes", "prefix_reuse"),
    ("shares_prefixes", "tenants_apart"),
    ("cuts_characters", "split_characters"),
    ("leaks_stops", "stop_string"),
    ("drops_tail", "held_back_tail"),
    ("says_empty_reason", "chunk_shapes"),
    ("shows_control", "ends_of_turn"),
    ("cuts_arguments", "streamed_calls"),
    ("compiles_anything", "bad_schema"),
    ("ignores_schemas", "bad_schema"),
    ("template_500", "template_errors"),
    ("scales_logprobs", "raw_logprobs"),
    ("batch_changes_logprobs", "batch_invariance"),
    ("has_no_logprobs", "speculation"),
    ("eats_spaces", "tokenizer"),
    ("runs_on", "disconnect"),
    ("context_500", "context_overflow"),
    ("truncates", "no_truncation"),
    ("opens_metrics", "guarded"),
    ("has_no_caps", "caps"),
    ("crashes_when_busy", "overload"),
    ("crashes_when_busy", "progress"),
    ("ignores_schemas", "json_schema"),
    ("ignores_choices", "choice"),
    ("ignores_regex", "regex"),
    ("bad_regex_500", "bad_regex"),
    ("ignores_tool_choice", "tool_choice_required"),
    ("ignores_tool_choice", "tool_choice_named"),
    ("one_vector", "embeddings"),
    ("ignores_priority", "priority"),
    ("ignores_salts", "cache_salt"),
    ("forgets_seeds", "seed"),
]


def target(url: str) -> Target:
    return Target(url, "fake", api_key="k1", other_api_key="k2", timeout_s=10)


def run(url: str, name: str) -> Result:
    (result,) = run_suite(target(url), select(name))
    return result


@pytest.mark.parametrize(("fault", "name"), FAULTS)
def test_a_fault_fails_its_row(fault: str, name: str):
    pace = ("is_slow",) if name == "stream_beside_prefill" else ()  # its gaps must be longer than a machine's hiccups
    with faking(*pace) as url:
        for _ in range(3):
            right = run(url, name)
            if right.status is Status.PASS:
                break
    with faking(fault, *pace) as url:
        wrong = run(url, name)
    assert right.status is Status.PASS, right.reason
    assert wrong.status is Status.FAIL, wrong.reason
    assert "expected" in wrong.reason


@pytest.mark.parametrize(("stolen_s", "num_readings"), [(0.0, 1), (1.0, 6)])
def test_gaps_are_read_again_where_the_host_took_time(
    monkeypatch: pytest.MonkeyPatch, stolen_s: float, num_readings: int
):
    """And a server that freezes its streams fails all the same."""
    clock = itertools.count()
    monkeypatch.setattr(scheduling, "stolen_seconds", lambda: stolen_s * next(clock))
    num_read = 0

    async def freezes(server: Server) -> str:
        nonlocal num_read
        num_read += 1
        raise Failed("expected gaps of at most 50 ms; came one of 900 ms")

    monkeypatch.setattr(scheduling, "_stream_beside_prompt", freezes)
    with pytest.raises(Failed, match="900 ms"):
        asyncio.run(scheduling.stream_beside_prefill(Server(Target("http://127.0.0.1:1", "fake"))))
    assert num_read == num_readings


@pytest.mark.parametrize("fault", ["html", "empty", "hangs_up", "missing"])
def test_nothing_passes_on_a_server_that_says_nothing(fault: str):
    """Whatever the shape of the nonsense: no check passes, and none ends the run."""

    async def ask(url: str, checks: Sequence[Check]) -> list[Result]:
        server = Server(Target(url, "fake", api_key="k1", other_api_key="k2", context_length=1024, capacity=8))
        return [await run_check(server, check) for check in checks]

    with faking(fault) as url:
        results = asyncio.run(ask(url, select(None)))
    assert [(r.check.name, r.reason) for r in results if r.status is Status.PASS] == []
    assert sum(result.status is Status.FAIL for result in results) > 40


def test_fields_that_are_ignored_do_not_pass():
    with faking("ignores_fields") as url:
        results = run_suite(target(url), [*select("8"), *select("9")])
    passed = {result.check.name for result in results if result.status is Status.PASS}
    assert passed <= {"several_choices", "embeddings", "seed"}


def test_every_row_is_there_once_and_in_order():
    """The numbers of rows per chapter are those of the list of cases, and then two chapters of features."""
    assert [len(chapter.checks) for chapter in CHAPTERS] == [10, 11, 3, 6, 6, 5, 9, 17, 8]
    checks = select(None)
    assert len({check.name for check in checks}) == len(checks)
    assert [chapter.number for chapter in CHAPTERS] == list(range(1, 10))
    assert all(check.note for check in checks if check.is_unseen)
    assert sum(check.start is not None for check in checks) == 10


def test_selection():
    assert [check.id for check in select("3")] == ["3.1", "3.2", "3.3"]
    assert [check.name for check in select("stop_*")] == ["stop_string"]
    assert [check.id for check in select("7.8")] == ["7.8"]
    with pytest.raises(ConfigurationError, match="no check matches 'nothing'"):
        select("nothing")


def test_the_command(tmp_path: Path):
    """Its exit status is 0 only if nothing fails; the file has every row, and the page is made of such files."""
    file = tmp_path / "results.json"
    base = ["conformance", "--model", "fake", "--api-key", "k1", "--json", str(file), "--only", "4"]
    with faking() as url:
        ended = CliRunner().invoke(app, [*base, "--url", url])
    assert ended.exit_code == 0, ended.output
    assert "6 pass, 0 fail" in ended.output
    with faking("leaks_stops") as url:
        ended = CliRunner().invoke(app, [*base, "--url", f"{url}/v1"])
    assert ended.exit_code == 1
    assert "1 fail" in ended.output
    results = json.loads(file.read_text())
    assert results["counts"]["fail"] == 1
    page = side_by_side({"ours": results})
    assert "| 4.3 | No part of a stop string is shown | fail |" in page
    assert "| 5.1 | Tool calls of a stream are those of the whole reply | not run |" in page


def test_a_server_that_is_not_there():
    ended = CliRunner().invoke(app, ["conformance", "--url", "http://127.0.0.1:9", "--model", "x"])
    assert ended.exit_code == 1
    assert "cannot be asked" in ended.output


def test_the_document_keeps_reasons():
    check = select("1.1")[0]
    told = document([Result(check, Status.NOT_APPLICABLE, "why", 0.0)], "http://x", "m")
    assert told["results"][0] == {
        "id": "1.1",
        "name": "thread_count",
        "title": check.title,
        "result": "not applicable",
        "reason": "why",
        "seconds": 0.0,
    }
