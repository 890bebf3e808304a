"""What a step's result does: tokens to sequences, blocks to the prefix tree, ends."""

from __future__ import annotations

from millpond_engine.core.groups import advance_beams, end_sequence, fail_group
from millpond_engine.core.sequence import Group, Sequence
from millpond_engine.core.state import State
from millpond_engine.records.grammar import Guide
from millpond_engine.records.outputs import PromptOutput, SequenceOutput
from millpond_engine.records.request import FinishReason
from millpond_engine.records.step import RowResult, RowStep, StepPlan, StepResult, TokenLogprobs


def apply_result(state: State, plan: StepPlan, result: StepResult, now: float) -> None:
    """Book a step that has run. Results of sequences that ended meanwhile are dropped."""
    sequences = state.flights.pop(plan.step, None)
    if sequences is None:
        return
    by_row = {row.row: row for row in result.rows}
    searches: dict[Group, None] = {}
    for sequence, step in zip(sequences, plan.rows, strict=True):
        sequence.flights -= 1
        if sequence.finish is not None:
            continue
        if step.row in result.failed_rows:
            guide = sequence.guide
            own = guide.failure if guide is not None else ""
            _fail_sequence(state, sequence, own or result.failed_rows[step.row])
            continue
        _take_row(state, sequence, step, by_row.get(step.row), now)
        if sequence.branches is not None:
            searches[sequence.group] = None
    for group in searches:
        if group.running:
            advance_beams(state, group)
    state.end_step(plan.step)


def apply_failure(state: State, plan: StepPlan) -> None:
    """Book a step that was lost: its requests end with an error, what it swapped out is computed again."""
    sequences = state.flights.pop(plan.step, ())
    for sequence in sequences:
        sequence.flights -= 1
    for sequence in sequences:
        if sequence.finish is None:
            fail_group(state, sequence.group)
    for group in state.queue:
        if group.host_blocks and group.preempted_step == plan.step:
            state.drop_host(group)
            for sequence in group.waiting:
                sequence.lost, sequence.computed, sequence.host_table = sequence.computed, 0, []
    state.dropped_rows += plan.dropped_rows
    state.end_step(plan.step)


def _take_row(state: State, sequence: Sequence, step: RowStep, got: RowResult | None, now: float) -> None:
    """Book what one sequence computed."""
    num_full = (step.start + step.num_tokens) // state.capacity.block_tokens
    if num_full > sequence.published and sequence.running:
        _publish(state, sequence, num_full)
    if not sequence.group.prompt_reported:
        _take_prompt(state, sequence, step, got, now)
    if got is None:
        return
    if got.token is not None and step.sample:
        _take_token(state, sequence, got.token, got)
    elif step.num_branches and sequence.running:
        sequence.branches = got.branches


def _publish(state: State, sequence: Sequence, num_full: int) -> None:
    """Make the blocks filled by the step findable."""
    if sequence.stale or not state.cache.enabled:
        return
    first = sequence.published
    fence = state.newest_flight() if sequence.flights else None
    exchanged = state.cache.publish(
        sequence.table, sequence.tokens, sequence.group.request.namespace, (first, num_full), fence
    )
    sequence.published = num_full
    if exchanged:
        sequence.shared = max(sequence.shared, first + exchanged)
        sequence.told = min(sequence.told, 0)


def _take_prompt(state: State, sequence: Sequence, step: RowStep, got: RowResult | None, now: float) -> None:
    """Collect prompt log-probabilities; report the prompt when its last token is computed."""
    group = sequence.group
    if got is not None and got.prompt_logprobs:
        known = len(group.prompt_logprobs) - step.start
        group.prompt_logprobs += got.prompt_logprobs[max(known, 0) :]
    if step.start + step.num_tokens < sequence.prompt_tokens:
        return
    group.prompt_reported = True
    output = PromptOutput(group.request.request_id, group.cached_tokens or 0, tuple(group.prompt_logprobs))
    state.news.prompts.append(output)
    if group.unborn:
        state.enqueue(group, now)
    if sequence.limit == sequence.prompt_tokens:
        state.news.sequences.append(SequenceOutput(group.request.request_id, 0, finish=FinishReason.LENGTH))
        end_sequence(state, sequence, FinishReason.LENGTH)


def _take_token(state: State, sequence: Sequence, token: int, got: RowResult) -> None:
    """Accept one sampled token, and end the sequence where it must."""
    group = sequence.group
    tokens = sequence.tokens
    tokens.append(token)
    sequence.pending -= 1
    finish = None
    stop_token = None
    if token in group.ends and sequence.num_output > group.request.stop.min_tokens:
        finish, stop_token = FinishReason.STOP, token
    elif sequence.guide is not None and sequence.guide.advance(token):
        if sequence.guide.failure:
            _fail_sequence(state, sequence, sequence.guide.failure)
            return
        finish = FinishReason.STOP
    elif len(tokens) >= sequence.limit:
        finish = FinishReason.LENGTH
    logprobs: tuple[TokenLogprobs, ...] = ()
    if got.logprobs is not None:
        sequence.logprob_sum += got.logprobs.logprob
        logprobs = (got.logprobs,)
    if group.held:
        sequence.logprobs += logprobs
    else:
        told = (token,) if stop_token is None else ()
        news = SequenceOutput(group.request.request_id, sequence.index, told, logprobs, finish, stop_token)
        state.news.sequences.append(news)
    if finish is not None:
        end_sequence(state, sequence, finish)


def list_guides(state: State, plan: StepPlan) -> list[tuple[int, Guide]]:
    """(row, guide) of the sequences that a planned step samples under a grammar, up to the last token read."""
    wanted, found = set(plan.constrained), list[tuple[int, Guide]]()
    for sequence, step in zip(state.flights.get(plan.step, ()), plan.rows, strict=False):
        grammar = sequence.group.request.grammar
        if step.row in wanted and sequence.finish is None and grammar is not None:
            if sequence.guide is None:
                sequence.guide = grammar.start()
            found.append((step.row, sequence.guide))
    return found


def _fail_sequence(state: State, sequence: Sequence, message: str) -> None:
    """End a sequence whose row failed alone; its request too, if nothing can go on without it."""
    group = sequence.group
    if group.held or (group.unborn and not group.prompt_reported):
        fail_group(state, group, message)
        return
    output = SequenceOutput(
        group.request.request_id, sequence.index, finish=FinishReason.ERROR, message=message
    )
    state.news.sequences.append(output)
    end_sequence(state, sequence, FinishReason.ERROR)
