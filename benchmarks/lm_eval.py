"""lm-evaluation-harness against our server over HTTP, and its loglikelihoods beside those of the reference backend.

`python -m benchmarks.lm_eval` installs the harness into an environment of its own (it wants torch), starts
`headrace serve`, runs a multiple-choice task (loglikelihoods) and a short-answer task (generation), whose data are
below, and writes the section `lm-eval` of docs/benchmarks.md. `--only-run` prints and writes nothing.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.peers.environments import TORCH, Recipe, ensure
from benchmarks.peers.report import replace_section, table
from benchmarks.peers.servers import Server, headrace_server
from headrace.evaluation.scoring import score
from headrace.evaluation.texts import Window
from headrace.models.catalogue import DEFAULT_MODEL
from headrace.server.build import ServeConfig, build
from headrace.server.system import usable_cores

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
VERSION = "0.4.13"
RECIPE = Recipe("lm-eval", VERSION, (f"torch=={TORCH}", f"lm-eval[api]=={VERSION}"), "lm_eval")
FACTS = [
    ("The capital of France is", ("Paris", "London", "Rome", "Madrid")),
    ("The capital of Japan is", ("Tokyo", "Kyoto", "Seoul", "Beijing")),
    ("The opposite of hot is", ("cold", "warm", "dry", "tall")),
    ("The opposite of early is", ("late", "soon", "fast", "never")),
    ("A week has seven", ("days", "hours", "months", "years")),
    ("An hour has sixty", ("minutes", "seconds", "days", "weeks")),
    ("Water freezes at zero degrees", ("Celsius", "Fahrenheit", "north", "east")),
    ("The sun rises in the", ("east", "west", "north", "south")),
    ("Bees make", ("honey", "milk", "bread", "wine")),
    ("Cows give us", ("milk", "honey", "wool", "eggs")),
    ("Shakespeare wrote the play Romeo and", ("Juliet", "Ophelia", "Hamlet", "Cordelia")),
    ("The largest planet of the solar system is", ("Jupiter", "Mars", "Venus", "Mercury")),
    ("The color of grass is", ("green", "red", "blue", "black")),
    ("A triangle has three", ("sides", "wheels", "circles", "legs")),
    ("Two plus two is", ("four", "five", "three", "nine")),
    ("Fish live in the", ("water", "sky", "desert", "trees")),
    ("The first month of the year is", ("January", "March", "June", "December")),
    ("People read books in a", ("library", "bakery", "garage", "stable")),
    ("At night we can see the moon and the", ("stars", "sun", "rain", "grass")),
    ("To cut paper you use", ("scissors", "spoons", "pillows", "soap")),
]
QUESTIONS = [
    ("What is the capital of Italy?", "Rome"),
    ("What is the capital of Germany?", "Berlin"),
    ("How many days does a week have?", "7"),
    ("What color is the sky on a clear day?", "Blue"),
    ("Which animal barks?", "Dog"),
    ("What is 2 + 3?", "5"),
    ("Who wrote Hamlet?", "William Shakespeare"),
    ("On which planet do we live?", "Earth"),
]
SHOTS = "Question: What is the capital of Spain?\nAnswer: Madrid\nQuestion: Which animal meows?\nAnswer: Cat\n"
TASKS = {
    "headrace_facts": """
task: headrace_facts
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/facts.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 0
metric_list: [{{metric: acc}}]
""",
    "headrace_questions": """
task: headrace_questions
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/questions.jsonl}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n", "."], max_gen_toks: 16, temperature: 0}}
metric_list: [{{metric: exact_match, ignore_case: true}}]
""",
}


def write_tasks(folder: Path) -> None:
    facts = [{"text": text, "choices": list(choices)} for text, choices in FACTS]
    questions = [{"text": f"{SHOTS}Question: {text}\nAnswer:", "answer": f" {answer}"} for text, answer in QUESTIONS]
    for name, rows in (("facts", facts), ("questions", questions)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(text.format(folder=folder), "utf-8")


def run(python: Path, url: str, folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(results by task, samples of the facts)."""
    model = {
        "model": DEFAULT_MODEL,
        "base_url": f"{url}/completions",
        "num_concurrent": 4,
        "tokenizer_backend": "remote",
    }
    arguments = ",".join(f"{name}={value}" for name, value in model.items())
    command = ["-m", "lm_eval", "run", "--model", "local-completions", "--model_args", arguments]
    command += ["--tasks", ",".join(TASKS), "--include_path", str(folder), "--log_samples"]
    subprocess.run(
        [str(python), *command, "--output_path", str(folder / "out")],
        check=True,
        env={"PATH": "/usr/bin:/bin", "OPENAI_API_KEY": "none", "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"},
    )
    (results,) = (folder / "out").rglob("results_*.json")
    (samples,) = (folder / "out").rglob("samples_headrace_facts_*.jsonl")
    lines = samples.read_text("utf-8").splitlines()
    return json.loads(results.read_text("utf-8"))["results"], [json.loads(line) for line in lines]


def logprobs_of(samples: list[dict[str, Any]]) -> Iterator[tuple[str, str, float]]:
    """(context, continuation, loglikelihood as the harness got it)."""
    for sample in samples:
        for arguments, answer in zip(sample["arguments"].values(), sample["filtered_resps"], strict=True):
            yield arguments["arg_0"], arguments["arg_1"], float(answer[0])


def on_reference(pairs: list[tuple[str, str, float]]) -> list[tuple[float, int]]:
    """(loglikelihood, tokens) of each pair's continuation."""
    deployment = build(ServeConfig(backend="reference", kv_format="f32", kv_memory_bytes=256 << 20))
    encode = deployment.tokenizer.encode
    found = []
    for context, continuation, _ in pairs:
        num_known = len(encode(context))
        tokens = tuple(encode(context + continuation))
        logprobs = score(deployment.engine, [Window(tokens, num_known)])
        found.append((math.fsum(logprobs), len(logprobs)))
    return found


def main() -> None:
    console = Console(stderr=True)
    with console.status("installing lm-evaluation-harness, which takes minutes the first time"):
        python = ensure(RECIPE, console.print).python
    spec = headrace_server(
        Path(sys.executable), DEFAULT_MODEL, "Headrace lm-eval", usable_cores()[0], "--kv-memory", "400MiB"
    )
    with tempfile.TemporaryDirectory() as temporary, Server(spec) as server:
        server.wait_ready()
        folder = Path(temporary)
        write_tasks(folder)
        results, samples = run(python, f"{server.url}/v1", folder)
    pairs = list(logprobs_of(samples))
    with console.status("scoring on the reference backend"):
        reference = on_reference(pairs)
    num_tokens = sum(count for _, count in reference)
    gaps = [ours - right for (_, _, ours), (right, _) in zip(pairs, reference, strict=True)]
    best = [max(range(4), key=lambda i, at=at: reference[at + i][0]) == 0 for at in range(0, len(reference), 4)]
    rows = [
        ("facts, accuracy", f"{results['headrace_facts']['acc,none']:.3f}"),
        ("the same by the reference backend", f"{sum(best) / len(best):.3f}"),
        ("facts, loglikelihood a token: mean difference from the reference backend", f"{sum(gaps) / num_tokens:+.4f}"),
        ("and of absolute differences", f"{sum(map(abs, gaps)) / num_tokens:.4f}"),
        ("questions, exact match", f"{results['headrace_questions']['exact_match,none']:.3f}"),
    ]
    body = (
        "## lm-evaluation-harness over HTTP\n\n"
        f"Made by `python -m benchmarks.lm_eval` on {time.strftime('%Y-%m-%d')}: version {VERSION}, its model type "
        f"`local-completions` with the server's own tokenizer, SmolLM2-135M-Instruct Q4_1, {len(FACTS)} facts of four "
        f"choices ({num_tokens} tokens scored) and {len(QUESTIONS)} questions.\n\n{table(('', 'measured'), rows)}"
    )
    print(body)
    if "--only-run" not in sys.argv:
        PAGE.write_text(replace_section(PAGE.read_text("utf-8"), "lm-eval", body), "utf-8")


if __name__ == "__main__":
    main()
