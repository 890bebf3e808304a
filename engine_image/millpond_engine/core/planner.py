"""One step's plan: decodes first, then prefill chunks and admissions under one token budget.

Of what decodes leave, the oldest unfinished prompt gets all but a reserved slice; the slice goes to
the other running prompts, shortest first, and to new ones; what is left over flows back. So a long
prompt neither starves the short ones behind it nor is starved by them (Sarathi-Serve, OSDI'24, with
a fairer slice).
"""

from __future__ import annotations

from millpond_engine.core.admission import Admission
from millpond_engine.core.builder import PlanBuilder
from millpond_engine.core.preemption import schedule_chunk
from millpond_engine.core.sequence import Sequence
from millpond_engine.core.state import State
from millpond_engine.records.step import StepPlan


def make_plan(state: State, now: float) -> StepPlan:
    """Plan the next step and move the sequences' counters along with it."""
    state.step += 1
    builder = PlanBuilder(state.step, state.settings.max_batch_tokens)
    decodes, prefills = _sort_running(state)
    prefills.sort(key=lambda sequence: (-sequence.group.rule.priority, sequence.group.admission))
    _plan_decodes(state, builder, decodes, now, bool(prefills) or len(state.queue) > 0)
    _plan_prefills(state, builder, prefills, now)
    if len(state.queue) and builder.budget > 0 and not (builder.num_preempted and builder.starts):
        Admission(state, builder, now).run()
    if builder.budget > 0:
        _extend_prefills(state, builder, prefills, now)
    return _seal(state, builder)


def _sort_running(state: State) -> tuple[list[Sequence], list[Sequence]]:
    """Running sequences that have something to compute: decodes and prefills."""
    decodes: list[Sequence] = []
    prefills: list[Sequence] = []
    for sequence in state.running:
        computed = sequence.computed
        total = len(sequence.tokens) + sequence.pending
        if total - computed == 1 and computed >= sequence.prompt_tokens:
            if total < sequence.limit:
                decodes.append(sequence)
        elif computed < total:
            prefills.append(sequence)
    return decodes, prefills


def _plan_decodes(
    state: State, builder: PlanBuilder, decodes: list[Sequence], now: float, others: bool
) -> None:
    """One token for each decode; if the budget is short, for those that have waited longest."""
    kept = builder.budget * state.settings.admission_percent // 100 if others else 0
    if len(decodes) > builder.budget - kept:
        decodes = sorted(decodes, key=lambda sequence: sequence.last_step)
    size, counts = state.capacity.block_tokens, state.cache.pool.counts
    for sequence in decodes:
        if builder.budget <= kept:
            return
        if not sequence.running:  # it has become a victim of one before it
            continue
        table, index = sequence.table, sequence.computed // size
        if index < len(table) and counts[table[index]] == 1:
            builder.schedule(sequence, 1)
        else:
            schedule_chunk(state, builder, sequence, 1, now)


def _plan_prefills(state: State, builder: PlanBuilder, prefills: list[Sequence], now: float) -> None:
    """Chunks for the prompts in the batch: the oldest first, then the shortest."""
    waiting = len(state.queue) > 0 and bool(state.free_rows)
    kept = 0
    if len(prefills) > 1 or waiting:
        kept = min(state.settings.max_batch_tokens * state.settings.admission_percent // 100, builder.budget)
    order = [*prefills[:1], *sorted(prefills[1:], key=lambda s: s.num_tokens - s.computed)]
    for number, sequence in enumerate(order):
        if number == 1:
            kept = kept // 2 if waiting else 0
        share = builder.budget - kept
        if share > 0 and sequence.running:
            schedule_chunk(state, builder, sequence, min(share, sequence.num_tokens - sequence.computed), now)


def _extend_prefills(state: State, builder: PlanBuilder, prefills: list[Sequence], now: float) -> None:
    """Let chunks grow by what nobody else wanted, as far as blocks are free without preempting."""
    size = state.capacity.block_tokens
    for sequence in prefills:
        room = (len(sequence.table) + state.cache.pool.num_available) * size - sequence.computed
        extra = min(sequence.num_tokens - sequence.computed, builder.budget, room)
        if extra > 0 and sequence in builder.starts:
            schedule_chunk(state, builder, sequence, extra, now)


def _seal(state: State, builder: PlanBuilder) -> StepPlan:
    if builder.empty:
        state.end_step(builder.step)
        return builder.seal(())
    plan = builder.seal(tuple(state.dropped_rows))
    state.dropped_rows.clear()
    state.flights[plan.step] = tuple(builder.starts)
    return plan
