"""Options that describe a load, of `headrace bench` and of `headrace simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

GeneratedWorkload = Annotated[
    str | None, typer.Option(help="Generated: chat or code (with --rate, and --length-scale 0.125 say).")
]
Requests = Annotated[int | None, typer.Option(min=1, help="Requests per round; of a trace, its first ones.")]
PromptTokens = Annotated[int, typer.Option(min=1, help="Tokens of a (first) prompt.")]
OutputTokens = Annotated[int, typer.Option(min=1, help="Tokens of a reply.")]
PrefixTokens = Annotated[int, typer.Option(min=0, help="Of the prompt, in common with other requests.")]
Prefixes = Annotated[int, typer.Option(min=1, help="Different common prefixes.")]
Turns = Annotated[int, typer.Option(min=1, help="Requests per conversation; each resends the history.")]
TurnTokens = Annotated[int, typer.Option(min=1, help="New tokens of a later turn.")]
Think = Annotated[float, typer.Option(min=0, help="Seconds before a later turn.")]
Zipf = Annotated[float, typer.Option(min=0, help="Skew of the tenants' shares.")]
Rate = Annotated[str | None, typer.Option(help="Open loop: Poisson arrivals per second, such as 2 or 1,2,4.")]
Trace = Annotated[
    Path | None, typer.Option(exists=True, dir_okay=False, help="Open loop: an Azure CSV or a Mooncake JSONL.")
]
LengthScale = Annotated[float, typer.Option(help="Of a trace or --workload: multiplies lengths.")]
SloTtft = Annotated[float | None, typer.Option(min=0, help="Goodput: time to first token.")]
SloTpot = Annotated[float | None, typer.Option(min=0, help="Goodput: mean time per token after it.")]
