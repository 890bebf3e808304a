"""Room for running sequences: free blocks, fenced ones to wait for, then those of victims.

A victim's KV is swapped to host memory, thrown away and computed again, or the request is refused.

Which of these is decided by seconds: bytes over bandwidth against tokens over prefill speed. A
victim is a whole request. Lower classes go first, and the last admitted within a class, so the oldest
always advances; a request preempted `max_preemptions` times comes back with its whole length
guaranteed and is left alone.
"""

from __future__ import annotations

from collections import Counter

from millpond_engine.core.blocks import count_blocks
from millpond_engine.core.builder import PlanBuilder
from millpond_engine.core.sequence import Group, Sequence
from millpond_engine.core.state import State
from millpond_engine.records.outputs import Preempted
from millpond_engine.records.request import FinishReason, PreemptionMode, Refusal, RefusalReason, WaitReason
from millpond_engine.records.step import BlockMove

_HYSTERESIS = 0.8
"""The other mode must cost less than this share of the last one's cost to be chosen instead."""
CAPACITY = "Capacity"
CLASS = "Class"


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
    sequence.table += cache.allocate(missing, sequence.group.account.owner)
    builder.schedule(sequence, num_tokens)
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
    target = state.cache.allocate(1, sequence.group.account.owner)[0]
    builder.copy_block(sequence, source, target)
    sequence.table[index] = target
    sequence.published = min(sequence.published, index)
    sequence.shared = min(sequence.shared, index)
    sequence.told = min(sequence.told, 0)
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


def preempt(state: State, builder: PlanBuilder, group: Group, reason: str, now: float) -> None:
    """Take everything from a request in the batch, and swap it out, queue it again, or refuse it."""
    for sequence in group.running:
        builder.cancel(sequence)
    mode = _choose_mode(state, builder, group)
    swap = mode is PreemptionMode.SWAP
    lost = 0 if swap else sum(_count_lost(state, sequence) for sequence in group.running)
    num_blocks = len({block for sequence in group.running for block in sequence.table})
    if swap:
        _swap_out(state, builder, group)
    for sequence in list(group.running):
        _put_back(state, builder, sequence, keep=swap)
    group.num_preemptions += 1
    group.guaranteed = False
    state.last_mode = mode
    if reason == CAPACITY:
        state.estimate.preempt()
    _note(state, builder, group, Preempted(group.request.request_id, mode, reason, num_blocks, lost))
    if mode is PreemptionMode.REJECT:
        message = (
            f"preempted ({reason}) with {num_blocks} blocks; this pool refuses then instead of queueing again"
        )
        state.news.refusals.append(Refusal(group.request.request_id, RefusalReason.PREEMPTED, message))
        state.forget(group, FinishReason.ERROR)
    else:
        state.enqueue(group, now)


def shed(state: State, builder: PlanBuilder, sequence: Sequence, now: float) -> None:
    """Take one sample of a request back to the queue, so that its others can go on."""
    group, num_blocks = sequence.group, len(sequence.table)
    builder.cancel(sequence)
    lost = _count_lost(state, sequence)
    _put_back(state, builder, sequence, keep=False)
    mode = PreemptionMode.RECOMPUTE
    _note(state, builder, group, Preempted(group.request.request_id, mode, CAPACITY, num_blocks, lost))
    state.enqueue(group, now)


def _note(state: State, builder: PlanBuilder, group: Group, preempted: Preempted) -> None:
    group.preempted_step = builder.step
    group.wait_reason = WaitReason.PREEMPTED
    state.counters.preemptions += 1
    state.news.preemptions.append(preempted)


def _count_lost(state: State, sequence: Sequence) -> int:
    return max(0, sequence.computed - sequence.shared * state.capacity.block_tokens)


def list_victims(state: State, builder: PlanBuilder) -> list[Group]:
    """Running requests that may be preempted."""
    groups = {sequence.group: None for sequence in state.running}
    return [group for group in groups if not group.guaranteed and group.started_step != builder.step]


def get_victim_key(group: Group) -> tuple[int, int]:
    """Order of victims, the first to go first."""
    return (group.rule.priority, -group.admission)


def _put_back(state: State, builder: PlanBuilder, sequence: Sequence, *, keep: bool) -> None:
    """Return a running sequence to its request's waiting ones."""
    state.release(sequence, builder)
    if not keep:
        sequence.lost = max(sequence.lost, sequence.computed)
        sequence.computed = 0
    if sequence.group.branching:  # branches are not kept: the last token is computed again for them
        sequence.branches = None
        sequence.computed = min(sequence.computed, len(sequence.tokens) - 1)
    sequence.group.waiting.append(sequence)


def _choose_mode(state: State, builder: PlanBuilder, group: Group) -> PreemptionMode:
    setting = state.settings.preemption
    if setting == "Reject":
        return PreemptionMode.REJECT
    num_blocks = len(_list_swap_blocks(state, group))
    copied = any(sequence in builder.copied for sequence in group.running)
    if setting == "Recompute" or copied or not 0 < num_blocks <= state.host.num_free:
        return PreemptionMode.RECOMPUTE
    return PreemptionMode.SWAP if setting == "Swap" else _choose_cheaper(state, group, num_blocks)


def _choose_cheaper(state: State, group: Group, num_blocks: int) -> PreemptionMode:
    """Compare seconds: bytes both ways over bandwidth against lost tokens over prefill speed."""
    bandwidth, speed = state.capacity.copy_bytes_per_second, state.prefill_speed
    if bandwidth <= 0 or speed is None:
        return PreemptionMode.RECOMPUTE
    references = Counter(block for sequence in group.running for block in sequence.table)
    counts = state.cache.pool.counts
    num_private = sum(1 for block, number in references.items() if counts[block] == number)
    swap = 2 * num_blocks * state.capacity.bytes_per_block / bandwidth
    recompute = num_private * state.capacity.block_tokens / speed
    if state.last_mode is PreemptionMode.SWAP:
        recompute /= _HYSTERESIS
    elif state.last_mode is PreemptionMode.RECOMPUTE:
        swap /= _HYSTERESIS
    return PreemptionMode.SWAP if swap < recompute else PreemptionMode.RECOMPUTE


def _list_swap_blocks(state: State, group: Group) -> list[int]:
    """Blocks with computed KV, each once."""
    size = state.capacity.block_tokens
    return list({block: None for s in group.running for block in s.table[: count_blocks(s.computed, size)]})


def _swap_out(state: State, builder: PlanBuilder, group: Group) -> None:
    blocks = _list_swap_blocks(state, group)
    hosts = state.host.allocate(len(blocks))
    place = dict(zip(blocks, hosts, strict=True))
    builder.swap_out += [BlockMove(device, host) for device, host in place.items()]
    for sequence in group.running:
        used = count_blocks(sequence.computed, state.capacity.block_tokens)
        sequence.host_table = [place[block] for block in sequence.table[:used]]
    group.host_blocks = hosts
