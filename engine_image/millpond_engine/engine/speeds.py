"""Measured speeds: what a busy step tells about prefill and decode. No data is None, never zero."""

from __future__ import annotations

from dataclasses import dataclass

from millpond_engine.records.step import StepPlan

_WEIGHT = 0.1
"""Of the newest step in the moving means: about the last ten busy steps count."""
_MIN_PREFILL_TOKENS = 16
"""A shorter chunk measures the step's constant cost, not the prefill speed."""


@dataclass(frozen=True, slots=True)
class StepSample:
    """What one executed step did and how long the runner took."""

    prefill_tokens: int
    decode_rows: int
    seconds: float


def make_sample(plan: StepPlan, seconds: float) -> StepSample:
    """What a plan did; a row of one token counts as decode."""
    prefill = sum(row.num_tokens for row in plan.rows if row.num_tokens > 1)
    return StepSample(prefill, sum(1 for row in plan.rows if row.num_tokens == 1), seconds)


class SpeedMeter:
    """Moving means over executed steps."""

    def __init__(self) -> None:
        self.prefill_tokens_per_second: float | None = None
        self.decode_tokens_per_second: float | None = None
        self.decode_seconds_per_step: float | None = None

    def add(self, sample: StepSample) -> None:
        """Learn from one step."""
        if sample.seconds <= 0:
            return
        if sample.prefill_tokens == 0 and sample.decode_rows > 0:
            self.decode_seconds_per_step = _blend(self.decode_seconds_per_step, sample.seconds)
            rate = sample.decode_rows / sample.seconds
            self.decode_tokens_per_second = _blend(self.decode_tokens_per_second, rate)
        elif sample.prefill_tokens >= _MIN_PREFILL_TOKENS:
            rate = sample.prefill_tokens / self._prefill_share(sample)
            self.prefill_tokens_per_second = _blend(self.prefill_tokens_per_second, rate)

    def _prefill_share(self, sample: StepSample) -> float:
        """Seconds of a mixed step that the prompt tokens took.

        The decode part is what a pure decode step takes; where that is unknown or larger than the
        step, tokens share the time by number.
        """
        if sample.decode_rows == 0:
            return sample.seconds
        decode = self.decode_seconds_per_step
        if decode is None or decode >= sample.seconds:
            return sample.seconds * sample.prefill_tokens / (sample.prefill_tokens + sample.decode_rows)
        return sample.seconds - decode


def _blend(old: float | None, new: float) -> float:
    return new if old is None else old + _WEIGHT * (new - old)
