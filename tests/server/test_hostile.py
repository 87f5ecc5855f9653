"""What schemathesis makes of our OpenAPI document, and worse, against a real server beside a healthy stream."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings

from tests.server.conftest import eventually
from tests.server.healthy_stream import Healthy
from tests.server.processes import get, served, value_of

MODEL = "smollm2-135m-instruct"
NUM_CASES = 2000
NUM_HOSTILE = 400
TIMEOUT_S = 30


def p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]


def memory_mb(process: Any) -> float:
    status = Path(f"/proc/{process.pid}/status").read_text("ascii")
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))) / 1024


def hostile_bodies(rng: random.Random) -> Iterator[tuple[str, bytes]]:
    """Token ids, broken UTF-8, giant numbers, deep JSON, regexes and schemas, each in many variants."""
    paths = ("/chat/completions", "/completions", "/embeddings")
    while True:
        n = rng.choice([1, 10, 100, 1000, 5000])
        ids = [rng.choice([0, 1, 49151, 49152, -1, 2**31, 2**63, rng.randrange(49152)]) for _ in range(min(n, 300))]
        deep = "[" * n + "]" * n
        digits = "9" * n
        junk = bytes(rng.randrange(256) for _ in range(n))
        nested: Any = {"type": "string"}
        for _ in range(min(n, 60)):
            nested = rng.choice(
                [
                    {"type": "object", "properties": {"a": nested, "b": nested}},
                    {"anyOf": [nested, {"type": "null"}]},
                    {"type": "array", "items": nested, "maxItems": n},
                ]
            )
            if len(str(nested)) > 20_000:
                break
        atom = rng.choice(["a", "[ab]", "(a|b)", ".", "\\w", "(x+x+)"])
        regex = rng.choice(
            [f"({atom}*)*", f"({atom}{{1,{n}}}){{1,{n}}}", atom * min(n, 2000), f".*{atom}.{{{n}}}", "(" * n]
        )
        messages = [{"role": "user", "content": "x"}]
        yield rng.choice(
            [
                ("/completions", json.dumps({"prompt": ids, "max_tokens": 1}).encode()),
                ("/embeddings", json.dumps({"input": ids}).encode()),
                (rng.choice(paths), junk),
                (rng.choice(paths), b'{"prompt": "' + junk + b'"}'),
                (rng.choice(paths), b'{"messages": [{"role": "user", "content": "\xff\xfe' + junk + b'"}]}'),
                (rng.choice(paths), f'{{"prompt": {deep}, "messages": {deep}, "input": {deep}}}'.encode()),
                (rng.choice(paths), f'{{"prompt": "x", "max_tokens": {digits}, "seed": -{digits}}}'.encode()),
                (rng.choice(paths), f'{{"prompt": "x", "temperature": {digits}.{digits}e{digits[:6]}}}'.encode()),
                ("/completions", json.dumps({"prompt": "x", "max_tokens": 4, "regex": regex}).encode()),
                (
                    "/chat/completions",
                    json.dumps(
                        {
                            "messages": messages,
                            "max_tokens": 4,
                            "response_format": {"type": "json_schema", "json_schema": {"schema": nested}},
                        }
                    ).encode(),
                ),
                (
                    "/chat/completions",
                    json.dumps(
                        {
                            "messages": messages,
                            "max_tokens": 4,
                            "tool_choice": "required",
                            "tools": [{"type": "function", "function": {"name": "f", "parameters": nested}}],
                        }
                    ).encode(),
                ),
                ("/completions", json.dumps({"prompt": "x", "max_tokens": 4, "grammar": "start: " + regex}).encode()),
                ("/completions", json.dumps({"prompt": "x " * n, "max_tokens": 2, "stop": ["y" * 200] * 16}).encode()),
            ]
        )


def send_generated_cases(url: str, seen: Counter[str]) -> None:
    root = url.removesuffix("/v1")
    schema = schemathesis.openapi.from_url(f"{root}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    posts = [operation for operation in operations if operation.method.lower() == "post"]
    client = httpx.Client(timeout=TIMEOUT_S, verify=False)
    for operation in operations:
        is_post = operation in posts
        count = int(1.3 * NUM_CASES / len(posts)) if is_post else 20  # some repeat

        @settings(
            max_examples=count,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy())
        def ask(case: Any) -> None:
            body = case.body
            if isinstance(body, dict):
                # Replies of any length are somebody's right; here it is their number that counts.
                body = {**body, **{name: 3 for name in ("max_tokens", "max_completion_tokens") if name in body}}
                if case.path.endswith("/completions"):
                    body.setdefault("max_tokens", 3)
            content = json.dumps(body).encode() if is_post and body is not None else None
            try:
                path = case.formatted_path
            except Exception:  # a path parameter that is no text
                return
            answer = client.request(case.method, root + path, content=content, params=case.query or None)
            seen[f"{answer.status_code}"] += 1
            assert answer.status_code < 500, (case.path, content, answer.text)

        ask()


@pytest.mark.long
def test_nothing_breaks_and_nobody_waits(smollm2_path: Path) -> None:
    options = ("--port", "0", "--kv-memory", "300MiB", "--no-log-requests")
    with served("-m", "headrace.cli", "serve", MODEL, *options) as (process, url):
        # What is normal: a stream beside as many short requests of ordinary clients.
        ordinary = {"prompt": "x " * 100, "max_tokens": 3}
        with (
            Healthy(url).running() as beside_others,
            httpx.Client(base_url=url, timeout=TIMEOUT_S, verify=False) as client,
        ):
            end_s = time.monotonic() + 8
            while time.monotonic() < end_s:
                client.post("/completions", json=ordinary | {"seed": int(time.monotonic() * 1e6)})
        before_mb = memory_mb(process)
        seen: Counter[str] = Counter()
        with Healthy(url).running() as beside_cases:
            send_generated_cases(url, seen)
        print(f"{sum(seen.values())} generated cases: {dict(seen)}")
        assert sum(seen.values()) >= NUM_CASES
        hostile: Counter[str] = Counter()
        slowest_s = 0.0
        with Healthy(url).running() as beside_hostile, httpx.Client(timeout=TIMEOUT_S, verify=False) as client:
            bodies = hostile_bodies(random.Random(5))
            for _ in range(NUM_HOSTILE):
                path, body = next(bodies)
                start_s = time.monotonic()
                answer = client.post(url + path, content=body)
                slowest_s = max(slowest_s, time.monotonic() - start_s)
                assert answer.status_code < 500, (path, body[:500], answer.text)
                if answer.status_code >= 400:
                    assert answer.json()["error"]["message"]
                hostile[f"{answer.status_code}"] += 1
        after_mb = memory_mb(process)
        print(
            f"{NUM_HOSTILE} hostile: {dict(hostile)}, slowest {slowest_s:.2f} s; {before_mb:.0f} -> {after_mb:.0f} MB"
        )
        for name, stream in (("ordinary", beside_others), ("cases", beside_cases), ("hostile", beside_hostile)):
            gaps, texts, errors = stream.streamed
            print(f"beside {name}: {len(gaps)} gaps, P99 {p99(gaps) * 1e3:.0f} ms, largest {max(gaps) * 1e3:.0f} ms")
            assert not errors
            # The last one may have been cut short by the end of the test; every other is whole and the same.
            assert len(set(texts)) == 1
        assert after_mb < before_mb + 300, "memory grows"
        eventually(lambda: value_of("headrace_requests_running", get(url, "/metrics").text) == 0)
        normal_s = p99(beside_others.streamed.gaps_s)
        for stream in (beside_cases, beside_hostile):
            assert p99(stream.streamed.gaps_s) <= 3 * normal_s
