"""Blocks for a running sequence that must grow: free ones, fenced ones to wait for, then those of victims."""

from __future__ import annotations

from millpond_engine.core.blocks import count_blocks
from millpond_engine.core.builder import PlanBuilder
from millpond_engine.core.preemption import CAPACITY, get_victim_key, list_victims, preempt, shed
from millpond_engine.core.sequence import Group, Sequence
from millpond_engine.core.state import State


def schedule_chunk(
    state: State, builder: PlanBuilder, sequence: Sequence, num_tokens: int, now: float
) -> bool:
    """Let a running sequence compute its next tokens, making room as needed.

    Returns False when it gets nothing in this step: it has become a victim itself, or the blocks it
    needs come free when the step in flight ends.
    """
    cache, table, size = state.cache, sequence.table, state.capacity.block_tokens
    index = sequence.computed // size
    if (
        index < len(table)
        and cache.pool.counts[table[index]] > 1
        and not _own(state, builder, sequence, index, now)
    ):
        return False
    missing = count_blocks(sequence.computed + num_tokens, size) - len(table)
    if missing > 0 and not make_room(state, builder, sequence, missing, now):
        return False
    blocks = cache.allocate(missing)
    sequence.table += blocks
    builder.schedule(sequence, num_tokens, tuple(blocks))
    return True


def make_room(state: State, builder: PlanBuilder, sequence: Sequence, num_blocks: int, now: float) -> bool:
    """Preempt until `num_blocks` can be allocated for a running sequence."""
    while state.cache.pool.num_available < num_blocks:
        state.counters.failed_allocations += 1
        victim = None if state.cache.count_fenced() else _choose_victim(state, builder, sequence)
        if victim is None:
            return False
        builder.num_preempted += 1
        if isinstance(victim, Sequence):
            shed(state, builder, victim, now)
        else:
            preempt(state, builder, victim, CAPACITY, now)
        if not sequence.running:
            return False
    return True


def _own(state: State, builder: PlanBuilder, sequence: Sequence, index: int, now: float) -> bool:
    """Copy a table's block before writing to it while others hold it too (copy on write)."""
    if not make_room(state, builder, sequence, 1, now):
        return False
    source = sequence.table[index]
    if state.cache.pool.counts[source] == 1:  # the other holder was the victim
        return True
    target = state.cache.allocate(1)[0]
    builder.copy_block(sequence, source, target)
    sequence.table[index] = target
    sequence.published = min(sequence.published, index)
    sequence.shared = min(sequence.shared, index)
    sequence.dirty = True
    state.cache.release([source], None)
    return True


def _choose_victim(state: State, builder: PlanBuilder, sequence: Sequence) -> Group | Sequence | None:
    """Who gives way to a running sequence: a whole request, one sample of a request, or nobody.

    A request is its own victim only when it comes first in the order; of several samples it then
    gives up the last, as does any request when all others are guaranteed.
    """
    own = sequence.group
    victims = list_victims(state, builder)
    if not own.guaranteed:
        victims = [group for group in victims if group.rule.priority <= own.rule.priority]
    victim = min(victims, key=get_victim_key, default=None)
    if victim is not None and victim is not own:
        return victim
    running = list({s.group: None for s in state.running})
    for group in [own] if victim is own else [own, *running]:
        if len(group.running) > 1 and group.beam is None:
            return group.running[-1]
    if len(running) > 1:
        return victim
    assert state.cache.list_leases(), "a request that fits the pool alone must not run out of blocks alone"
    return None
