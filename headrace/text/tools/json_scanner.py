"""Where a JSON value ends, or stops being one, found while it is written."""

from __future__ import annotations

import re

# A state is what may come next: the characters, and the state each of them leads to.
_State = dict[str, str]
_SPACE = " \t\r\n"
_DIGITS = "0123456789"


def _to(state: str, chars: str) -> _State:
    return dict.fromkeys(chars, state)


_VALUE: _State = {
    '"': "string",
    "{": "first key",
    "[": "first item",
    "-": "minus",
    "0": "zero",
    **_to("integer", _DIGITS[1:]),
    **{word[0]: word[:1] for word in ("true", "false", "null")},
}
_FRACTION_OR_EXPONENT: _State = {".": "point", "e": "e", "E": "e"}
_STATES: dict[str, _State] = {
    "value": _to("value", _SPACE) | _VALUE,
    "first item": _to("first item", _SPACE) | _VALUE | {"]": "after"},
    "first key": _to("first key", _SPACE) | {'"': "string", "}": "after"},
    "key": _to("key", _SPACE) | {'"': "string"},
    "colon": _to("colon", _SPACE) | {":": "value"},
    "after": _to("after", _SPACE) | {",": "comma", "]": "after", "}": "after"},
    "string": {'"': "after", "\\": "escape"},
    "escape": _to("string", '"\\/bfnrt') | {"u": "u"},
    **{a: _to(b, _DIGITS + "abcdefABCDEF") for a, b in (("u", "u1"), ("u1", "u2"), ("u2", "u3"), ("u3", "string"))},
    **{
        word[:i]: {word[i]: word[: i + 1] if i + 1 < len(word) else "after"}
        for word in ("true", "false", "null")
        for i in range(1, len(word))
    },
    "minus": {"0": "zero"} | _to("integer", _DIGITS[1:]),
    "zero": _FRACTION_OR_EXPONENT,
    "integer": _to("integer", _DIGITS) | _FRACTION_OR_EXPONENT,
    "point": _to("fraction", _DIGITS),
    "fraction": _to("fraction", _DIGITS) | {"e": "e", "E": "e"},
    "e": {"+": "sign", "-": "sign"} | _to("exponent", _DIGITS),
    "sign": _to("exponent", _DIGITS),
    "exponent": _to("exponent", _DIGITS),
}
_ENDS_WITH_NEXT = frozenset(("zero", "integer", "fraction", "exponent"))
"""A number says that it is over by what follows it."""
_ORDINARY = re.compile(r'[^"\\\x00-\x1f]*')


class JsonScanner:
    """Follows one JSON value (RFC 8259, strictly: no NaN, no control characters in strings) from its first character.

    `push` consumes what belongs to the value. Nothing is kept but the open brackets, so cost and memory do not depend
    on how the text was cut.
    """

    __slots__ = ("_brackets", "_is_key", "_state", "is_complete")

    def __init__(self) -> None:
        self._brackets: list[str] = []
        self._state = "value"
        self._is_key = False
        """The string that is open is the key of an object."""
        self.is_complete = False

    def push(self, text: str, start: int = 0) -> int:
        """The index behind the last character of `text[start:]` that belongs to the value.

        Less than `len(text)`: the value is complete there, or the character there is an error.
        """
        i = start
        while i < len(text) and not self.is_complete:
            if self._state == "string":
                ordinary = _ORDINARY.match(text, i)
                assert ordinary is not None, "it matches nothing, too"
                i = ordinary.end()
                if i == len(text):
                    break
            if self._state in _ENDS_WITH_NEXT and text[i] not in _STATES[self._state]:
                self._state = "after"
                self.is_complete = not self._brackets
            if self.is_complete or not self._step(text[i]):
                break
            i += 1
        return i

    def _step(self, char: str) -> bool:
        before = self._state
        after = _STATES[before].get(char)
        if after is None:
            return False
        is_structure = before not in ("string", "escape")
        if is_structure and char in "{[":
            self._brackets.append(char)
        elif is_structure and char in "}]":
            if self._brackets.pop() + char not in ("{}", "[]"):
                return False
        elif is_structure and char == '"':
            self._is_key = before in ("key", "first key")
        elif after == "comma":
            after = "key" if self._brackets[-1] == "{" else "value"
        elif after == "after" and self._is_key:
            after, self._is_key = "colon", False
        self._state = after
        self.is_complete = after == "after" and not self._brackets
        return True


def is_json(text: str) -> bool:
    """Whether all of `text` is one JSON value, white space around it included."""
    scanner = JsonScanner()
    end = scanner.push(text + " ")
    return scanner.is_complete and not text[end:].strip(_SPACE)
