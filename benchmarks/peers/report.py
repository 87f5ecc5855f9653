"""From the record of a run to Markdown. Pure: mappings in (as they lie in benchmarks/results/), text out."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

OURS = "Headrace"
SAME = "same file"
BEST = "best"
CUT_SHORT = "†"
BUSY_LOAD = 0.5
"""Runnable processes of others, averaged over the minute before the run."""

Row = Mapping[str, Any]


# Numbers.


def number(value: float) -> str:
    """Three figures: 0.123, 4.56, 78.9, 123, 4567."""
    for limit, digits in ((1, 3), (10, 2), (100, 1)):
        if abs(value) < limit:
            return f"{value:.{digits}f}"
    return f"{value:.0f}"


def median_and_range(values: Sequence[float]) -> str:
    """The range is left out where there is one value."""
    middle = number(statistics.median(values))
    return middle if len(values) == 1 else f"{middle} ({number(min(values))}-{number(max(values))})"


def median_ratio(ours: Mapping[int, float], theirs: Mapping[int, float]) -> float | None:
    """Median over the rounds that both have of ours / theirs; None where they share none."""
    ratios = [ours[each] / theirs[each] for each in sorted(ours.keys() & theirs.keys()) if theirs[each] > 0]
    return statistics.median(ratios) if ratios else None


def times(ratio: float | None) -> str:
    """ "4.5x", or nothing."""
    return "" if ratio is None else f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.0f}x"


# Tables.


def table(header: Sequence[str], rows: Iterable[Sequence[str]], num_left: int = 1) -> str:
    """Markdown; all but the first `num_left` columns are aligned right."""
    rule = ["---"] * num_left + ["---:"] * (len(header) - num_left)
    lines = [header, rule, *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines) + "\n"


def settings_title(settings: Mapping[str, Any]) -> str:
    """Flash attention and one KV buffer by name, numbers with their name."""
    words = []
    for name, value in settings.items():
        plain = name.replace("_", " ")
        if value is True:
            words.append(plain)
        elif value is False:
            words += [f"no {plain}"] if name == "flash_attention" else []
        else:
            words.append(f"{plain} {value}")
    return ", ".join(words)


def subject_table(document: Row, subject: Row) -> str:
    """Tokens per second of every engine on one model file: with that file, and at its best."""
    samples = [each for each in document["samples"] if each["subject"] == subject["name"]]
    columns = _columns(samples, subject)
    header = ["tokens/s", *(title for title, _, _ in columns)]
    rows = []
    for load in subject["loads"]:
        here = [each for each in samples if each["load"] == load["name"]]
        if here:
            ours = _by_round(here, OURS, SAME)
            rows.append([load["title"], *(_cell(here, peer, role, ours, load) for _, peer, role in columns)])
    return table(header, rows) if rows else "Nothing was measured.\n"


def _columns(samples: Sequence[Row], subject: Row) -> list[tuple[str, str, str]]:
    """(title, peer, role). A peer that never differs from its same-file figure has one column."""
    columns = []
    for peer in dict.fromkeys(each["peer"] for each in samples):
        own = [each for each in samples if each["peer"] == peer]
        has_same = any(SAME in each["roles"] for each in own)
        differs = any(SAME not in each["roles"] for each in own)
        if has_same:
            columns.append((peer if peer == OURS else f"{peer}, {subject['format']}", peer, SAME))
        if differs:
            columns.append((f"{peer}, best", peer, BEST))
    return sorted(columns, key=lambda column: column[1] != OURS)


def _by_round(samples: Iterable[Row], peer: str, role: str) -> dict[int, float]:
    return {each["round"]: each["tokens_per_s"] for each in samples if each["peer"] == peer and role in each["roles"]}


def _cell(samples: Sequence[Row], peer: str, role: str, ours: Mapping[int, float], load: Row) -> str:
    mine = [each for each in samples if each["peer"] == peer and role in each["roles"]]
    if not mine:
        return "-"
    if role == BEST and SAME in mine[0]["roles"]:
        return "the same"
    text = median_and_range([each["tokens_per_s"] for each in mine])
    if any(each["num_steps"] is not None and each["num_steps"] < load["num_steps"] for each in mine):
        text += CUT_SHORT
    if peer == OURS:
        return text
    if ratio := times(median_ratio(ours, _by_round(mine, peer, role))):
        text += f", {ratio}"
    how = settings_title(mine[0]["settings"])
    if role == BEST:
        how = ", ".join(part for part in (mine[0]["variant"], how) if part)
    return f"{text}; {how}" if how else text


def floor_note(document: Row, subject: Row) -> str:
    """What share of the memory's bandwidth a single stream of ours used; "" where that was not measured."""
    own = [
        each
        for each in document["samples"]
        if each["subject"] == subject["name"] and each["load"] == "decode-1" and each["peer"] == OURS
    ]
    own = [each for each in own if each.get("read_gb_per_s")]
    if not own or not subject.get("weight_bytes"):
        return ""
    floors = [each["read_gb_per_s"] * 1e9 / subject["weight_bytes"] for each in own]  # tokens per second
    shares = [100 * each["tokens_per_s"] / floor for each, floor in zip(own, floors, strict=True)]
    read = [each["read_gb_per_s"] for each in own]
    return (
        f"One step of one stream reads the weights once, {subject['weight_bytes'] / 1e6:.0f} MB: at the "
        f"{median_and_range(read)} GB/s read just before and after each turn, at most {median_and_range(floors)} "
        f"tokens/s. {OURS} reaches {median_and_range(shares)} % of it.\n"
    )


def http_table(document: Row, load: Row) -> str:
    """One row per server."""
    http = document["http"]
    samples = [each for each in http["samples"] if each["load"] == load["name"]]
    header = ["server", "out tokens/s", "", "TTFT P50, ms", "", "TTFT P99, ms", ""]
    header += ["inter-token P50 / P99, ms", "errors", "note"]
    ours = [each for each in samples if each["server"] == OURS]
    rows = []
    for server in dict.fromkeys(each["server"] for each in samples):
        mine = [each for each in samples if each["server"] == server]
        cells = [server]
        for name in ("output_tokens_per_s", "ttft_ms.p50", "ttft_ms.p99"):
            values = _figures(mine, name)
            ratio = None if server == OURS else median_ratio(_figures(ours, name), values)
            cells += [median_and_range(list(values.values())) if values else "-", times(ratio)]
        gaps = [_figures(mine, f"inter_token_ms.{part}") for part in ("p50", "p99")]
        cells.append(" / ".join(number(statistics.median(each.values())) if each else "-" for each in gaps))
        cells.append(str(round(sum(_figures(mine, "num_errors").values()))))
        notes = [http["notes"].get(server, ""), *dict.fromkeys(note for each in mine for note in each["notes"])]
        cells.append("; ".join(note for note in notes if note))
        rows.append(cells)
    return table(header, rows) if rows else "Nothing was measured.\n"


def _figures(samples: Iterable[Row], name: str) -> dict[int, float]:
    return {each["round"]: each["figures"][name] for each in samples if name in each["figures"]}


# The section.


def section(document: Row) -> str:
    """Everything between the markers."""
    rounds = document["rounds"]
    parts = [
        f"## {document['title']}\n",
        f"Made by `{document['command']}` on {document['started'][:10]}: {rounds} "
        f"{'round' if rounds == 1 else 'rounds'}, {document['threads']} threads. Raw rounds: "
        f"[{document['results']}](../{document['results']}).\n",
        machine_text(document["machine"]),
        "### In process\n",
        "Tokens per second over all streams: median (range) over the rounds, then how many times as fast Headrace is "
        "(median of the ratios inside a round), then the settings, those that won a sweep of this peer. "
        "*Best* is the peer's fastest format of the same model, requantized from the file as shipped and so of lower "
        "quality (Q4_0) or larger (Q8_0, F16). A prompt is timed up to its first token; a decode between the "
        "first tokens of all streams and 128 steps later, after prompts of 128 tokens each.\n",
    ]
    if any(_is_cut_short(document, each) for each in document["samples"]):
        parts.append(f"{CUT_SHORT} Fewer than 128 steps fitted into the time limit; the rate is over those that did.\n")
    for subject in document["subjects"]:
        parts += [f"**{subject['title']}**\n", subject_table(document, subject), floor_note(document, subject)]
    if document["http"] is not None:
        http = document["http"]
        parts += [
            "### Over HTTP\n",
            f"Measured by `headrace bench` from this machine: streaming, temperature 0, {http['num_requests']} "
            "requests per load. The ratios are Headrace's figure over the server's.\n",
        ]
        for load in http["loads"]:
            parts += [f"**{load['title']}**\n", http_table(document, load)]
        if http["ready_s"]:
            ready = ", ".join(f"{server} {seconds:.1f} s" for server, seconds in http["ready_s"].items())
            parts.append(f"From start to ready: {ready}.\n")
    parts += ["### Engines\n", engines_table(document["engines"])]
    if gaps := gaps_text(document):
        parts += ["### Missing, and why\n", gaps]
    return "\n".join(part for part in parts if part)


def _is_cut_short(document: Row, sample: Row) -> bool:
    steps = {load["name"]: load["num_steps"] for each in document["subjects"] for load in each["loads"]}
    return sample["num_steps"] is not None and sample["num_steps"] < steps.get(sample["load"], 0)


def machine_text(machine: Row) -> str:
    gib = machine["memory_bytes"] / 2**30
    load = machine.get("load_1m")
    parts = [
        f"Machine: {machine['processor']}, {machine['cores']} cores ({machine['cores_limited_by']}), {gib:.0f} GiB, "
        f"{' '.join(machine['instruction_sets'])}; {machine['system']}, Python {machine['python']}."
    ]
    if load is not None:
        parts.append(
            f"Load average before the run: {load:.1f}"
            + (
                ": **other work was running: the figures are rough, and not to be quoted**, for engines that spin at "
                "barriers lose most by it."
                if load > BUSY_LOAD
                else "."
            )
        )
    peaks = machine.get("peaks")
    if peaks:
        limits = [
            f"{name.replace('_', ' ')} {' / '.join(number(each) for each in values)}"
            for name, values in peaks.items()
            if isinstance(values, list) and name != "threads" and values and all(values)
        ]
        threads = " / ".join(str(each) for each in peaks["threads"])
        parts.append(f"Limits with {threads} threads: {'; '.join(limits)}.")
    elif machine.get("peaks_missing"):
        parts.append(f"Limits of the machine {machine['peaks_missing']}.")
    return " ".join(parts) + "\n"


def engines_table(engines: Iterable[Row]) -> str:
    rows = [
        [
            each["name"],
            each["version"],
            f"{each['install_s']:.0f} s" if each.get("install_s") else "-",
            "; ".join(part for part in (each.get("note", ""), facts_text(each.get("facts", {}))) if part),
        ]
        for each in engines
        if not each.get("reason")
    ]
    return table(["engine", "version", "installed in", "note"], rows, num_left=4)


def facts_text(facts: Row) -> str:
    return ", ".join(f"{name}: {value}" for name, value in facts.items())


def gaps_text(document: Row) -> str:
    """A line per reason, with all that it explains."""
    lines: dict[tuple[str, str], list[str]] = {}
    for each in document["engines"]:
        if each.get("reason"):
            lines.setdefault((f"{each['name']} {each['version']}", each["reason"]), [])
    for each in document["gaps"]:
        lines.setdefault((each["peer"], each["reason"]), []).append(f"{each['subject']} {each['load']}")
    for each in (document["http"] or {}).get("gaps", ()):
        lines.setdefault((each["server"], each["reason"]), []).append(each["load"])
    said = []
    for (who, reason), what in lines.items():
        where = f" ({', '.join(dict.fromkeys(what))})" if what else ""
        said.append(f"- {who}{where}: {reason}\n")
    return "".join(said)


# The page.


def replace_section(page: str, name: str, body: str) -> str:
    """The page with the section of that name replaced, or added at the end.

    Raises `ValueError` where its markers do not come as one pair.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    block = f"{begin}\n{body.strip()}\n{end}\n"
    counts = (page.count(begin), page.count(end))
    if counts == (0, 0):
        return f"{page.rstrip()}\n\n{block}" if page.strip() else block
    start, stop = page.find(begin), page.find(end)
    if counts != (1, 1) or stop < start:
        raise ValueError(f"the markers of section {name!r} come {counts[0]} and {counts[1]} times; one pair is wanted")
    return page[:start] + block + page[stop + len(end) :].removeprefix("\n")
