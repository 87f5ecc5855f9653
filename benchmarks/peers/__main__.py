"""`make bench-peers`: every engine that can be had here, interleaved with Headrace, into docs/benchmarks.md.

1. an environment per peer, made once (environments)      4. rounds over HTTP (servers, http_loads)
2. its settings swept, once (sweep)                       5. the record to benchmarks/results/NAME.json
3. rounds in process (rounds)                             6. its tables to docs/benchmarks.md (report)
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from benchmarks.peers import files, servers
from benchmarks.peers.environments import Environment, Unavailable, ensure, hardware
from benchmarks.peers.http_loads import HttpRecord, run_http
from benchmarks.peers.lab import FULL, QUICK, Lab
from benchmarks.peers.loads import HTTP_LOADS, LOADS, QUICK_LOADS, QUICK_SUBJECTS, SUBJECTS, Load, Subject
from benchmarks.peers.peers import HEADRACE, PEERS, REFERENCE, Peer, Variant
from benchmarks.peers.report import replace_section, section
from benchmarks.peers.rounds import Contender, Gap, Record, contenders, run_rounds
from benchmarks.peers.runner import ROOT
from benchmarks.peers.servers import ServerSpec
from benchmarks.peers.sweep import Choice, Sweep, sweep
from headrace.bench.machine import PeaksError, inspect_machine, measure_reading
from headrace.models.fetch import resolve
from headrace.models.loaders.checkpoint import open_checkpoint
from headrace.server.system import usable_cores, version

PAGE = ROOT / "docs" / "benchmarks.md"
RESULTS = ROOT / "benchmarks" / "results"
QUANTIZER = "llama.cpp"
ADDRESS = re.compile(r"https?://[^\s'\")]+|\b(?:[\w-]+\.)+(?:org|com|net|io)\b(?!/)")
INTRODUCTION = """# Benchmarks

Each figure with the command that makes it. Peers run on the same files and threads, in turns with Headrace, because
hosts and neighbours change within minutes: compare inside a section, not across sections.

"""


def main() -> None:
    options = parse_options(sys.argv[1:])
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    with Progress(*columns, console=console, refresh_per_second=2) as bars:
        document = Session(options, Bar(bars)).run()
    document = without_places(document, {str(ROOT): ".", str(Path.home()): "~"})
    RESULTS.mkdir(parents=True, exist_ok=True)
    (ROOT / document["results"]).write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    page = PAGE.read_text("utf-8") if PAGE.exists() else INTRODUCTION
    text = section(document)
    PAGE.write_text(replace_section(page, options.section, text), "utf-8")
    print(text)
    console.print(f"{PAGE.relative_to(ROOT)} and {document['results']} are written.")


def parse_options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench-peers ARGS=...", description="Headrace beside its peers.")
    parser.add_argument("--quick", action="store_true", help="one round, fewer loads, shorter time limits")
    parser.add_argument("--rounds", type=int, help="default: 5, quick 1")
    parser.add_argument("--only", type=_names(PEERS), help=f"peers, with commas: {', '.join(map(_fold, PEERS))}")
    parser.add_argument("--loads", type=_names(LOADS | HTTP_LOADS), help=f"of {', '.join(LOADS | HTTP_LOADS)}")
    parser.add_argument("--subjects", type=_names(SUBJECTS), help=f"model files, of {', '.join(SUBJECTS)}")
    parser.add_argument("--no-http", action="store_true", help="in process only")
    parser.add_argument(
        "--threads", type=int, default=usable_cores()[0], help="of every engine (default: usable cores)"
    )
    parser.add_argument("--requests", type=int, help="per load over HTTP; default: 64, quick 32")
    parser.add_argument("--resweep", action="store_true", help="find the peers' best settings again")
    parser.add_argument("--retry", action="store_true", help="try again to install what could not be had")
    parser.add_argument("--section", help="of docs/benchmarks.md; default: peers, quick peers-quick")
    options = parser.parse_args(arguments)
    options.rounds = options.rounds or (1 if options.quick else 5)
    options.requests = options.requests or (32 if options.quick else 64)
    options.section = options.section or ("peers-quick" if options.quick else "peers")
    options.only = options.only or list(PEERS)
    options.subjects = options.subjects or list(QUICK_SUBJECTS if options.quick else SUBJECTS)
    options.loads = options.loads or list(QUICK_LOADS if options.quick else (LOADS | HTTP_LOADS))
    if HEADRACE not in options.only:
        options.only.insert(0, HEADRACE)  # nothing to compare with otherwise
    options.command = f'make bench-peers ARGS="{shlex.join(arguments)}"' if arguments else "make bench-peers"
    return options


def without_places(value: Any, places: dict[str, str]) -> Any:
    """The document without addresses and without this machine's paths: reasons quote what installers said."""
    if isinstance(value, dict):
        return {key: without_places(each, places) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_places(each, places) for each in value]
    if not isinstance(value, str):
        return value
    for place, short in places.items():
        value = value.replace(place, short)
    return ADDRESS.sub("(address)", value)


def _fold(name: str) -> str:
    """As it is typed: "onnx-runtime-genai"."""
    return name.strip().lower().replace(" ", "-")


def _names(known: Any) -> Any:
    def names(text: str) -> list[str]:
        folded = {_fold(name): name for name in known}
        wanted = [_fold(name) for name in text.split(",")]
        if unknown := [name for name in wanted if name not in folded]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: known are {', '.join(folded)}")
        return [folded[name] for name in wanted]

    return names


class Bar:
    """One line of progress: what runs now, and how many measurements are done."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._task: TaskID = bars.add_task("", total=None)

    def begin(self, num_total: int) -> None:
        self._bars.reset(self._task, total=num_total)

    def advance(self, what: str) -> None:
        """`what` begins; whatever ran before is done."""
        self._bars.update(self._task, description=what[:90], advance=1)

    def say(self, what: str) -> None:
        self._bars.console.print(what, highlight=False)


class Session:
    """One run of the benchmark."""

    def __init__(self, options: argparse.Namespace, bar: Bar) -> None:
        self._options = options
        self._bar = bar
        self._python = Path(sys.executable)
        self._environments: dict[str, Environment] = {}
        self._reasons: dict[str, str] = {}
        self._record = Record()
        self._http = HttpRecord()
        self._specs: list[ServerSpec] = []

    def run(self) -> dict[str, Any]:
        options = self._options
        started = datetime.now(UTC)
        self._install()
        machine = inspect_machine()
        sweeps: dict[str, dict[str, Sweep]] = {}
        subjects = [SUBJECTS[name] for name in options.subjects]
        with Lab(self._environments, self._python, options.threads, self._file_of) as lab:
            for subject in subjects:
                sweeps[subject.name] = self._measure(lab, subject)
                lab.stop(subject)
            facts = lab.facts
        http_loads = [HTTP_LOADS[name] for name in options.loads if name in HTTP_LOADS and not options.no_http]
        if http_loads:
            self._measure_http(http_loads, sweeps)
        return {
            "format": 1,
            "title": "Headrace and its peers" + (", a quick look" if options.quick else ""),
            "section": options.section,
            "command": options.command,
            "started": started.isoformat(timespec="seconds"),
            "results": str((RESULTS / f"{options.section}.json").relative_to(ROOT)),
            "rounds": options.rounds,
            "threads": options.threads,
            "machine": asdict(machine),
            "engines": [self._engine(PEERS[name], facts) for name in options.only],
            "subjects": [self._describe(subject) for subject in subjects],
            "samples": [asdict(each) for each in self._record.samples],
            "gaps": [asdict(each) for each in self._record.gaps],
            "sweeps": {
                subject: {peer: asdict(found) for peer, found in by_peer.items()} for subject, by_peer in sweeps.items()
            },
            "http": {
                "num_requests": options.requests,
                "loads": [asdict(load) for load in http_loads],
                "samples": [asdict(each) for each in self._http.samples],
                "gaps": [asdict(each) for each in self._http.gaps],
                "ready_s": self._http.ready_s,
                "notes": {spec.title: spec.note for spec in self._specs},
            }
            if http_loads
            else None,
        }

    # Environments and files.

    def _install(self) -> None:
        for name in self._options.only:
            recipe = PEERS[name].recipe
            if recipe is None:
                continue
            try:
                if PEERS[name].left_out:
                    raise Unavailable(PEERS[name].left_out)
                self._environments[name] = ensure(recipe, self._bar.say, retry=self._options.retry)
            except Unavailable as error:
                self._reasons[name] = str(error)
                self._bar.say(f"{name} {recipe.version} is missing: {error}")

    def _file_of(self, peer: Peer, subject: Subject, variant: Variant) -> Path:
        if variant.format == peer.own_format:
            return files.own_folder(peer, subject, self._environments[peer.name], self._bar.say)
        return files.file_of(subject, variant.format, self._environments.get(QUANTIZER), self._bar.say)

    # In process.

    def _loads(self, subject: Subject) -> list[Load]:
        return [LOADS[name] for name in subject.loads if name in self._options.loads]

    def _peers(self) -> list[Peer]:
        """Those that can be measured in process."""
        here = [PEERS[name] for name in self._options.only]
        return [peer for peer in here if peer.module and (peer.recipe is None or peer.name in self._environments)]

    def _measure(self, lab: Lab, subject: Subject) -> dict[str, Sweep]:
        loads = self._loads(subject)
        if not loads:
            return {}
        sweeps: dict[str, Sweep] = {}
        peers = self._peers()
        self._bar.begin(sum(len(peer.variants(subject, all_formats=True)) for peer in peers if peer.recipe))
        for peer in peers:
            if peer.recipe is not None:
                sweeps[peer.name] = self._sweep(lab, peer, subject, loads)
        # Only what takes part stays in memory.
        lab.stop(subject)
        plan: dict[Load, list[Contender]] = {load: [] for load in loads}
        for load in loads:
            for peer in peers:
                choice = sweeps[peer.name].choice(load, subject) if peer.name in sweeps else Choice(None, None)
                plan[load] += contenders(peer, subject, choice)
        self._bar.begin(self._options.rounds * sum(map(len, plan.values())))
        run_rounds(
            lab,
            subject,
            plan,
            num_rounds=self._options.rounds,
            effort=QUICK if self._options.quick else FULL,
            record=self._record,
            advance=self._bar.advance,
            read_gb_per_s=self._read_gb_per_s,
        )
        return sweeps

    def _read_gb_per_s(self) -> float | None:
        with contextlib.suppress(PeaksError):  # told with the machine
            return measure_reading(self._options.threads)
        return None

    def _sweep(self, lab: Lab, peer: Peer, subject: Subject, loads: list[Load]) -> Sweep:
        assert peer.recipe is not None
        digest = hashlib.sha256(f"{hardware()} {self._options.threads} threads".encode()).hexdigest()[:8]
        key = f"{peer.recipe.name}-{peer.recipe.version}-{digest}"
        found = sweep(
            lab,
            peer,
            subject,
            key,
            loads,
            is_thorough=not self._options.quick,
            again=self._options.resweep,
            advance=self._bar.advance,
        )
        for what, reason in found.failures.items():
            self._bar.say(f"{peer.name}, {what}: {reason}")
            self._record.gaps.append(Gap(subject.name, f"sweep of {what}", peer.name, reason))
        return found

    # Over HTTP: the default model, by every server.

    def _measure_http(self, loads: list[Any], sweeps: dict[str, dict[str, Sweep]]) -> None:
        subject = SUBJECTS["smollm2"]
        self._specs = self._server_specs(subject)
        self._bar.begin(len(self._specs) * (1 + self._options.rounds * len(loads)))
        run_http(
            self._python,
            self._specs,
            loads,
            num_rounds=self._options.rounds,
            num_requests=self._options.requests,
            record=self._http,
            advance=self._bar.advance,
        )

    def _server_specs(self, subject: Subject) -> list[ServerSpec]:
        threads = self._options.threads
        specs = [servers.headrace_server(self._python, subject.model, HEADRACE, threads)]
        if REFERENCE in self._options.only:
            flags = ("--backend", "reference", "--kv-format", "f32")
            specs.append(servers.headrace_server(self._python, subject.model, REFERENCE, threads, *flags))
        eos_ids = _eos_ids(subject)
        for wanted in (subject.format, "Q4_0"):
            try:
                file = files.file_of(subject, wanted, self._environments.get(QUANTIZER), self._bar.say)
            except Unavailable as error:
                self._bar.say(str(error))
                continue
            if here := self._environments.get("llama-server"):
                program = here.built("llama-server")
                specs.append(servers.llama_server(program, file, f"llama-server, {wanted}", threads))
            elif here := self._environments.get("llama.cpp"):  # it takes one request at a time: second choice
                title = f"llama-cpp-python's server, {wanted}"
                specs.append(servers.llama_cpp_server(here.python, file, title, threads, eos_ids))
        return specs

    # Descriptions.

    def _engine(self, peer: Peer, facts: dict[str, dict[str, Any]]) -> dict[str, Any]:
        here = self._environments.get(peer.name)
        return {
            "name": peer.name,
            "version": peer.recipe.version if peer.recipe else _own_version(),
            "note": peer.note,
            "facts": facts.get(peer.name, {}),
            "versions": here.versions if here else {},
            "install_s": here.install_s if here else None,
            "reason": self._reasons.get(peer.name),
        }

    def _describe(self, subject: Subject) -> dict[str, Any]:
        try:
            file = files.file_of(subject, subject.format, self._environments.get(QUANTIZER), self._bar.say)
            weight_bytes = open_checkpoint(
                file
            ).num_bytes  # all are read in a step: the models here tie their embeddings
        except Unavailable:
            weight_bytes = None
        return {
            "name": subject.name,
            "title": subject.title,
            "format": subject.format,
            "weight_bytes": weight_bytes,
            "loads": [asdict(load) for load in self._loads(subject)],
        }


def _eos_ids(subject: Subject) -> tuple[int, ...]:
    from headrace.models.registry import describe  # noqa: PLC0415

    return tuple(describe(open_checkpoint(resolve(subject.model))).eos_token_ids)


def _own_version() -> str:
    """With the commit, and whether files differ from it."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return f"{version()} ({described.stdout.strip()})" if described.returncode == 0 else version()


if __name__ == "__main__":
    main()
