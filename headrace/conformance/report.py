"""Results as a table, as JSON, and as a page with several servers side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headrace.conformance.outcome import Status
from headrace.conformance.suite import CHAPTERS, Result

_COLOURS = {Status.PASS: "green", Status.FAIL: "red", Status.NOT_APPLICABLE: "dim"}


def counts(results: Sequence[Result]) -> dict[Status, int]:
    return {status: sum(result.status is status for result in results) for status in Status}


def print_results(results: Sequence[Result], console: Console) -> None:
    titles = {str(chapter.number): chapter.title for chapter in CHAPTERS}
    table = Table("row", "behaviour", "result", "reason")
    chapter = ""
    for result in results:
        if (number := result.check.id.split(".")[0]) != chapter:
            chapter = number
            table.add_section()
            table.add_row(number, f"[bold]{titles[number]}[/]")
        status = f"[{_COLOURS[result.status]}]{result.status}[/]"
        table.add_row(result.check.id, result.check.title, status, escape(result.reason))
    console.print(table)
    console.print(told(results))


def told(results: Sequence[Result]) -> str:
    number = counts(results)
    return (
        f"{number[Status.PASS]} pass, {number[Status.FAIL]} fail, {number[Status.NOT_APPLICABLE]} not applicable "
        f"({sum(result.seconds for result in results):.0f} s)"
    )


def document(results: Sequence[Result], url: str, model: str) -> dict[str, Any]:
    return {
        "url": url,
        "model": model,
        "counts": {str(status): count for status, count in counts(results).items()},
        "results": [
            {
                "id": result.check.id,
                "name": result.check.name,
                "title": result.check.title,
                "result": str(result.status),
                "reason": result.reason,
                "seconds": round(result.seconds, 3),
            }
            for result in results
        ],
    }


def side_by_side(documents: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown: each row with the result of every named document, the rows seen in part, the reasons of what did not
    pass."""
    names = list(documents)
    rows = {name: {row["id"]: row for row in documents[name]["results"]} for name in names}
    lines = [f"| row | behaviour | {' | '.join(names)} |", "|---|---|" + "---|" * len(names)]
    totals = [" / ".join(str(documents[name]["counts"][status]) for status in Status) for name in names]
    lines.append(f"| | **pass / fail / not applicable** | {' | '.join(totals)} |")
    reasons, parts = [], []
    for chapter in CHAPTERS:
        lines.append(f"| **{chapter.number}** | **{_cell(chapter.title)}** |{' |' * len(names)}")
        for check in chapter.checks:
            found = [rows[name].get(check.id) for name in names]
            cells = ["not run" if row is None else row["result"] for row in found]
            lines.append(f"| {check.id} | {_cell(check.title)} | {' | '.join(cells)} |")
            for name, row in zip(names, found, strict=True):
                if row is not None and row["result"] != Status.PASS and not check.is_unseen:
                    reasons.append(f"| {check.id} | {name} | {row['result']} | {_cell(row['reason'])} |")
            if check.is_unseen:
                reasons.append(f"| {check.id} | any | {Status.NOT_APPLICABLE} | {_cell(check.note)} |")
            elif check.note:
                parts.append(f"| {check.id} | {_cell(check.note)} |")
    lines += ["", "Seen in part only:", "", "| row | what is looked at |", "|---|---|", *parts]
    lines += [
        "",
        "What did not pass, and why:",
        "",
        "| row | server | result | reason |",
        "|---|---|---|---|",
        *reasons,
    ]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("\n", " ")
