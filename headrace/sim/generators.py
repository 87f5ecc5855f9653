"""Workloads like those of public services, as rows of a trace: any number of them, at any rate, from a seed.

Lengths are drawn from the marginals of the Azure traces of 2023, kept here as quantiles (inputs and outputs are
uncorrelated in both); arrivals are a Poisson process.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from headrace.core.errors import ConfigurationError
from headrace.sim.arrivals import poisson
from headrace.sim.traces import TraceRow

PERCENTS = (0, 1, 2, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 55, 60, 65, 70, 75, 80, 85, 90, 95, 98, 99, 99.5, 99.9, 100)
BLOCK_TOKENS = 16
"""Later turns share their history in whole blocks of so many tokens, whatever the scale of lengths."""


@dataclass(frozen=True, slots=True)
class Marginals:
    """Quantiles of lengths in tokens, at `PERCENTS`; between them lengths are spread evenly."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    later_turns: float = 0.0
    """Share of requests that resend an earlier one and its reply, and go on from there."""


# fmt: off
WORKLOADS: Mapping[str, Marginals] = {
    "chat": Marginals(  # azure_llm_2023_conv.csv, 19,366 requests
        (2, 29, 91, 181, 207, 372, 387, 396, 403, 414, 703, 984, 1020, 1045, 1071, 1097, 1130, 1189, 1315, 1876, 2734,
         4083, 4098, 4142, 4831, 6212, 14050),
        (7, 16, 24, 41, 54, 67, 77, 85, 91, 96, 103, 113, 129, 151, 177, 217, 384, 395, 400, 411, 424, 451, 540, 601,
         643, 954, 1000),
        later_turns=0.3,
    ),
    "code": Marginals(  # azure_llm_2023_code.csv, 8,819 requests
        (3, 17, 35, 75, 147, 232, 386, 578, 770, 938, 1075, 1261, 1469, 1690, 1909, 2164, 2433, 2745, 3192, 3919, 5186,
         7302, 7436, 7436, 7436, 7437, 7437),
        (6, 6, 6, 6, 7, 7, 8, 9, 9, 10, 11, 12, 13, 14, 16, 18, 20, 24, 29, 39, 55, 90, 172, 252, 361, 824,
         1899),
    ),
}
# fmt: on


def generate(
    name: str, num_requests: int, rate_per_s: float, seed: int, length_scale: float = 1.0
) -> tuple[TraceRow, ...]:
    """Rows of the workload `name`, one of `WORKLOADS`. Raises `ConfigurationError` for another.

    A later turn comes some time after the one it continues (the process is Poisson all the same: the turns that are
    due take its arrivals). Its prompt is as long as the marginal says, or longer if its history is.
    """
    marginals = WORKLOADS.get(name)
    if marginals is None:
        raise ConfigurationError(f"there is no workload {name!r}; there are {', '.join(WORKLOADS)}.")
    draw = random.Random(f"{seed} {name}")
    block = BLOCK_TOKENS
    rows: list[TraceRow] = []
    next_block = 0
    recent: list[int] = []  # rows that may be continued
    for arrival_s in poisson(rate_per_s, num_requests, seed):
        num_prompt = _length(marginals.prompt, draw, length_scale)
        num_output = _length(marginals.output, draw, length_scale)
        history: tuple[int, ...] = ()
        # Who is continued has been answered: ten arrivals lie between at least.
        if len(recent) > 10 and draw.random() < marginals.later_turns:
            before = rows[recent.pop(draw.randrange(len(recent) - 10))]
            history = before.block_ids[: before.num_prompt // block]
            num_prompt = max(num_prompt, before.num_prompt + before.num_output + block)
        num_new = -(-num_prompt // block) - len(history)
        block_ids = (*history, *range(next_block, next_block + num_new))
        next_block += num_new
        recent.append(len(rows))
        del recent[:-200]
        rows.append(TraceRow(arrival_s, num_prompt, num_output, block_ids, block))
    return tuple(rows)


def _length(quantiles: tuple[int, ...], draw: random.Random, scale: float) -> int:
    percent = 100 * draw.random()
    index = next(i for i, high in enumerate(PERCENTS[1:]) if percent <= high)
    low, high = PERCENTS[index], PERCENTS[index + 1]
    share = (percent - low) / (high - low)
    return max(1, round(scale * (quantiles[index] + share * (quantiles[index + 1] - quantiles[index]))))
