"""Prefixes that running prefills are about to make findable: computing them twice would be a waste."""

from __future__ import annotations

from millpond_engine.core.sequence import Sequence
from millpond_engine.core.state import State
from millpond_engine.core.tree import TOKEN_BYTES, make_child_key


class ComingBlocks:
    """The next unpublished full block of each running sequence: (parent block or namespace, tokens) to class priority."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._size = state.capacity.block_tokens
        self.forget()

    def forget(self) -> None:
        """Somebody has left the batch: look again when asked."""
        self._priorities: dict[tuple[object, bytes], int] | None = None

    def add(self, sequence: Sequence) -> None:
        """Note what a sequence that has just been let in will publish next."""
        if self._priorities is not None:
            self._note(sequence, self._priorities)

    def _note(self, sequence: Sequence, priorities: dict[tuple[object, bytes], int]) -> None:
        depth = sequence.published
        start = depth * self._size
        if len(sequence.tokens) < start + self._size or sequence.stale:
            return
        parent: object = sequence.table[depth - 1] if depth else sequence.group.namespace
        key = (parent, sequence.tokens[start : start + self._size].tobytes())
        priority = sequence.group.rule.priority
        priorities[key] = max(priority, priorities.get(key, priority))

    def includes(self, sequence: Sequence, hit: list[int], tokens: bytes) -> bool:
        """Whether the block behind `hit` is coming from a peer of the same class or a higher one."""
        offset = len(hit) * self._size
        if len(sequence.tokens) - 1 < offset + self._size:
            return False
        if self._priorities is None:
            self._priorities = {}
            for running in self._state.running:
                self._note(running, self._priorities)
        parent: object = hit[-1] if hit else sequence.group.namespace
        key = (parent, make_child_key(tokens, offset * TOKEN_BYTES, self._size * TOKEN_BYTES))
        priority = self._priorities.get(key)
        return priority is not None and priority >= sequence.group.rule.priority
