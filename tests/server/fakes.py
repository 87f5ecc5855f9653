"""A deployment without a model: tokens are bytes, and the engine says what the prompt tells it to.

A prompt that contains `say:WORDS.` (up to the last byte of the prompt, or a newline) is answered by WORDS and the end
token; any other by `REPLY`. Real tokenizer, template and limits around it, so that only the model is missing.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

from headrace.core.events import TokenEvent
from headrace.core.request import Pooling, Request
from headrace.core.result import TokenLogprob
from headrace.core.sequence import FinishReason
from headrace.engine.limits import Limits
from headrace.engine.predict.calibration import CalibrationReport
from headrace.engine.state import EngineStats, TenantStats
from headrace.memory.manager import GroupStats
from headrace.text.chat_template import ChatTemplate
from headrace.text.grammar.compiler import GrammarCompiler
from headrace.text.matcher import TokenMatcher
from headrace.text.tokenizer import Tokenizer

REPLY = "Hello from the fake model."
BOS, EOS, TURN, TURN_END = 256, 257, 258, 259
CONTROL = {"<bos>": BOS, "<eos>": EOS, "<turn>": TURN, "</turn>": TURN_END}
PIECES = [bytes((i,)) for i in range(256)] + [text.encode() for text in CONTROL]
NUM_BLOCKS = 100
CONTEXT_LENGTH = 256

TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] == 'system' and not loop.first -%}{{ raise_exception('system goes first') }}{%- endif -%}
<turn>{{ message['role'] }}
{{ message['content'] }}</turn>
{%- endfor -%}
{%- if add_generation_prompt -%}<turn>assistant
{% endif -%}
"""


def make_tokenizer() -> Tokenizer:
    control = TokenMatcher(CONTROL)
    return Tokenizer(
        encode_ordinary=lambda text, at_start: list(text.encode()),
        ids={chr(i): i for i in range(128)} | CONTROL,
        pieces=PIECES,
        control=control,
        bos_id=BOS,
        eos_id=EOS,
        eos_ids=[EOS],
        prefix_ids=[BOS],
        chat_template=TEMPLATE,
    )


@dataclass
class Running:
    request: Request
    choice: int
    script: list[int]
    num_sent: int = 0


@dataclass
class FakeEngine:
    """Has the methods of `headrace.engine.engine.Engine`. Every running choice gets one token per step."""

    step_s: float = 0.0
    max_running: int = 64
    max_queue: int = 16
    context_length: int = CONTEXT_LENGTH
    fail_at_step: int | None = None
    on_step: Callable[[], None] | None = None
    waiting: list[Request] = field(default_factory=list)
    running: dict[tuple[str, int], Running] = field(default_factory=dict)
    seen: set[tuple[int, ...]] = field(default_factory=set)
    requests: list[Request] = field(default_factory=list)
    """Everything ever submitted."""
    aborted: list[tuple[str, int | None, int]] = field(default_factory=list)
    """(request id, choice, step at which the abort was read)."""
    num_steps: int = 0
    num_prompt: int = 0
    num_cached: int = 0
    num_generated: int = 0
    drops_late: bool = False
    """Requests with a deadline, all of them."""
    wake_s: float | None = None

    def submit(self, request: Request) -> None:
        limits = Limits(self.context_length, self.context_length, self.max_queue, self.max_running, len(PIECES))
        limits.sequence_limit(request)
        limits.check_queue(self.num_places)
        self.waiting.append(request)
        self.requests.append(request)

    def abort(self, request_id: str, choice: int | None = None) -> None:
        self.aborted.append((request_id, choice, self.num_steps))
        self.waiting = [r for r in self.waiting if r.id != request_id]
        for key in [k for k in self.running if k[0] == request_id and choice in (None, k[1])]:
            del self.running[key]

    def step(self) -> list[TokenEvent]:
        events: list[TokenEvent] = []
        while self.waiting and len(self.running) + self.waiting[0].num_choices <= self.max_running:
            events += self._admit(self.waiting.pop(0))
        if not self.running:
            return events
        if self.on_step is not None:
            self.on_step()
        if self.step_s:
            time.sleep(self.step_s)
        self.num_steps += 1
        if self.fail_at_step is not None and self.num_steps >= self.fail_at_step:
            raise RuntimeError("a bug of the engine")
        return events + [self._next(run) for run in list(self.running.values())]

    def _admit(self, request: Request) -> list[TokenEvent]:
        if self.drops_late and request.deadline_s is not None:
            error = "its deadline cannot be met any more"
            return [TokenEvent(request.id, 0, finish_reason=FinishReason.LATE, error=error)]
        self.num_prompt += len(request.prompt)
        cached = len(request.prompt) - 1 if request.prompt in self.seen and not request.score_prompt else 0
        self.num_cached += cached
        self.seen.add(request.prompt)
        scores = ()
        if request.score_prompt:
            count = request.prompt_top
            scores = tuple(logprob_of(token, count) for token in request.prompt[1:])
        if request.pooling:
            half = len(request.prompt) // 2
            parts = (
                [request.prompt[:half], request.prompt[half:]]
                if request.pooling is Pooling.MEAN
                else [request.prompt[-1:]]
            )
            pieces = [TokenEvent(request.id, 0, pooled=array("d", hidden_sum(part))) for part in parts if part]
            return [*pieces, TokenEvent(request.id, 0, finish_reason=FinishReason.LENGTH)]
        if request.sampling.max_tokens == 0:
            return [TokenEvent(request.id, 0, prompt_logprobs=scores, finish_reason=FinishReason.LENGTH)]
        script = script_of(request)
        for choice in range(request.num_choices):
            self.running[request.id, choice] = Running(request, choice, script)
        half = len(scores) // 2
        pieces = [s for s in (scores[:half], scores[half:]) if s]
        return [
            *(TokenEvent(request.id, 0, prompt_logprobs=piece, num_cached=cached) for piece in pieces),
            TokenEvent(request.id, 0, num_cached=cached),
        ]

    def _next(self, run: Running) -> TokenEvent:
        sampling = run.request.sampling
        token = run.script[run.num_sent % len(run.script)]
        run.num_sent += 1
        self.num_generated += 1
        reason = None
        room = self.context_length - len(run.request.prompt)
        if token in sampling.stop_token_ids:
            reason = FinishReason.STOP
        elif run.num_sent >= (room if sampling.max_tokens is None else sampling.max_tokens):
            reason = FinishReason.LENGTH
        if reason is not None:
            del self.running[run.request.id, run.choice]
        logprobs = () if sampling.num_logprobs is None else (logprob_of(token, sampling.num_logprobs),)
        return TokenEvent(run.request.id, run.choice, (token,), logprobs, (), reason, 0, time.monotonic())

    @property
    def num_places(self) -> int:
        return self.max_queue + max(0, self.max_running - len(self.running)) - len(self.waiting)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def stats(self) -> EngineStats:
        used = len(self.running)
        return EngineStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            steps=self.num_steps,
            requests=len(self.requests),
            prompt_tokens=self.num_prompt,
            cached_tokens=self.num_cached,
            computed_tokens=self.num_prompt - self.num_cached + self.num_generated,
            generated_tokens=self.num_generated,
            preemptions=5,
            displacements=2,
            evictions=0,
            groups=(GroupStats("full", NUM_BLOCKS, used, 3, NUM_BLOCKS - 3 - used),),
            num_places=self.num_places,
            step_budget=160,
            calibration=CalibrationReport(100, 0.5, 0.25),
            cost_errors=(0.125, 0.25),
            tenants=(TenantStats("a", 10, 20, 30, 40),),
            verifications=0,
            proposed_drafts=0,
            accepted_drafts=0,
        )


def logprob_of(token: int, count: int) -> TokenLogprob:
    """The fake model's belief: -0.25 for what it says, less for the ids after it."""
    top = tuple(((token + i) % 256, -0.25 - i) for i in range(count))
    return TokenLogprob(token, -0.25, 0, top)


def hidden_sum(tokens: Sequence[int]) -> tuple[float, ...]:
    """The fake model's hidden states, summed up: of a token its id, its square root, and 1."""
    return (float(sum(tokens)), sum(token**0.5 for token in tokens), float(len(tokens)))


def script_of(request: Request) -> list[int]:
    text = bytes(t for t in request.prompt if t < 256)
    _, found, words = text.rpartition(b"say:")
    if not found:
        return [*REPLY.encode(), EOS]
    for end in (b"\n", b"assistant"):
        words = words.partition(end)[0]
    return [*words, EOS]


def make_deployment(engine: FakeEngine | None = None, vocab_size: int | None = None) -> SimpleNamespace:
    """What `headrace.server.build.build` would return. `vocab_size`: the model's, where it is not the tokenizer's."""
    tokenizer = make_tokenizer()
    return SimpleNamespace(
        engine=engine or FakeEngine(),
        tokenizer=tokenizer,
        grammars=GrammarCompiler(tokenizer, vocab_size or tokenizer.vocab_size),
        template=ChatTemplate(TEMPLATE),
        name="fake-model",
        context_length=CONTEXT_LENGTH,
        vocab_size=vocab_size or tokenizer.vocab_size,
        eos_ids=tokenizer.eos_ids,
        description=None,
        hidden_size=3,
        count_threads=lambda: (4, 3),
        tool_format=None,
        thinking=None,
    )
