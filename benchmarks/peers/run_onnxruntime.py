"""ONNX Runtime GenAI, static batches, on a model of its own builder. Runs in the peer's environment."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime_genai as og

from benchmarks.peers.wire import serve


class Runner:
    """`wire.Engine`. All prompts of a batch have one length and start together."""

    def load(self, model: str, threads: int, options: dict[str, Any]) -> dict[str, Any]:
        config_file = Path(model) / "genai_config.json"
        config = json.loads(config_file.read_text("utf-8"))
        session = config["model"]["decoder"]["session_options"]
        if session.get("intra_op_num_threads") != threads:
            session["intra_op_num_threads"] = threads
            config_file.write_text(json.dumps(config, indent=1), "utf-8")
        self._model = og.Model(model)
        return {}

    def prompt(self, tokens: list[int], settings: dict[str, Any]) -> None:
        generator = self._generator([tokens], 1)
        generator.generate_next_token()

    def decode(self, prompts: list[list[int]], num_steps: int, settings: dict[str, Any]) -> Iterator[int]:
        generator = self._generator(prompts, num_steps + 2)
        generator.generate_next_token()
        yield len(prompts)
        for _ in range(num_steps):
            generator.generate_next_token()
            yield len(prompts)

    def _generator(self, prompts: list[list[int]], num_new: int) -> Any:
        """With the prompts computed."""
        length = len(prompts[0]) + num_new
        params = og.GeneratorParams(self._model)
        # min_length: no sequence ends before the others.
        params.set_search_options(batch_size=len(prompts), max_length=length, min_length=length, do_sample=False)
        generator = og.Generator(self._model, params)
        generator.append_tokens(np.array(prompts, np.int32))
        return generator


if __name__ == "__main__":
    serve(Runner())
