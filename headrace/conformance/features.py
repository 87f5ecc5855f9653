"""Chapter 8: what clients ask of an API beyond text: structured output, forced calls, further endpoints.

Fields outside OpenAI's API go by the names of vLLM, llama.cpp or Headrace; another server may have the same under
another name.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import mean, median
from typing import Any

from headrace.conformance import toy_model
from headrace.conformance.check import Chapter
from headrace.conformance.client import CHAT, COMPLETIONS, Refused, Server, messages
from headrace.conformance.launcher import Launcher
from headrace.conformance.outcome import Failed, NotApplicable, require
from headrace.conformance.replies import Call, Generation, show
from headrace.conformance.streaming import token_ids
from headrace.conformance.structure import WEATHER, first_obeyed, response_format

CHAPTER = Chapter(8, "Structured output, forced calls, further endpoints")

_SEEDS = (1, 2, 3)
_COLOUR: Mapping[str, Any] = {
    "type": "object",
    "properties": {"colour": {"type": "string", "enum": ["red", "green"]}, "is_dark": {"type": "boolean"}},
    "required": ["colour", "is_dark"],
    "additionalProperties": False,
}
_TIME = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "The time in a zone.",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"type": "string", "enum": ["UTC", "CET"]}},
            "required": ["zone"],
            "additionalProperties": False,
        },
    },
}


@CHAPTER.check("response_format json_object: the reply is a JSON object")
async def json_object(server: Server) -> str:
    ended = 0
    for seed in _SEEDS:
        reply = await server.chat(
            "Reply with a small JSON object that has the key name.",
            response_format={"type": "json_object"},
            max_tokens=150,
            temperature=1,
            seed=seed,
        )
        if reply.choice.finish_reason == "length":
            require(reply.text.lstrip()[:1] == "{", "a JSON object", show(reply.text))
            continue
        ended += 1
        require(isinstance(_parsed(reply.text), dict), "a JSON object", show(reply.text))
    require(ended, f"one of {len(_SEEDS)} replies to end within 150 tokens", "none")
    return f"{ended} of {len(_SEEDS)} replies ended, as objects"


@CHAPTER.check("response_format json_schema: the reply obeys the schema")
async def json_schema(server: Server) -> str:
    for seed in _SEEDS:
        reply = await server.chat(
            "Tell me a colour.", max_tokens=80, temperature=1, seed=seed, **response_format(_COLOUR)
        )
        value = _parsed(reply.text)
        fits = isinstance(value, dict) and value.keys() == {"colour", "is_dark"}
        require(
            fits and value["colour"] in ("red", "green") and isinstance(value["is_dark"], bool),
            'an object such as {"colour": "red", "is_dark": true}',
            show(reply.text),
        )
    return f"{len(_SEEDS)} replies, such as {show(reply.text)}"


@CHAPTER.check("regex: the text is one of the expression's")
async def regex(server: Server) -> str:
    pattern = "[A-C]{2}-[0-9]{4}"
    return await _constrained(server, "regex", pattern, lambda text: re.fullmatch(pattern, text) is not None)


@CHAPTER.check("grammar: the text is one of the grammar's", part="in GBNF or in Lark's form")
async def grammar(server: Server) -> str:
    def fits(text: str) -> bool:
        return text in ("zig zag", "zag zag", "zig zig", "zag zig")

    try:
        return await _constrained(server, "grammar", 'root ::= word " " word\nword ::= "zig" | "zag"\n', fits)
    except Failed as gbnf:
        try:
            return await _constrained(server, "grammar", 'start: word " " word\nword: "zig" | "zag"\n', fits)
        except Failed:
            raise gbnf from None


@CHAPTER.check("choice: the text is one of those given")
async def choice(server: Server) -> str:
    words = ["zanzibar", "quagga", "ouzo"]
    return await _constrained(server, "choice", words, lambda text: text in words)


@CHAPTER.check("tool_choice required: the reply is a call that obeys the parameters")
async def tool_choice_required(server: Server) -> str:
    reply = await server.chat(
        "Tell me a story.", tools=[WEATHER, _TIME], tool_choice="required", max_tokens=100, temperature=0
    )
    _check_call(reply, {"get_weather", "get_time"})
    require(reply.choice.finish_reason == "tool_calls", "finish_reason tool_calls", reply.choice.finish_reason)
    return _told(reply.choice.calls)


@CHAPTER.check("tool_choice with a name: the reply is a call of that function")
async def tool_choice_named(server: Server) -> str:
    for tool in ("get_time", "get_weather"):
        forced = {"type": "function", "function": {"name": tool}}
        reply = await server.chat(
            "Tell me a story.", tools=[WEATHER, _TIME], tool_choice=forced, max_tokens=100, temperature=0
        )
        _check_call(reply, {tool})
    return _told(reply.choice.calls)


@CHAPTER.check("tool_choice none: no call is made")
async def tool_choice_none(server: Server) -> str:
    reply = await server.chat(
        "What is the weather in Paris?", tools=[WEATHER], tool_choice="none", max_tokens=24, temperature=0
    )
    require(not reply.choice.calls and reply.text, "text and no call", show(reply.body))
    wrong = {"type": "function", "function": {"name": "no_such_function"}}
    body = {"messages": messages("Hi."), "tools": [WEATHER], "tool_choice": wrong, "max_tokens": 4}
    refused = await server.post(CHAT, body)
    require(refused.status in (400, 422), "status 400 for a tool_choice that names no tool", refused)
    return f"text; refused: {refused}"


@CHAPTER.check("/v1/embeddings: one vector per input, equal for equal texts")
async def embeddings(server: Server) -> str:
    texts = ["The cat sleeps.", "Stocks fell sharply today.", "The cat sleeps."]
    reply = await server.post("/v1/embeddings", {"input": texts})
    if reply.status != 200:
        raise Refused("/v1/embeddings", reply)
    body = reply.json()
    data = body.get("data") if isinstance(body, dict) else None
    if not isinstance(data, list) or len(data) != 3:
        raise Failed(f"expected data with 3 embeddings; came {show(body)}")
    first, second, third = [each["embedding"] for each in sorted(data, key=lambda each: each["index"])]
    require(
        len(first) == len(second) == len(third) > 1 and all(isinstance(x, int | float) for x in first),
        "three vectors of one length",
        show([first[:2], second[:2]]),
    )
    near, far = (max(abs(a - b) for a, b in zip(first, other, strict=True)) for other in (third, second))
    require(near < 1e-3 < far, "equal texts to have equal vectors, others not", f"differences of {near:g} and {far:g}")
    require((body.get("usage") or {}).get("prompt_tokens"), "usage.prompt_tokens", body.get("usage"))
    return f"three vectors of {len(first)} numbers"


@CHAPTER.check("n: that many different choices, in both endpoints and in streams")
async def several_choices(server: Server) -> str:
    fields: dict[str, Any] = {"n": 3, "max_tokens": 12, "temperature": 1.5, "seed": 5}
    for reply in (
        await server.complete("My favourite", **fields),
        await server.chat("Tell me something.", **fields),
        await server.stream("My favourite", **fields),
    ):
        require(sorted(reply.choices) == [0, 1, 2], "choices 0, 1 and 2", sorted(reply.choices))
        texts = {each.text for each in reply.choices.values()}
        require(len(texts) > 1, "choices that differ at temperature 1.5", show(sorted(texts)))
        missing = [i for i, each in reply.choices.items() if each.finish_reason is None]
        require(not missing, "a finish_reason of each choice", f"none of {missing}")
    return "3 choices each"


@CHAPTER.check("best_of: the most probable of that many is given; fewer than n is refused")
async def best_of(server: Server) -> str:
    body = {"prompt": "My favourite", "max_tokens": 10, "temperature": 1.5, "n": 3, "best_of": 2}
    reply = await server.post(COMPLETIONS, body)
    require(reply.status in (400, 422), "status 400 for best_of 2 with n 3", reply)
    fields: dict[str, Any] = {"max_tokens": 10, "temperature": 1.5, "logprobs": 1}
    many = await server.complete("My favourite", n=8, seed=1, **fields)
    best = await server.complete("My favourite", n=1, best_of=8, seed=2, **fields)
    require(len(best.choices) == 1, "one choice of best_of 8", len(best.choices))
    typical = median(_mean_logprob(many, index) for index in many.choices)
    reached = _mean_logprob(best, 0)
    require(reached >= typical, f"a mean logprob above {typical:.2f}, the median of 8 choices", f"{reached:.2f}")
    return f"mean logprob {reached:.2f}; the median of 8 choices is {typical:.2f}"


@CHAPTER.check("echo: the completion begins with the prompt")
async def echo(server: Server) -> str:
    prompt = "The sun rises in the"
    plain = await server.complete(prompt, **server.exactly(4))
    echoed = await server.complete(prompt, echo=True, **server.exactly(4))
    require(echoed.text == prompt + plain.text, repr(prompt + plain.text), repr(echoed.text))
    return repr(echoed.text)


async def suffix_of_a_toy(launcher: Launcher) -> str:
    """A toy model that was made for it: logprobs are those of the marks and both texts, put together here."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "toy-base.gguf"
        toy_model.write(file, toy_model.ROPES["base"], fills_in=True)
        async with launcher.start(model=file) as started:
            server = started.server
            seen = await suffix(server)
            before, after = await token_ids(server, _GAP[0]), await token_ids(server, _GAP[1])
            prefix_id, suffix_id, middle_id = toy_model.FILL_IN
            ids = [prefix_id, *before, suffix_id, *after, middle_id]
            options: dict[str, Any] = {"max_tokens": 4, "temperature": 0, "logprobs": 1}
            expected = await server.complete(ids, **options)
            found = await server.complete(_GAP[0], suffix=_GAP[1], **options)
            require(found.num_prompt == len(ids), f"a prompt of {len(ids)} tokens", found.num_prompt)
            pairs = zip(found.choice.logprobs, expected.choice.logprobs, strict=True)
            distance = max(abs((one or 0.0) - (other or 0.0)) for one, other in pairs)
            require(distance < 1e-3, "logprobs of prefix, suffix and middle in this order", show(found.choice.logprobs))
    return f"{seen} with a toy model that was made for it, and the logprobs that its marks give"


_GAP = ("def add(a, b):\n    ", "\n\nprint(add(1, 2))\n")
"""What stands before and after."""


@CHAPTER.check(
    "suffix: what comes after the text is read",
    part="that the prompt grows by it, where the model was made for it",
    otherwise=suffix_of_a_toy,
)
async def suffix(server: Server) -> str:
    prompt, after = _GAP
    plain = await server.complete(prompt, max_tokens=4)
    reply = await server.post(COMPLETIONS, {"prompt": prompt, "suffix": after, "max_tokens": 4})
    if reply.status == 400 and server.target.model in json.dumps(reply.error()):
        raise NotApplicable(f"the model was not made for it: {reply}")
    if reply.status != 200:
        raise Refused("suffix", reply)
    grown = reply.json()["usage"]["prompt_tokens"] - plain.num_prompt
    require(grown >= 4, "more prompt tokens with a suffix", f"{grown} more")
    return f"{grown} more prompt tokens"


@CHAPTER.check("echo with logprobs: the prompt is scored")
async def scored_prompt(server: Server) -> str:
    prompt = "one two three four five six seven"
    reply = await server.complete(prompt, echo=True, logprobs=1, max_tokens=1, temperature=0)
    found = reply.choice.logprobs
    require(len(found) == reply.num_prompt + 1, f"{reply.num_prompt + 1} logprobs", len(found))
    scores = [value for value in found[1:] if value is not None]
    require(
        len(scores) == len(found) - 1 and all(value <= 0 for value in scores), "logprobs after the first", show(found)
    )
    require(len(set(scores)) > 2, "logprobs that differ", show(found))
    return f"{len(found)} logprobs, {mean(scores):.2f} on average"


@CHAPTER.check("prompt_logprobs: one entry per prompt token, the first null")
async def prompt_logprobs(server: Server) -> str:
    reply = await server.complete("one two three four five six seven", prompt_logprobs=1, max_tokens=1)
    found: Any = reply.body["choices"][0].get("prompt_logprobs", reply.body.get("prompt_logprobs"))
    if not isinstance(found, list) or not found:
        raise Failed(f"expected prompt_logprobs in the reply; came one with {', '.join(reply.body)}")
    require(len(found) == reply.num_prompt, f"{reply.num_prompt} entries", len(found))
    require(found[0] is None and all(found[1:]), "null first, and then something for each token", show(found))
    return f"{len(found)} entries"


@CHAPTER.check("/render: messages become the prompt's text")
async def render(server: Server) -> str:
    said = "What is a headrace, please?"
    reply = await server.post("/render", {"messages": messages(said)})
    if reply.status != 200:
        raise Refused("/render", reply)
    body = reply.json()
    prompt = body.get("prompt") if isinstance(body, dict) else None
    if not isinstance(prompt, str) or said not in prompt:
        raise Failed(f"expected a prompt with {said!r} in it; came {show(body)}")
    ids = await server.complete(prompt, max_tokens=1, add_special_tokens=False)
    chat = await server.chat(said, max_tokens=1)
    require(ids.num_prompt == chat.num_prompt, f"{chat.num_prompt} tokens, as of the chat", ids.num_prompt)
    return f"{len(prompt)} characters, {chat.num_prompt} tokens"


@CHAPTER.check("timings: a reply says how long it took", part="an object of that name with times in milliseconds")
async def timings(server: Server) -> str:
    try:  # some tell when they are asked, some always
        reply = await server.complete(server.words(32), timings=True, **server.exactly(8))
    except Refused:
        reply = await server.complete(server.words(32), **server.exactly(8))
    found = reply.body.get("timings") or (reply.usage.get("timings") if reply.usage else None)
    if not isinstance(found, dict):
        raise Failed(f"expected timings in the reply; came one with {', '.join(reply.body)}")
    spans = {name: value for name, value in found.items() if name.endswith("_ms") and "per_token" not in name}
    require(len(spans) >= 2, "times whose names end in _ms", show(found))
    wrong = {n: v for n, v in spans.items() if not isinstance(v, int | float) or not 0 <= v <= reply.seconds * 1000}
    require(not wrong, f"times of 0 to {reply.seconds * 1000:.0f} ms", show(wrong))
    require(any(value > 0 for value in spans.values()), "times above 0", show(spans))
    return show({name: round(value, 1) for name, value in spans.items()})


async def _constrained(server: Server, kind: str, value: object, fits: Any) -> str:
    """A constraint is obeyed by three sampled replies."""
    body: dict[str, Any] = {"prompt": "Tell me a story.", "max_tokens": 24, "temperature": 1, "seed": 1}
    text, wrap = await first_obeyed(server, body, kind, value, fits)
    for seed in _SEEDS[1:]:
        reply = await server.complete(**{**body, "seed": seed, **wrap(value)})
        require(fits(reply.text), f"a text that obeys {kind} {show(value)}", repr(reply.text))
        require(reply.choice.finish_reason == "stop", "finish_reason stop", reply.choice.finish_reason)
    return f"{len(_SEEDS)} replies, such as {text!r}"


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise Failed(f"expected JSON; came {show(text)!r}") from None


def _check_call(reply: Generation, names: set[str]) -> None:
    require(reply.choice.calls, f"a call of {' or '.join(sorted(names))}", f"the text {show(reply.text)!r}")
    for call in reply.choice.calls:
        require(call.name in names, f"a call of {' or '.join(sorted(names))}", call.name)
        arguments = _parsed(call.arguments)
        field, values = ("city", ("Paris", "Rome")) if call.name == "get_weather" else ("zone", ("UTC", "CET"))
        fits = isinstance(arguments, dict) and arguments.keys() == {field} and arguments[field] in values
        require(fits, f"arguments with {field} one of {', '.join(values)}", call.arguments)


def _told(calls: list[Call]) -> str:
    return ", ".join(f"{call.name}({show(call.arguments)})" for call in calls)


def _mean_logprob(reply: Generation, index: int) -> float:
    values = [value for value in reply.choices[index].logprobs if value is not None]
    if not values:
        raise Failed("expected logprobs; came none")
    return mean(values)
