"""Constraints to grammars: compiled in a process that can be killed, then here, and kept."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections import OrderedDict
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from headrace.core.errors import HeadraceError, InvalidRequest
from headrace.core.grammar import Grammar
from headrace.text.grammar.constraint import Constraint
from headrace.text.grammar.vocabulary import Vocabulary
from headrace.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance

COMPILE_S = 2.0
START_S = 30.0
CACHED = 128
"""Compiled grammars kept for the next request with the same constraint; some 0.1-2 MB each."""


class CompilerFailure(HeadraceError):
    """The compiling process does not start."""


class GrammarCompiler:
    """For one vocabulary. Any thread may call it; one constraint is compiled at a time.

    Nothing is loaded before `prepare` or the first constraint, and no process is started before the latter.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._cache: OrderedDict[Constraint, Grammar] = OrderedDict()
        self._vocabulary: Vocabulary | None = None
        self._wrapped: llguidance.LLTokenizer | None = None
        self._worker: _Worker | None = None

    @property
    def vocabulary(self) -> Vocabulary:
        if self._vocabulary is None:
            self._vocabulary = Vocabulary(self._tokenizer, self._vocab_size)
        return self._vocabulary

    def prepare(self) -> None:
        """Load the library and give it the vocabulary. This holds the interpreter's lock, for 0.2 s with 50,000 tokens
        and longer beside other work: whoever has streams must have done it before, or all of them stop meanwhile."""
        with self._lock:
            self._wrap()

    def prepare_meanwhile(self) -> None:
        """The same on a thread of its own; `prepare` and whatever needs it then wait for its end, or do it again and
        tell what is wrong."""
        threading.Thread(target=self._prepare_quietly, name="headrace-grammars", daemon=True).start()

    def _prepare_quietly(self) -> None:
        with contextlib.suppress(Exception):
            self.prepare()

    def compile(self, constraint: Constraint) -> Grammar:
        """Raises `InvalidRequest` naming the constraint's field for what is wrong, unsupported or too expensive."""
        with self._lock:
            if (grammar := self._cache.get(constraint)) is None:
                grammar = self._cache[constraint] = self._compile(constraint)
                if len(self._cache) > CACHED:
                    self._cache.popitem(last=False)
            self._cache.move_to_end(constraint)
            return grammar

    def close(self) -> None:
        """End the process. It starts again when it is needed."""
        with self._lock:
            self._stop()

    def _compile(self, constraint: Constraint) -> Grammar:
        import llguidance  # noqa: PLC0415

        from headrace.text.grammar.compiled import LIMITS, CompiledGrammar  # noqa: PLC0415

        if self._worker is None:
            self._worker = _Worker(self.vocabulary)
        try:
            source, error = self._worker.ask((constraint.kind, constraint.text), COMPILE_S)
        except (EOFError, OSError, TimeoutError) as failure:
            self._stop()
            what = f"takes more than {COMPILE_S:g} s" if isinstance(failure, TimeoutError) else "needs too much memory"
            raise _refused(constraint, f"compiling it {what}; simplify it") from None
        if error:
            raise _refused(constraint, _first_lines(error))
        matcher = llguidance.LLMatcher(self._wrap(), source, log_level=0, limits=LIMITS)
        if matcher.is_error():  # the same source has just compiled
            raise _refused(constraint, _first_lines(matcher.get_error()))
        most = None if constraint.max_bytes is None else constraint.max_bytes + 1
        return CompiledGrammar(matcher, self.vocabulary.mask_bytes, most)

    def _wrap(self) -> llguidance.LLTokenizer:
        from headrace.text.grammar.compiled import wrap  # noqa: PLC0415

        if self._wrapped is None:
            self._wrapped = wrap(self.vocabulary)
        return self._wrapped

    def _stop(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker = None


class _Worker:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "headrace.text.grammar.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        # The connections own the descriptors from here on.
        self._requests = Connection(_taken(self._process.stdin), readable=False)
        self._answers = Connection(_taken(self._process.stdout), writable=False)
        try:
            if self.ask(vocabulary.plain(), START_S) != "ready":
                raise EOFError
        except (EOFError, OSError, TimeoutError) as error:
            self.kill()
            raise CompilerFailure("the process that compiles grammars did not start; its errors are above") from error

    def ask(self, request: Any, timeout_s: float) -> Any:
        """Raises `TimeoutError`, or EOFError or OSError where the process has died."""
        self._requests.send(request)
        if not self._answers.poll(timeout_s):
            raise TimeoutError
        return self._answers.recv()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._requests.close()
        self._answers.close()


def _taken(pipe: Any) -> int:
    descriptor = os.dup(pipe.fileno())
    pipe.close()
    return descriptor


def _refused(constraint: Constraint, what: str) -> InvalidRequest:
    return InvalidRequest("invalid_grammar", f"{constraint.param} cannot be followed: {what}.", param=constraint.param)


def _first_lines(error: str, limit: int = 300) -> str:
    lines = [line.strip() for line in error.splitlines() if line.strip() and line.strip() != "<non-verbose/>"]
    text = " ".join(lines).rstrip(".")
    return text if len(text) <= limit else text[:limit] + "..."
