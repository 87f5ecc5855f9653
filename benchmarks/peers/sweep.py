"""Which settings suit a peer: each tried briefly; found once and kept in the cache.

Of several tries the fastest counts: whatever disturbs a measurement makes it slower.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.environments import cache_root
from benchmarks.peers.lab import GLANCE, Lab
from benchmarks.peers.loads import LOADS, Load, Subject
from benchmarks.peers.peers import Peer, Settings, Variant
from benchmarks.peers.report import settings_title
from benchmarks.peers.runner import RunnerError

SWEPT = ("prompt-512", "decode-1", "decode-16")
PASSES = 2

Advance = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Figure:
    """What one variant with one choice of settings did on one load."""

    load: str
    variant: Variant
    settings: Settings
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Choice:
    """The fastest of a peer on a load: with the subject's own file, and with whatever format it likes."""

    same: Figure | None
    best: Figure | None


@dataclass(frozen=True, slots=True)
class Sweep:
    figures: tuple[Figure, ...]
    failures: dict[str, str]
    """Reasons, by what was tried."""

    def choice(self, load: Load, subject: Subject) -> Choice:
        return choose(self.figures, swept_for(load), subject.format)


def swept_for(load: Load) -> str:
    """The load whose sweep decides: more than one stream are decided by sixteen."""
    if load.is_prompt:
        return "prompt-512"
    return "decode-1" if load.num_sequences == 1 else "decode-16"


def choose(figures: Iterable[Figure], load: str, same_format: str) -> Choice:
    here = [figure for figure in figures if figure.load == load]
    same = [figure for figure in here if figure.variant.format == same_format]

    def fastest(some: list[Figure]) -> Figure | None:
        return max(some, key=lambda figure: figure.tokens_per_s, default=None)

    return Choice(fastest(same), fastest(here))


def sweep(
    lab: Lab,
    peer: Peer,
    subject: Subject,
    key: str,
    loads: Iterable[Load],
    *,
    is_thorough: bool,
    again: bool,
    advance: Advance,
) -> Sweep:
    """The cached sweep, completed by what the loads need and it lacks. `key` names versions, processor and threads.

    A thorough one tries everything; another one only the file formats, with the first settings that work, and is done
    only while there is no thorough one. Raises nothing: what fails is among the failures.
    """
    folder = cache_root() / "sweeps"
    thorough, glance = folder / f"{key}-{subject.name}.json", folder / f"{key}-{subject.name}-formats.json"
    path = thorough if is_thorough or thorough.exists() else glance
    known = None if again else _read(path)
    needed = [name for name in SWEPT if name in {swept_for(load) for load in loads}]
    figures = list(known.figures) if known else []
    missing = [name for name in needed if name not in {figure.load for figure in figures}]
    if known and not missing:
        return known
    failures: dict[str, str] = {}  # earlier ones are tried again
    variants = peer.variants(subject, all_formats=True)
    if not is_thorough:
        variants = list({variant.format: variant for variant in reversed(variants)}.values())
    for variant in variants:
        advance(f"{peer.name}: trying {variant.title}")
        tried, reasons = _try(lab, peer, subject, variant, missing, is_thorough=is_thorough)
        figures += tried
        failures |= reasons
    found = Sweep(tuple(figures), failures)
    if figures:
        _write(path, found)
    return found


def _try(
    lab: Lab, peer: Peer, subject: Subject, variant: Variant, loads: list[str], *, is_thorough: bool
) -> tuple[list[Figure], dict[str, str]]:
    best: dict[tuple[str, int], float] = {}
    failures: dict[str, str] = {}
    for attempt in range(PASSES if is_thorough else 1):
        for name in loads:
            for i, settings in enumerate(peer.settings(LOADS[name])):
                try:
                    done = lab.measure(
                        peer, subject, variant, LOADS[name], settings, seed=f"sweep-{attempt}", effort=GLANCE
                    )
                except RunnerError as error:
                    what = (variant.title, name, settings_title(settings))
                    failures[", ".join(part for part in what if part)] = str(error)
                    continue
                best[name, i] = max(best.get((name, i), 0.0), done.tokens_per_s)
                if not is_thorough:
                    break
    figures = [Figure(name, variant, peer.settings(LOADS[name])[i], rate) for (name, i), rate in best.items()]
    return figures, failures


def _read(path: Path) -> Sweep | None:
    try:
        stored = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    return Sweep(tuple(_figure(each) for each in stored["figures"]), stored["failures"])


def _figure(stored: dict[str, Any]) -> Figure:
    options = tuple((name, value) for name, value in stored["variant"]["options"])
    return Figure(
        stored["load"], Variant(stored["variant"]["format"], options), stored["settings"], stored["tokens_per_s"]
    )


def _write(path: Path, found: Sweep) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(found), indent=1), "utf-8")
