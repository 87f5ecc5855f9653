"""Messages to token ids, with content kept apart from control.

The template writes control tokens as text, and so can anyone who writes a message. To tell them apart, every text of
a control token inside the messages is broken with a mark, a character that occurs nowhere else; the template is
rendered; what then still spells a control token was written by the template. The marks are taken out before encoding,
so content gets exactly the ids of ordinary text.

A control token could also be put together from a text of the template and the edge of a message ("<|" + "im_end|>").
So a mark also guards an edge that could be the end, or the beginning, of one. Left alone is what only the template
could bring about: cutting a message apart and gluing the middle to half a token of its own.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

from headrace.text.chat_template import ChatTemplate, Message, TemplateError
from headrace.text.matcher import TokenMatcher
from headrace.text.tokenizer import Tokenizer

ROLES = frozenset(("system", "developer", "user", "assistant", "tool", "function", "ipython", "observation"))
"""Templates may build control tokens of these, `<|` + role + `|>`. Any other role is kept from becoming part of one."""

# Marks: printable, so that Python's repr leaves them; caseless, not white space, so that no filter changes them; and
# unlikely in a message. Cuneiform, Egyptian hieroglyphs, and rare Han characters for whoever sends all of those.
_MARKS = [range(0x12000, 0x12399), range(0x13000, 0x1342F), range(0x20000, 0x2A6DE)]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A chat as the model reads it."""

    text: str
    ids: list[int]


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    **variables: Any,
) -> ChatPrompt:
    """Render and encode. No string anywhere in `messages`, `tools` or `variables` becomes a control token.

    Nothing is added around the prompt: a template writes its own bos. Raises TemplateError as `render` does,
    UnicodeEncodeError for lone surrogates. Not for an event loop: see `ChatTemplate` and `Tokenizer.encode`.
    """
    arguments = {
        "messages": template.prepare(messages),
        "tools": tools,
        "add_generation_prompt": add_generation_prompt,
        **variables,
    }
    marker = _Marker(_edges(tokenizer.control), arguments, template.source)
    marked = {name: marker.mark(value) for name, value in arguments.items()}
    rendered = template.render_marked(marked, marker.sign)
    segments = [
        segment.replace(marker.sign, "") if isinstance(segment, str) else segment
        for segment in tokenizer.control.split(rendered)
    ]
    return ChatPrompt(rendered.replace(marker.sign, ""), tokenizer.encode_segments(s for s in segments if s != ""))


@dataclass(frozen=True, slots=True, eq=False)
class _Edges:
    """The control tokens' texts, and what of them could stand at the edge of a message. All folded."""

    whole: TokenMatcher
    beginnings: frozenset[str]  # proper ones
    endings: frozenset[str]
    longest: int


@lru_cache(maxsize=8)
def _edges(control: TokenMatcher) -> _Edges:
    texts = {_fold(text): token for text, token in control.ids.items()}
    return _Edges(
        whole=TokenMatcher(texts),
        beginnings=frozenset(text[:i] for text in texts for i in range(1, len(text))),
        endings=frozenset(text[i:] for text in texts for i in range(1, len(text))),
        longest=max(map(len, texts), default=0),
    )


class _Marker:
    """Copies a nested value, breaking every control token in its strings."""

    def __init__(self, edges: _Edges, value: Any, source: str) -> None:
        self._edges = edges
        self.sign = _unused_character([*_strings(value), source])

    def mark(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, Mapping):
            # A key is a name the template asks for, so its edges are left alone.
            return {self._inside(key) if isinstance(key, str) else key: self._field(key, v) for key, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(item) for item in value]
        return value

    def _field(self, key: Any, value: Any) -> Any:
        if key == "role" and isinstance(value, str) and value not in ROLES:
            folded = _fold(value)
            if any(folded in text for text in self._edges.whole.ids):
                return self.sign + self._inside(value) + self.sign
        return self.mark(value)

    def _inside(self, text: str) -> str:
        """Break whole tokens, after their first character; overlapping ones too, in any case (filters change it)."""
        folded = _fold(text)
        cuts = [0, *(start + 1 for start in self._edges.whole.starts(folded)), len(text)]
        for at in cuts[1:-1]:
            if folded[at - 1] in self._edges.whole.ids:
                raise TemplateError(
                    f"{text[at - 1]!r} is a control token of this model and cannot be written in a message"
                )
        return self.sign.join(text[a:b] for a, b in pairwise(cuts)) if len(cuts) > 2 else text

    def _text(self, text: str) -> str:
        core = text.strip()  # templates strip
        if not core:
            return text
        edge = min(len(core), self._edges.longest)
        head, tail = _fold(core[:edge]), _fold(core[-edge:] if edge else "")
        opens = any(head[:i] in self._edges.endings for i in range(1, edge + 1))
        closes = any(tail[-i:] in self._edges.beginnings for i in range(1, edge + 1))
        text = self._inside(text)
        if opens:
            at = len(text) - len(text.lstrip())
            text = text[:at] + self.sign + text[at:]
        if closes:
            at = len(text.rstrip())
            text = text[:at] + self.sign + text[at:]
        return text


def _fold(text: str) -> str:
    """Lower case, of the same length."""
    if text.isascii():
        return text.lower()
    upper = text.upper()
    folded = upper.lower()
    if len(upper) == len(folded) == len(text):
        return folded
    return "".join(low if len(low := char.upper().lower()) == 1 else char for char in text)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _unused_character(texts: Iterable[str]) -> str:
    used = set[str]().union(*texts)  # once: a text may hold all marks but the last
    for candidates in _MARKS:
        for code in candidates:
            if chr(code) not in used:
                return chr(code)
    raise TemplateError("the messages hold every character that could mark content; leave out the rarest ones")
