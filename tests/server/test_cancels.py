"""Two hundred clients that leave at any moment, whatever they asked for: nothing of theirs stays behind."""

from __future__ import annotations

import asyncio
import random
import re
from pathlib import Path
from typing import Any

import httpx

from headrace.server.system import usable_cores
from tests.server.conftest import eventually
from tests.server.processes import get, served, value_of

MODEL = "smollm2-135m-instruct"
NUM_CALLS = 200
AT_ONCE = 24
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}


def call_of(rng: random.Random) -> tuple[str, dict[str, Any]]:
    words = " ".join(rng.choice(["one", "two", "three", "sea"]) for _ in range(rng.choice([3, 30, 300])))
    body: dict[str, Any] = {"max_tokens": 400, "stream": rng.random() < 0.5, "n": rng.choice([1, 1, 2, 4]), "seed": 1}
    if rng.random() < 0.3:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    else:
        body["ignore_eos"] = True
    if rng.random() < 0.2:
        body["logprobs"] = True
        return "/chat/completions", {**body, "messages": [{"role": "user", "content": words}]}
    if rng.random() < 0.2:
        return "/completions", {**body, "prompt": [words, words + " again"]}
    return "/completions", {**body, "prompt": words}


async def leave_early(client: httpx.AsyncClient, rng: random.Random, places: asyncio.Semaphore) -> str:
    path, body = call_of(rng)
    async with places:
        try:
            answer = await asyncio.wait_for(client.post(path, json=body), rng.choice([0.0, 0.01, 0.1, 0.5, 1.5]))
            return str(answer.status_code)
        except TimeoutError:  # the client has closed its connection
            return "left"


def test_nothing_stays_behind(smollm2_path: Path) -> None:
    options = ("--port", "0", "--kv-memory", "120MiB", "--max-running", "16")
    with served("-m", "headrace.cli", "serve", MODEL, *options) as (process, url):

        async def main() -> list[str]:
            places, rng = asyncio.Semaphore(AT_ONCE), random.Random(7)
            limits = httpx.Limits(max_connections=AT_ONCE, max_keepalive_connections=0)
            async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits, verify=False) as client:
                calls = [leave_early(client, random.Random(rng.random()), places) for _ in range(NUM_CALLS)]
                return await asyncio.gather(*calls)

        ends = asyncio.run(main())
        assert ends.count("left") > NUM_CALLS / 2
        assert set(ends) <= {"left", "200", "429"}, set(ends)

        def is_empty() -> bool:
            text = get(url, "/metrics").text
            used = re.findall(r'^headrace_kv_blocks\{.*state="used".*\} (\S+)$', text, re.MULTILINE)
            assert used, "no metric of used blocks"
            waiting, running = (value_of(f"headrace_requests_{name}", text) for name in ("waiting", "running"))
            return waiting == running == 0 and set(map(float, used)) == {0.0}

        eventually(is_empty)
        assert get(url, "/health").status_code == 200
        answer = httpx.post(f"{url}/completions", json={"prompt": "Hello", "max_tokens": 3}, verify=False, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] == 3
        text = get(url, "/metrics").text
        num_threads, attending = (value_of(f'headrace_threads{{state="{x}"}}', text) for x in ("all", "attending"))
        assert 1 <= attending <= num_threads == usable_cores()[0]
        assert process.poll() is None
