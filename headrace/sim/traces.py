"""Public traces of LLM services, as rows to replay.

- Azure public dataset (2023): CSV with the header TIMESTAMP,ContextTokens,GeneratedTokens; times of day.
- Mooncake (FAST'25): one JSON object per line with timestamp (ms), input_length, output_length and hash_ids, the ids
  of the prompt's 512-token blocks: two prompts share a block where they share its id.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from headrace.core.errors import ConfigurationError

MOONCAKE_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request. `arrival_s` counts from the first row of the trace."""

    arrival_s: float
    num_prompt: int
    num_output: int
    block_ids: tuple[int, ...] = ()
    """Of the prompt's blocks, each of `block_tokens` but the last; the same id stands for the same tokens."""
    block_tokens: int = 0


def read_trace(path: Path, *, time_scale: float = 1.0, length_scale: float = 1.0) -> tuple[TraceRow, ...]:
    """The rows of a trace in the order of their arrival.

    `time_scale` multiplies times (0.5: twice as fast), `length_scale` tokens, blocks included; a length stays at
    least 1. Raises `ConfigurationError` naming the line that cannot be read.
    """
    if time_scale <= 0 or length_scale <= 0:
        raise ConfigurationError(f"time_scale is {time_scale} and length_scale {length_scale}; both must be above 0.")
    try:
        with path.open(encoding="utf-8", newline="") as file:
            first = file.readline()
            file.seek(0)
            rows = list(_mooncake(file, path) if first.lstrip().startswith("{") else _azure(file, path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"the trace {path} cannot be read: {error}") from error
    if not rows:
        raise ConfigurationError(f"the trace {path} has no rows.")
    rows.sort(key=lambda row: row.arrival_s)
    start_s = rows[0].arrival_s
    return tuple(_scaled(row, start_s, time_scale, length_scale) for row in rows)


def _scaled(row: TraceRow, start_s: float, time_scale: float, length_scale: float) -> TraceRow:
    return TraceRow(
        arrival_s=(row.arrival_s - start_s) * time_scale,
        num_prompt=max(1, round(row.num_prompt * length_scale)),
        num_output=max(1, round(row.num_output * length_scale)),
        block_ids=row.block_ids,
        block_tokens=max(1, round(row.block_tokens * length_scale)) if row.block_ids else 0,
    )


def _azure(file: Iterator[str], path: Path) -> Iterator[TraceRow]:
    reader = csv.DictReader(file)
    wanted = {"TIMESTAMP", "ContextTokens", "GeneratedTokens"}
    if not wanted <= set(reader.fieldnames or ()):
        raise ConfigurationError(
            f"{path} is no trace known here: its first line is neither a JSON object nor has the columns "
            f"{', '.join(sorted(wanted))}."
        )
    for row in reader:
        try:
            arrival = datetime.fromisoformat(row["TIMESTAMP"])
            num_prompt, num_output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"{path}, line {reader.line_num}: {error}") from error
        # Differences are all that counts, so that a time zone does not matter as long as it is the same throughout.
        yield TraceRow((arrival.replace(tzinfo=None) - datetime(2020, 1, 1)).total_seconds(), num_prompt, num_output)


def _mooncake(file: Iterator[str], path: Path) -> Iterator[TraceRow]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            lengths = int(row["input_length"]), int(row["output_length"])
            yield TraceRow(row["timestamp"] / 1000, *lengths, tuple(row["hash_ids"]), MOONCAKE_BLOCK_TOKENS)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigurationError(f"{path}, line {number}: {error!r}") from error
