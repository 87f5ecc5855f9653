"""Memory for the whole of a reply, by what is predicted to be freed and when.

The cache must hold, at any time to come, the context of whoever still runs then. With a running sequence i of c_i
tokens that will generate r_i more, one each step, memory is fullest just before somebody ends (between ends it only
grows): when j ends,

    need(j) = sum over i with r_i >= r_j of c_i + r_j

A candidate starts if the largest of these, itself included, fits the cache (cf. Gong et al., "Past-Future Scheduler
for LLM Serving under SLA Guarantees", 2025). Admission by the prompt alone lets in sequences that preempt each other
later; by the whole reply of all at once it waits for memory that will be free in time.
"""

from __future__ import annotations

from headrace.core.sequence import Sequence
from headrace.engine.gates import Verdict
from headrace.engine.state import EngineState


class PredictedMemoryGate:
    """With the replies' high quantile for lengths. Prefixes that several share count for each of them, so the gate errs
    towards waiting. Never closed when nobody runs. A sort of those who run, per candidate.
    """

    def ask(self, sequence: Sequence, state: EngineState, now: float) -> Verdict:
        capacity = state.memory.capacity_blocks
        if capacity is None or not len(state.running):
            return Verdict.ADMIT
        running = [other for other in state.running if not other.request.is_batch or sequence.request.is_batch]
        fits = peak_blocks([*running, sequence], state) <= capacity
        return Verdict.ADMIT if fits else Verdict.FULL


def peak_blocks(sequences: list[Sequence], state: EngineState) -> int:
    """The most cache blocks that these will hold at once, if nobody joins them."""
    size, ledger = state.memory.block_size, state.ledger
    ends = []
    for sequence in sequences:
        remaining = ledger.remaining_high(sequence)
        ends += [(remaining, sequence.num_tokens)] * sequence.num_places
    ends.sort(reverse=True)
    peak, num_tokens = 0, 0
    for number, (remaining, context) in enumerate(ends, start=1):
        num_tokens += context
        # Each wastes half a block on average, and never a whole one.
        peak = max(peak, int((num_tokens + number * (remaining + size / 2)) / size))
    return peak
