"""What takes seconds: this client's own cost, and the machine's limits."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.bench.machine import COMPILERS, measure_peaks

pytestmark = pytest.mark.long

SERVER = Path(__file__).with_name("scripted_server.py")


def test_the_client_uses_little_of_a_core(tmp_path, smollm2_path, record_property):
    """64 streams of 20 tokens/s for 15 s, the server in another process: under 5 % of a core, and nothing is late."""
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"first_s": 0.1, "gaps_s": [0.031, 0.069, 0.052, 0.048]}))
    server = subprocess.Popen(
        [sys.executable, SERVER, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdin is not None and server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        out = tmp_path / "out.json"
        load = ("--requests", "64", "--concurrency", "64", "--prompt-tokens", "64", "--output-tokens", "300")
        subprocess.run(
            [sys.executable, "-m", "headrace.cli", "bench", "--no-machine", "--url", url, *load, "--json", out],
            cwd=SERVER.parents[2],
            check=True,
            capture_output=True,
            env={**os.environ, "COLUMNS": "120"},
        )
        server.stdin.close()
        server.wait(10)
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
    figures = json.loads(out.read_text())["points"][0]["targets"]["A"]["median"]
    print(f"\nCPU share at 64 x 20 tokens/s: {100 * figures['client_cpu_share']:.2f} % of a core")
    record_property("client_cpu_share", figures["client_cpu_share"])
    assert figures["output_tokens_per_s"] > 64 * 20 * 0.9
    assert figures["inter_token_ms.mean"] == pytest.approx(50, rel=0.02)
    assert figures["client_cpu_share"] < 0.05


@pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="no C++ compiler")
def test_the_limits_are_measured_and_plausible():
    peaks = measure_peaks(2)
    assert peaks["threads"] == [1, 2]
    for name in ("read_gb_per_s", "float32_fma_gflops"):
        assert len(peaks[name]) == 2 and all(value > 1 for value in peaks[name])
    if peaks["int8_maddubs_gops"]:  # eight products in int16 save most of the madds
        assert max(peaks["int8_maddubs_x8_gops"]) > 0.8 * max(peaks["int8_maddubs_gops"])
    assert measure_peaks(1)["threads"] == [1], "the second time it is built already"
