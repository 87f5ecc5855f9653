"""The command line. Commands import what they need when they run, so that `headrace --help` costs nothing."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.bench.command import bench
from headrace.bench.simulate_command import calibrate, simulate
from headrace.conformance.command import conformance
from headrace.evaluation.command import app as evaluation
from headrace.models.catalogue import DEFAULT_MODEL

if TYPE_CHECKING:
    from headrace.core.sampling import SamplingParams
    from headrace.llm import LLM
    from headrace.models.progress import Progress
    from headrace.server.inspection import ModelReport

app = typer.Typer(
    name="headrace",
    help="Headrace serves large language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

MODEL_HELP = "Catalogue name, .gguf file, model folder, or hub id (org/name, org/name:QUANT)."
Model = Annotated[str, typer.Option("--model", "-m", help=MODEL_HELP)]
ModelArgument = Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL_HELP, show_default=DEFAULT_MODEL)]
ModelOption = Annotated[str | None, typer.Option("--model", "-m", help="The same, as every command takes it.")]
Context = Annotated[
    int | None, typer.Option("--context-length", min=1, help="Tokens of prompt and reply. Default: the model's.")
]
KvMemory = Annotated[
    str | None,
    typer.Option("--kv-memory", help="Memory for the cache: 512MiB, 4GB. Default: chosen from what is free."),
]
Template = Annotated[
    Path | None,
    typer.Option(
        "--chat-template", exists=True, dir_okay=False, help="A Jinja file in place of the model's own template."
    ),
]
Backend = Annotated[
    str,
    typer.Option(
        metavar="native|reference",
        help="native: C++ on the CPU. reference: NumPy in float32, slow; what the native one is tested against.",
    ),
]
Threads = Annotated[
    int | None, typer.Option(min=1, help="Of the native backend. Default: the cores this process may use.")
]
Isa = Annotated[
    str, typer.Option(help="Instruction set of the native backend. Default: the best; see inspect --system.")
]
KvFormat = Annotated[str, typer.Option(metavar="f16|f32", help="Keys and values in the cache.")]
Activations = Annotated[
    str,
    typer.Option(
        metavar="mixed|int8|int16",
        help="Inputs of quantized products in the native backend: int8 with the largest numbers in float (mixed); int8 "
        "alone is a little faster, int16 as good as float32 and slower.",
    ),
]
MaxTokens = Annotated[
    int | None, typer.Option(min=1, help="Most tokens of a reply. Default: until the context is full.")
]
Temperature = Annotated[float, typer.Option(help="0 always takes the most probable token.")]
TopP = Annotated[float, typer.Option(help="Sample from the most probable tokens that together have this probability.")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same reply. Default: drawn.")]
System = Annotated[str | None, typer.Option("--system", help="A system message to begin with.")]


def print_version(wanted: bool) -> None:
    if wanted:
        from headrace.server.system import version  # noqa: PLC0415

        print(f"headrace {version()}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=print_version, help="Print the version and end.")
    ] = False,
) -> None:
    """Serve, talk to, and look into large language models."""


@app.command()
def serve(
    model: ModelArgument = None,
    *,
    model_option: ModelOption = None,
    host: Annotated[str, typer.Option(help="0.0.0.0 lets other machines in; think of --api-key then.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8000,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="The name requests use; given again, aliases. Default: the model's own.")
    ] = None,
    context_length: Context = None,
    kv_memory: KvMemory = None,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens per cache block.")] = 16,
    max_running: Annotated[int, typer.Option(min=1, help="Sequences that run at once.")] = 64,
    max_step_tokens: Annotated[int, typer.Option(min=1, help="Tokens computed in one step.")] = 160,
    inter_token_ms: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            help="Longest step that reads prompts beside running streams. Default: 2.5 times a step without prompts, "
            "and 20 ms at least.",
        ),
    ] = None,
    max_queue: Annotated[int, typer.Option(min=1, help="Requests that may wait; more get 429.")] = 256,
    policy: Annotated[
        str,
        typer.Option(
            help="Who is first: fcfs, sjf, srpt, mlfq, edf or slack; around it fair, dlpm, priority, lpf or ageing."
        ),
    ] = "fair(priority(fcfs))",
    max_wait: Annotated[float, typer.Option(min=0, help="Seconds after which ageing puts a request first.")] = 30.0,
    key_weight: Annotated[
        list[str] | None, typer.Option(help="An API key's share: KEY=2, for fair and dlpm; may be given again.")
    ] = None,
    batching: Annotated[
        str,
        typer.Option(metavar="continuous|static|window|alike-length|alike-cache|two-queues", help="Who runs together."),
    ] = "continuous",
    batch_window_ms: Annotated[float, typer.Option(min=0, help="What a batch of window waits for more.")] = 50.0,
    batch_size: Annotated[int, typer.Option(min=1, help="Requests for which a batch of window does not wait.")] = 8,
    predictor: Annotated[
        str, typer.Option(metavar="bound|history|oracle", help="Of reply lengths, for sjf, srpt, slack and the gates.")
    ] = "bound",
    budget: Annotated[
        str, typer.Option(metavar="paced|fixed", help="Of a step: measured, or --max-step-tokens.")
    ] = "paced",
    reserve_replies: Annotated[
        bool, typer.Option(help="Start who fits with its whole predicted reply, not with its prompt only.")
    ] = False,
    tenant_running_tokens: Annotated[
        int | None, typer.Option(min=1, help="Prompts and predicted replies that may run for one key.")
    ] = None,
    tenant_queued_tokens: Annotated[
        int | None, typer.Option(min=1, help="The same, that may wait; more get 429.")
    ] = None,
    refuse_late: Annotated[bool, typer.Option(help="429 for who is predicted to miss its deadline_ms.")] = False,
    ttft_ms: Annotated[
        float | None, typer.Option(min=1, help="429 for who is predicted to wait longer for its first token.")
    ] = None,
    drop_late: Annotated[bool, typer.Option(help="429 for who waits and can no longer meet its deadline_ms.")] = False,
    depth: Annotated[int, typer.Option(min=1, max=2, help="Steps kept launched; 2 plans one while another runs.")] = 1,
    backend: Backend = "native",
    threads: Threads = None,
    isa: Isa = "",
    kv_format: KvFormat = "f16",
    activations: Activations = "mixed",
    speculate: Annotated[
        str | None,
        typer.Option(
            metavar="prompt-lookup",
            help="Guess tokens and verify several in one step: the same replies, sooner where they repeat the prompt. "
            "Default: no guessing.",
        ),
    ] = None,
    chat_template: Template = None,
    tool_format: Annotated[
        str | None,
        typer.Option(
            help="How the model writes tool calls: hermes, qwen, llama3, mistral, mistral-v3. Default: as its template."
        ),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(envvar="HEADRACE_API_KEY", help="Ask for this key everywhere but at /health; may be given again."),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(help="Site whose pages may use the server from a browser, such as https://example.org; *: all."),
    ] = None,
    drain_timeout: Annotated[float, typer.Option(min=0, help="Seconds that running replies get after SIGTERM.")] = 60.0,
    max_body: Annotated[str, typer.Option(help="Largest request body.")] = "8MiB",
    max_choices: Annotated[int, typer.Option(min=1, help="Largest n of a request.")] = 16,
    max_logprobs: Annotated[int, typer.Option(min=0, help="Largest top_logprobs of a request.")] = 20,
    max_prompts: Annotated[int, typer.Option(min=1, help="Most prompts in one completions request.")] = 64,
    log_requests: Annotated[bool, typer.Option(help="A line per finished request on standard error.")] = True,
    access_log: Annotated[bool, typer.Option(help="A line per HTTP request as well.")] = False,
) -> None:
    """Serve a model over OpenAI's HTTP API until Ctrl-C or SIGTERM."""
    with friendly_errors():
        from headrace.engine.composition import SchedulingConfig  # noqa: PLC0415
        from headrace.server.build import ServeConfig  # noqa: PLC0415
        from headrace.server.limits import CallLimits  # noqa: PLC0415
        from headrace.server.serve import ServerOptions  # noqa: PLC0415
        from headrace.server.serve import serve as run  # noqa: PLC0415

        names = served_model_name or []
        config = ServeConfig(
            model=one_model(model, model_option),
            context_length=context_length,
            block_size=block_size,
            kv_memory_bytes=parse_bytes(kv_memory),
            max_running=max_running,
            max_step_tokens=max_step_tokens,
            scheduling=SchedulingConfig(
                policy=policy,
                max_wait_s=max_wait,
                weights=parse_weights(key_weight or ()),
                batching=batching,
                batch_window_ms=batch_window_ms,
                batch_size=batch_size,
                predictor=predictor,
                budget=budget,
                inter_token_ms=inter_token_ms,
                reserve_replies=reserve_replies,
                tenant_running_tokens=tenant_running_tokens,
                tenant_queued_tokens=tenant_queued_tokens,
                refuse_late=refuse_late,
                ttft_ms=ttft_ms,
                drop_late=drop_late,
            ),
            max_queue=max_queue,
            depth=depth,
            backend=backend,
            threads=threads,
            isa=isa,
            kv_format=kv_format,
            activations=activations,
            speculate=speculate,
            chat_template=chat_template,
            tool_format=tool_format,
            served_model_name=names[0] if names else None,
        )
        limits = CallLimits(
            max_choices=max_choices,
            max_logprobs=max_logprobs,
            max_prompts=max_prompts,
            max_body_bytes=parse_bytes(max_body) or 0,
        )
        options = ServerOptions(
            host=host,
            port=port,
            aliases=tuple(names[1:]),
            api_keys=tuple(api_key or ()),
            origins=tuple(allow_origin or ()),
            drain_timeout_s=drain_timeout,
            log_requests=log_requests,
            access_log=access_log,
            limits=limits,
        )
        run(config, options, progress_bars())


@app.command()
def chat(
    model: ModelArgument = None,
    *,
    model_option: ModelOption = None,
    system: System = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = 0.7,
    top_p: TopP = 0.95,
    seed: Seed = None,
    context_length: Context = None,
    kv_memory: KvMemory = None,
    chat_template: Template = None,
    backend: Backend = "native",
    threads: Threads = None,
    isa: Isa = "",
    kv_format: KvFormat = "f16",
    activations: Activations = "mixed",
) -> None:
    """Talk to a model in the terminal; from a pipe, each line is a message.

    /clear forgets the conversation, Ctrl-C stops a reply, Ctrl-D ends.
    """
    from headrace.core.errors import RequestError  # noqa: PLC0415
    from headrace.core.randomness import draw_seed  # noqa: PLC0415

    with friendly_errors(), contextlib.ExitStack() as stack:
        params = sampling(max_tokens, temperature, top_p, seed)  # what is wrong is said before a model is loaded
        opening = [{"role": "system", "content": checked_text(system, "--system")}] if system else []
        llm = stack.enter_context(
            open_llm(
                one_model(model, model_option),
                context_length=context_length,
                kv_memory_bytes=parse_bytes(kv_memory),
                chat_template=chat_template,
                backend=backend,
                threads=threads,
                isa=isa,
                kv_format=kv_format,
                activations=activations,
            )
        )
        messages = list(opening)
        for line in user_lines():
            if line == "/clear":
                messages = list(opening)
                continue
            messages.append({"role": "user", "content": line})
            reply = ""
            if seed is None:
                params = replace(params, seed=draw_seed())
            try:
                for piece in llm.stream(messages, params):
                    reply += piece
                    print(piece, end="", flush=True)
            except KeyboardInterrupt:
                print(" [stopped]", end="")
            except RequestError as error:  # most likely the context is full
                print(f"headrace: {error} (/clear begins anew)", file=sys.stderr)
                messages.pop()
                continue
            print(flush=True)
            messages.append({"role": "assistant", "content": reply})


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads it from standard input.")],
    *,
    model: Model = DEFAULT_MODEL,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given again.")] = None,
    context_length: Context = None,
    kv_memory: KvMemory = None,
    backend: Backend = "native",
    threads: Threads = None,
    isa: Isa = "",
    kv_format: KvFormat = "f16",
    activations: Activations = "mixed",
) -> None:
    """Continue a text, without a chat template."""
    with friendly_errors(), contextlib.ExitStack() as stack:
        from headrace.llm import check_stops  # noqa: PLC0415

        params = sampling(max_tokens, temperature, top_p, seed)  # what is wrong is said before a model is loaded
        stops = check_stops(stop or ())
        text = checked_text(sys.stdin.read() if prompt == "-" else prompt, "the prompt")
        llm = stack.enter_context(
            open_llm(
                model,
                context_length=context_length,
                kv_memory_bytes=parse_bytes(kv_memory),
                backend=backend,
                threads=threads,
                isa=isa,
                kv_format=kv_format,
                activations=activations,
            )
        )
        for piece in llm.stream(text, params, stop=stops):
            print(piece, end="", flush=True)
        print(flush=True)


@app.command()
def pull(model: ModelArgument = None, model_option: ModelOption = None) -> None:
    """Fetch a model, so that it is there without a network, and print its path."""
    with friendly_errors():
        from headrace.models.fetch import resolve  # noqa: PLC0415

        with progress_bars() as progress:
            path = resolve(one_model(model, model_option), progress)
        print(path)


@app.command()
def inspect(
    model: ModelArgument = None,
    model_option: ModelOption = None,
    system: Annotated[bool, typer.Option("--system", help="Show this machine instead.")] = False,
) -> None:
    """What a model is made of and what of it fits here; or what this machine offers."""
    with friendly_errors():
        if system:
            print_system()
            return
        from headrace.models.fetch import resolve  # noqa: PLC0415
        from headrace.server.inspection import report_model  # noqa: PLC0415

        with progress_bars() as progress:
            path = resolve(one_model(model, model_option), progress)
        print_model(report_model(path))


app.command()(bench)
app.command()(calibrate)
app.command()(simulate)
app.command()(conformance)
app.add_typer(evaluation)


# What the commands share.


@contextlib.contextmanager
def friendly_errors() -> Iterator[None]:
    """Errors that were raised on purpose end in one line and exit code 1; bugs keep their traceback."""
    from headrace.core.errors import HeadraceError  # noqa: PLC0415

    try:
        yield
    except HeadraceError as error:
        print(f"headrace: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except BrokenPipeError:  # `headrace generate ... | head`
        sys.stderr.close()
        raise typer.Exit(0) from None


@contextlib.contextmanager
def progress_bars() -> Iterator[Progress]:
    """Bars on standard error while something is fetched or loaded; none until there is something to report."""
    from headrace.models.progress import rich_progress  # noqa: PLC0415

    with contextlib.ExitStack() as stack:
        bars: list[Progress] = []

        def report(num_done: int, num_total: int, what: str) -> None:
            if not bars:
                bars.append(stack.enter_context(rich_progress()))
            bars[0](num_done, num_total, what)

        yield report


@contextlib.contextmanager
def open_llm(model: str, **options: Any) -> Iterator[LLM]:
    from headrace.llm import LLM  # noqa: PLC0415

    with progress_bars() as progress:
        llm = LLM(model, progress=progress, **options)
    with llm:
        yield llm


def sampling(max_tokens: int | None, temperature: float, top_p: float, seed: int | None) -> SamplingParams:
    from headrace.core.randomness import draw_seed  # noqa: PLC0415
    from headrace.core.sampling import SamplingParams  # noqa: PLC0415

    return SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=draw_seed() if seed is None else seed
    )


def one_model(argument: str | None, option: str | None) -> str:
    """The model, given as an argument or as --model. Raises `ConfigurationError` for two different ones."""
    from headrace.core.errors import ConfigurationError  # noqa: PLC0415

    if argument is not None and option is not None and argument != option:
        raise ConfigurationError(f"two models are given, {argument!r} and {option!r}; give one.")
    return argument or option or DEFAULT_MODEL


def checked_text(text: str, what: str) -> str:
    """Raises `ConfigurationError` for bytes that are no UTF-8, which Python hands on as lone surrogates."""
    from headrace.core.errors import ConfigurationError  # noqa: PLC0415

    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigurationError(f"{what} is not UTF-8 (at character {error.start}).") from error
    return text


def user_lines() -> Iterator[str]:
    """What the user says, line by line, until the end of input; asks only on a terminal."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401, PLC0415  (gives input() a history)
    while True:
        try:
            line = input("> " if is_terminal else "")
        except EOFError:
            if is_terminal:
                print()
            return
        except KeyboardInterrupt:
            print()
            continue
        if line.strip():
            yield line.strip()


def parse_bytes(text: str | None) -> int | None:
    """ "512MiB", "4GB", "1000" -> bytes. Raises `ConfigurationError`."""
    import re  # noqa: PLC0415

    from headrace.core.errors import ConfigurationError  # noqa: PLC0415

    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ConfigurationError(f"{text!r} is not a size; write it like 512MiB or 4GB.")
    number, unit, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** " KMGT".index(unit.upper() or " "))


def parse_weights(texts: Iterable[str]) -> dict[str, float]:
    """ "KEY=2" -> {the key's tenant: 2.0}. Raises `ConfigurationError`."""
    from headrace.core.errors import ConfigurationError  # noqa: PLC0415
    from headrace.server.guard import tenant_of  # noqa: PLC0415

    weights = {}
    for text in texts:
        key, separator, weight = text.rpartition("=")
        try:
            weights[tenant_of(key)] = float(weight)
        except ValueError:
            separator = ""
        if not separator:  # the message is no place for a key
            raise ConfigurationError(f"a key's weight is {weight!r}; write KEY=2.")
    return weights


def show_bytes(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def print_facts(facts: Mapping[str, str]) -> None:
    """Not a table of rich's, which would break a long path in two."""
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name:<{width}}   {value}")


def print_model(report: ModelReport) -> None:
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    print_facts(
        {
            "path": str(report.path),
            "architecture": report.architecture,
            "parameters": f"{report.num_parameters:,}",
            "weights as stored": show_bytes(report.num_bytes),
            "context": f"{report.context_length:,} tokens",
            "vocabulary": f"{report.vocab_size:,} tokens",
        }
    )
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 1000)
    formats = Table("format", "tensors", "bytes", "share", title="Formats", title_justify="left")
    for share in report.formats:
        formats.add_row(
            share.name,
            str(share.num_tensors),
            show_bytes(share.num_bytes),
            f"{100 * share.num_bytes / max(1, report.num_bytes):.1f} %",
        )
    console.print(formats)

    groups = Table(
        "group", "kind", "layers", "window", "per token", "per sequence", title="Cache groups", title_justify="left"
    )
    for group in report.groups:
        groups.add_row(
            group.name,
            group.kind,
            str(group.num_layers),
            f"{group.window:,}" if group.window else "-",
            show_bytes(group.bytes_per_token) if group.bytes_per_token else "-",
            show_bytes(group.bytes_at(report.context_length)),
        )
    console.print(groups)
    print(capacity(report))


def capacity(report: ModelReport) -> str:
    """What of it fits here."""
    weights, here = show_bytes(report.num_bytes), show_bytes(report.memory_bytes)
    cache = report.cache
    if cache is None or not report.fits:
        needed = "a cache for one sequence" if cache is None else f"{show_bytes(cache.num_bytes)} of cache"
        return f"Does not fit: {here} are available here; needed are {weights} of weights and {needed}."
    tokens = f"{cache.num_tokens:,} tokens in all, " if cache.num_tokens else ""
    longest = ""
    if cache.longest_tokens < report.context_length:
        longest = f" No sequence may be longer than {cache.longest_tokens:,} tokens; --kv-memory gives more."
    return (
        f"Available here: {here}. Beside the weights (about {weights}) `headrace serve` takes "
        f"{show_bytes(cache.num_bytes)} of it for the cache ({cache.kv_format} keys and values): {tokens}"
        f"{cache.num_full_sequences:,} sequences of the whole context at once.{longest}"
    )


def print_system() -> None:
    import platform  # noqa: PLC0415

    from headrace.backends.native import _native  # noqa: PLC0415
    from headrace.server import system  # noqa: PLC0415

    cores, limited_by = system.usable_cores()
    total, available = system.memory_bytes()
    best, *others = _native.isas()
    print_facts(
        {
            "processor": f"{system.processor()} ({platform.machine()})",
            "instruction sets": " ".join(system.instruction_sets()) or "unknown",
            "usable cores": f"{cores} ({limited_by})",
            "memory": f"{show_bytes(total)}, of which {show_bytes(available)} available",
            "native backend": f"{best}, {cores} threads" + (f" (--isa: also {', '.join(others)})" if others else ""),
            "system": platform.platform(),
            "python": platform.python_version(),
            "headrace": system.version(),
            **system.package_versions(),
        }
    )


if __name__ == "__main__":
    app()
