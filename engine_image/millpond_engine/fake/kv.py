"""A KV cache that stores token ids instead of tensors, so that a wrong block is found the moment it is read."""

from __future__ import annotations

from collections.abc import Sequence

from millpond_engine.records.step import StepPlan


class FakeKv:
    """Slots of device and host blocks; each holds the token written there, or nothing."""

    def __init__(self, num_blocks: int, num_host_blocks: int, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._device: list[list[int | None]] = [[None] * block_tokens for _ in range(num_blocks)]
        self._host: list[list[int | None]] = [[None] * block_tokens for _ in range(num_host_blocks)]

    def move(self, plan: StepPlan) -> None:
        """Swap out, then swap in, as the plan orders."""
        for move in plan.swap_out:
            self._host[move.host] = list(self._device[move.device])
        for move in plan.swap_in:
            self._device[move.device] = list(self._host[move.host])

    def copy(self, plan: StepPlan) -> None:
        """Copy blocks on the device."""
        contents = [list(self._device[copy.source]) for copy in plan.copies]
        for copy, content in zip(plan.copies, contents, strict=True):
            self._device[copy.target] = content

    def write(self, table: Sequence[int], start: int, tokens: Sequence[int]) -> None:
        """Store `tokens` at positions `start` and up."""
        for position, token in enumerate(tokens, start):
            block, slot = divmod(position, self._block_tokens)
            self._device[table[block]][slot] = token

    def check(self, table: Sequence[int], tokens: Sequence[int]) -> None:
        """Assert that the table's slots hold exactly `tokens`: what attention would read is what was said."""
        for position, token in enumerate(tokens):
            block, slot = divmod(position, self._block_tokens)
            held = self._device[table[block]][slot]
            assert held == token, (
                f"position {position}: block {table[block]} slot {slot} holds {held}, not {token}"
            )
