"""What the batch will still do: the blocks it will take, and the prefixes it will make findable."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable

from millpond_engine.core.blocks import count_blocks
from millpond_engine.core.limits import count_group_blocks
from millpond_engine.core.sequence import Group, Sequence
from millpond_engine.core.state import State
from millpond_engine.core.tree import TOKEN_BYTES, make_child_key


class Forecast:
    """The running sequences by expected end; made when first asked, kept up to date while a step admits."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._size = state.capacity.block_tokens
        self._watermark = count_blocks(state.capacity.num_blocks * state.settings.watermark_percent, 100)
        self._entries: list[tuple[int, int]] | None = None
        self._allocated = 0
        """Blocks that only running sequences hold."""
        self._promised = 0
        """Blocks that their known tokens still need."""
        self._failed: list[tuple[int, int, int]] = []
        """What did not fit in the long run: whatever is larger in every respect does not either."""

    def add(self, sequence: Sequence) -> None:
        """Count a sequence that has just been let in."""
        if self._entries is not None:
            insort(self._entries, self._measure(sequence))

    def fits(self, sequence: Sequence, hit: Iterable[int], needed: int) -> bool:
        """Room for `needed` blocks now, and later for the growth of everybody; `hit` will be referenced.

        Into an empty batch enters whoever fits now.
        """
        available = self._state.cache.count_available_without(hit)
        if needed > available:
            return False
        if self._entries is None:
            self._entries = sorted(self._measure(running) for running in self._state.running)
        if needed > available - self._promised:
            return False
        if not self._entries:
            return True
        if is_due_a_guarantee(self._state, sequence.group) and not self._can_guarantee(sequence.group):
            return False
        remaining, taken = self._expect(sequence), self._state.cache.pool.num_available - available
        if any(remaining >= other[0] and needed >= other[1] and taken >= other[2] for other in self._failed):
            return False
        entries = list(self._entries)
        insort(entries, (-remaining, needed))
        if compute_peak_blocks(entries, self._size) <= available + self._allocated - self._watermark:
            return True
        self._failed.append((remaining, needed, taken))
        return False

    def _measure(self, sequence: Sequence) -> tuple[int, int]:
        """Minus the tokens a sequence will still generate, and the blocks it will then give back."""
        private = len(sequence.table) - sequence.shared
        planned = max(
            private, count_blocks(min(sequence.num_tokens + 1, sequence.limit), self._size) - sequence.shared
        )
        self._allocated += private
        self._promised += planned - private
        return (-self._expect(sequence), planned)

    def _expect(self, sequence: Sequence) -> int:
        limit = sequence.group.request.stop.max_tokens
        if sequence.group.guaranteed:
            return limit - sequence.num_output
        return self._state.estimate.compute_remaining(sequence.num_output, limit)

    def _can_guarantee(self, group: Group) -> bool:
        """All guaranteed requests together fit the pool at their full length."""
        settings, capacity = self._state.settings, self._state.capacity
        groups = {s.group for s in self._state.running if s.group.guaranteed} | {group}
        return sum(count_group_blocks(g.request, settings, capacity) for g in groups) <= capacity.num_blocks


class ComingBlocks:
    """The next unpublished full block of each running sequence: computing it twice would be a waste."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._size = state.capacity.block_tokens
        self._priorities: dict[tuple[object, bytes], int] | None = None
        """By (parent block or namespace, tokens), the highest class priority; made when first asked."""

    def add(self, sequence: Sequence) -> None:
        """Note what a sequence that has just been let in will publish next."""
        if self._priorities is not None:
            self._note(sequence, self._priorities)

    def _note(self, sequence: Sequence, priorities: dict[tuple[object, bytes], int]) -> None:
        depth = sequence.published
        start = depth * self._size
        if len(sequence.tokens) < start + self._size or sequence.stale:
            return
        parent: object = sequence.table[depth - 1] if depth else sequence.group.request.namespace
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
        parent: object = hit[-1] if hit else sequence.group.request.namespace
        key = (parent, make_child_key(tokens, offset * TOKEN_BYTES, self._size * TOKEN_BYTES))
        priority = self._priorities.get(key)
        return priority is not None and priority >= sequence.group.rule.priority


def is_due_a_guarantee(state: State, group: Group) -> bool:
    """It has been preempted as often as a request may be."""
    return group.num_preemptions >= state.settings.max_preemptions


def compute_peak_blocks(entries: Iterable[tuple[int, int]], block_tokens: int) -> float:
    """Most blocks in use at any time, if every sequence grows by a token a step and leaves at its end.

    `entries` are (-remaining tokens, private blocks), longest remaining first. When the i-th ends, the
    ones before it have grown by its remaining tokens (the view of LightLLM's Past-Future scheduler,
    ASPLOS 2025).
    """
    held = 0
    peak = 0.0
    for number, (negative_remaining, blocks) in enumerate(entries, 1):
        held += blocks
        peak = max(peak, held - number * negative_remaining / block_tokens)
    return peak
