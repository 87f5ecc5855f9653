"""Prometheus metrics: a registry per server. What the engine counts is read from its last snapshot at scrape time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from headrace.server.engine_thread import EngineThread

# Seconds. A token takes about 1 ms on a fast GPU and 1 s on a slow core, a first token minutes after a long prompt.
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_FIRST_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_DURATION_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)


class Metrics:
    """What a server observes of its calls, and the collector for what its engine counts."""

    def __init__(self, engine: EngineThread, threads: Callable[[], tuple[int, int]] | None = None) -> None:
        """`threads`: those that compute, all and just now, if the backend tells."""
        self._registry = CollectorRegistry()

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"headrace_{name}_seconds", text, buckets=buckets, registry=self._registry)

        self.time_to_first_token = histogram(
            "time_to_first_token", "From a call's arrival to its first token (TTFT).", _FIRST_BUCKETS
        )
        self.queue = histogram("queue", "From a request's arrival at the engine to its admission.", _FIRST_BUCKETS)
        self.inter_token = histogram("inter_token", "Between tokens of one choice.", _TOKEN_BUCKETS)
        self.duration = histogram("request_duration", "From a call's arrival to its end.", _DURATION_BUCKETS)
        self.requests = Counter(
            "headrace_requests",
            "Choices ended, by reason: stop, length, abort (the client left), error.",
            ["finish_reason"],
            registry=self._registry,
        )
        for reason in ("stop", "length", "abort", "error"):
            self.requests.labels(finish_reason=reason)  # present from the start, as zero
        self.refused = Counter(
            "headrace_requests_refused", "Calls answered with an error, by status.", ["status"], registry=self._registry
        )
        self._registry.register(_EngineCollector(engine))
        if threads is not None:
            self._registry.register(_ThreadsCollector(threads))

    def text(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self._registry)


class _ThreadsCollector(Collector):
    def __init__(self, threads: Callable[[], tuple[int, int]]) -> None:
        self._threads = threads

    def collect(self) -> Iterator[Metric]:
        counts = GaugeMetricFamily(
            "headrace_threads",
            "Threads that compute: all, and those of the latest step. One whose core has other work sits out a while.",
            labels=["state"],
        )
        for state, count in zip(("all", "attending"), self._threads(), strict=True):
            counts.add_metric([state], count)
        yield counts


class _EngineCollector(Collector):
    def __init__(self, engine: EngineThread) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats
        yield GaugeMetricFamily("headrace_requests_running", "Sequences that hold blocks.", stats.num_running)
        yield GaugeMetricFamily("headrace_requests_waiting", "Sequences in the queue.", stats.num_waiting)
        blocks = GaugeMetricFamily(
            "headrace_kv_blocks",
            "Cache blocks per group: total; used by sequences; cached, used by none and kept for prefix hits; free.",
            labels=["group", "state"],
        )
        for group in stats.groups:
            for state, count in (
                ("total", group.num_blocks),
                ("used", group.num_used),
                ("cached", group.num_cached),
                ("free", group.num_free),
            ):
                blocks.add_metric([group.name, state], count)
        yield blocks
        preemptions = CounterMetricFamily(
            "headrace_preemptions",
            "Sequences that gave their blocks back before their end: memory ended (memory), or somebody better waited "
            "(policy).",
            labels=["kind"],
        )
        preemptions.add_metric(["memory"], stats.preemptions - stats.displacements)
        preemptions.add_metric(["policy"], stats.displacements)
        yield preemptions
        yield GaugeMetricFamily(
            "headrace_step_budget_tokens", "Tokens the latest step could have had.", stats.step_budget
        )
        errors = GaugeMetricFamily(
            "headrace_step_time_error",
            "Mean absolute relative error of predicted step times of late: of steps of streams, and with prompts.",
            labels=["kind"],
        )
        for kind, error in zip(("streams", "prompts"), stats.cost_errors, strict=True):
            errors.add_metric([kind], error)
        yield errors
        calibration = stats.calibration
        yield GaugeMetricFamily(
            "headrace_length_log_error",
            "Mean of |ln(predicted / actual)| over the latest replies' lengths.",
            calibration.log_error,
        )
        yield GaugeMetricFamily(
            "headrace_length_kendall_tau",
            "Agreement of predicted with actual lengths in order, from -1 to 1, over the latest replies.",
            calibration.tau,
        )
        use = GaugeMetricFamily(
            "headrace_tenant_tokens",
            "Prompts and predicted replies of the requests that wait or run.",
            labels=["tenant", "state"],
        )
        service = CounterMetricFamily(
            "headrace_tenant_service_tokens",
            "Of choices that have ended, prompts read or cached, and replies.",
            labels=["tenant", "kind"],
        )
        for tenant in stats.tenants:
            use.add_metric([tenant.name, "waiting"], tenant.num_queued)
            use.add_metric([tenant.name, "running"], tenant.num_running)
            service.add_metric([tenant.name, "prompt"], tenant.prompt_tokens)
            service.add_metric([tenant.name, "generated"], tenant.generated_tokens)
        yield use
        yield service
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens admitted.", stats.prompt_tokens),
            ("cached_prompt_tokens", "Prompt tokens found in the prefix tree (hits).", stats.cached_tokens),
            ("generated_tokens", "Tokens sampled.", stats.generated_tokens),
            ("steps", "Steps of the engine.", stats.steps),
            (
                "spec_verifications",
                "Times that a sequence had drafts verified; each brought a token, and one for each accepted draft.",
                stats.verifications,
            ),
            ("spec_proposed_tokens", "Drafts verified.", stats.proposed_drafts),
            ("spec_accepted_tokens", "Drafts that were right.", stats.accepted_drafts),
        ):
            yield CounterMetricFamily(f"headrace_{name}", text, value)
