"""Chapter 7: errors, cancellation, shutdown, metrics, security."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any

from headrace.conformance.check import Chapter
from headrace.conformance.client import CHAT, COMPLETIONS, Server, after_events, begins, messages
from headrace.conformance.gauges import KV_USED, RUNNING, Gauge
from headrace.conformance.launcher import Launcher
from headrace.conformance.outcome import Failed, NotApplicable, require
from headrace.conformance.replies import Reply, read_whole, show

CHAPTER = Chapter(7, "API errors, cancellation, shutdown, metrics, security")

_CHAT_BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 1}
_PROMPT_BODY: dict[str, Any] = {"prompt": "Hi.", "max_tokens": 1}
_LEAVE_AFTER = (2, 5, 9, 14)
"""Events; a guess may be under way at any of them."""
_TAKES_NO_MORE_S = 0.3
"""After SIGTERM."""
_EXIT_S = 15.0

OPEN_ROUTES = ("/health", "/v1/health")
OPENAI_ROUTES: Sequence[tuple[str, str, dict[str, Any] | None]] = (
    ("POST", CHAT, _CHAT_BODY),
    ("POST", COMPLETIONS, _PROMPT_BODY),
    ("POST", "/chat/completions", _CHAT_BODY),
    ("POST", "/completions", _PROMPT_BODY),
    ("POST", "/v1/embeddings", {"input": "Hi."}),
    ("POST", "/embeddings", {"input": "Hi."}),
    ("GET", "/v1/models", None),
    ("GET", "/models", None),
    ("POST", "/tokenize", {"prompt": "Hi.", "content": "Hi."}),
    ("POST", "/detokenize", {"tokens": [1]}),
    ("POST", "/render", {"messages": [{"role": "user", "content": "Hi."}]}),
    ("POST", "/apply-template", {"messages": [{"role": "user", "content": "Hi."}]}),
    ("POST", "/invocations", _PROMPT_BODY),
    ("POST", "/score", {"text_1": "a", "text_2": "b"}),
    ("POST", "/v1/score", {"text_1": "a", "text_2": "b"}),
    ("POST", "/rerank", {"query": "a", "documents": ["b"]}),
    ("POST", "/v1/rerank", {"query": "a", "documents": ["b"]}),
    ("POST", "/pooling", {"input": "Hi."}),
    ("POST", "/classify", {"input": "Hi."}),
    ("POST", "/infill", {"input_prefix": "a", "input_suffix": "b", "max_tokens": 1, "n_predict": 1}),
    ("GET", "/metrics", None),
    ("GET", "/version", None),
    ("GET", "/props", None),
    ("GET", "/slots", None),
    ("GET", "/server_info", None),
    ("GET", "/get_model_info", None),
    ("GET", "/openapi.json", None),
    ("GET", "/docs", None),
    ("GET", "/", None),
)
OTHER_DIALECTS: Sequence[tuple[str, str, dict[str, Any] | None]] = (
    ("POST", "/v1/messages", _CHAT_BODY),
    ("POST", "/v1/messages/count_tokens", _CHAT_BODY),
    ("POST", "/v1/responses", {"input": "Hi.", "max_output_tokens": 1}),
    ("POST", "/completion", {"prompt": "Hi.", "n_predict": 1}),
    ("POST", "/generate", {"text": "Hi.", "inputs": "Hi.", "sampling_params": {"max_new_tokens": 1}}),
    ("POST", "/api/generate", {"prompt": "Hi.", "stream": False, "options": {"num_predict": 1}}),
    ("POST", "/api/chat", _CHAT_BODY | {"stream": False}),
    ("GET", "/api/tags", None),
    ("POST", "/api/show", {}),
)


@CHAPTER.check("A client that leaves ends its request, streamed or not")
async def disconnect(server: Server) -> str:
    await server.quiet()
    before = await server.gauge(RUNNING)
    fields = server.exactly(min(1500, (server.context_length or 2048) - 200))
    await server.stream(server.words(12), until=after_events(4), **fields)
    streamed_s = await _freed(server, RUNNING, before, "streamed")
    leaving = asyncio.create_task(server.post(COMPLETIONS, {"prompt": server.words(12), **fields}))
    await asyncio.sleep(0.6)
    if leaving.done():
        reply = leaving.result()
        require(reply.status == 200, "status 200 of a long request", reply)
        raise NotApplicable(f"a request of {fields['max_tokens']} tokens was over before its client could leave")
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    whole_s = await _freed(server, RUNNING, before, "not streamed")
    return f"freed after {streamed_s:.2f} s when streamed, {whole_s:.2f} s when not"


@CHAPTER.process_check("The same with speculation on")
async def disconnect_speculating(launcher: Launcher) -> str:
    """Clients that leave in the midst of a text that repeats itself, of which much can be guessed."""
    if not launcher.command.speculate_args:
        raise NotApplicable("needs the server's option for speculation: give --speculate-args")
    async with launcher.start(more=launcher.command.speculate_args) as started:
        server = started.server
        prompt = f"{server.words(12)}. " * 8
        fields = server.exactly(min(1000, (server.context_length or 2048) // 2))
        await server.complete(prompt, **server.exactly(24))
        await server.quiet()
        gauges = [RUNNING] + [KV_USED] * await _has(server, KV_USED)
        before = [await server.gauge(gauge) for gauge in gauges]
        slowest_s = 0.0
        for num_events in _LEAVE_AFTER:
            await server.stream(prompt, until=after_events(num_events), **fields)
            slowest_s = max(
                [slowest_s] + [await _freed(server, *each, "streamed") for each in zip(gauges, before, strict=True)]
            )
        again = await server.complete(prompt, **server.exactly(24))
        require(again.num_output == 24, "24 tokens after clients have left", again.num_output)
    told = " and ".join(gauge.what for gauge in gauges)
    return f"{len(_LEAVE_AFTER)} clients left; {told} as before after {slowest_s:.2f} s at most"


@CHAPTER.check("A prompt beyond the context: status 400, code context_length_exceeded, token counts")
async def context_overflow(server: Server) -> str:
    context = server.known_context()
    text = server.words(1.5 * context + 64)
    for path, body in ((CHAT, {"messages": messages(text)}), (COMPLETIONS, {"prompt": text})):
        for stream in (False, True):
            reply = await server.post(path, body | {"max_tokens": 4, "stream": stream})
            what = f"{path} with stream {str(stream).lower()}"
            require(reply.status == 400, f"status 400 of {what}", reply)
            code = reply.error().get("code")
            require(
                code == "context_length_exceeded",
                f"code context_length_exceeded of {what}",
                f"code {code!r} with {reply}",
            )
            counts = json.dumps(reply.error())
            require(str(context) in counts, f"the context length {context} in the error of {what}", reply)
    return f"refused: {reply}"


@CHAPTER.check("A prompt is never cut silently")
async def no_truncation(server: Server) -> str:
    context = server.known_context()
    text = "The password is swordfish. " + server.words(1.4 * context) + " What is the password?"
    reply = await server.post(CHAT, {"messages": messages(text), "max_tokens": 8})
    if reply.status in (400, 413, 422):
        return f"refused: {reply}"
    require(reply.status == 200, "status 400, or 200 and a word about the truncation", reply)
    body = reply.json()
    require(body.get("truncated") is True, "status 400, or truncated: true in the reply", show(body))
    return "cut, and the reply says so"


@CHAPTER.process_check("After SIGTERM running requests end well and new ones are refused")
async def sigterm(launcher: Launcher) -> str:
    async with launcher.start() as started:
        server = started.server
        fields = server.exactly(min(200, (server.context_length or 2048) // 2))
        begun = asyncio.Event()
        watch = after_events(4, begun.set)
        whole = asyncio.create_task(server.complete(server.words(12), **fields))
        stream = asyncio.create_task(server.stream(server.words(12), until=watch, **fields))
        await begins(begun, stream)
        started.process.terminate()
        refused = await _refused(server)
        is_over = stream.done()
        replies = await asyncio.gather(stream, whole, return_exceptions=True)
        for what, reply in zip(("stream", "reply"), replies, strict=True):
            if isinstance(reply, BaseException):
                raise reply
            require(reply.choice.finish_reason, f"a finish_reason at the end of the {what}", "none")
            if "ignore_eos" in fields:
                require(
                    reply.num_output == fields["max_tokens"],
                    f"{fields['max_tokens']} tokens of the {what}",
                    reply.num_output,
                )
        require(stream.result().is_done, "[DONE] at the end of the stream", "none")
        if is_over:  # and well, so that it may have been so before the signal
            raise NotApplicable(f"a stream of {fields['max_tokens']} tokens was over before a new request was answered")
        status = await started.ended(_EXIT_S)
        require(status is not None, f"an end within {_EXIT_S:.0f} s after the last reply", "none")
        require(status == 0, "exit status 0", status)
    return f"a stream and a whole reply of {fields['max_tokens']} tokens ended well; a new request: {refused}"


async def _refused(server: Server) -> str:
    """How a new request is refused. Raises `Failed` if one is taken that was sent a while after the signal."""
    start_s = time.monotonic()
    while True:
        late_s = time.monotonic() - start_s
        try:
            reply = await server.post(COMPLETIONS, _PROMPT_BODY)
        except Failed:
            return "no connection"
        if reply.status in (429, 503):
            return str(reply)
        require(reply.status == 200, "status 503 of a new request after SIGTERM", reply)
        require(late_s < _TAKES_NO_MORE_S, f"no new request to be taken {late_s:.1f} s after SIGTERM", reply)
        await asyncio.sleep(0.02)


@CHAPTER.check("Without a key every route but /health is closed")
async def guarded(server: Server) -> str:
    if server.target.api_key is None:
        raise NotApplicable("the server was given without a key; --api-key has it checked")
    reply = await server.post(CHAT, _CHAT_BODY, key=None)
    require(reply.status in (401, 403), f"status 401 of {CHAT} without a key", reply)
    wrong = await server.post(CHAT, _CHAT_BODY, key=f"{server.target.api_key}x")
    require(wrong.status in (401, 403), f"status 401 of {CHAT} with a wrong key", wrong)
    return await _all_closed(server, OPENAI_ROUTES)


@CHAPTER.check("Routes of other dialects are closed too")
async def guarded_dialects(server: Server) -> str:
    if server.target.api_key is None:
        raise NotApplicable("the server was given without a key; --api-key has it checked")
    with_key = [await _ask(server, method, path, body, "") for method, path, body in OTHER_DIALECTS]
    there = [route for route, reply in zip(OTHER_DIALECTS, with_key, strict=True) if reply.status not in (404, 405)]
    if not there:
        raise NotApplicable("the server has no other dialect that is known here")
    return await _all_closed(server, there)


@CHAPTER.check(
    "One call cannot ask for too much: n, best_of, stop, logit_bias",
    part="far beyond any sensible cap",
)
async def caps(server: Server) -> str:
    base = {"prompt": "Hi.", "max_tokens": 1}
    chat = {"messages": messages("Hi."), "max_tokens": 1}
    calls: Sequence[tuple[str, str, dict[str, Any]]] = (
        ("n 10000 of a completion", COMPLETIONS, base | {"n": 10000}),
        ("n 10000 of a chat", CHAT, chat | {"n": 10000}),
        ("best_of 10000", COMPLETIONS, base | {"best_of": 10000}),
        ("20000 stop strings", COMPLETIONS, base | {"stop": [f"stop{i}" for i in range(20000)]}),
        ("a logit_bias of 20000 tokens", COMPLETIONS, base | {"logit_bias": {str(i): 0 for i in range(20000)}}),
        ("top_logprobs 10000", CHAT, chat | {"logprobs": True, "top_logprobs": 10000}),
    )
    accepted = []
    for what, path, body in calls:
        reply = await server.post(path, body, timeout_s=20)
        if reply.status == 200:
            accepted.append(what)
        else:
            require(400 <= reply.status < 500, f"status 400 for {what}", reply)
    require(not accepted, "status 400 for each", f"200 for {', '.join(accepted)}")
    return f"{len(calls)} refused"


@CHAPTER.check("Under overload no request fails on the server: it is answered, or 429 with Retry-After")
async def overload(server: Server) -> str:
    fields = {"messages": messages(server.words(10)), **server.exactly(8)}
    replies = await asyncio.gather(*(server.post(CHAT, fields) for _ in range(30)))
    for reply in replies:
        require(reply.status in (200, 429), "status 200 or 429 of each of 30 requests at once", reply)
        if reply.status == 200:
            require(read_whole(reply).choice.finish_reason, "a finish reason of each reply", reply)
        else:
            require(reply.headers.get("retry-after"), "Retry-After with status 429", dict(reply.headers))
    done = sum(reply.status == 200 for reply in replies)
    require(done, "some of 30 requests at once to be answered", "none")
    return f"{done} answered, {len(replies) - done} told to come again"


async def _has(server: Server, gauge: Gauge) -> bool:
    try:
        await server.gauge(gauge)
    except NotApplicable:
        return False
    return True


async def _freed(server: Server, gauge: Gauge, before: float, what: str) -> float:
    """Seconds until the gauge is back. Raises `Failed` after one."""
    start_s = time.monotonic()
    while (value := await server.gauge(gauge)) > before:
        if time.monotonic() - start_s > 1.0:
            raise Failed(
                f"expected a request ({what}) to end within 1 s after its client left; {gauge.what}: {value:g}, "
                f"{before:g} before it"
            )
        await asyncio.sleep(0.03)
    return time.monotonic() - start_s


async def _all_closed(server: Server, routes: Sequence[tuple[str, str, dict[str, Any] | None]]) -> str:
    is_open, closed = [], 0
    for method, path, body in routes:
        reply = await _ask(server, method, path, body, None)
        closed += reply.status in (401, 403)
        if reply.status not in (401, 403, 404, 405):  # what is not there is closed
            is_open.append(f"{path} ({reply.status})")
    require(not is_open and closed, "status 401 without a key of every route", f"answers of {', '.join(is_open)}")
    return f"{closed} of {len(routes)} routes answer 401, the others do not exist"


async def _ask(server: Server, method: str, path: str, body: dict[str, Any] | None, key: str | None) -> Reply:
    if method == "GET":
        return await server.get(path, key=key, timeout_s=20)
    return await server.post(path, body or {}, key=key, timeout_s=20)
