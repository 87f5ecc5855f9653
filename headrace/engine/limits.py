"""What the scheduler refuses at submit."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from headrace.core.errors import InvalidRequest, Overloaded
from headrace.core.request import Request


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on single requests and on the queue.

    `param` of their errors is the field of `Request` or `SamplingParams` at fault, or "n" for the number of choices.
    """

    context_length: int
    """Tokens the model reads at most, prompt and reply together."""
    capacity_tokens: int
    """Longest sequence the KV pool can hold."""
    max_queue: int
    """Requests that may wait."""
    max_running: int
    """Places: sequences that run at once, and so the most choices one request may ask for (`n`)."""
    vocab_size: int
    """Token ids are 0 ... vocab_size - 1. In a plan an id below zero is a token in flight: none may come in."""

    def sequence_limit(self, request: Request) -> int:
        """Most tokens a sequence of this request may have, or the reason why there is none.

        Raises `InvalidRequest`.
        """
        num_prompt, wanted = len(request.prompt), request.sampling.max_tokens
        if num_prompt == 0:
            raise InvalidRequest("empty_prompt", "The prompt has no tokens; send at least one.", param="prompt")
        self._check_ids(request)
        if request.pooling and (wanted != 0 or request.score_prompt):
            raise _invalid("max_tokens", f"max_tokens is {wanted}; a request for an embedding generates nothing.")
        if wanted == 0 and not (request.score_prompt or request.pooling):
            raise _invalid(
                "max_tokens",
                "max_tokens is 0; that makes sense only together with scoring the prompt (prompt_logprobs, or echo and "
                "logprobs).",
            )
        if request.num_choices > 1 and (wanted == 0 or request.resumed):
            raise _invalid(
                "n", f"n is {request.num_choices}; a request that samples nothing, or is resumed, has one choice."
            )
        if not 1 <= request.num_choices <= self.max_running:
            raise _invalid(
                "n", f"n is {request.num_choices}; this server runs at most {self.max_running} choices at once."
            )
        _check_resumed(request)
        longest = min(self.context_length, self.capacity_tokens)
        asked = num_prompt + wanted if wanted is not None else num_prompt + len(request.resumed) + 1
        if asked > longest:
            raise self._overflow(request, asked)
        limit = longest if wanted is None else asked
        most = request.grammar.max_tokens if request.grammar is not None else None
        return limit if most is None else min(limit, num_prompt + most)

    def check_queue(self, num_places: int) -> None:
        """Raises `Overloaded` when there is neither a free place to run in nor one to wait in."""
        if num_places <= 0:
            raise Overloaded(
                "queue_full",
                f"{self.max_queue} requests are waiting, as many as may (max_queue). Try again shortly.",
                retry_after_s=1.0,
            )

    def _check_ids(self, request: Request) -> None:
        sampling = request.sampling
        fields: tuple[tuple[str, Collection[int]], ...] = (
            ("prompt", request.prompt),
            ("resumed", request.resumed),
            ("stop_token_ids", sampling.stop_token_ids),
            ("logit_bias", [token for token, _ in sampling.logit_bias]),
        )
        for name, ids in fields:
            if ids and not (min(ids) >= 0 and max(ids) < self.vocab_size):
                bad = next(token for token in ids if not 0 <= token < self.vocab_size)
                raise _invalid(name, f"{name} has the token id {bad}; ids are 0 to {self.vocab_size - 1}.")

    def _overflow(self, request: Request, asked: int) -> InvalidRequest:
        """The prompt is at fault if it leaves no room for what must come, else max_tokens."""
        if asked > self.context_length:
            code, longest, remedy = "context_length_exceeded", self.context_length, ""
            reads = f"this model reads at most {longest} tokens"
        else:
            code, longest, remedy = "kv_capacity_exceeded", self.capacity_tokens, ", or run it with more KV memory"
            reads = f"The KV pool holds {longest} tokens"
        num_prompt, num_resumed, wanted = len(request.prompt), len(request.resumed), request.sampling.max_tokens
        has = f"the prompt has {num_prompt}" + (f" and the resumed reply {num_resumed}" if num_resumed else "")
        excess = num_prompt + num_resumed + (wanted != 0) - longest
        if excess > 0:
            return InvalidRequest(
                code, f"{reads}; {has}. Shorten the prompt by at least {excess}{remedy}.", param="prompt"
            )
        return InvalidRequest(
            code,
            f"{reads}; {has} and max_tokens asks for {wanted} more. "
            f"Shorten the prompt or ask for at most {longest - num_prompt}{remedy}.",
            param="max_tokens",
        )


def _check_resumed(request: Request) -> None:
    """A resumed reply has something left to generate: it has not reached `max_tokens` nor a stop token."""
    num_resumed, wanted = len(request.resumed), request.sampling.max_tokens
    if num_resumed and wanted is not None and num_resumed >= wanted:
        raise _invalid(
            "resumed", f"resumed has {num_resumed} tokens and max_tokens is {wanted}: nothing is left to generate."
        )
    ends = request.sampling.stop_token_ids.intersection(request.resumed)
    if ends:
        raise _invalid("resumed", f"resumed has the stop token {min(ends)}: that reply had ended.")


def _invalid(param: str, message: str) -> InvalidRequest:
    return InvalidRequest("invalid_value", message, param=param)
