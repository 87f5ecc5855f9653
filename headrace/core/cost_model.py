"""How long a step takes, learnt from steps.

    seconds = fixed + rows(n) + streams + prompts + keys read + query-key pairs       (each times its coefficient)

with n the rows of the step (its tokens) and rows(n) piecewise linear: a step of a few rows is bound by reading the
weights, so that another row is nearly free, and one of many by arithmetic. All coefficients are at least zero. They
minimise the squared *relative* error, by normal equations that forget exponentially and non-negative least squares by
coordinate descent (Franc, Hlavac and Navara, Sequential coordinate-wise algorithm for NNLS, 2005). Pure Python: an
observation costs some 20 us, its share of the fits included.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.core.errors import ConfigurationError
from headrace.core.work import StepWork

FORMAT = 1
"""Of the JSON file; raised when a field changes its meaning."""
KNOTS = (4, 16)
"""Rows at which the slope of rows(n) changes: below the first the kernels wait for memory, from the second on their
tiles are full (measured; docs/benchmarks.md)."""
FEATURES = (
    "step",
    f"row up to {KNOTS[0]}",
    f"row up to {KNOTS[1]}",
    "row above",
    "stream",
    "prompt",
    "1000 keys read by streams",
    "1000 query-key pairs of prompts",
)
NUM = len(FEATURES)
REFIT_EVERY = 64  # observations
SWEEPS = 20
"""Of a fit between observations: it starts from the one before."""
MANY_SWEEPS = 5000
FORGET = 0.9995
"""What an observation weighs after the next: half after 1,400 steps."""
HEAVY = 1e30
ERROR_MOVE = 0.02


def features(work: StepWork) -> tuple[float, ...]:
    """Parallel to `FEATURES`."""
    streams, prompt, prompts, _, keys, pairs = work
    rows, (low, high) = streams + prompt, KNOTS
    return (
        1.0,
        min(rows, low),
        min(max(rows - low, 0), high - low),
        max(rows - high, 0),
        streams,
        prompts,
        keys / 1000,
        pairs / 1000,
    )


def region(work: StepWork) -> str:
    """A kind of step, for which errors are told apart."""
    if not work.num_prompt:
        low, high = KNOTS
        streams = work.num_streams
        return (
            f"1 to {low} streams" if streams <= low else f"{low + 1} to {high}" if streams <= high else f"above {high}"
        )
    return "prompts and streams" if work.num_streams else "prompts alone"


@dataclass(slots=True)
class _Error:
    """Mean absolute relative error of predictions made before the step was seen, of late."""

    mean: float = 0.0
    count: int = 0

    def add(self, error: float) -> None:
        self.count += 1
        self.mean += max(ERROR_MOVE, 1 / self.count) * (error - self.mean)


class CostModel:
    """Predicts seconds of steps, and learns from each step it is told of."""

    def __init__(self, seeds: Iterable[tuple[StepWork, float]] = (), seed_weight: float = 0.01) -> None:
        """`seeds`: steps and their supposed seconds, to start from: each counts as `seed_weight` steps seen."""
        self._products = [[0.0] * NUM for _ in range(NUM)]
        self._targets = [0.0] * NUM
        self.coefficients = [0.0] * NUM
        """Seconds per feature, parallel to `FEATURES`."""
        self._weight = 1.0
        """Of the next observation: it grows, in place of a decay of all that was seen."""
        self._num_unfitted = 0
        self.num_observed = 0
        self._errors: dict[str, _Error] = {}
        for work, seconds in seeds:
            self._add(features(work), seconds, seed_weight)
        self.fit()

    def seconds(self, work: StepWork) -> float:
        """Predicted; 0 of a model that has seen nothing and was not seeded. A microsecond."""
        streams, prompt, prompts, _, keys, pairs = work
        step, row_low, row_middle, row_high, stream, prompt_each, key, pair = self.coefficients
        rows, (low, high) = streams + prompt, KNOTS
        if rows <= low:
            total = step + row_low * rows
        elif rows <= high:
            total = step + row_low * low + row_middle * (rows - low)
        else:
            total = step + row_low * low + row_middle * (high - low) + row_high * (rows - high)
        return total + stream * streams + prompt_each * prompts + (key * keys + pair * pairs) / 1000

    def observe(self, work: StepWork, seconds: float) -> bool:
        """A step has taken so long. Times that are not above zero are ignored. True: the coefficients have changed,
        which they do at every step in the beginning and with every `REFIT_EVERY`th in the end."""
        if seconds <= 0:
            return False
        if self.num_observed:
            kind = region(work)
            error = self._errors.get(kind)
            if error is None:
                error = self._errors[kind] = _Error()
            error.add(abs(self.seconds(work) - seconds) / seconds)
        self._weight /= FORGET
        self._add(features(work), seconds, self._weight)
        self.num_observed += 1
        self._num_unfitted += 1
        if self._num_unfitted < min(REFIT_EVERY, 1 + self.num_observed // 4):
            return False
        self.fit(SWEEPS)
        return True

    def errors(self) -> dict[str, tuple[float, int]]:
        """Region -> (mean absolute relative error of predictions made before their step was seen, their number)."""
        return {kind: (error.mean, error.count) for kind, error in self._errors.items()}

    def fit(self, num_sweeps: int = MANY_SWEEPS) -> None:
        """Bring the coefficients up to date; `observe` does it from time to time."""
        self._num_unfitted = 0
        if self._weight > HEAVY:
            self._products = [[x / self._weight for x in row] for row in self._products]
            self._targets = [x / self._weight for x in self._targets]
            self._weight = 1.0
        products, targets, found = self._products, self._targets, self.coefficients
        scales = [products[i][i] for i in range(NUM)]
        if not any(scales):
            return
        for _ in range(num_sweeps):
            moved = 0.0
            for i, scale in enumerate(scales):
                if scale <= 0.0:
                    continue
                row = products[i]
                slope = sum([a * x for a, x in zip(row, found, strict=True)]) - targets[i]
                new = max(0.0, found[i] - slope / scale)
                # What the move does to predictions: a feature's size is worth its share of a step.
                moved = max(moved, abs(new - found[i]) * math.sqrt(scale))
                found[i] = new
            if moved < 1e-7 * math.sqrt(max(scales[0], 1e-12)) * max(found[0], 1e-6):
                break

    def _add(self, row: tuple[float, ...], seconds: float, weight: float) -> None:
        weight /= seconds * seconds  # relative errors
        for i, x in enumerate(row):
            if x:
                wx = weight * x
                products = self._products[i]
                for j, y in enumerate(row):
                    products[j] += wx * y
                self._targets[i] += wx * seconds

    # --- on disk ---------------------------------------------------------------------------------------------------

    def document(self, about: Mapping[str, Any]) -> dict[str, Any]:
        """As JSON. `about`: of what machine and model."""
        return {
            "format": FORMAT,
            "about": dict(about),
            "features": list(FEATURES),
            "coefficients": self.coefficients,
            "num_observed": self.num_observed,
            "errors": {kind: [error.mean, error.count] for kind, error in self._errors.items()},
            "products": [[x / self._weight for x in row] for row in self._products],
            "targets": [x / self._weight for x in self._targets],
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> CostModel:
        """Raises `ConfigurationError` for a document of another format."""
        if document.get("format") != FORMAT or document.get("features") != list(FEATURES):
            raise ConfigurationError(
                f"the cost model has format {document.get('format')!r} or features this version does not know; make it "
                "anew: headrace calibrate."
            )
        try:
            model = cls()
            model._products = [[float(x) for x in row] for row in document["products"]]
            model._targets = [float(x) for x in document["targets"]]
            model.coefficients = [float(x) for x in document["coefficients"]]
            model.num_observed = int(document["num_observed"])
            model._errors = {kind: _Error(float(mean), int(n)) for kind, (mean, n) in document["errors"].items()}
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigurationError(f"the cost model is damaged: {error!r}") from error
        sizes = {len(row) for row in (*model._products, model._targets, model.coefficients)} | {len(model._products)}
        if sizes != {NUM}:
            raise ConfigurationError(f"the cost model is damaged: its rows have {sorted(sizes)} numbers, not {NUM}.")
        return model


def load_cost_model(path: Path) -> tuple[CostModel, dict[str, Any]]:
    """A saved model, and what it is of. Raises `ConfigurationError`."""
    try:
        document = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"the cost model {path} cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise ConfigurationError(f"the cost model {path} is no JSON object.")
    return CostModel.from_document(document), document.get("about", {})


def save_cost_model(path: Path, model: CostModel, about: Mapping[str, Any]) -> None:
    """Atomic: whoever reads sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f"{path.name}.tmp")
    scratch.write_text(json.dumps(model.document(about), indent=1) + "\n", "utf-8")
    scratch.replace(path)
