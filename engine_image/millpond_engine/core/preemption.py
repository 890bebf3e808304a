"""Room for a sequence that must grow: free blocks, then fenced ones, then victims.

A victim is a whole request. Its KV is swapped to host memory, thrown away and computed again, or the
request is refused, whichever costs least seconds. Lower classes go first, and the last admitted
within a class, so the oldest always advances; a request preempted `max_preemptions` times comes back
with its whole length guaranteed and is left alone.
"""

from __future__ import annotations

from collections import Counter

from millpond_engine.core.blocks import count_blocks
from millpond_engine.core.builder import PlanBuilder
from millpond_engine.core.outputs import Preempted
from millpond_engine.core.request import FinishReason, PreemptionMode, Refusal, RefusalReason, WaitReason
from millpond_engine.core.sequence import Group, Sequence
from millpond_engine.core.state import State
from millpond_engine.core.step import BlockMove

_HYSTERESIS = 0.8
"""The other mode must cost less than this share of the last one's cost to be chosen instead."""
CAPACITY = "Capacity"
CLASS = "Class"


def grow(
    state: State, builder: PlanBuilder, sequence: Sequence, num_blocks: int, now: float
) -> tuple[int, ...] | None:
    """Append blocks to a running sequence's table, preempting others if need be.

    Returns None when it gets nothing in this step: it has become a victim itself, or the blocks it
    needs come free when the step in flight ends.
    """
    if not make_room(state, builder, sequence, num_blocks, now):
        return None
    blocks = state.cache.allocate(num_blocks)
    sequence.table += blocks
    return tuple(blocks)


def own_block(state: State, builder: PlanBuilder, sequence: Sequence, index: int, now: float) -> bool:
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


def make_room(state: State, builder: PlanBuilder, sequence: Sequence, num_blocks: int, now: float) -> bool:
    """Preempt until `num_blocks` can be allocated for a running sequence."""
    cache = state.cache
    while cache.num_available < num_blocks:
        state.counters.failed_allocations += 1
        if cache.count_fenced():
            return False
        victim = _choose_victim(state, builder, sequence)
        if victim is None:
            return False
        if isinstance(victim, Sequence):
            shed(state, builder, victim, now)
        else:
            preempt(state, builder, victim, CAPACITY, now)
        builder.num_preempted += 1
        if not sequence.running:
            return False
    return True


def find_lower_class_victims(state: State, builder: PlanBuilder, group: Group) -> list[Group]:
    """Running requests that a waiting one may displace because its class is higher, first victim first."""
    victims = [other for other in _list_victims(state, builder) if other.rule.priority < group.rule.priority]
    return sorted(victims, key=_victim_key)


def preempt(state: State, builder: PlanBuilder, group: Group, reason: str, now: float) -> None:
    """Take everything from a request in the batch, and swap it out, queue it again, or refuse it."""
    for sequence in group.running:
        builder.cancel(sequence)
    mode = _choose_mode(state, builder, group)
    lost = (
        0
        if mode is PreemptionMode.SWAP
        else sum(s.computed - s.shared * state.capacity.block_tokens for s in group.running)
    )
    num_blocks = len({block for sequence in group.running for block in sequence.table})
    if mode is PreemptionMode.SWAP:
        _swap_out(state, builder, group)
    for sequence in list(group.running):
        _put_back(state, builder, sequence, keep=mode is PreemptionMode.SWAP)
    group.preempted_step = builder.step
    group.num_preemptions += 1
    group.guaranteed = False
    group.wait_reason = WaitReason.PREEMPTED
    state.last_mode = mode
    state.counters.preemptions += 1
    if reason == CAPACITY:
        state.estimate.preempt()
    request_id = group.request.request_id
    state.news.preemptions.append(Preempted(request_id, mode, reason, num_blocks, max(lost, 0)))
    if mode is PreemptionMode.REJECT:
        message = (
            f"preempted for {reason} after {num_blocks} blocks; this pool refuses instead of queueing again"
        )
        state.news.refusals.append(Refusal(request_id, RefusalReason.PREEMPTED, message))
        state.forget(group, FinishReason.ERROR)
    else:
        state.enqueue(group, now)


def shed(state: State, builder: PlanBuilder, sequence: Sequence, now: float) -> None:
    """Take one sample of a request back to the queue, so that its others can go on."""
    group = sequence.group
    builder.cancel(sequence)
    num_blocks, lost = len(sequence.table), sequence.computed - sequence.shared * state.capacity.block_tokens
    _put_back(state, builder, sequence, keep=False)
    group.preempted_step = builder.step
    request_id = group.request.request_id
    state.counters.preemptions += 1
    state.news.preemptions.append(
        Preempted(request_id, PreemptionMode.RECOMPUTE, CAPACITY, num_blocks, max(lost, 0))
    )
    state.enqueue(group, now)


def _choose_victim(state: State, builder: PlanBuilder, sequence: Sequence) -> Group | Sequence | None:
    """Who gives way to a running sequence: a whole request, one sample of its own request, or nobody."""
    own = sequence.group
    victims = _list_victims(state, builder)
    if not own.guaranteed:
        victims = [group for group in victims if group.rule.priority <= own.rule.priority]
    victim = min(victims, key=_victim_key, default=None)
    if victim is own or victim is None:
        crowds = [own] if victim is own else [own, *{s.group: None for s in state.running}]
        for group in crowds:
            if len(group.running) > 1 and group.beam is None:
                return group.running[-1]
    if victim is own and len({s.group for s in state.running}) == 1:
        assert state.cache.list_leases(), (
            "a request that fits the pool alone must not run out of blocks alone"
        )
        return None
    return victim


def _list_victims(state: State, builder: PlanBuilder) -> list[Group]:
    groups = {sequence.group: None for sequence in state.running}
    return [group for group in groups if not group.guaranteed and group.started_step != builder.step]


def _victim_key(group: Group) -> tuple[int, int]:
    return (group.rule.priority, -group.admission)


def _put_back(state: State, builder: PlanBuilder, sequence: Sequence, *, keep: bool) -> None:
    """Return a running sequence to its request's waiting ones."""
    state.release(sequence, builder)
    if not keep:
        sequence.lost = max(sequence.lost, sequence.computed)
        sequence.computed = 0
    if sequence.branching:  # branches are not kept: the last token is computed again for them
        sequence.branches = None
        sequence.computed = min(sequence.computed, len(sequence.tokens) - 1)
    sequence.group.waiting.append(sequence)


def _choose_mode(state: State, builder: PlanBuilder, group: Group) -> PreemptionMode:
    setting = state.settings.preemption
    if setting == "Reject":
        return PreemptionMode.REJECT
    copied = any(sequence in builder.copied for sequence in group.running)
    blocks = _list_swap_blocks(state, group)
    possible = 0 < len(blocks) <= state.host.num_free and not copied
    if setting == "Recompute" or not possible:
        return PreemptionMode.RECOMPUTE
    if setting == "Swap":
        return PreemptionMode.SWAP
    return _choose_cheaper(state, group, len(blocks))


def _choose_cheaper(state: State, group: Group, num_blocks: int) -> PreemptionMode:
    """Compare seconds: bytes both ways over bandwidth against lost tokens over prefill speed."""
    bandwidth, speed = state.capacity.copy_bytes_per_second, state.speed.tokens_per_second
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
    group.swapped = True
