"""What the scheduler refuses at submit."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.core.errors import InvalidRequest, Overloaded
from headrace.core.request import Request


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on single requests and on the queue."""

    context_length: int
    """Tokens the model reads at most, prompt and reply together."""
    capacity_tokens: int
    """Longest sequence the KV pool can hold."""
    max_queue: int
    """Requests that may wait."""
    max_choices: int
    """Choices one request may ask for (`n`); all run at once."""

    def sequence_limit(self, request: Request) -> int:
        """Most tokens a sequence of this request may have, or the reason why there is none.

        Raises `InvalidRequest`.
        """
        num_prompt, wanted = len(request.prompt), request.sampling.max_tokens
        if num_prompt == 0:
            raise InvalidRequest("empty_prompt", "The prompt has no tokens; send at least one.", param="prompt")
        if wanted == 0 and not request.score_prompt:
            raise InvalidRequest(
                "invalid_value",
                "max_tokens is 0; that makes sense only together with scoring the prompt (echo and logprobs).",
                param="max_tokens",
            )
        if request.num_choices > 1 and (wanted == 0 or request.resumed):
            raise InvalidRequest(
                "invalid_value",
                f"n is {request.num_choices}; a request that samples nothing, or is resumed, has one choice.",
                param="n",
            )
        if not 1 <= request.num_choices <= self.max_choices:
            raise InvalidRequest(
                "invalid_value",
                f"n is {request.num_choices}; this server runs at most {self.max_choices} choices at once.",
                param="n",
            )
        asked = num_prompt + (1 if wanted is None else wanted)
        if asked > self.context_length:
            raise InvalidRequest("context_length_exceeded", self._overflow(num_prompt, wanted), param="messages")
        if asked > self.capacity_tokens:
            raise InvalidRequest(
                "kv_capacity_exceeded",
                f"the KV pool holds {self.capacity_tokens} tokens; the prompt has {num_prompt} and "
                f"max_tokens asks for {asked - num_prompt} more. Shorten it, or start the server with more KV memory.",
                param="max_tokens",
            )
        longest = min(self.context_length, self.capacity_tokens)
        return longest if wanted is None else asked

    def _overflow(self, num_prompt: int, wanted: int | None) -> str:
        reads = f"this model reads at most {self.context_length} tokens; the prompt has {num_prompt}"
        room = self.context_length - num_prompt
        if room < 1:
            return f"{reads}. Shorten the prompt by at least {1 - room}."
        return f"{reads} and max_tokens asks for {wanted} more. Shorten the prompt or ask for at most {room}."

    def check_queue(self, num_waiting: int) -> None:
        """Raises `Overloaded` when no more may wait."""
        if num_waiting >= self.max_queue:
            raise Overloaded(
                "queue_full",
                f"{num_waiting} requests are waiting, as many as may (max_queue). Try again shortly.",
                retry_after_s=1.0,
            )
