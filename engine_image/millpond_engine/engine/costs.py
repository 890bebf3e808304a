"""Whose device time a step is: seconds = a·new tokens + b·context tokens, fitted to the steps as they run."""

from __future__ import annotations

from millpond_engine.records.step import StepPlan

_MIN_STEPS = 16
_FORGET = 0.999
"""Weight of the past per step: the fit follows what the last thousand steps cost."""


class StepCosts:
    """Least squares over (new tokens, context tokens) of executed steps, both coefficients at least 0.

    Until enough steps are seen, and whenever the steps do not tell the two apart, only new tokens count.
    """

    def __init__(self) -> None:
        self._num_steps = 0
        self._nn = self._nc = self._cc = self._ns = self._cs = 0.0
        self._per_new = 1.0
        self._per_context = 0.0

    def weigh(self, new_tokens: int, context_tokens: int) -> float:
        """Share of a row, up to the common factor of its step."""
        return new_tokens * self._per_new + context_tokens * self._per_context

    def learn(self, plan: StepPlan, seconds: float) -> None:
        """Fit one more step."""
        if seconds <= 0:
            return
        new = float(plan.num_tokens)
        context = float(sum(row.start + row.num_tokens for row in plan.rows))
        self._nn, self._nc = self._nn * _FORGET + new * new, self._nc * _FORGET + new * context
        self._cc = self._cc * _FORGET + context * context
        self._ns, self._cs = self._ns * _FORGET + new * seconds, self._cs * _FORGET + context * seconds
        self._num_steps += 1
        if self._num_steps >= _MIN_STEPS:
            self._solve()

    def _solve(self) -> None:
        determinant = self._nn * self._cc - self._nc * self._nc
        if determinant <= 1e-9 * self._nn * self._cc:
            return
        per_new = (self._ns * self._cc - self._cs * self._nc) / determinant
        per_context = (self._cs * self._nn - self._ns * self._nc) / determinant
        if per_new <= 0:
            return
        self._per_new, self._per_context = per_new, max(per_context, 0.0)
