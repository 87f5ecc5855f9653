"""An OpenAI-compatible server without a model that does everything right, but for the faults it is told to have.

Its tokens are words (single characters after a prompt that is not ASCII), and the next one is a pure function of the
prompt, the text so far and, unless greedy, the seed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import threading
import time
import zlib
from collections.abc import Iterator
from typing import Any

CONTEXT = 1024
KEYS = ("k1", "k2")
TOKEN_S = 0.001
PREFILL_S = 0.0006
WORDS = ("sun", "moon", "star", "tree", "lake", "hill", "wind", "rain")
MATCHES = {"[0-9]{3}": "123", "[A-C]{2}-[0-9]{4}": "AB-1234"}
"""Regular expression -> a text of it: those that the suite asks for."""
GENERATING = ("/v1/completions", "/v1/chat/completions")
JSON = b"Content-Type: application/json\r\n"


class Refusal(Exception):
    def __init__(self, status: int, code: str, message: str, headers: bytes = b"") -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.headers = status, code, message, headers


class FakeServer:
    def __init__(self, faults: set[str]) -> None:
        self.faults = faults
        self.token_s = TOKEN_S * (20 if "is_slow" in faults else 3 if "runs_on" in faults else 1)
        self.num_running = 0
        self.seen: dict[tuple[str, str], set[str]] = {}
        """(key, salt) -> prompts computed."""
        self._draws = itertools.count(1000)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            length = re.search(r"(?i)content-length: (\d+)", head)
            body = json.loads(await reader.readexactly(int(length[1]))) if length else {}
            key = re.search(r"(?i)authorization: Bearer (\S+)", head)
            path = head.split()[1]
            try:
                await self.answer(path, body, key[1] if key else "", reader, writer)
            except Refusal as refusal:
                error = {"message": refusal.message, "code": refusal.code}
                write(writer, refusal.status, {"error": error}, refusal.headers)
            await writer.drain()
        writer.close()

    async def answer(
        self, path: str, body: dict[str, Any], key: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if "html" in self.faults:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>")
            return
        if "empty" in self.faults:
            write(writer, 200, {})
            return
        if "hangs_up" in self.faults:
            return
        if "missing" in self.faults:
            raise Refusal(501, "missing", "not here")
        if path == "/health":
            while "blocks_health" in self.faults and self.num_running:
                await asyncio.sleep(0.01)
            write(writer, 200, {})
            return
        if key not in KEYS and not ("opens_metrics" in self.faults and path == "/metrics"):
            raise Refusal(401, "invalid_api_key", "a key is needed")
        if path in GENERATING:
            await self.generate(path, body, key, reader, writer)
        elif path == "/v1/models":
            write(writer, 200, {"data": [{"id": "fake", "max_model_len": CONTEXT}]})
        elif path == "/metrics":
            text = f"vllm:num_requests_running {self.num_running}\n".encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(text), text))
        elif path == "/tokenize":
            write(writer, 200, {"tokens": [ord(letter) for letter in body["prompt"]]})
        elif path == "/detokenize":
            text = "".join(map(chr, body["tokens"]))
            write(writer, 200, {"prompt": text.replace("  ", " ") if "eats_spaces" in self.faults else text})
        elif path == "/v1/embeddings":
            vectors = [
                [1.0 if "one_vector" in self.faults else float(hashed(text, i)) for i in "abc"]
                for text in body["input"]
            ]
            data = [{"index": i, "embedding": vector} for i, vector in enumerate(vectors)]
            write(writer, 200, {"data": data, "usage": {"prompt_tokens": 3}})
        else:
            raise Refusal(404, "not_found", "nothing here")

    async def generate(
        self, path: str, body: dict[str, Any], key: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        is_chat = path == GENERATING[1]
        prompt = json.dumps(body["messages"]) if is_chat else body["prompt"]
        self.check(body, prompt)
        if "crashes_when_busy" in self.faults and self.num_running >= 8:
            raise Refusal(500, "crash", "no block left")
        num_prompt = len(prompt.split())
        place = (key if "shares_prefixes" not in self.faults else "", body.get("cache_salt", "") * self.obeys("salts"))
        known = self.seen.setdefault(place, set())
        num_cached = num_prompt if prompt in known and "forgets_prefixes" not in self.faults else 0
        self.num_running += 1
        try:
            prefill_s = PREFILL_S * (num_prompt - num_cached)
            if "freezes_streams" in self.faults:
                time.sleep(prefill_s)
            await asyncio.sleep(prefill_s)
            known.add(prompt)
            if body.get("stream"):
                writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
            choices = []
            for index in range(min(body.get("n") or 1, 16)):
                choices.append(await self.choose(index, is_chat, prompt, body, reader, writer))
        finally:
            self.num_running -= 1
        num_output = sum(count for _, count in choices)
        usage = {"prompt_tokens": num_prompt, "completion_tokens": num_output}
        usage |= {"prompt_tokens_details": {"cached_tokens": num_cached}}
        if body.get("stream"):
            event(writer, {"id": "1", "object": kind(is_chat, True), "choices": [], "usage": usage})
            writer.write(b"data: [DONE]\n\n")
        else:
            body = {"id": "1", "object": kind(is_chat, False), "choices": [choice for choice, _ in choices]}
            write(writer, 200, body | {"usage": usage})

    def check(self, body: dict[str, Any], prompt: str) -> None:
        if len(prompt.split()) > CONTEXT and "truncates" not in self.faults:
            message = f"{len(prompt.split())} tokens are more than {CONTEXT}"
            if "context_500" in self.faults:
                raise Refusal(500, "oops", message)
            raise Refusal(400, "context_length_exceeded", message)
        too_much = (body.get("n") or 1) > 16 or (body.get("best_of") or 1) > 16 or (body.get("top_logprobs") or 0) > 20
        lists = max(
            len(body.get("stop") or ()) if isinstance(body.get("stop"), list) else 0, len(body.get("logit_bias") or ())
        )
        if (too_much or lists > 1000) and "has_no_caps" not in self.faults:
            raise Refusal(400, "invalid_value", "too much")
        if self.obeys("priority") and not isinstance(body.get("priority", 0), int):
            raise Refusal(400, "invalid_value", "priority is no integer")
        schema = (body.get("response_format") or {}).get("json_schema", {}).get("schema", {})
        pattern = json.dumps(schema)
        if "([" in pattern and self.obeys("schemas") and "compiles_anything" not in self.faults:
            raise Refusal(400, "invalid_value", "the pattern is no regular expression")
        if body.get("regex") == "foo[(" and self.obeys("regex"):
            raise Refusal(400 if "bad_regex_500" not in self.faults else 500, "invalid_value", "no regular expression")
        if not body.get("messages", True):
            raise Refusal(400, "invalid_value", "messages is empty")
        for message in body.get("messages", ()):
            if not isinstance(message["content"], str):
                raise Refusal(400 if "template_500" not in self.faults else 500, "invalid_value", "content is no text")

    def obeys(self, field: str) -> bool:
        return f"ignores_{field}" not in self.faults and "ignores_fields" not in self.faults

    async def choose(
        self,
        index: int,
        is_chat: bool,
        prompt: str,
        body: dict[str, Any],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> tuple[dict[str, Any], int]:
        """One choice: streamed as it comes, and as a whole; and its number of tokens."""
        calls = self.calls(body)
        text = self.forced_text(body)
        tokens = text if text is not None else self.tokens(index, prompt, body)
        limit = len(text) if text is not None else body.get("max_tokens", 16)
        stops = [body["stop"]] if isinstance(body.get("stop"), str) else body.get("stop") or []
        sent, so_far, scored, reason = "", "", [], "length"
        early = "" if "says_empty_reason" in self.faults else None
        for token in itertools.islice(tokens, 0 if calls else limit):
            await asyncio.sleep(self.token_s)
            if reader.at_eof() and "runs_on" not in self.faults:
                raise ConnectionError
            so_far += token
            scored.append(self.logprob(prompt, so_far, body))
            cut = min((so_far.find(stop) for stop in stops if stop in so_far), default=-1)
            if cut >= 0:
                so_far, reason = so_far[:cut], "stop"
                break
            safe = len(so_far) if "leaks_stops" in self.faults else len(so_far) - held(so_far, stops)
            if safe > len(sent):
                piece, sent = so_far[len(sent) : safe], so_far[:safe]
                if body.get("stream"):
                    shown = "\ufffd" if "cuts_characters" in self.faults and not piece.isascii() else piece
                    event(writer, chunk(is_chat, index, shown, early))
                    if "runs_on" not in self.faults:
                        await writer.drain()
        if text is not None or (is_chat and not body.get("ignore_eos")):
            reason = "stop"
            so_far += "<|im_end|>" if "shows_control" in self.faults else ""
        reason = "tool_calls" if calls else reason
        if body.get("stream"):
            rest = "" if "drops_tail" in self.faults else so_far[len(sent) :]
            if rest:
                event(writer, chunk(is_chat, index, rest, early))
            event(writer, chunk(is_chat, index, "", reason, calls))
        choice: dict[str, Any] = {"index": index, "finish_reason": reason}
        if body.get("logprobs"):
            choice["logprobs"] = {
                "tokens": [f"t{i}" for i in range(len(scored))],
                "token_logprobs": scored,
                "top_logprobs": [{f"t{i}": value - i for i in range(5)} for value in scored],
            }
            choice["logprobs"] |= {"tokens": re.findall(" ?[^ ]+", so_far)}
        if is_chat:
            return choice | {"message": {"content": so_far, "tool_calls": calls}}, len(scored)
        return choice | {"text": so_far}, len(scored)

    def tokens(self, index: int, prompt: str, body: dict[str, Any]) -> Iterator[str]:
        if not prompt.isascii():
            yield from itertools.cycle("🌶ď好 ")
        source: object = ""
        if body.get("temperature", 1) > 0:
            source = body.get("seed", 0) if "forgets_seeds" not in self.faults else next(self._draws)
        text = ""
        while True:
            word = " " + WORDS[hashed(prompt + text, (source, index if source != "" else 0)) % len(WORDS)]
            text += word
            yield word

    def logprob(self, prompt: str, text: str, body: dict[str, Any]) -> float:
        value = -0.1 - hashed(prompt + text) % 100 / 50
        if "scales_logprobs" in self.faults:
            value /= body.get("temperature") or 1
        if "batch_changes_logprobs" in self.faults and self.num_running > 1:
            value -= 1e-4
        return value if "has_no_logprobs" not in self.faults else 0.0

    def forced_text(self, body: dict[str, Any]) -> str | None:
        """What a constraint leaves; None without one."""
        format = body.get("response_format") or {}
        if format.get("type") == "json_schema" and self.obeys("schemas"):
            return json.dumps(instance(format["json_schema"]["schema"]))
        if "regex" in body and self.obeys("regex"):
            return MATCHES.get(body["regex"], "")
        if "choice" in body and self.obeys("choices"):
            return str(body["choice"][0])
        return None

    def calls(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        wanted = body.get("tool_choice")
        if wanted in (None, "none", "auto") or not self.obeys("tool_choice"):
            return []
        functions = [tool["function"] for tool in body["tools"]]
        if isinstance(wanted, dict):
            functions = [f for f in functions if f["name"] == wanted["function"]["name"]]
        name, arguments = functions[0]["name"], json.dumps(instance(functions[0]["parameters"]))
        if body.get("stream") and "cuts_arguments" in self.faults:
            arguments = arguments[:-3] + '"}'
        return [{"index": 0, "id": "1", "function": {"name": name, "arguments": arguments}}]


def hashed(*values: object) -> int:
    return zlib.crc32(repr(values).encode())


def held(text: str, stops: list[str]) -> int:
    """Length of the longest tail that a stop string begins with."""
    return max((k for stop in stops for k in range(1, len(stop)) if text.endswith(stop[:k])), default=0)


def instance(schema: dict[str, Any]) -> Any:
    """A value that obeys a simple schema."""
    if "enum" in schema:
        return schema["enum"][0]
    if "oneOf" in schema:
        return instance(schema["oneOf"][0])
    match schema.get("type"):
        case "object":
            return {name: instance(part) for name, part in schema.get("properties", {}).items()}
        case "array":
            return [instance(schema["items"])] * schema.get("minItems", 1)
    return schema.get("type") == "boolean" or "a"


def kind(is_chat: bool, is_chunk: bool) -> str:
    return ("chat.completion.chunk" if is_chunk else "chat.completion") if is_chat else "text_completion"


def chunk(is_chat: bool, index: int, text: str, reason: str | None, calls: object = None) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": index, "finish_reason": reason}
    choice |= {"delta": {"content": text, "tool_calls": calls}} if is_chat else {"text": text}
    return {"id": "1", "object": kind(is_chat, True), "choices": [choice], "usage": None}


def event(writer: asyncio.StreamWriter, value: object) -> None:
    writer.write(b"data: " + json.dumps(value).encode() + b"\n\n")


def write(writer: asyncio.StreamWriter, status: int, value: object, headers: bytes = b"") -> None:
    data = json.dumps(value).encode()
    head = b"HTTP/1.1 %d X\r\nContent-Length: %d\r\nConnection: close\r\n%b%b\r\n" % (status, len(data), JSON, headers)
    writer.write(head + data)


@contextlib.contextmanager
def faking(*faults: str) -> Iterator[str]:
    """On a thread of this process: its URL."""
    server = FakeServer(set(faults))
    loop = asyncio.new_event_loop()
    listener = loop.run_until_complete(asyncio.start_server(server.handle, "127.0.0.1", 0, limit=1 << 24))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)
        time.sleep(0)
        listener.close()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
