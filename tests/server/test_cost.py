"""What a streamed token costs the event loop: processor time of its thread, so that a busy machine matters little."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

import pytest

from tests.server.fakes import FakeEngine

NUM_STREAMS = 64
NUM_TOKENS = 300

CLIENT = """
import json, selectors, socket, sys
port, num_streams, num_tokens = map(int, sys.argv[1:])
body = json.dumps({"prompt": "say:abcdefg", "max_tokens": num_tokens, "ignore_eos": True, "stream": True}).encode()
head = f"POST /v1/completions HTTP/1.1\\r\\nhost: x\\r\\ncontent-length: {len(body)}\\r\\nconnection: close\\r\\n\\r\\n"
selector = selectors.DefaultSelector()
read = {}
for _ in range(num_streams):
    client = socket.create_connection(("127.0.0.1", port))
    client.sendall(head.encode() + body)
    selector.register(client, selectors.EVENT_READ)
    read[client] = b""
while selector.get_map():
    for key, _ in selector.select():
        data = key.fileobj.recv(65536)
        read[key.fileobj] = read[key.fileobj][-40:] + data
        if not data:
            selector.unregister(key.fileobj)
assert all(tail.endswith(b"data: [DONE]\\n\\n\\r\\n0\\r\\n\\r\\n") for tail in read.values()), list(read.values())[0]
"""


@pytest.mark.long
def test_a_streamed_token_costs_little(start):
    server = start(FakeEngine(step_s=0.01, context_length=10_000, max_queue=128))
    loop = server.loop
    assert loop is not None

    async def thread_s() -> float:
        return time.thread_time()

    def loop_s() -> float:
        return asyncio.run_coroutine_threadsafe(thread_s(), loop).result()

    before = loop_s()
    arguments = [str(server.port), str(NUM_STREAMS), str(NUM_TOKENS)]
    subprocess.run([sys.executable, "-c", CLIENT, *arguments], check=True, timeout=60)
    used_s = loop_s() - before
    assert server.engine.num_generated == NUM_STREAMS * NUM_TOKENS
    cost_us = 1e6 * used_s / (NUM_STREAMS * NUM_TOKENS)
    print(f"{cost_us:.1f} us of the event loop per streamed token at {NUM_STREAMS} streams")
    assert cost_us < 100
