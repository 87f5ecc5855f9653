"""How fast the reference backend is: enough to be lived with. `make test-long`, or

python -m pytest -m long tests/engine/test_speed.py
"""

from __future__ import annotations

import time

import pytest

from headrace import LLM, SamplingParams

NUM_TOKENS = 64


@pytest.mark.long
def test_a_single_stream_on_the_reference_backend(smollm2_path, capsys):
    with LLM(smollm2_path, backend="reference", kv_memory_bytes=200 << 20, context_length=512, max_running=1) as llm:
        stream = llm.stream(
            "Once upon a time", SamplingParams(max_tokens=1 + NUM_TOKENS, temperature=0), ignore_eos=True
        )
        next(stream)  # the prompt is not decoding
        start_s, start_cpu_s = time.monotonic(), time.thread_time()
        list(stream)
        rate = NUM_TOKENS / (time.monotonic() - start_s)
        own_rate = NUM_TOKENS / (time.thread_time() - start_cpu_s)  # one thread computes: what a free core would give
    with capsys.disabled():
        print(f"\nreference backend, one stream: {rate:.1f} tokens/s, {own_rate:.1f} on a core of its own")
    assert own_rate >= 10
