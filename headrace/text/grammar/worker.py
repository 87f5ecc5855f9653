"""The process in which grammars are compiled first: it may take too long, eat its memory or crash; nobody else does.

Frames of pickled objects on standard input and output. First comes a vocabulary (`Bytes`); then for each (kind, text)
an answer: (source for llguidance, "") or ("", what is wrong).
"""

from __future__ import annotations

import os
import resource
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import llguidance

from headrace.text.grammar.compiled import LIMITS, wrap
from headrace.text.grammar.constraint import JSON_OPTIONS
from headrace.text.grammar.vocabulary import Bytes

MEMORY_BYTES = 2 << 30
STACK_BYTES = 4 << 20
"""Half of what the server's threads have: what recursion survives here survives there."""
FIRST_MASK_S = 0.25
"""A mask usually takes some 0.1 ms. Fuel bounds the lexer's work, not that on very long literals."""


def source_of(kind: str, text: str) -> str:
    """Raises ValueError for what is no JSON, or no GBNF."""
    match kind:
        case "json_schema":
            return llguidance.LLMatcher.grammar_from_json_schema(text, overrides=JSON_OPTIONS)
        case "regex":
            # \d and \w are ASCII's, as in JSON Schema: else "digits" are those of every script.
            return llguidance.LLMatcher.grammar_from_lark(f"start: /{llguidance.regex_to_lark(text, 'dw')}/")
        case "grammar":
            return llguidance.grammar_from("grammar", text)
    return llguidance.LLMatcher.grammar_from_lark(text)


def compile_one(tokenizer: llguidance.LLTokenizer, kind: str, text: str) -> tuple[str, str]:
    try:
        source = source_of(kind, text)
    except (ValueError, RecursionError) as error:
        return "", str(error)
    matcher = llguidance.LLMatcher(tokenizer, source, log_level=0, limits=LIMITS)
    start_s = time.monotonic()
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        return "", matcher.get_error()
    if time.monotonic() - start_s > FIRST_MASK_S:
        return "", f"what may come first takes more than {FIRST_MASK_S:g} s to find; simplify it"
    return source, ""


def _serve(requests: Connection, answers: Connection) -> None:
    vocabulary: Bytes = requests.recv()
    tokenizer = wrap(vocabulary)
    answers.send("ready")
    while True:
        try:
            request: Any = requests.recv()
        except EOFError:  # the server has gone
            return
        answers.send(compile_one(tokenizer, *request))


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    requests, answers = Connection(os.dup(0), writable=False), Connection(os.dup(1), readable=False)
    os.dup2(2, 1)  # what a library prints must not end up between the answers
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve, args=(requests, answers))
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
