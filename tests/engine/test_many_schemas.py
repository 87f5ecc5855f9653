"""Two hundred JSON schemas of all kinds at temperature 1.0: replies end, parse and fit."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from headrace.core.request import Request
from headrace.core.sampling import SamplingParams
from headrace.core.sequence import FinishReason
from headrace.server.build import ServeConfig, build
from headrace.text.grammar import constraint as constraints

NUM_SCHEMAS = 200
MAX_TOKENS = 600
FORMATS = jsonschema.FormatChecker(("date", "uuid", "ipv4", "email"))
"""Of times jsonschema knows less than RFC 3339: six digits of a fraction at most."""
WORDS = "name age city title price items tags status id email notes author year score kind active size color".split()  # noqa: SIM905


def schema_of(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    kinds = ["string", "bounded", "integer", "number", "boolean", "enum", "const", "null", "format", "pattern", "range"]
    if depth < 3:
        kinds += ["object"] * 4 + ["array"] * 3 + ["anyOf", "tuple", "union"]
    kind = "object" if depth == 0 else rng.choice(kinds)
    match kind:
        case "object":
            names = rng.sample(WORDS, rng.randint(1, 4))
            properties = {name: schema_of(rng, depth + 1) for name in names}
            required = [name for name in names if rng.random() < 0.8]
            return {
                "type": "object",
                "properties": properties,
                "required": required,
                "additionalProperties": rng.random() < 0.1 and {"type": "integer"},
            }
        case "array":
            least = rng.randint(0, 2)
            sizes = {"minItems": least, "maxItems": least + rng.randint(1, 3)}
            return {"type": "array", "items": schema_of(rng, depth + 1), **sizes}
        case "tuple":
            return {"type": "array", "prefixItems": [schema_of(rng, depth + 1) for _ in range(2)], "items": False}
        case "anyOf":
            return {"anyOf": [{"type": "integer"}, schema_of(rng, depth + 1)]}
        case "union":
            return {"type": rng.sample(["string", "integer", "null", "boolean"], 2)}
        case "bounded":
            return {"type": "string", "minLength": rng.randint(0, 3), "maxLength": rng.randint(5, 40)}
        case "enum":
            return {"enum": rng.sample(["red", "green", "a b", 1, 2.5, None, True, 'q"uote'], 3)}
        case "const":
            return {"const": rng.choice(["fixed", 12, None, {"a": [1, 2]}])}
        case "format":
            return {"type": "string", "format": rng.choice(["date", "time", "date-time", "uuid", "ipv4", "email"])}
        case "pattern":
            return {
                "type": "string",
                "pattern": rng.choice(["^[A-Z]{3}-[0-9]{2,4}$", "^(low|mid|high)$", "^\\+?[0-9 ]{5,12}$"]),
            }
        case "range":
            low = rng.randint(-50, 50)
            return {"type": rng.choice(["integer", "number"]), "minimum": low, "maximum": low + rng.randint(1, 500)}
    return {"type": kind}


@pytest.mark.long
def test_replies_end_parse_and_fit(smollm2_path: Path) -> None:
    deployment = build(ServeConfig(str(smollm2_path), kv_memory_bytes=600 << 20, max_queue=NUM_SCHEMAS))
    tokenizer, engine = deployment.tokenizer, deployment.engine
    schemas = [schema_of(random.Random(seed)) for seed in range(NUM_SCHEMAS)]
    assert len({json.dumps(schema) for schema in schemas}) > 0.95 * NUM_SCHEMAS
    replies: dict[str, list[int]] = {}
    for i, schema in enumerate(schemas):
        grammar = deployment.grammars.compile(constraints.json_schema(schema, "response_format"))
        wish = f"Answer with a JSON object of this schema: {json.dumps(schema)}"
        text = f"<|im_start|>user\n{wish}<|im_end|>\n<|im_start|>assistant\n"
        params = SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, seed=i, stop_token_ids=deployment.eos_ids)
        engine.submit(Request(f"{i}", tuple(tokenizer.encode(text, parse_special=True)), params, grammar=grammar))
        replies[f"{i}"] = []
    reasons: dict[str, FinishReason] = {}
    num_steps = 0
    while engine.has_work:
        num_steps += 1
        for event in engine.step():
            replies[event.request_id] += event.tokens
            if event.finish_reason is not None:
                reasons[event.request_id] = event.finish_reason
    deployment.grammars.close()
    ended = [i for i, reason in reasons.items() if reason is FinishReason.STOP]
    num_tokens = sum(map(len, replies.values()))
    print(f"{len(ended)} of {NUM_SCHEMAS} ended within {MAX_TOKENS} tokens; {num_tokens} tokens in {num_steps} steps")
    for i, tokens in replies.items():
        if i not in ended:
            print(f"{i}: {json.dumps(schemas[int(i)])}: ...{tokenizer.decode(tokens[-60:])}")
    for i in ended:
        value = json.loads(tokenizer.decode(replies[i][:-1]))
        jsonschema.validate(value, schemas[int(i)], format_checker=FORMATS)
    assert len(ended) >= 0.95 * NUM_SCHEMAS
    assert FinishReason.ERROR not in reasons.values()
