"""Schemas narrowed so that replies end: at a high temperature a model writes digits and addresses for ever.

What is narrowed is beyond what programs read: integers outside of +-(2^53 - 1), where JSON's numbers stop being exact
everywhere (RFC 8259, section 6), and formats longer than their own standard allows. Bounds that a schema has stay as
they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MOST_EXACT = 2**53 - 1
FORMAT_CHARS: Mapping[str, int] = {
    "date-time": 35,  # RFC 3339 with nanoseconds and an offset
    "time": 24,
    "email": 254,  # RFC 5321, with erratum 1690
    "idn-email": 254,
    "hostname": 253,  # RFC 1123
    "idn-hostname": 253,
}
_VALUES = frozenset({"const", "enum", "default", "examples"})
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")


def finite(schema: Any) -> Any:
    """The same schema with these bounds wherever it has none of its own."""
    if isinstance(schema, list):
        return [finite(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    narrowed = {name: value if name in _VALUES else finite(value) for name, value in schema.items()}
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "integer" in kinds and "number" not in kinds:
        narrowed |= _exact_bounds(schema)
    if isinstance(format := schema.get("format"), str) and format in FORMAT_CHARS and "maxLength" not in schema:
        narrowed["maxLength"] = FORMAT_CHARS[format]
    return narrowed


def _exact_bounds(schema: Mapping[str, Any]) -> dict[str, int]:
    given = [schema[name] for name in (*_LOWER, *_UPPER) if name in schema]
    if not all(isinstance(bound, int | float) and abs(bound) <= MOST_EXACT for bound in given):
        return {}
    bounds = {}
    if not any(name in schema for name in _LOWER):
        bounds["minimum"] = -MOST_EXACT
    if not any(name in schema for name in _UPPER):
        bounds["maximum"] = MOST_EXACT
    return bounds
