"""Does the README's first command serve? Starts it, asks it as a client would, ends it: python scripts/smoke.py COMMAND

COMMAND ends in a server that prints Headrace's ready line: `make serve PORT=0`. Exit code 0 where everything went well.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import openai

START_S = 900  # the first start builds the kernels and fetches the model
END_S = 30


def main(command: list[str]) -> None:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    watchdog = threading.Timer(START_S, process.kill)
    watchdog.start()
    try:
        url, model = wait_until_ready(process)
        watchdog.cancel()
        ask(url, model)
        server = server_of(process.pid)
        subprocess.run(["kill", "-TERM", str(server)], check=True)
        code = process.wait(END_S)
        assert code == 0, f"{command[0]} ended with {code} after SIGTERM to the server"
        print("smoke: SIGTERM ended it with exit code 0")
    finally:
        watchdog.cancel()
        if process.poll() is None:
            for pid in (server_of(process.pid), process.pid):
                subprocess.run(["kill", "-KILL", str(pid)], check=False)


def wait_until_ready(process: subprocess.Popen[str]) -> tuple[str, str]:
    """(URL, model) of the ready line; what comes before it is passed on."""
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        if match := re.match(r"Headrace ready: (http://\S+/v1)  model (\S+)", line):
            return match[1], match[2]
    raise SystemExit(f"smoke: no ready line; the command ended with {process.wait()}")


def ask(url: str, model: str) -> None:
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120)
    served = [entry.id for entry in client.models.list()]
    assert served == [model], served
    start_s = time.monotonic()
    reply = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is the capital of France? Answer in one sentence."}],
        temperature=0,
        max_tokens=30,
    )
    text = reply.choices[0].message.content
    assert text and "Paris" in text, text
    print(f"smoke: {model} answered {text!r} in {time.monotonic() - start_s:.2f} s")


def server_of(pid: int) -> int:
    """The process at the end of a chain of only children: make's recipe, or `pid` itself."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()  # a command's name may hold anything
        except OSError:
            continue  # it has just ended
        if int(fields[1]) == pid:
            return server_of(int(stat.parent.name))
    return pid


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # by way of the finally
    main(sys.argv[1:])
