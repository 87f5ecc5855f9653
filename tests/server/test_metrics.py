"""What /metrics says after known work."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from tests.server.conftest import RunningServer, eventually
from tests.server.fakes import NUM_BLOCKS, FakeEngine


def scrape(server: RunningServer) -> dict[tuple, float]:
    response = server.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def test_counts_and_histograms(start):
    server = start(FakeEngine(step_s=0.002))
    client = server.client()
    for _ in range(2):
        client.completions.create(model="fake-model", prompt="say:hello", max_tokens=4, n=2)
    client.completions.create(model="fake-model", prompt="say:hello")
    assert server.post("/v1/completions", json={"prompt": 5}).status_code == 400
    eventually(lambda: server.service.engine.stats.num_running == 0)
    found = scrape(server)
    num_prompt = len(".say:hello")
    assert found["headrace_requests_total", ("finish_reason", "length")] == 4
    assert found["headrace_requests_total", ("finish_reason", "stop")] == 1
    assert found["headrace_requests_total", ("finish_reason", "abort")] == 0
    assert found["headrace_requests_refused_total", ("status", "400")] == 1
    assert found[("headrace_prompt_tokens_total",)] == 3 * num_prompt
    assert found[("headrace_cached_prompt_tokens_total",)] == 2 * (num_prompt - 1)
    assert found[("headrace_generated_tokens_total",)] == 4 * 4 + 6
    assert found[("headrace_time_to_first_token_seconds_count",)] == 3
    assert found[("headrace_inter_token_seconds_count",)] == 4 * 3 + 5
    assert found[("headrace_request_duration_seconds_count",)] == 3
    assert found[("headrace_steps_total",)] == server.engine.num_steps
    assert found[("headrace_requests_running",)] == found[("headrace_requests_waiting",)] == 0
    assert found["headrace_kv_blocks", ("group", "full"), ("state", "total")] == NUM_BLOCKS
    for state in ("used", "cached", "free"):
        assert ("headrace_kv_blocks", ("group", "full"), ("state", state)) in found


def test_scheduling_is_seen_from_outside(start):
    found = scrape(start())
    assert found["headrace_preemptions_total", ("kind", "memory")] == 3
    assert found["headrace_preemptions_total", ("kind", "policy")] == 2
    assert found[("headrace_step_budget_tokens",)] == 160
    assert found["headrace_threads", ("state", "all")] == 4
    assert found["headrace_threads", ("state", "attending")] == 3
    assert found["headrace_step_time_error", ("kind", "prompts")] == 0.25
    assert found[("headrace_length_log_error",)] == 0.5
    assert found[("headrace_length_kendall_tau",)] == 0.25
    for state, num_tokens in (("waiting", 10), ("running", 20)):
        assert found["headrace_tenant_tokens", ("state", state), ("tenant", "a")] == num_tokens
    for kind, num_tokens in (("prompt", 30), ("generated", 40)):
        assert found["headrace_tenant_service_tokens_total", ("kind", kind), ("tenant", "a")] == num_tokens


def test_the_inter_token_time_is_the_steps(start):
    server = start(FakeEngine(step_s=0.03))
    server.client().completions.create(model="fake-model", prompt="say:hello", stream=False)
    found = scrape(server)
    mean = found[("headrace_inter_token_seconds_sum",)] / found[("headrace_inter_token_seconds_count",)]
    assert 0.029 < mean < 0.06


def test_two_servers_do_not_share_their_numbers(start):
    first, second = start(), start()
    first.client().completions.create(model="fake-model", prompt="x")
    assert scrape(second)[("headrace_time_to_first_token_seconds_count",)] == 0
