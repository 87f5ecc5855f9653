"""Figures for the page, with matplotlib where it is installed."""

from __future__ import annotations

from pathlib import Path

from benchmarks.policies.lab import Plot

MISSING = "Plots need matplotlib, which is not installed: pip install 'headrace[plots]'."


def draw(plot: Plot, folder: Path) -> Path:
    """Raises `ImportError` without matplotlib. The same plot gives the same bytes."""
    import matplotlib  # noqa: PLC0415  # an extra of its own

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "headrace"
    from matplotlib import pyplot  # noqa: PLC0415

    figure, axes = pyplot.subplots(figsize=(6.4, 3.6))
    for name, (xs, ys) in plot.lines.items():
        axes.plot(xs, ys, label=name, marker="o" if len(xs) < 30 else None, markersize=3, linewidth=1.4)
    for number, (name, level) in enumerate(plot.levels.items()):
        axes.axhline(level, label=name, color=f"C{len(plot.lines) + number}", linestyle="--", linewidth=1)
    axes.set_title(plot.title, fontsize="medium")
    axes.set_xlabel(plot.x)
    axes.set_ylabel(plot.y)
    if plot.log_y:
        axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.tight_layout()
    path = folder / f"{plot.name}.svg"
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    # Matplotlib leaves blanks at the ends of lines.
    path.write_text("".join(f"{line.rstrip()}\n" for line in path.read_text("utf-8").splitlines()), "utf-8")
    return path
