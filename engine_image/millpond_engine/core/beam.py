"""Beam search over reported branches: which continuations live on, which are finished, when to stop.

Scores are log-probability / length ** length_penalty with the end token counted, and the search
stops when no running beam can beat the worst finished one at its present length: the rules of the
`generate` function of Hugging Face transformers with its default `early_stopping=False`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from millpond_engine.records.request import BeamParams, FinishReason

Branches = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Survivor:
    """A beam of the next step: a beam of this step and its next token."""

    parent: int
    token: int
    logprob_sum: float


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished continuation."""

    score: float
    tokens: tuple[int, ...]
    finish: FinishReason
    stop_token: int | None


class BeamSearch:
    """State of one search: the finished continuations, best first, at most `width`."""

    def __init__(self, params: BeamParams, n: int, max_tokens: int) -> None:
        self.width = params.width
        self.finished: list[Hypothesis] = []
        self._n = n
        self._penalty = params.length_penalty
        self._max_tokens = max_tokens

    def count_branches(self, num_ends: int) -> int:
        """Most likely tokens needed per beam, so that `width` of them go on even if every end token is among them."""
        return max(2, 1 + num_ends) * self.width

    def advance(
        self,
        sums: Sequence[float],
        branches: Sequence[Branches],
        *,
        num_output: int,
        ends: frozenset[int],
        get_output: Callable[[int], tuple[int, ...]],
    ) -> list[Survivor]:
        """Choose the next beams from all branches; an empty list ends the search.

        `sums` are the log-probabilities of the beams, which have all generated `num_output` tokens;
        `get_output` returns those of one beam.
        """
        ranked = [
            Survivor(parent, token, sums[parent] + logprob)
            for parent, choices in enumerate(branches)
            for token, logprob in choices
        ]
        ranked.sort(key=lambda item: -item.logprob_sum)
        del ranked[self.count_branches(len(ends)) :]
        length = num_output + 1
        at_limit = length >= self._max_tokens
        for item in ranked[: self.width]:
            if at_limit or item.token in ends:
                self._finish(item, get_output(item.parent), ends)
        survivors = [] if at_limit else [item for item in ranked if item.token not in ends][: self.width]
        if survivors and len(self.finished) == self.width:
            best = survivors[0].logprob_sum / length**self._penalty
            return survivors if best > self.finished[-1].score else []
        return survivors

    def results(self) -> list[Hypothesis]:
        """The best n, best first."""
        return self.finished[: self._n]

    def _finish(self, item: Survivor, output: tuple[int, ...], ends: frozenset[int]) -> None:
        score = item.logprob_sum / (len(output) + 1) ** self._penalty
        stopped = item.token in ends
        hypothesis = Hypothesis(
            score=score,
            tokens=output if stopped else (*output, item.token),
            finish=FinishReason.STOP if stopped else FinishReason.LENGTH,
            stop_token=item.token if stopped else None,
        )
        self.finished.append(hypothesis)
        self.finished.sort(key=lambda other: -other.score)
        del self.finished[self.width :]
