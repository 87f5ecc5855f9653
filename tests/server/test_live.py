"""The whole line: `headrace serve` with SmolLM2 on the native backend, and the official client."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import httpx
import openai
import pytest

from tests.server.conftest import eventually
from tests.server.processes import get, served, value_of

MODEL = "smollm2-135m-instruct"
FRANCE = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]

Server = tuple[subprocess.Popen, str]


@pytest.fixture(scope="module")
def server(smollm2_path: Path) -> Iterator[Server]:
    with served("-m", "headrace.cli", "serve", MODEL, "--port", "0", "--kv-memory", "400MiB") as pair:
        yield pair


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server[1], api_key="none", max_retries=0, timeout=120)


def test_the_model_is_listed(client: openai.OpenAI):
    assert [(m.id, m.max_model_len) for m in client.models.list()] == [(MODEL, 8192)]


def test_a_streamed_chat_reply(client: openai.OpenAI):
    stream = client.chat.completions.create(
        model=MODEL, messages=FRANCE, temperature=0, max_tokens=30, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert "Paris" in text
    assert "<|im_end|>" not in text
    assert chunks[-1].choices[0].finish_reason == "stop"
    whole = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0, max_tokens=30)
    assert whole.choices[0].message.content == text
    assert whole.usage.completion_tokens == last.usage.completion_tokens
    assert whole.usage.prompt_tokens_details.cached_tokens >= 32, "the second time most of the prompt is known"


def test_scores_agree_with_generation(client: openai.OpenAI):
    """The logprobs of sampled tokens are those the same text gets as a prompt."""
    reply = client.completions.create(
        model=MODEL, prompt="Once upon a time", temperature=0, max_tokens=6, logprobs=0
    ).choices[0]
    tokens = httpx.post(
        str(client.base_url).replace("/v1/", "/tokenize"), json={"prompt": "Once upon a time" + reply.text}
    ).json()["tokens"]
    scored = client.completions.create(model=MODEL, prompt=tokens, echo=True, logprobs=0, max_tokens=0).choices[0]
    assert scored.text == "Once upon a time" + reply.text
    assert scored.logprobs.token_logprobs[-6:] == pytest.approx(reply.logprobs.token_logprobs, abs=1e-3)


def test_prompt_logprobs_are_those_of_an_echo(client: openai.OpenAI):
    """Twice: the second time the prompt is in the prefix cache, of which such a request makes no use."""
    for _ in range(2):
        choice = client.completions.create(
            model=MODEL,
            prompt="The capital of France is Paris. " * 20,
            echo=True,
            logprobs=0,
            max_tokens=0,
            extra_body={"prompt_logprobs": 3},
        ).choices[0]
        first, *scored = choice.prompt_logprobs
        assert first is None
        assert [next(iter(entry.values()))["logprob"] for entry in scored] == choice.logprobs.token_logprobs[1:]
        assert len(scored) > 100
        assert all(3 <= len(entry) <= 4 for entry in scored)
        paris = next(entry for entry in scored if next(iter(entry.values()))["decoded_token"] == " Paris")
        own, *_ = paris.values()
        assert own["rank"] == 1 + sum(entry["logprob"] > own["logprob"] for entry in paris.values()) or own["rank"] > 3


def test_the_best_of_four_is_one_of_the_four(client: openai.OpenAI):
    options = {"model": MODEL, "prompt": "My favourite", "max_tokens": 8, "seed": 3, "extra_body": {"ignore_eos": True}}
    all_four = client.completions.create(n=4, logprobs=0, **options).choices
    best = max(all_four, key=lambda choice: fmean(choice.logprobs.token_logprobs))
    assert len({choice.text for choice in all_four}) == 4
    reply = client.completions.create(best_of=4, **options)
    assert [choice.text for choice in reply.choices] == [best.text]
    assert reply.usage.completion_tokens == 32


def test_timings_add_up_to_less_than_the_call_took(client: openai.OpenAI):
    body = {"ignore_eos": True, "timings": True}
    start_s = time.monotonic()
    reply = client.completions.create(model=MODEL, prompt=[9, 8, 7] * 100, max_tokens=20, extra_body=body)
    took_ms = 1e3 * (time.monotonic() - start_s)
    timings = reply.timings
    parts = [timings["queue_ms"], timings["prefill_ms"], timings["decode_ms"]]
    assert all(part >= 0 for part in parts)
    assert 0.5 * took_ms < sum(parts) < took_ms
    assert timings["tokens_per_second"] == pytest.approx(19e3 / timings["decode_ms"])
    assert timings["cached_tokens"] == 0


def test_samplers_are_reproducible(client: openai.OpenAI):
    """The same seed gives the same reply, and each sampler another one than none."""
    texts = {}
    for extra in (
        {},
        {"typical_p": 0.2},
        {"xtc_probability": 1.0, "xtc_threshold": 0.05},
        {"dry_multiplier": 5, "dry_allowed_length": 1, "dry_sequence_breakers": []},
    ):
        replies = [
            client.completions.create(
                model=MODEL,
                prompt="one two three one two three one two three one",
                max_tokens=12,
                seed=5,
                extra_body=extra | {"ignore_eos": True},
            )
            for _ in range(2)
        ]
        assert replies[0].choices[0].text == replies[1].choices[0].text
        texts[str(extra)] = replies[0].choices[0].text
    assert len(set(texts.values())) == 4, texts


def test_embeddings_tell_near_from_far(client: openai.OpenAI):
    texts = ["The cat sits on the mat.", "A kitten is lying on a rug.", "Interest rates rose again in March."]
    reply = client.embeddings.create(model=MODEL, input=[*texts, texts[0]])
    cat, kitten, rates, again = (data.embedding for data in reply.data)
    assert len(cat) == 576

    def cosine(a: list[float], b: list[float]) -> float:
        return sum(x * y for x, y in zip(a, b, strict=True))

    assert cosine(cat, cat) == pytest.approx(1, abs=1e-5)
    assert cosine(cat, again) == pytest.approx(1, abs=1e-5)
    assert cosine(cat, kitten) > cosine(cat, rates) + 0.05
    assert reply.usage.total_tokens == reply.usage.prompt_tokens > 24


def test_a_prompt_of_one_token_too_many(client: openai.OpenAI):
    for max_tokens in (None, 5):
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model=MODEL, prompt=[1] * 8193, max_tokens=max_tokens)
        assert caught.value.code == "context_length_exceeded"
        assert "8192" in caught.value.message
        assert "8193" in caught.value.message


def test_a_streaming_client_that_is_killed_frees_everything(server: Server, client: openai.OpenAI):
    _, url = server
    body = json.dumps({"model": MODEL, "messages": FRANCE, "stream": True, "ignore_eos": True})
    curl = subprocess.Popen(
        ["curl", "-sN", f"{url}/chat/completions", "-H", "content-type: application/json", "-d", body],
        stdout=subprocess.PIPE,
    )
    assert curl.stdout is not None
    for _ in range(6):  # a few events
        curl.stdout.readline()
    with httpx.Client() as http:  # one, or each scrape would load certificates for many steps

        def scrape() -> str:
            return http.get(url.replace("/v1", "/metrics")).text

        assert value_of("headrace_requests_running", scrape()) == 1
        curl.kill()
        before = value_of("headrace_steps_total", scrape())
        eventually(lambda: value_of("headrace_requests_running", scrape()) == 0)
        text = scrape()
    curl.wait()
    curl.stdout.close()
    # The step that ran when the client was killed, and one for the news to travel.
    assert value_of("headrace_steps_total", text) <= before + 2
    assert 'state="used"} 0.0' in text
    assert 'headrace_requests_total{finish_reason="abort"} 1.0' in text


def test_a_client_that_leaves_an_embedding_frees_it(server: Server):
    _, url = server
    body = json.dumps({"input": [[5, 6, 7] * 1500] * 4})
    with httpx.Client() as http:

        def scrape() -> str:
            return http.get(url.replace("/v1", "/metrics")).text

        curl = subprocess.Popen(
            ["curl", "-s", f"{url}/embeddings", "-H", "content-type: application/json", "-d", body],
            stdout=subprocess.PIPE,
        )
        eventually(lambda: value_of("headrace_requests_running", scrape()) > 0)
        curl.kill()
        eventually(lambda: value_of("headrace_requests_running", scrape()) == 0)
        text = scrape()
    curl.communicate()
    assert value_of("headrace_requests_waiting", text) == 0
    assert 'state="used"} 0.0' in text


def test_health_answers_during_a_long_prompt(server: Server, client: openai.OpenAI):
    _, url = server
    stream = client.completions.create(model=MODEL, prompt=[5, 6, 7] * 300, max_tokens=1, stream=True)
    slowest = 0.0
    with httpx.Client() as http:
        for _ in range(20):
            start_s = time.monotonic()
            assert http.get(url.replace("/v1", "/health")).status_code == 200
            slowest = max(slowest, time.monotonic() - start_s)
            time.sleep(0.02)
    list(stream)
    assert slowest < 0.25


def test_sigterm_in_the_middle_of_a_stream(server: Server, client: openai.OpenAI):
    """Last: it ends the server."""
    process, url = server
    stream = client.chat.completions.create(
        model=MODEL, messages=FRANCE, temperature=0, max_tokens=150, stream=True, extra_body={"ignore_eos": True}
    )
    chunks = [next(iter(stream))]
    process.send_signal(signal.SIGTERM)
    eventually(lambda: get(url, "/ready").status_code == 503)
    with pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(model=MODEL, messages=FRANCE)
    assert caught.value.status_code == 503
    chunks += list(stream)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert process.wait(20) == 0
    assert sum(len(chunk.choices[0].delta.content or "") > 0 for chunk in chunks) > 100, "nothing was cut off"
