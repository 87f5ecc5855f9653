"""Tool calls and reasoning through the official client, against an engine without a model."""

from __future__ import annotations

import json

import openai
import pytest

from headrace.text.tools.reasoning import THINK
from headrace.text.tools.schema import parse_tools
from headrace.text.tools.untaught import with_tools_told
from tests.server.conftest import RunningServer
from tests.server.fakes import FakeEngine
from tests.server.test_chat import say, stream_of

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture
def server(start) -> RunningServer:
    return start(FakeEngine(context_length=2048))


def called(name: str, **arguments: object) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {json.dumps(arguments)}}}</tool_call>'


def ask(server: RunningServer, text: str, **options: object):
    options = {"tools": [WEATHER], **options}
    return server.client().chat.completions.create(model="fake-model", messages=say(text), **options)


def calls_of(chunks: list[dict]) -> list[dict]:
    """The calls of a streamed choice, put together as clients do."""
    calls: list[dict] = []
    for chunk in chunks:
        for choice in chunk["choices"]:
            for piece in choice["delta"].get("tool_calls", ()):
                if piece["index"] == len(calls):
                    assert piece["type"] == "function"
                    calls.append({"id": piece["id"], "name": piece["function"]["name"], "arguments": ""})
                calls[piece["index"]]["arguments"] += piece["function"]["arguments"]
    return calls


def test_a_call_whole_and_streamed(server: RunningServer):
    text = "Let me see. " + called("weather", city="Köln")
    choice = ask(server, text).choices[0]
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "weather")
    assert json.loads(call.function.arguments) == {"city": "Köln"}
    assert (choice.message.content, choice.finish_reason) == ("Let me see. ", "tool_calls")

    chunks = stream_of(server, {"messages": say(text), "tools": [WEATHER]})
    (streamed,) = calls_of(chunks)
    assert (streamed["name"], streamed["arguments"]) == ("weather", call.function.arguments)
    assert len(streamed["id"]) == 9
    assert streamed["id"].isalnum()
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_several_calls_at_once(server: RunningServer):
    text = called("weather", city="Rome") + called("weather", city="Oslo")
    calls = ask(server, text).choices[0].message.tool_calls
    assert [json.loads(call.function.arguments)["city"] for call in calls] == ["Rome", "Oslo"]
    assert len({call.id for call in calls}) == 2
    assert [c["arguments"] for c in calls_of(stream_of(server, {"messages": say(text), "tools": [WEATHER]}))] == [
        call.function.arguments for call in calls
    ]


def test_without_tools_the_same_text_is_content(server: RunningServer):
    text = called("weather", city="Rome")
    for options in ({"tools": openai.NOT_GIVEN}, {"tool_choice": "none"}):
        choice = ask(server, text, **options).choices[0]
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, "stop")


def test_a_call_cut_short_keeps_its_finish_reason(server: RunningServer):
    choice = ask(server, called("weather", city="Rome"), max_tokens=50).choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls[0].function.arguments.startswith('{"city')


def test_results_go_back_to_the_model(server: RunningServer):
    """The whole round: tools, a call, its result, an answer."""
    call = ask(server, called("weather", city="Rome")).choices[0].message
    messages = [
        *say("x"),
        call.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "sunny"},
        *say("It is sunny."),
    ]
    reply = server.client().chat.completions.create(model="fake-model", messages=messages, tools=[WEATHER])
    assert reply.choices[0].message.content == "It is sunny."
    prompt = bytes(token for token in server.engine.requests[-1].prompt if token < 256).decode()
    assert '{"name": "weather", "arguments": {"city": "Rome"}}' in prompt
    assert "<tool_response>\nsunny\n</tool_response>" in prompt
    assert '"description": "The weather of a city."' in prompt


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
        ({"tools": [WEATHER], "tool_choice": "always"}, "tool_choice"),
        ({"tools": [WEATHER], "choice": ["a"]}, "choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"messages": [*say("x"), {"role": "tool", "tool_call_id": "nobody", "content": "?"}]},
            "messages[1].tool_call_id",
        ),
        ({"messages": [*say("x"), {"role": "tool", "content": "?"}]}, "messages[1].tool_call_id"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "messages[0].tool_calls[0].type"),
    ],
)
def test_what_is_wrong_is_named(server: RunningServer, change: dict, param: str):
    response = server.post("/v1/chat/completions", json={"messages": say("x")} | change)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert ask(server, "fine").choices[0].message.content == "fine"


def test_reasoning_is_apart(server: RunningServer):
    server.service.deployment.thinking = THINK
    text = "<think>Rome is in Italy.</think>It is sunny."
    message = ask(server, text, tools=openai.NOT_GIVEN).choices[0].message
    assert (message.content, message.reasoning_content) == ("It is sunny.", "Rome is in Italy.")
    deltas = [chunk["choices"][0]["delta"] for chunk in stream_of(server, {"messages": say(text)})]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Rome is in Italy."
    assert "".join(delta.get("content", "") for delta in deltas) == "It is sunny."

    message = ask(server, text + called("weather", city="Rome")).choices[0].message
    assert message.reasoning_content == "Rome is in Italy."
    assert message.tool_calls[0].function.name == "weather"


def test_stops_and_logprobs_beside_calls(server: RunningServer):
    text = "Well. " + called("weather", city="Rome")
    choice = ask(server, text, logprobs=True, stop=["Italy"]).choices[0]
    assert choice.message.tool_calls[0].function.name == "weather"
    assert "".join(scored.token for scored in choice.logprobs.content) == text
    chunks = stream_of(server, {"messages": say(text), "tools": [WEATHER], "logprobs": True})
    scored = [each for chunk in chunks for c in chunk["choices"] for each in (c["logprobs"] or {}).get("content") or ()]
    assert "".join(each["token"] for each in scored) == text


def test_tools_are_told_ahead_of_the_first_message():
    tools = parse_tools([WEATHER])
    told = with_tools_told([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}], tools)
    assert [message["role"] for message in told] == ["system", "user"]
    assert told[0]["content"].startswith("Be brief.\n\n")
    assert with_tools_told([{"role": "user", "content": "Hi"}], ())[0]["content"] == "Hi"
