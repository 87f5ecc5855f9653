"""What became of one request: times on the run's clock, counts, or an error."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RequestResult:
    """One finished or failed request. Times in seconds of one monotonic clock, the same for a whole run.

    `token_times_s` are the arrivals of what brought text, in order. In process that is every token. Over HTTP it is
    every event with text: a server may hold a token back (half a character) and then send two in one event, so that
    `num_output`, where the server tells it, may be larger than the number of times.
    """

    index: int
    start_s: float
    """When it was sent; over HTTP before the connection is opened."""
    token_times_s: tuple[float, ...] = field(default=(), repr=False)
    num_prompt: int | None = None
    """As the target counts them; None where it does not say."""
    num_output: int = 0
    num_cached: int | None = None
    """Prompt tokens the target found in its cache; None where it does not say."""
    is_counted: bool = True
    """`num_output` is the target's own count; False: one per event with text."""
    due_s: float | None = None
    """When the plan wanted it sent; None in a closed loop."""
    tenant: str = ""
    error: str | None = None
    """The kind, short enough to count by: "http 429", "timeout"."""
    detail: str = ""
    """The error in full."""
    text: str = field(default="", repr=False)

    @property
    def ttft_s(self) -> float | None:
        """To the first text."""
        return self.token_times_s[0] - self.start_s if self.token_times_s else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first one; None for a reply of one token."""
        if self.num_output < 2 or len(self.token_times_s) < 2:
            return None
        return (self.token_times_s[-1] - self.token_times_s[0]) / (self.num_output - 1)

    @property
    def end_to_end_s(self) -> float | None:
        """To the last text."""
        return self.token_times_s[-1] - self.start_s if self.token_times_s else None
