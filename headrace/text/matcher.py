"""Finds the texts of special and user-defined tokens inside ordinary text."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

_END = ""  # the key in a trie node that says: a token ends here


class TokenMatcher:
    """Leftmost-longest occurrences of a fixed set of token texts.

    A vocabulary may hold thousands of such tokens (Gemma has 6,400), too many for one alternation: that is slow
    to compile and tries every branch. Here a regular expression finds the places where the first two characters
    fit, and a trie decides. Cost: one scan of the text, and at such places the length of the match.
    """

    __slots__ = ("_candidate", "_trie", "ids")

    def __init__(self, ids: Mapping[str, int]) -> None:
        self.ids = {text: token for text, token in ids.items() if text}
        self._trie: dict[str, Any] = {}
        for text in self.ids:
            node = self._trie
            for char in text:
                node = node.setdefault(char, {})
            node[_END] = {}
        places = [
            re.escape(first) + ("" if _END in after else f"(?=[{''.join(map(re.escape, sorted(after)))}])")
            for first, after in self._trie.items()
        ]
        self._candidate = re.compile("|".join(places)) if places else None

    def starts(self, text: str) -> Iterator[int]:
        """Every index of `text` where some token begins, inside other tokens too."""
        if self._candidate is not None:
            for candidate in self._candidate.finditer(text):
                if self._end(text, candidate.start()) >= 0:
                    yield candidate.start()

    def split(self, text: str) -> list[str | int]:
        """Cut `text` into ordinary stretches (str, never empty) and the ids of the tokens between them."""
        segments: list[str | int] = []
        done = position = 0  # text[:done] is in segments; no token begins in text[done:position]
        while self._candidate is not None and (candidate := self._candidate.search(text, position)):
            start = candidate.start()
            end = self._end(text, start)
            if end < 0:
                position = start + 1
                continue
            if start > done:
                segments.append(text[done:start])
            segments.append(self.ids[text[start:end]])
            done = position = end
        if done < len(text):
            segments.append(text[done:])
        return segments

    def _end(self, text: str, start: int) -> int:
        """Where the longest token that begins at `start` ends; -1 if none does."""
        end = -1
        node = self._trie
        for i in range(start, len(text)):
            if text[i] not in node:
                break
            node = node[text[i]]
            if _END in node:
                end = i + 1
        return end
