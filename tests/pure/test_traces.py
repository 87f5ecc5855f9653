"""Trace files as their owners write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.core.errors import ConfigurationError
from headrace.sim.traces import TraceRow, read_trace

AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:18:04.0319600,9,0
"""
MOONCAKE = """\
{"timestamp": 3000, "input_length": 1030, "output_length": 500, "hash_ids": [0, 1, 2]}
{"timestamp": 6000, "input_length": 512, "output_length": 4, "hash_ids": [0]}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text)
    return path


def test_azure(tmp_path):
    rows = read_trace(write(tmp_path, AZURE))
    assert [(row.num_prompt, row.num_output) for row in rows] == [(4808, 10), (3180, 8), (9, 1)]
    assert [row.arrival_s for row in rows] == pytest.approx([0.0, 0.052, 60.052])
    scaled = read_trace(write(tmp_path, AZURE), time_scale=0.5, length_scale=1 / 8)
    assert [(row.num_prompt, row.num_output) for row in scaled] == [(601, 1), (398, 1), (1, 1)]
    assert [row.arrival_s for row in scaled] == pytest.approx([0.0, 0.026, 30.026])


def test_mooncake(tmp_path):
    path = write(tmp_path, MOONCAKE)
    assert read_trace(path) == (TraceRow(0.0, 1030, 500, (0, 1, 2), 512), TraceRow(3.0, 512, 4, (0,), 512))
    assert read_trace(path, length_scale=0.125)[0] == TraceRow(0.0, 129, 62, (0, 1, 2), 64)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "neither a JSON object nor has the columns"),
        ("a,b\n1,2\n", "neither a JSON object nor has the columns"),
        (AZURE + "yesterday,1,1\n", "line 5"),
        (AZURE + "2023-11-16 18:17:04,many,1\n", "line 5"),
        (MOONCAKE + '{"timestamp": 1}\n', "line 3"),
        (MOONCAKE + "{\n", "line 3"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no rows"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, text, message):
    with pytest.raises(ConfigurationError, match=message):
        read_trace(write(tmp_path, text))


def test_scales_must_be_positive(tmp_path):
    with pytest.raises(ConfigurationError, match="time_scale"):
        read_trace(write(tmp_path, AZURE), time_scale=0)
