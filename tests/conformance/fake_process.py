"""The fake server as a process: python -m tests.conformance.fake_process --port PORT [--model NAME] [--threads N]
[--speculate] [FAULT ...]. It does everything right, but for the faults it is told to have."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from headrace.conformance import toy_model
from tests.conformance.fake_server import FakeServer, Refusal, write

WARM_S = 0.3
"""Before a server that is ready too early can answer."""
TOKEN_S = 0.004
"""Long beside what sleeping and waking take, or speeds would differ by chance."""
LOGPROBS = {"tokens": ["t0"], "token_logprobs": [-1.0]}
OTHER_SPEED = 3
"""How much slower what is slow is."""


class FakeProcess(FakeServer):
    def __init__(self, options: argparse.Namespace) -> None:
        faults = set(options.faults)
        if options.speculate and "runs_on_speculating" in faults:
            faults.add("runs_on")
        super().__init__(faults)
        self.options = options
        self.start_s = time.monotonic()
        self.is_draining = False
        self.token_s = TOKEN_S
        is_large = "f16" in options.model and "quantized_is_slow" not in faults
        if is_large or ("default_is_slow" in faults and options.threads is None):
            self.token_s *= OTHER_SPEED
        if "overcommits" in faults:
            for _ in range(4):
                threading.Thread(target=self.burn, daemon=True).start()

    def burn(self) -> None:
        """Outside the interpreter's lock."""
        while True:
            if self.num_running:
                hashlib.pbkdf2_hmac("sha256", b"", b"", 3000)
            else:
                time.sleep(0.001)

    async def generate(self, path: str, body: dict[str, Any], key: str, *ends: Any) -> None:
        if self.is_draining and "takes_all" not in self.faults:
            raise Refusal(503, "shutting_down", "the server is shutting down")
        if "is_ready_early" in self.faults and time.monotonic() < self.start_s + WARM_S:
            raise Refusal(503, "loading", "the model is being loaded")
        if isinstance(body.get("prompt"), list):
            write(ends[1], 200, self.toy_reply(body["prompt"]))
        else:
            await super().generate(path, body, key, *ends)

    def toy_reply(self, ids: list[int]) -> dict[str, Any]:
        """Of the toy model, as its file is named."""
        name = Path(self.options.model).stem.removeprefix("toy-")
        known = toy_model.logprobs("base" if "ignores_scaling" in self.faults else name)
        top = {f"t{i}": value for i, value in enumerate(known[len(ids)])}
        choice = {"index": 0, "text": "t0", "finish_reason": "length", "logprobs": LOGPROBS | {"top_logprobs": [top]}}
        return {"choices": [choice], "usage": {"prompt_tokens": len(ids), "completion_tokens": 1}}

    async def serve(self) -> None:
        ended = asyncio.Event()
        listener = await asyncio.start_server(self.handle, "127.0.0.1", self.options.port, limit=1 << 24)
        if "dies" not in self.faults:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
        await ended.wait()
        self.is_draining = True
        while self.num_running:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        listener.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", default="fake")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--speculate", action="store_true")
    parser.add_argument("faults", nargs="*")
    options = parser.parse_args()
    if "knows_no_gguf" in options.faults and options.model.endswith(".gguf"):
        sys.exit("error: a file of an unknown kind")
    if "ignores_cpuset" in options.faults:
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    asyncio.run(FakeProcess(options).serve())
    if "fails_at_the_end" in options.faults:
        sys.exit(3)


if __name__ == "__main__":
    main()
