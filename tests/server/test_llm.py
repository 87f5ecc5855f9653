"""`LLM` over the fake engine: the same text stage, driven from the caller's threads."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

import headrace.llm
from headrace import LLM, SamplingParams
from headrace.core.errors import HeadraceError, InvalidRequest
from headrace.server.engine_thread import EngineFailure
from tests.server.fakes import CONTEXT_LENGTH, REPLY, FakeEngine, make_deployment

SAY = [{"role": "user", "content": "say:hi"}]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def llm(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    monkeypatch.setattr(headrace.llm, "build", lambda config, progress=None: make_deployment(engine))
    with LLM("fake-model") as opened:
        yield opened


def test_generate_in_one_batch(llm: LLM, engine: FakeEngine):
    completions = llm.generate(["say:one", list(b"say:four"), "x"])
    assert [c.text for c in completions] == ["one", "four", REPLY]
    assert [c.finish_reason for c in completions] == ["stop"] * 3
    assert engine.num_steps == len(REPLY) + 1, "all ran together"
    assert llm.generate("say:one")[0].num_cached == len(b"say:one")


def test_params_for_each_and_stops(llm: LLM, engine: FakeEngine):
    params = [SamplingParams(max_tokens=2), SamplingParams(num_logprobs=1, seed=3)]
    short, scored = llm.generate(["say:abcdef", "say:abcdef"], params, stop=["de"])
    assert (short.text, short.finish_reason, short.tokens) == ("ab", "length", tuple(b"ab"))
    assert (scored.text, scored.finish_reason) == ("abc", "stop")
    assert [s.token for s in scored.scored] == list(b"abc")
    assert not engine.has_work, "the stop string ended it in the engine, too"
    with pytest.raises(ValueError, match="2 params for 1 prompts"):
        llm.generate(["x"], params)


def test_chat_one_and_many(llm: LLM):
    assert llm.chat(SAY).text == "hi"
    assert [c.text for c in llm.chat([SAY, [{"role": "user", "content": "say:yo"}]])] == ["hi", "yo"]


def test_stream_yields_strings(llm: LLM):
    pieces = list(llm.stream(SAY))
    assert "".join(pieces) == "hi"
    assert [p.delta.finish_reason for p in pieces] == [None, None, "stop"]
    assert "".join(llm.stream("say:x", SamplingParams(max_tokens=3), ignore_eos=True)) == "xx"


def test_a_stream_given_up_is_aborted(llm: LLM, engine: FakeEngine):
    stream = llm.stream("say:abc", ignore_eos=True)
    assert next(stream) == "a"
    stream.close()
    assert not engine.has_work


def test_a_refused_prompt_takes_its_batch_along(llm: LLM, engine: FakeEngine):
    with pytest.raises(InvalidRequest) as caught:
        llm.generate(["say:x", "x" * CONTEXT_LENGTH])
    assert caught.value.code == "context_length_exceeded"
    assert not engine.has_work
    assert llm.generate("say:x")[0].text == "x"


def test_several_threads_share_the_steps(llm: LLM, engine: FakeEngine):
    engine.step_s = 0.002
    texts: dict[int, str] = {}

    def work(i: int) -> None:
        texts[i] = llm.generate(f"say:number {i} here")[0].text

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {i: f"number {i} here" for i in range(6)}
    assert engine.num_steps < 6 * len("number 0 here.") / 2


def test_closed_is_closed(llm: LLM):
    stream = llm.stream("say:abc")
    next(stream)
    llm.close()
    with pytest.raises(HeadraceError, match="closed"):
        next(stream)
    with pytest.raises(HeadraceError, match="closed"):
        llm.generate("x")


def test_a_stop_string_is_not_cut_into_letters(llm: LLM):
    """`stop="zqo!"` was a sequence of the stops z, q, o and !: the reply ended at the first o."""
    assert llm.generate("say:hello world", stop="wor")[0].text == "hello "
    assert llm.generate("say:hello world", stop=["wor", "zz"])[0].text == "hello "
    assert "".join(llm.stream("say:hello world", stop="wor")) == "hello "
    for empty in ("", [""], ["x", ""]):
        with pytest.raises(InvalidRequest, match="stop has ''"):
            llm.generate("x", stop=empty)


def test_an_engine_that_fails_fails_every_open_call(llm: LLM, engine: FakeEngine):
    """The thread that ran the failing step got the error; the others went on stepping what was left of the engine, for
    as long as it claimed to have work."""
    begun = threading.Barrier(4)
    errors: list[HeadraceError] = []

    def work() -> None:
        stream = llm.stream("say:abc", ignore_eos=True)
        next(stream)
        begun.wait()
        with pytest.raises(EngineFailure, match="a bug of the engine") as caught:
            for _ in stream:
                time.sleep(0.001)
        errors.append(caught.value)

    def fail() -> None:
        engine.on_step = None
        raise RuntimeError("a bug of the engine")

    threads = [threading.Thread(target=work, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    begun.wait()
    engine.on_step = fail
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert len(errors) == 3
    with pytest.raises(EngineFailure, match="make a new LLM"):
        llm.generate("x")
    llm.close()


def test_an_engine_that_fails_at_submit(llm: LLM, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch):
    def broken(request: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(engine, "submit", broken)
    for _ in range(2):
        with pytest.raises(EngineFailure, match="ZeroDivisionError"):
            llm.generate("x")


@pytest.fixture
def heeds_ctrl_c() -> Iterator[None]:
    """A test run started in the background inherits a SIGINT that is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_ctrl_c_waits_for_the_end_of_the_step(llm: LLM, engine: FakeEngine):
    """Raised inside of a step, KeyboardInterrupt left a launched plan behind; in a notebook the model was lost."""
    stream = llm.stream("say:abc", ignore_eos=True)
    assert next(stream) == "a"
    engine.on_step = lambda: signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    engine.on_step = None
    assert engine.num_generated == 2, "the step was finished"
    assert not engine.has_work
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert llm.generate("say:still here")[0].text == "still here"


def test_importing_headrace_loads_nothing_heavy():
    heavy = {"numpy", "fastapi", "pydantic", "jinja2", "tokenizers"}
    code = f"import sys, headrace, headrace.cli; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
