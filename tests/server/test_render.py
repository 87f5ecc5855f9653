"""POST /render: the text a chat becomes."""

from __future__ import annotations

import pytest

from headrace.text.tools.schema import parse_tools
from headrace.text.tools.untaught import with_tools_told
from tests.server.conftest import RunningServer
from tests.server.fakes import FakeEngine
from tests.server.test_tools import WEATHER

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hé"}]
TEXT = "<turn>system\nBe brief.</turn><turn>user\nhé</turn><turn>assistant\n"


def test_what_the_template_makes_of_messages(start):
    server = start(FakeEngine(context_length=2048))
    assert server.post("/render", json={"messages": CHAT}).json() == {"prompt": TEXT}
    assert server.post("/v1/chat/completions", json={"messages": CHAT}).status_code == 200
    (request,) = server.engine.requests
    assert server.service.deployment.tokenizer.decode(request.prompt) == TEXT, "a chat reads the same"


def test_tools_are_told_in_the_prompt(start):
    server = start(FakeEngine(context_length=2048))
    prompt = server.post("/render", json={"messages": CHAT, "tools": [WEATHER]}).json()["prompt"]
    told = with_tools_told(CHAT, parse_tools([WEATHER]))
    assert prompt == "".join(f"<turn>{m['role']}\n{m['content']}</turn>" for m in told) + "<turn>assistant\n"


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "messages"),
        ({"messages": []}, 400, "messages"),
        ({"messages": "hi"}, 400, "messages"),
        ({"messages": CHAT[::-1]}, 400, "messages"),
        ({"messages": CHAT, "tools": "x"}, 400, "tools"),
        ({"messages": [{"role": "user", "content": "x" * 3000}]}, 400, "messages"),
        ({"messages": CHAT, "prompt": "x"}, 400, "prompt"),
        ({"messages": CHAT, "model": "other"}, 404, "model"),
    ],
)
def test_refusals_are_a_chats(shared: RunningServer, body: dict, status: int, param: str):
    response = shared.post("/render", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)


def test_a_full_queue_and_an_end_refuse_it_too(start):
    server = start(FakeEngine(max_queue=0, max_running=0))
    assert server.post("/render", json={"messages": CHAT}).status_code == 429
    server.service.is_draining = True
    assert server.post("/render", json={"messages": CHAT}).status_code == 503
