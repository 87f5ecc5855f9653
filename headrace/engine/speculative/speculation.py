"""How many drafts each sequence gets in a step."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Sequence as SequenceOf

from headrace.core.protocols import Drafter
from headrace.core.sequence import Sequence, Status
from headrace.core.work import StepTimes, StepWork
from headrace.memory.manager import MemoryManager

RUNNING = Status.RUNNING


class _Guesses:
    """How good the guesses at one sequence have been, and the last one, whose truth is not known yet."""

    __slots__ = ("accuracy", "drafts", "position")

    def __init__(self, accuracy: float) -> None:
        self.accuracy = accuracy
        """Share of drafts that are right where all before them are."""
        self.drafts: tuple[int, ...] = ()
        self.position = 0
        """Of the first of them."""


class Speculation:
    """As many drafts as should pay: those with which a step's expected tokens per second are most.

    A sequence's drafts are right with a chance of a, a^2, a^3 and so on, a being what its guesses have come to. Over
    all sequences, the likeliest drafts are taken, as many as make the step's tokens grow faster than its time. What a
    row costs the engine has learnt from its steps: where one is bound by reading the weights poor guesses pay too,
    where a batch fills the machine only good ones do.

    A guess is made for every decoding sequence in every step, and whether it was right is seen in what comes next, be
    it verified or not: to know when guesses begin to be right costs no computed row.

    No drafts get replies that follow a grammar (a mask is made of tokens that are known) and, while more than
    `MOST_USED` of a cache group's blocks are held, all. Drafts take up what everybody's own tokens leave of the budget,
    and of the blocks what is left beside one for everybody.
    """

    FIRST_ACCURACY = 0.5
    MOST_ACCURACY = 0.97
    MOVE = 0.2
    """Of the way from an accuracy to the latest outcome."""
    MOST_USED = 0.9
    LEAST_GAIN = 1.02
    """Expected, in tokens per second: less than this is eaten up by what the step's cost does not show."""

    def __init__(self, drafter: Drafter, times: StepTimes, max_drafts: int = 12) -> None:
        self.drafter = drafter
        self.times = times
        self.max_drafts = max_drafts
        """Of one sequence in one step."""
        self._guesses: dict[int, _Guesses] = {}

    def drafts(
        self, running: SequenceOf[Sequence], memory: MemoryManager, budget: int
    ) -> Mapping[int, tuple[int, ...]]:
        """The drafts of a step, by sequence id; `budget` tokens are all that it may compute.

        Empty ones for a sequence with a token in flight that would have got some (depth 2): it should wait for that
        token, for drafts go on from what is known.
        """
        chances: list[tuple[float, int]] = []
        num_own = num_decoding = num_keys = 0
        for sequence in running:
            if sequence.status is RUNNING and (remaining := sequence.num_remaining) > 0:
                num_own += remaining
                if remaining == 1:
                    num_decoding += 1
                    num_keys += sequence.num_tokens
                    if sequence.num_tokens > sequence.num_prompt and sequence.request.grammar is None:
                        self._add_chances(sequence, chances)
        if not chances:
            return {}
        room = min(budget - num_own, self._num_spare_blocks(memory) - len(running))
        chances.sort(reverse=True)
        counts: dict[int, int] = {}
        for _, id in chances[: self._num_that_pay(num_decoding, num_keys, chances[: max(0, room)])]:
            counts[id] = counts.get(id, 0) + 1
        in_flight = {sequence.id for sequence in running if sequence.num_in_flight}
        return {id: () if id in in_flight else self._guesses[id].drafts[:count] for id, count in counts.items()}

    def _add_chances(self, sequence: Sequence, chances: list[tuple[float, int]]) -> None:
        """Guess, having learnt from the guess before."""
        guesses = self._guesses.get(sequence.id)
        if guesses is None:
            guesses = self._guesses[sequence.id] = _Guesses(self.FIRST_ACCURACY)
        accuracy = guesses.accuracy
        for draft, token in zip(guesses.drafts, sequence.tokens[guesses.position :], strict=False):
            accuracy += self.MOVE * ((draft == token) - accuracy)
            if draft != token:
                break
        guesses.accuracy = accuracy = min(accuracy, self.MOST_ACCURACY)
        position = guesses.position = len(sequence.tokens)
        # A step samples a token after the last draft too, and none may lie beyond the limit.
        most = min(self.max_drafts, sequence.limit - position - 1)
        guesses.drafts = self.drafter.propose(sequence, most) if most > 0 else ()
        chance = 1.0
        for _ in guesses.drafts:
            chance *= accuracy
            chances.append((chance, sequence.id))

    def _num_spare_blocks(self, memory: MemoryManager) -> int:
        """Blocks that drafts may take in the group that has fewest, a block being needed for a draft at worst."""
        return min(group.num_available - int((1.0 - self.MOST_USED) * group.pool.num_blocks) for group in memory.groups)

    def _num_that_pay(self, num_decoding: int, num_keys: int, chances: SequenceOf[tuple[float, int]]) -> int:
        """How many of the drafts, the likeliest first, to verify in a step of so many sequences."""
        seconds, expected, num_best = self.times.seconds, float(num_decoding), 0
        step_s = seconds(StepWork.of_streams(num_decoding, num_keys))
        if step_s <= 0.0:
            return len(chances)  # nothing is known yet: trying tells
        best = self.LEAST_GAIN * expected / step_s
        keys_each = num_keys // num_decoding
        for count, (chance, _) in enumerate(chances, 1):
            expected += chance
            num_rows = num_decoding + count
            rate = expected / seconds(StepWork(num_rows, 0, 0, num_rows, num_keys, count * keys_each))
            if rate > best:
                best, num_best = rate, count
        return num_best

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        self._guesses.pop(sequence.id, None)
        self.drafter.forget(sequence)

    def check(self, ids: Collection[int]) -> None:
        """`ids`: of all sequences that have not ended."""
        assert set(self._guesses) <= set(ids), "guesses outlived their sequence"
