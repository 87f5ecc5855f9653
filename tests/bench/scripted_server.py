"""An OpenAI-like server that streams by a script: no model, known times. A process of its own, or a thread of a test.

`python scripted_server.py SCRIPT.json` prints its port, and serves until its standard input closes. A script:

    {"first_s": 0.2, "gaps_s": [0.05, ...], "cached": 7, "fail_every": 0, "usage": true, "context": 4096,
     "add": 0, "break_after": null}

Stream i (in order of arrival) waits first_s * (1 + i % 3), then sends its tokens with the gaps in turn, starting at
gap i. `fail_every` n: each n-th stream is answered by 429. `add`: tokens the server
adds to a prompt. `break_after` n: each stream ends in the middle, after n tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
import threading
from collections.abc import Iterator
from typing import Any

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"


class ScriptedServer:
    def __init__(self, script: dict[str, Any]) -> None:
        self.script = script
        self.bodies: list[dict[str, Any]] = []
        self.sent: list[list[float]] = []
        """Per stream, when the server wrote each token."""
        self._numbers = itertools.count()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            length = next((int(x[15:]) for x in head.split(b"\r\n") if x.lower().startswith(b"content-length:")), 0)
            body = json.loads(await reader.readexactly(length)) if length else {}
            await self.answer(head.split()[1].decode(), body, writer)
            await writer.drain()
        writer.close()

    async def answer(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if path.endswith("/models"):
            model = {"id": "scripted", "max_model_len": self.script.get("context", 4096)}
            self.whole(writer, 200, {"data": [model]})
            return
        prompt = body.get("prompt") or body["messages"][0]["content"]
        num_prompt = len(prompt) if isinstance(prompt, list) else len(prompt.split())
        num_prompt += self.script.get("add", 0)
        usage = {"prompt_tokens": num_prompt, "completion_tokens": body["max_tokens"]}
        if not body.get("stream"):
            self.whole(writer, 200, {"choices": [{"text": " a"}], "usage": usage})
            return
        number = next(self._numbers)
        self.bodies.append(body)
        self.sent.append([])
        every = self.script.get("fail_every", 0)
        if every and number % every == every - 1:
            self.whole(writer, 429, {"error": {"message": "the queue is full"}})
            return
        await self.stream(number, body, usage, writer)

    async def stream(
        self, number: int, body: dict[str, Any], usage: dict[str, Any], writer: asyncio.StreamWriter
    ) -> None:
        script, loop = self.script, asyncio.get_running_loop()
        is_chat = "messages" in body
        writer.write(HEAD)
        if is_chat:
            self.event(writer, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        due_s = loop.time() + script["first_s"] * (1 + number % 3)
        gaps = itertools.islice(itertools.cycle(script["gaps_s"]), number % len(script["gaps_s"]), None)
        for i in range(body["max_tokens"]):
            if (wait_s := due_s - loop.time()) > 0:
                await asyncio.sleep(wait_s)
            choice: dict[str, Any] = {"index": 0, "finish_reason": None, "logprobs": None}
            choice |= {"delta": {"content": f" t{i}"}} if is_chat else {"text": f" t{i}"}
            self.sent[number].append(loop.time())
            self.event(writer, {"id": "cmpl-1", "object": "x", "created": 1, "model": "scripted", "choices": [choice]})
            due_s += next(gaps)
            if i + 1 == script.get("break_after"):
                return
        if script.get("usage", True):
            usage |= {"prompt_tokens_details": {"cached_tokens": script.get("cached", 0)}}
            self.event(writer, {"choices": [], "usage": usage})
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    @staticmethod
    def event(writer: asyncio.StreamWriter, value: dict[str, Any]) -> None:
        data = b"data: " + json.dumps(value).encode() + b"\n\n"
        writer.write(b"%x\r\n%b\r\n" % (len(data), data))

    @staticmethod
    def whole(writer: asyncio.StreamWriter, status: int, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode()
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (status, len(data), data))


@contextlib.contextmanager
def serving(script: dict[str, Any]) -> Iterator[tuple[ScriptedServer, str]]:
    """On a thread of this process: (server, its URL)."""
    server = ScriptedServer(script)
    loop = asyncio.new_event_loop()
    listener = loop.run_until_complete(asyncio.start_server(server.handle, "127.0.0.1", 0))
    port = listener.sockets[0].getsockname()[1]
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield server, f"http://127.0.0.1:{port}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)
        listener.close()
        loop.close()


async def main() -> None:
    with open(sys.argv[1]) as file:
        server = ScriptedServer(json.load(file))
    listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    print(listener.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
