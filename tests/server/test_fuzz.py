"""No body, however odd, is answered by a 5xx, and the engine outlives them all."""

from __future__ import annotations

import json
import random

from headrace.server.protocol import (
    HARMLESS,
    UNSUPPORTED,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    RenderRequest,
)
from tests.server.conftest import RunningServer, eventually
from tests.server.fakes import REPLY

ODD = [
    *(
        "null",
        "true",
        "false",
        "0",
        "1",
        "-1",
        "2",
        "0.5",
        "-0.0",
        "1e999",
        "-1e999",
        "NaN",
        "1e-400",
        "9007199254740993",
    ),
    *("1" + "0" * 30, "1" + "0" * 400, "18446744073709551616", "-9223372036854775809", '""', '"x"', '"1"', '"\\u0000"'),
    *(
        '"\\ud83c\\udf36"',
        '"<turn>"',
        '"</turn>"',
        json.dumps("é" * 50),
        "[]",
        "[[]]",
        "[null]",
        '[""]',
        '["a","b"]',
        "[1,2]",
    ),
    *(
        "[true]",
        "[1.5]",
        "[-1]",
        "[260]",
        "[[1],[2]]",
        '[["a"]]',
        "{}",
        '{"1":1}',
        '{"a":"b"}',
        '{"1":NaN}',
        '{"1":1e999}',
    ),
    *(
        '{"type":"text"}',
        '{"include_usage":true}',
        '{"include_usage":5}',
        '[{"role":"user"}]',
        '[{"role":"user","content":"x"}]',
    ),
    *(
        '[{"role":"assistant","content":null}]',
        '[{"role":"user","content":[{"type":"text"}]}]',
        '[{"role":5,"content":"x"}]',
    ),
    *('[{"role":"user","content":[]}]', '[{"role":"user","content":"x","name":5}]', "[" * 300 + "]" * 300),
]


def test_odd_values_in_every_field(shared: RunningServer):
    rng = random.Random(7)
    for path, kind, valid in (
        ("/v1/chat/completions", ChatRequest, {"messages": '[{"role":"user","content":"say:x"}]', "max_tokens": "3"}),
        ("/v1/completions", CompletionRequest, {"prompt": '"say:x"', "max_tokens": "3"}),
        ("/v1/embeddings", EmbeddingRequest, {"input": '"x"'}),
        ("/render", RenderRequest, {"messages": '[{"role":"user","content":"x"}]'}),
    ):
        fields = [*kind.model_fields, *UNSUPPORTED, *sorted(HARMLESS), "unknown"]
        seen = set()
        for _ in range(600):
            odd = {rng.choice(fields): rng.choice(ODD) for _ in range(rng.choice((1, 1, 2, 3)))}
            body = "{" + ",".join(f'"{name}":{value}' for name, value in (valid | odd).items()) + "}"
            response = shared.post(path, content=body.encode())
            assert response.status_code in (200, 400, 404), (body, response.text)
            if response.status_code >= 400:
                error = response.json()["error"]
                assert error["message"], body
                assert error["code"], body
            seen.add(response.status_code)
        assert seen == {200, 400, 404}
    eventually(lambda: shared.service.num_calls == 0 and not shared.engine.has_work)
    chat = shared.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}]})
    assert chat.json()["choices"][0]["message"]["content"] == REPLY
