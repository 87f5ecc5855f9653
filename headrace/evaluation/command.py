"""`headrace eval`: perplexity, divergence, similarity. Only the options are read when the command line is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.models.catalogue import DEFAULT_MODEL

if TYPE_CHECKING:
    from headrace.evaluation.texts import Window
    from headrace.server.build import Deployment, ServeConfig

app = typer.Typer(
    name="eval",
    help="Measure quality: perplexity, divergence from a reference, BLEU and ROUGE. Each prints one JSON object.",
    no_args_is_help=True,
)

Texts = Annotated[
    list[Path],
    typer.Argument(exists=True, dir_okay=False, help="Texts (UTF-8), or .json files with lists of token ids."),
]
Model = Annotated[str, typer.Option("--model", "-m", help="Catalogue name, .gguf file, model folder, or hub id.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="FIELD=VALUE of ServeConfig, such as max_step_tokens=64.")
]
ContextTokens = Annotated[int, typer.Option("--context", min=2, help="Tokens of a window.")]
Overlap = Annotated[
    int | None, typer.Option(min=1, help="Tokens a window repeats as context. Default: half of the context.")
]
Output = Annotated[Path | None, typer.Option("--json", help="Write the result here too.")]


@app.command()
def perplexity(
    texts: Texts,
    *,
    model: Model = DEFAULT_MODEL,
    setting: Settings = None,
    context: ContextTokens = 512,
    overlap: Overlap = None,
    json_file: Output = None,
) -> None:
    """exp of the mean negative logprob of the texts' tokens, each scored once behind at least --overlap tokens.

    A model's BOS token goes before each window; the first token of a text counts only behind one.
    """
    from headrace.cli import friendly_errors  # noqa: PLC0415

    with friendly_errors():
        from headrace.bench.settings import serve_config  # noqa: PLC0415
        from headrace.evaluation.scoring import perplexity as summarize  # noqa: PLC0415
        from headrace.evaluation.scoring import score  # noqa: PLC0415

        config = serve_config(model, setting or ())
        deployment = _load(config)
        per_text = {}
        everything: list[float] = []
        with _progress_bar() as begin:
            for path in texts:
                parts, num_tokens = _windows(path, deployment, context, overlap)
                logprobs = score(deployment.engine, parts, begin(path.name, num_tokens))
                per_text[str(path)] = summarize(logprobs).as_dict()
                everything += logprobs
        result = summarize(everything).as_dict() | {"texts": per_text, **_about(config, context, overlap)}
        _print(result, json_file)


@app.command()
def divergence(
    texts: Texts,
    *,
    model: Model = DEFAULT_MODEL,
    setting: Settings = None,
    reference: Annotated[str | None, typer.Option(help="The model to compare with. Default: --model.")] = None,
    reference_setting: Annotated[
        list[str] | None, typer.Option("--reference-set", help="FIELD=VALUE of the reference's ServeConfig.")
    ] = None,
    context: ContextTokens = 512,
    overlap: Overlap = None,
    json_file: Output = None,
) -> None:
    """KL(reference || model) over the whole vocabulary, and the mean |difference| of the texts' own logprobs.

    Both models must have the same vocabulary.
    """
    from headrace.cli import friendly_errors  # noqa: PLC0415

    with friendly_errors():
        from headrace.bench.settings import as_json, serve_config  # noqa: PLC0415
        from headrace.evaluation.divergence import diverge  # noqa: PLC0415

        config = serve_config(model, setting or ())
        base_config = serve_config(reference or model, reference_setting or ())
        if base_config.model != config.model:
            _check_vocabularies(base_config.model, config.model)
        deployment, base = _load(config), _load(base_config)
        parts: list[Window] = []
        num_total = 0
        for path in texts:
            found, num_tokens = _windows(path, deployment, context, overlap)
            parts += found
            num_total += num_tokens
        with _progress_bar() as begin:
            tick = begin("comparing", num_total)
            result = diverge(base.engine, deployment.engine, parts, deployment.tokenizer.vocab_size, tick).as_dict()
        about = _about(config, context, overlap) | {"reference_config": as_json(base_config)}
        _print(result | {"texts": [str(path) for path in texts]} | about, json_file)


@app.command()
def similarity(
    hypotheses: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="One text per line.")],
    references: Annotated[
        list[Path],
        typer.Argument(exists=True, dir_okay=False, help="One text per line, in the same order; one or more files."),
    ],
    *,
    json_file: Output = None,
) -> None:
    """BLEU and chrF (sacrebleu) and ROUGE-1, -2 and -L (rouge-score) of texts against references."""
    from headrace.cli import friendly_errors  # noqa: PLC0415

    with friendly_errors():
        from headrace.evaluation.similarity import bleu, read_lines, rouge  # noqa: PLC0415

        texts, against = read_lines(hypotheses), [read_lines(path) for path in references]
        _print(bleu(texts, against) | rouge(texts, against) | {"num_texts": len(texts)}, json_file)


# What the commands share.


def _load(config: ServeConfig) -> Deployment:
    from headrace.cli import progress_bars  # noqa: PLC0415
    from headrace.server.build import build  # noqa: PLC0415

    with progress_bars() as progress:
        return build(config, progress)


def _windows(path: Path, deployment: Deployment, context: int, overlap: int | None) -> tuple[list[Window], int]:
    """(the windows of a text, how many tokens they have to be run through)."""
    from headrace.core.errors import ConfigurationError  # noqa: PLC0415
    from headrace.evaluation.texts import first_token, read_tokens, windows  # noqa: PLC0415

    if context > deployment.context_length:
        raise ConfigurationError(
            f"--context is {context}; this model reads at most {deployment.context_length} tokens."
        )
    tokens = read_tokens(path, deployment.tokenizer)
    parts = list(windows(tokens, context, _overlap(context, overlap), first_token(deployment.tokenizer)))
    return parts, sum(len(window.tokens) - 1 for window in parts)


def _overlap(context: int, overlap: int | None) -> int:
    return max(1, context // 2) if overlap is None else overlap


def _check_vocabularies(reference: str, model: str) -> None:
    """Before any weight is loaded."""
    from headrace.bench.settings import open_tokenizer  # noqa: PLC0415
    from headrace.cli import progress_bars  # noqa: PLC0415
    from headrace.core.errors import ConfigurationError  # noqa: PLC0415

    with progress_bars() as progress:
        ours, theirs = open_tokenizer(model, progress), open_tokenizer(reference, progress)
    if ours.pieces != theirs.pieces:
        raise ConfigurationError(
            f"{reference} and {model} have different vocabularies ({theirs.vocab_size} and {ours.vocab_size} tokens): "
            "their distributions cannot be compared token by token."
        )


def _about(config: ServeConfig, context: int, overlap: int | None) -> dict[str, Any]:
    from headrace.bench.settings import as_json  # noqa: PLC0415

    return {"config": as_json(config), "context": context, "overlap": _overlap(context, overlap)}


def _print(result: dict[str, Any], json_file: Path | None) -> None:
    text = json.dumps(result, indent=2)
    print(text)
    if json_file is not None:
        json_file.write_text(text + "\n", "utf-8")


@contextmanager
def _progress_bar() -> Iterator[Callable[[str, int], Callable[[int], None]]]:
    """Gives `begin(title, total)`, which gives a bar's `advance(count)`; on standard error."""
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    columns: Sequence[Any] = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tokens"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:

        def begin(title: str, total: int) -> Callable[[int], None]:
            task = bars.add_task(title, total=total)
            return lambda count: bars.advance(task, count)

        yield begin
