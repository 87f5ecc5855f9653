"""Progress of long transfers, as a callback: who does the work knows no terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Progress(Protocol):
    """Told now and then how far a transfer is.

    num_done, num_total  bytes; num_total is 0 while unknown (waiting for another process, say)
    what                 the current stage in a few words; a new text begins a new bar
    """

    def __call__(self, num_done: int, num_total: int, what: str) -> None: ...


def no_progress(num_done: int, num_total: int, what: str) -> None:
    """The Progress of nobody watching."""


@contextmanager
def rich_progress() -> Iterator[Progress]:
    """Bars on standard error, one per stage: `with rich_progress() as progress: resolve(model, progress)`."""
    # Imported here: whoever only opens a cached model should not pay for a terminal library.
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import (  # noqa: PLC0415
        BarColumn,
        DownloadColumn,
        TaskID,
        TextColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as Bars  # noqa: PLC0415

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    tasks: dict[str, TaskID] = {}
    with Bars(*columns, console=Console(stderr=True)) as bars:

        def report(num_done: int, num_total: int, what: str) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=num_total or None)
            bars.update(tasks[what], completed=num_done, total=num_total or None)

        yield report
