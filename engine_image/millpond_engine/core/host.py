"""Host blocks that hold swapped sequences."""

from __future__ import annotations


class HostPool:
    """Free list of host blocks, with fences: a block read by a planned swap-in is free after that step."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._fences: dict[int, list[int]] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated."""
        return len(self._free)

    def allocate(self, num_blocks: int) -> list[int]:
        """Take blocks; the caller has checked `num_free`."""
        return [self._free.pop() for _ in range(num_blocks)]

    def release(self, blocks: list[int], fence: int | None) -> None:
        """Give blocks back, at once or when a step has ended."""
        if fence is None:
            self._free += blocks
        else:
            self._fences.setdefault(fence, []).extend(blocks)

    def end_step(self, step: int) -> None:
        """The step is over."""
        self._free += self._fences.pop(step, [])

    def list_unused(self) -> list[int]:
        """Free and fenced blocks (for checks)."""
        return self._free + [block for blocks in self._fences.values() for block in blocks]
