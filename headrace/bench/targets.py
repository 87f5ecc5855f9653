"""What a workload runs against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from headrace.bench.results import RequestResult
from headrace.sim.workload import PlannedRequest


class Target(Protocol):
    """A model that answers requests. Used from one event loop.

    The order of calls: `open`, then per run `prepare`, `send` for each request, `results` once all have ended; `close`.
    """

    name: str
    measures_client: bool
    """CPU time of this process during a run is the client's alone."""
    max_tokens: int | None
    """Context, prompt and reply together; None where it does not tell. Known after `open`."""

    async def open(self) -> None:
        """Raises `ConfigurationError` where there is no such target, or it cannot serve the workload's kind."""
        ...

    async def prepare(self, requests: Sequence[PlannedRequest]) -> None:
        """Encode ahead of the run what will be sent, and forget the run before."""
        ...

    async def send(self, request: PlannedRequest) -> None:
        """Returns when the reply is complete or has failed; what arrived is kept as it is."""
        ...

    def results(self) -> list[RequestResult]:
        """Of all requests sent since `prepare`, in the order of their index."""
        ...

    def describe(self) -> dict[str, Any]:
        """What a report should tell about the target."""
        ...

    async def close(self) -> None: ...
