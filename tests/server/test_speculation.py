"""A server that speculates: the usage of its replies and its metrics."""

from __future__ import annotations

from pathlib import Path

import openai

from tests.server.processes import get, served, value_of

LIST = "1. Anna Schmidt, Berlin\n2. Luca Rossi, Milan\n3. Marie Dupont, Lyon\n4. Jan Kowalski, Krakow"


def test_usage_and_metrics_tell_of_drafts(smollm2_path: Path):
    options = ("--port", "0", "--kv-memory", "64MiB", "--max-running", "4", "--speculate", "prompt-lookup")
    with served("-m", "headrace.cli", "serve", "smollm2-135m-instruct", *options) as (_, url):
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120)

        def ask(text: str, **options):
            messages = [{"role": "user", "content": text}]
            return client.chat.completions.create(
                model="smollm2-135m-instruct", messages=messages, temperature=0, **options
            )

        short = ask("Say hi.", max_tokens=1)
        assert short.usage.completion_tokens_details is None, "no step of it had drafts"
        copied = ask(f"Copy this list exactly:\n\n{LIST}", max_tokens=64)
        assert copied.choices[0].message.content.strip() == LIST
        usage = copied.usage
        details = usage.completion_tokens_details
        assert 0 < details.accepted_prediction_tokens < usage.completion_tokens
        *_, last = ask(
            f"Copy this list exactly:\n\n{LIST}", max_tokens=64, stream=True, stream_options={"include_usage": True}
        )
        assert last.usage.completion_tokens == usage.completion_tokens
        again = last.usage.completion_tokens_details
        metrics = get(url, "/metrics").text
        accepted = value_of("headrace_spec_accepted_tokens_total", metrics)
        proposed = value_of("headrace_spec_proposed_tokens_total", metrics)
        assert accepted == details.accepted_prediction_tokens + again.accepted_prediction_tokens
        assert proposed - accepted == details.rejected_prediction_tokens + again.rejected_prediction_tokens
        assert 1 <= value_of("headrace_spec_verifications_total", metrics) <= proposed
