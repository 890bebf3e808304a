"""Prefixes that running prefills are about to make findable: computing them twice would be a waste."""

from __future__ import annotations

from millpond_engine.core.sequence import Sequence
from millpond_engine.core.state import State
from millpond_engine.core.tree import TOKEN_BYTES, make_child_key


class ComingBlocks:
    """The next unpublished full block of each running sequence: (parent block or namespace, tokens) to class priority."""

    def __init__(self, state: State) -> None:
        self._size = state.capacity.block_tokens
        self._priorities: dict[tuple[object, bytes], int] = {}
        for sequence in state.running:
            self.add(sequence)

    def add(self, sequence: Sequence) -> None:
        """Note what a running sequence will publish next."""
        depth = sequence.published
        start = depth * self._size
        if len(sequence.tokens) < start + self._size or sequence.stale:
            return
        parent: object = sequence.table[depth - 1] if depth else sequence.group.namespace
        key = (parent, sequence.tokens[start : start + self._size].tobytes())
        priority = sequence.group.rule.priority
        self._priorities[key] = max(priority, self._priorities.get(key, priority))

    def includes(self, sequence: Sequence, hit: list[int], tokens: bytes) -> bool:
        """Whether the block behind `hit` is coming from a peer of the same class or a higher one."""
        offset = len(hit) * self._size
        if len(sequence.tokens) - 1 < offset + self._size:
            return False
        parent: object = hit[-1] if hit else sequence.group.namespace
        key = (parent, make_child_key(tokens, offset * TOKEN_BYTES, self._size * TOKEN_BYTES))
        priority = self._priorities.get(key)
        return priority is not None and priority >= sequence.group.rule.priority
