"""The measurement proper: every load by every engine in turn, round after round, A B C, B C A, C A B.

Host and neighbours change within minutes; engines measured within the same minute can be compared, others not. Hence
ratios are taken inside a round and only then reduced to a median.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.peers.lab import Effort, Lab
from benchmarks.peers.loads import Load, Subject
from benchmarks.peers.peers import HEADRACE, Peer, Settings, Variant
from benchmarks.peers.runner import RunnerError
from benchmarks.peers.sweep import Choice

SAME = "same file"
BEST = "best"

Advance = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Contender:
    """An engine as it takes part in one load."""

    peer: Peer
    variant: Variant
    settings: Settings
    roles: tuple[str, ...]
    """SAME, BEST or both."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement."""

    round: int
    subject: str
    load: str
    peer: str
    roles: tuple[str, ...]
    variant: str
    settings: Settings
    tokens_per_s: float
    num_steps: int | None
    read_gb_per_s: float | None = None
    """What the memory gave just before and after, where that is the limit."""


@dataclass(frozen=True, slots=True)
class Gap:
    """A figure that is missing, and why."""

    subject: str
    load: str
    peer: str
    reason: str


@dataclass(slots=True)
class Record:
    samples: list[Sample] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)


def contenders(peer: Peer, subject: Subject, choice: Choice) -> list[Contender]:
    """One where the peer is fastest on the subject's own file, else two."""
    if peer.recipe is None:  # ours: nothing was swept, it runs as it comes
        own = peer.variants(subject, all_formats=False)
        return [Contender(peer, variant, {}, (SAME, BEST)) for variant in own]
    if choice.best is None:
        return []
    if choice.same is None or choice.same == choice.best:
        roles = (BEST,) if choice.same is None else (SAME, BEST)
        return [Contender(peer, choice.best.variant, choice.best.settings, roles)]
    return [
        Contender(peer, choice.same.variant, choice.same.settings, (SAME,)),
        Contender(peer, choice.best.variant, choice.best.settings, (BEST,)),
    ]


def run_rounds(
    lab: Lab,
    subject: Subject,
    plan: dict[Load, list[Contender]],
    *,
    num_rounds: int,
    effort: Effort,
    record: Record,
    advance: Advance,
    read_gb_per_s: Callable[[], float | None],
) -> None:
    """Fill the record. An engine that fails on a load leaves a gap and is not asked for that load again.

    `read_gb_per_s` measures the memory's bandwidth: around our own single streams, whose floor it is.
    """
    failed: set[tuple[str, str, str]] = set()
    for number in range(num_rounds):
        for load, everyone in plan.items():
            turn = number % max(1, len(everyone))
            for contender in everyone[turn:] + everyone[:turn]:
                key = (load.name, contender.peer.name, contender.variant.title)
                if key in failed:
                    continue
                advance(f"{subject.title}, {load.title}: {contender.peer.name} {contender.variant.title}")
                is_bound = contender.peer.name == HEADRACE and load.num_sequences == 1 and not load.is_prompt
                before = read_gb_per_s() if is_bound else None
                try:
                    done = lab.measure(
                        contender.peer,
                        subject,
                        contender.variant,
                        load,
                        contender.settings,
                        seed=f"round-{number}",
                        effort=effort,
                    )
                except RunnerError as error:
                    failed.add(key)
                    record.gaps.append(Gap(subject.name, load.name, contender.peer.name, str(error)))
                    continue
                after = read_gb_per_s() if is_bound else None
                record.samples.append(
                    Sample(
                        number,
                        subject.name,
                        load.name,
                        contender.peer.name,
                        contender.roles,
                        contender.variant.title,
                        contender.settings,
                        done.tokens_per_s,
                        done.num_steps,
                        (before + after) / 2 if before and after else None,
                    )
                )
