"""How long a reply can be, from what it has to follow: what the scheduler may plan with.

Upper bounds in bytes of UTF-8, None where there is none or none is found. A token is at least a byte.
"""

from __future__ import annotations

import json
import math
import re._parser as sre  # type: ignore[import-not-found]
from collections.abc import Iterable, Mapping
from typing import Any

MOST = 1 << 20
"""Longer than any context: as good as no bound."""
_CHAR = 4  # bytes of a character at most
_ESCAPED = 6  # "\\u00e9": bytes that a character of a JSON string takes at most


def longest_match(pattern: str) -> int | None:
    """Of a regular expression; None also where Python's syntax differs from that of the compiler."""
    try:
        _, most = sre.parse(pattern).getwidth()
    except (sre.error, RecursionError, OverflowError, ValueError):
        return None
    return _bounded(int(most) * _CHAR)


def longest_json(schema: Any) -> int | None:
    """Of a value that fits a JSON schema, written as `JSON_OPTIONS` say."""
    try:
        return _bounded(_longest(schema))
    except RecursionError:
        return None


def _longest(schema: Any) -> float:
    if not isinstance(schema, Mapping):
        return math.inf
    if "const" in schema:
        return _size(schema["const"])
    if isinstance(schema.get("enum"), list):
        return max(map(_size, schema["enum"]), default=0)
    for ways in (schema.get("anyOf"), schema.get("oneOf")):
        if isinstance(ways, list):
            return max(map(_longest, ways), default=0)
    kinds = schema.get("type")
    return max(_of_type(kind, schema) for kind in (kinds if isinstance(kinds, list) else [kinds]))


def _of_type(kind: Any, schema: Mapping[str, Any]) -> float:
    match kind:
        case "null":
            return 4
        case "boolean":
            return 5
        case "integer":
            return max(_digits(schema, bound) for bound in ("minimum", "maximum")) + 1
        case "string":
            return 2 + _ESCAPED * _count(schema, "maxLength")
        case "array":
            count = _count(schema, "maxItems")
            return 2 + count * (2 + _longest(schema.get("items"))) if count else 2
        case "object":
            if schema.get("additionalProperties") is not False or "patternProperties" in schema:
                return math.inf
            return 2 + sum(_members(schema.get("properties", {}).items()))
    return math.inf


def _members(properties: Iterable[tuple[str, Any]]) -> Iterable[float]:
    for name, schema in properties:
        yield _size(name) + 2 + _longest(schema) + 2  # "name": value,


def _count(schema: Mapping[str, Any], name: str) -> float:
    value = schema.get(name)
    return value if type(value) is int and value >= 0 else math.inf


def _digits(schema: Mapping[str, Any], name: str) -> float:
    value = schema.get(name)
    return len(str(int(value))) if isinstance(value, int | float) and abs(value) < 1e18 else math.inf


def _size(value: Any) -> int:
    return len(json.dumps(value))  # with every character that can be escaped escaped


def _bounded(size: float) -> int | None:
    return int(size) if size < MOST else None
