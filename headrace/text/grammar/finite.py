"""Schemas narrowed so that replies end: at a high temperature a model writes digits and addresses for ever.

What is narrowed is beyond what programs read: integers outside of +-(2^53 - 1), where JSON's numbers stop being exact
everywhere (RFC 8259, section 6), and formats longer than their own standard allows. Bounds that a schema has stay as
they are.

An object that names its properties gets no others unless its schema speaks of them (`additionalProperties` and the
like): programs that write a schema from a class mean that, and models would go on inventing properties. Not where a
schema is put together from parts that each know some of the properties.
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
_OTHERS = frozenset({"additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames"})
_PARTS = frozenset({"allOf", "anyOf", "oneOf", "$ref", "if", "not", "dependentSchemas"})
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")


def finite(schema: Any) -> Any:
    """The same schema with these bounds wherever it has none of its own."""
    return _narrowed(schema, closes=not _is_composed(schema))


def _narrowed(schema: Any, *, closes: bool) -> Any:
    if isinstance(schema, list):
        return [_narrowed(each, closes=closes) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    narrowed = {name: value if name in _VALUES else _narrowed(value, closes=closes) for name, value in schema.items()}
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "integer" in kinds and "number" not in kinds:
        narrowed |= _exact_bounds(schema)
    if isinstance(format := schema.get("format"), str) and format in FORMAT_CHARS and "maxLength" not in schema:
        narrowed["maxLength"] = FORMAT_CHARS[format]
    if closes and "object" in kinds and isinstance(schema.get("properties"), Mapping) and not _OTHERS & schema.keys():
        narrowed["additionalProperties"] = False
    return narrowed


def _is_composed(schema: Any) -> bool:
    """Whether what an object may have is said in more than one place."""
    if isinstance(schema, list):
        return any(map(_is_composed, schema))
    if not isinstance(schema, Mapping):
        return False
    if "properties" in schema and _PARTS & schema.keys():
        return True
    if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1:
        return True
    return any(_is_composed(value) for name, value in schema.items() if name not in _VALUES)


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
