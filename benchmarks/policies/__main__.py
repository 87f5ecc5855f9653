"""Run the experiments, print their tables, put them on the page.

python -m benchmarks.policies --traces FOLDER [--only shortest,modes,...] [--write]
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.peers.report import replace_section
from benchmarks.policies import bursts, fairness, goodput, modes, plots, shortest
from benchmarks.policies.lab import SCALE

DOCS = Path(__file__).parents[2] / "docs"
EXPERIMENTS = {
    "shortest": shortest.measure,
    "bursts": bursts.measure,
    "goodput": goodput.measure,
    "modes": modes.measure,
    "fairness": fairness.measure,
}
ABOUT = f"""## Policies on the virtual clock

Made by `python -m benchmarks.policies --write` with the Azure traces of 2023 in the folder `--traces` (or the
environment variable `HEADRACE_TRACES`); the same figures on every machine. The engine is the real one on a clock that
the cost model of steps moves, with coefficients about those of a calibration of SmolLM2-135M Q4_1 on two cores. Lengths
are those of the traces times {SCALE:g}, times scaled to the load that is stated; loads are shares of the capacity,
which is measured with twice as many requests always in flight as may run.
"""


def main(
    *,
    traces: Annotated[
        Path, typer.Option(envvar="HEADRACE_TRACES", help="Folder of azure_llm_2023_conv.csv and _code.csv.")
    ],
    only: Annotated[str, typer.Option(help=f"Some of {', '.join(EXPERIMENTS)}.")] = ",".join(EXPERIMENTS),
    write: Annotated[bool, typer.Option("--write", help="Put tables and plots into docs/.")] = False,
) -> None:
    console = Console()
    page = DOCS / "benchmarks.md"
    names = only.split(",")
    if unknown := set(names) - set(EXPERIMENTS):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}; there are {', '.join(EXPERIMENTS)}.")
    for name in names:
        begin = time.perf_counter()
        with console.status(name) as status:
            section = EXPERIMENTS[name](traces, lambda text, n=name, s=status: s.update(f"{n}: {text}"))
        console.print(section.body, markup=False, highlight=False, soft_wrap=True)
        console.print(f"{name} took {time.perf_counter() - begin:.0f} s")
        if write:
            body = section.body
            for plot in section.plots:
                try:
                    path = plots.draw(plot, DOCS / "figures")
                except ImportError:
                    console.print(plots.MISSING)
                    raise typer.Exit(1) from None
                body += f"\n![{plot.title}: {plot.y} over {plot.x}]({path.relative_to(DOCS)})\n"
            text = replace_section(page.read_text("utf-8"), "policies", ABOUT)
            page.write_text(replace_section(text, f"policies-{name}", body), "utf-8")


if __name__ == "__main__":
    typer.run(main)
