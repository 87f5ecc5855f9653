"""Raw streams on disk, so that another program can measure them again.

One JSON object per line and request:

    target, point, round, request (index), start_s, status, error, num_prompt and num_output as planned,
    pieces: [[arrival_s, base64 of the bytes as they came over the connection, HTTP headers and framing included], ...]
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from types import TracebackType

from headrace.bench.http_target import HttpTarget
from headrace.core.errors import ConfigurationError


class Recorder:
    """Appends the streams of each run to a file; a context manager. Raises `ConfigurationError` if it cannot."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("w", encoding="ascii")
        except OSError as error:
            raise ConfigurationError(f"the recording cannot be written: {error}") from error

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, target: HttpTarget, round_number: int, point: str) -> None:
        """The target's last run."""
        for request, exchange in target.exchanges:
            line = {
                "target": target.name,
                "point": point,
                "round": round_number,
                "request": request.index,
                "start_s": exchange.start_s,
                "status": exchange.status,
                "error": exchange.error,
                "num_prompt": len(request.prompt),
                "num_output": request.num_output,
                "pieces": [[time_s, base64.b64encode(data).decode()] for time_s, data in exchange.raw or ()],
            }
            self._file.write(json.dumps(line) + "\n")
