"""Results of several servers side by side, as a page: `python -m headrace.conformance PAGE NAME=FILE.json ...`.

The files are those of `headrace conformance --json`. What follows the line `<!-- table -->` of the page is replaced.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from headrace.conformance.report import side_by_side

MARK = "<!-- table -->\n"


def main(page: str, *named: str) -> None:
    documents = {}
    for each in named:
        name, _, file = each.partition("=")
        documents[name] = json.loads(Path(file).read_text("utf-8"))
    head, mark, _ = Path(page).read_text("utf-8").partition(MARK)
    if not mark or not documents:
        sys.exit(f"{page} needs the line {MARK.strip()}, and NAME=FILE.json must follow it.")
    Path(page).write_text(f"{head}{mark}\n{side_by_side(documents)}", "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
