"""Chapter 4: streaming, detokenization, stop strings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from headrace.conformance.check import Chapter
from headrace.conformance.client import Server
from headrace.conformance.outcome import Failed, NotApplicable, require
from headrace.conformance.replies import Generation, show

CHAPTER = Chapter(4, "Streaming, detokenisation, stop strings")

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_ROUND = "🌶ď好 "
SPECIAL = re.compile(r"<\|[\w.-]+\|>|</?s>|<(?:end|start)_of_turn>|<eos>|\[/?INST\]")
"""How control tokens of the common chat formats look in text."""


@CHAPTER.check("Characters whose bytes come in several tokens arrive whole")
async def split_characters(server: Server) -> str:
    prompt = _ROUND * 12
    fields: dict[str, Any] = server.exactly(40)
    ids = await token_ids(server, _ROUND * 2)
    if ids:
        fields["logit_bias"] = {str(token): 100 for token in ids}
    stream, whole = await _both(server, prompt, fields)
    for name, reply in (("stream", stream), ("whole reply", whole)):
        text = reply.text.rstrip(REPLACEMENT)  # the last character may have been cut by max_tokens
        require(REPLACEMENT not in text, f"no U+FFFD in the {name}", show(reply.text))
    require(stream.text == whole.text, f"the stream to say {show(whole.text)!r}", show(stream.text))
    if not any(ord(letter) > 127 for letter in whole.text.rstrip(REPLACEMENT)):
        raise NotApplicable(f"the model did not go on with {_ROUND!r} but with {show(whole.text)!r}")
    return f"{show(whole.text)!r} in {len(stream.times_s)} chunks"


@CHAPTER.check(
    "The parts of a stream are the whole text, with every space",
    part="with the stream interval that the server has",
)
async def spaces(server: Server) -> str:
    seeds, num_chars = (11, 12), 0
    for seed in seeds:
        fields = server.exactly(32) | {"temperature": 1.4, "seed": seed}
        prompt = "A list of names and numbers:\n  1. "
        stream, whole = await _both(server, prompt, fields)
        require(
            stream.text == whole.text, f"the stream with seed {seed} to say {show(whole.text)!r}", show(stream.text)
        )
        num_chars += len(whole.text)
    scored = await server.complete("A list of names and numbers:\n  1. ", logprobs=1, **server.exactly(40))
    tokens = "".join(scored.choice.tokens)
    if tokens.isascii():  # parts of characters have names of their own
        require(
            tokens == scored.text, f"the text {show(tokens)!r}, which the tokens of logprobs spell", show(scored.text)
        )
    return f"{num_chars} characters of {len(seeds)} sampled replies, and one by its tokens"


@CHAPTER.check("No part of a stop string is shown")
async def stop_string(server: Server) -> str:
    prompt, fields = "Once upon a time there was", server.exactly(24)
    text = (await server.complete(prompt, **fields)).text
    start = len(text) // 3 + 1
    stop = text[start : start + max(4, len(text) // 3)]
    if len(stop) < 4:
        raise Failed(f"expected a text of some length; came {text!r}")
    expected = text[: text.index(stop)]
    fields |= {"stop": [stop]}
    for name, reply in zip(("stream", "whole reply"), await _both(server, prompt, fields), strict=True):
        require(reply.text == expected, f"the {name} with stop {stop!r} to be {expected!r}", repr(reply.text))
        require(reply.choice.finish_reason == "stop", f"finish_reason stop of the {name}", reply.choice.finish_reason)
    return f"stopped before {show(stop)!r}"


@CHAPTER.check("What was held back for a stop string is sent when the reply ends without it")
async def held_back_tail(server: Server) -> str:
    prompt, fields = "Once upon a time there was", server.exactly(16)
    text = (await server.complete(prompt, **fields)).text
    if not text:
        raise Failed("expected a text; came none")
    stop = text[-min(6, len(text)) :] + "\x01no model writes this"
    for name, reply in zip(
        ("stream", "whole reply"), await _both(server, prompt, fields | {"stop": stop}), strict=True
    ):
        require(reply.text == text, f"the {name} to be {text!r}", repr(reply.text))
        require(
            reply.choice.finish_reason == "length", f"finish_reason length of the {name}", reply.choice.finish_reason
        )
    return f"the tail {text[-6:]!r} came"


@CHAPTER.check("finish_reason is null until the last chunk; the chunk with the usage has no choices")
async def chunk_shapes(server: Server) -> str:
    chat = await server.stream_chat("Name a colour.", max_tokens=8, temperature=0)
    text = await server.stream("The colour", **server.exactly(8))
    for stream, kind in ((chat, "chat.completion.chunk"), (text, "text_completion")):
        _check_chunks(stream, kind)
    return f"{len(chat.chunks)} chunks of a chat, {len(text.chunks)} of a completion"


@CHAPTER.check("Every token that ends a turn ends the reply, and none is shown")
async def ends_of_turn(server: Server) -> str:
    reasons = []
    for question in ("Say hi.", "What is 1 + 1? Answer with a number only.", "Name a colour, in one word."):
        reply = await server.chat(question, max_tokens=120, temperature=0)
        found = SPECIAL.search(reply.text)
        require(found is None, "no control token in the text", show(reply.text))
        reasons.append(reply.choice.finish_reason)
    require("stop" in reasons, "a reply to a short question to end by itself", f"finish reasons {reasons}")
    return f"{reasons.count('stop')} of 3 replies ended by themselves"


async def _both(server: Server, prompt: object, fields: Mapping[str, Any]) -> tuple[Generation, Generation]:
    """The same request streamed and whole. Asked again if they differ: a server may not give the same twice."""
    for _ in range(2):
        stream = await server.stream(prompt, **fields)
        whole = await server.complete(prompt, **fields)
        if stream.text == whole.text:
            break
    return stream, whole


def _check_chunks(stream: Generation, kind: str) -> None:
    require(stream.is_done, "a stream that ends with [DONE]", show(stream.chunks[-1:]))
    *with_choices, last = stream.chunks
    require(last.get("choices") == [] and last.get("usage"), "a last chunk with usage and choices []", show(last))
    ids = {chunk.get("id") for chunk in stream.chunks}
    require(len(ids) == 1 and None not in ids, "one id in all chunks", ids)
    for chunk in with_choices:
        require(chunk.get("object") == kind, f"object {kind}", show(chunk))
        require(not chunk.get("usage"), "usage in the last chunk only", show(chunk))
        require(len(chunk.get("choices") or ()) == 1, "a choice in each chunk", show(chunk))
    reasons = [chunk["choices"][0].get("finish_reason", "missing") for chunk in with_choices]
    require(
        reasons and set(reasons[:-1]) <= {None} and reasons[-1] in ("stop", "length"),
        "finish_reason null in each chunk and a reason in the last",
        reasons,
    )


async def token_ids(server: Server, text: str) -> list[int]:
    """By /tokenize as vLLM, SGLang and Headrace have it (prompt) or llama.cpp (content); empty if there is none."""
    for field in ("prompt", "content"):
        reply = await server.post("/tokenize", {field: text, "add_special_tokens": False})
        if reply.status != 200 and not reply.is_missing:
            reply = await server.post("/tokenize", {field: text})
        body = reply.json() if reply.status == 200 else {}
        if body.get("tokens"):
            return [token for token in body["tokens"] if isinstance(token, int)]
    return []
