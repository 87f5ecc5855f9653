"""BLEU and ROUGE against references, by the libraries whose figures papers quote: sacrebleu and rouge-score."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from headrace.core.errors import ConfigurationError

ROUGE = ("rouge1", "rouge2", "rougeL")
INSTALL = "pip install 'headrace[eval]'"


def read_lines(path: Path) -> list[str]:
    """One text per line. Raises `ConfigurationError`."""
    try:
        return path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from error


def check_lengths(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> None:
    """`references`: one or more whole sets. Raises `ConfigurationError` unless each is as long as `hypotheses`."""
    for number, lines in enumerate(references, 1):
        if len(lines) != len(hypotheses):
            raise ConfigurationError(
                f"there are {len(hypotheses)} hypotheses and {len(lines)} lines in reference file {number}; each line "
                "needs its reference."
            )
    if not hypotheses or not references:
        raise ConfigurationError("there is nothing to compare: give hypotheses and at least one reference file.")


def bleu(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Corpus BLEU (0 to 100), chrF, and the signature that makes the figure comparable."""
    try:
        from sacrebleu.metrics import BLEU, CHRF  # noqa: PLC0415
    except ImportError as error:
        raise ConfigurationError(f"BLEU needs sacrebleu: {INSTALL}") from error
    check_lengths(hypotheses, references)
    metric = BLEU()
    score = metric.corpus_score(list(hypotheses), [list(lines) for lines in references])
    chrf = CHRF().corpus_score(list(hypotheses), [list(lines) for lines in references])
    return {"bleu": score.score, "chrf": chrf.score, "bleu_signature": str(metric.get_signature())}


def rouge(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Mean F1 (0 to 1) with stemming; of several references the best one counts, text by text."""
    try:
        from rouge_score.rouge_scorer import RougeScorer  # type: ignore[import-untyped]  # noqa: PLC0415
    except ImportError as error:
        raise ConfigurationError(f"ROUGE needs rouge-score: {INSTALL}") from error
    check_lengths(hypotheses, references)
    scorer = RougeScorer(list(ROUGE), use_stemmer=True)
    scores = [scorer.score_multi(list(targets), text) for text, *targets in zip(hypotheses, *references, strict=True)]
    return {name: fmean(score[name].fmeasure for score in scores) for name in ROUGE}
