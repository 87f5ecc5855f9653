"""Gauges that servers publish in Prometheus's text format, under the names they are known by."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gauge:
    what: str
    names: tuple[str, ...]
    """Of a metric, or `name{label="value"}`; the first that is found counts."""

    def read(self, text: str) -> float | None:
        """The sum over all other labels; None where no name is there."""
        for name in self.names:
            metric, _, label = name.rstrip("}").partition("{")
            pattern = rf"^{re.escape(metric)}(\{{[^}}\n]*\}})? (\S+)$"
            values = [
                float(found[2])
                for found in re.finditer(pattern, text, re.MULTILINE)
                if not label or label in (found[1] or "")
            ]
            if values:
                return sum(values)
        return None


RUNNING = Gauge(
    "running requests",
    (
        "headrace_requests_running",
        "vllm:num_requests_running",
        "sglang:num_running_reqs",
        "llamacpp:requests_processing",
        "tgi_batch_current_size",
    ),
)
KV_USED = Gauge(
    "cache used by requests",
    (
        'headrace_kv_blocks{state="used"}',
        "vllm:kv_cache_usage_perc",
        "vllm:gpu_cache_usage_perc",
        "sglang:token_usage",
        "llamacpp:kv_cache_usage_ratio",
    ),
)
