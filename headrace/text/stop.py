"""Stop strings: where the text of a generation ends before its tokens do."""

import re
from collections.abc import Iterable


class StopStrings:
    """Passes text through until one of the stop strings appears in it.

    Holds back only the longest suffix that is a prefix of some stop string. The match that is *complete first* wins,
    since generation could have ended there; of several that end at the same character the longest, so that nothing of
    it is left in the text. Both depend on the text alone, not on how it was cut into pushes.

    An Aho-Corasick automaton (Aho & Corasick 1975): constant amortised time per character, however many stops.
    """

    __slots__ = ("_children", "_depth", "_fallback", "_first", "_found", "_held", "_include_stop", "_state", "matched")

    def __init__(self, stops: Iterable[str], *, include_stop: bool = False) -> None:
        """`include_stop` leaves the stop string itself at the end of the text. Raises ValueError for an empty one."""
        distinct = list(dict.fromkeys(stops))
        if "" in distinct:
            raise ValueError("a stop string is empty; it would end every text before its first character")
        self._include_stop = include_stop
        self.matched: str | None = None
        # States are the distinct prefixes of the stops, 0 the empty one.
        self._children: list[dict[str, int]] = [{}]
        self._depth = [0]  # length of the prefix: what must be held back
        self._fallback = [0]  # the longest proper suffix that is a state too
        self._found: list[str | None] = [None]  # the longest stop that ends here
        for stop in distinct:
            state = 0
            for char in stop:
                if char not in self._children[state]:
                    self._children[state][char] = len(self._children)
                    self._children.append({})
                    self._depth.append(self._depth[state] + 1)
                    self._fallback.append(0)
                    self._found.append(None)
                state = self._children[state][char]
            self._found[state] = stop
        queue = list(self._children[0].values())
        for state in queue:  # breadth first, and the list grows meanwhile
            if self._found[state] is None:
                self._found[state] = self._found[self._fallback[state]]
            for char, child in self._children[state].items():
                self._fallback[child] = self._next(self._fallback[state], char)
                queue.append(child)
        firsts = "".join(map(re.escape, self._children[0]))
        self._first = re.compile(f"[{firsts}]") if firsts else None
        self._state = 0
        self._held = ""  # the text that spells the current state

    def _next(self, state: int, char: str) -> int:
        while state and char not in self._children[state]:
            state = self._fallback[state]
        return self._children[state].get(char, 0)

    def push(self, text: str) -> tuple[str, str | None]:
        """`(emit, matched)`: the text now known to be clear of stops, and the stop that ended it, if one did.

        After a match everything further is swallowed, and `matched` returned again.
        """
        if self.matched is not None or self._first is None:
            return ("" if self.matched is not None else text), self.matched
        whole = self._held + text
        i = len(self._held)
        state = self._state
        while i < len(whole):
            if not state:  # nothing begun: jump to where a stop could begin
                begin = self._first.search(whole, i)
                if begin is None:
                    break
                i = begin.start()
            state = self._next(state, whole[i])
            i += 1
            found = self._found[state]
            if found is not None:
                self.matched = found
                self._state, self._held = 0, ""
                return whole[: i if self._include_stop else i - len(found)], found
        self._state = state
        clear = len(whole) - self._depth[state]
        self._held = whole[clear:]
        return whole[:clear], None

    def finish(self) -> str:
        """The text held back when generation ends without a match."""
        held, self._held, self._state = self._held, "", 0
        return held
