"""The start of a cost model: one stream is bound by reading the weights, a prompt by arithmetic."""

from __future__ import annotations

import pytest

from headrace.core.cost_model import CostModel
from headrace.core.work import StepWork
from headrace.program.roofline import Peaks, roofline_s, seeds

from .test_program import decoder

PEAKS = Peaks(flops_per_s=300e9, bytes_per_s=25e9)


def test_which_bound_holds():
    program = decoder()
    weights = program.weight_bytes(0.625)  # Q4_1: 20 bytes for 32 weights
    num_bytes = sum(weights.values())
    alone_s = roofline_s(program, ((0, 1),), 1, weights, PEAKS)
    assert alone_s == pytest.approx(num_bytes / 25e9, rel=0.05), "the weights once; little else"
    read_s = roofline_s(program, ((0, 160),), 1, weights, PEAKS)
    trunk = program.num_parameters - 49152 * 576  # the embedding is looked up, and is the head of one row
    assert read_s == pytest.approx(2 * trunk * 160 / 300e9, rel=0.1), "two operations per weight and token"
    assert read_s > 10 * alone_s


def test_a_seeded_model_knows_both():
    program = decoder()
    weights = program.weight_bytes(0.625)
    model = CostModel(seeds(program, weights, PEAKS))
    alone = model.seconds(StepWork(1, 0, 0, 1, 17, 0))
    assert alone == pytest.approx(roofline_s(program, ((16, 1),), 1, weights, PEAKS), rel=0.15)
    prompt = model.seconds(StepWork(0, 160, 1, 1, 0, 160 * 16 + 160 * 161 // 2))
    assert prompt == pytest.approx(roofline_s(program, ((16, 160),), 1, weights, PEAKS), rel=0.25)
