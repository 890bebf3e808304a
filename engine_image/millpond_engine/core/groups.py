"""Ends of sequences and requests, and the steps of a beam search."""

from __future__ import annotations

from millpond_engine.core.sequence import Group, Sequence
from millpond_engine.core.state import State
from millpond_engine.records.outputs import SequenceOutput
from millpond_engine.records.request import FinishReason


def end_sequence(state: State, sequence: Sequence, finish: FinishReason) -> None:
    """Give back everything of one sequence, and its request when it was the last."""
    group = sequence.group
    sequence.finish = finish
    if sequence.running:
        state.release(sequence)
    else:
        group.waiting.remove(sequence)
    if finish is not FinishReason.ERROR:
        state.estimate.finish(sequence.num_output)
    if group.held:
        group.done.append(sequence)
    if group.unborn and not (group.waiting or group.running or group.prompt_reported):
        state.make_sample(group)  # the one that was to compute the prompt for all is gone
        state.enqueue(group, group.waiting_since)
    if group.finished:
        if group.held and group.beam is None:
            _report_best(state, group)
        close_group(state, group, finish)
    elif not group.is_waiting():
        state.queue.remove(group)


def close_group(state: State, group: Group, finish: FinishReason) -> None:
    """Forget a request whose outputs are all told."""
    state.forget(group, finish)
    state.news.finished.append(group.request.request_id)


def fail_group(state: State, group: Group, message: str = "") -> None:
    """End every sequence of a request that has not ended with an error."""
    request_id = group.request.request_id
    alive = sorted([*(s.index for s in [*group.running, *group.waiting]), *group.unborn])
    indices = range(group.request.n) if group.held else alive
    state.news.sequences += [
        SequenceOutput(request_id, index, finish=FinishReason.ERROR, message=message) for index in indices
    ]
    close_group(state, group, FinishReason.ERROR)


def advance_beams(state: State, group: Group) -> None:
    """Take the next step of a beam search once all its beams have reported."""
    search, beams = group.beam, list(group.running)
    if search is None or group.waiting or any(beam.branches is None for beam in beams):
        return
    survivors = search.advance(
        [beam.logprob_sum for beam in beams],
        [beam.branches or () for beam in beams],
        num_output=beams[0].num_output,
        ends=group.ends,
        get_output=lambda parent: tuple(beams[parent].tokens[beams[parent].prompt_tokens :]),
    )
    if not survivors:
        _report_beams(state, group)
        return
    parents = {survivor.parent for survivor in survivors}
    for parent, beam in enumerate(beams):
        if parent not in parents:
            beam.finish = FinishReason.STOP
            state.release(beam)
    order: list[Sequence] = []
    for survivor in reversed(
        survivors
    ):  # the best child of a beam goes on in its row, after the others have left
        rest = survivors[: survivors.index(survivor)]
        beam = beams[survivor.parent]
        if any(other.parent == survivor.parent for other in rest):
            beam = state.fork(beam)
        beam.tokens.append(survivor.token)
        beam.chosen, beam.branches = survivor.token, None
        beam.logprob_sum = survivor.logprob_sum
        order.append(beam)
    group.running[:] = order[::-1]


def _report_beams(state: State, group: Group) -> None:
    search = group.beam
    assert search is not None
    request_id = group.request.request_id
    for index, best in enumerate(search.results()):
        state.estimate.finish(len(best.tokens))
        state.news.sequences.append(
            SequenceOutput(request_id, index, best.tokens, (), best.finish, best.stop_token, best.score)
        )
    close_group(state, group, FinishReason.STOP)


def _report_best(state: State, group: Group) -> None:
    """Report the n samples with the highest mean log-probability, best first."""
    ranked = sorted(group.done, key=_get_mean_logprob, reverse=True)
    wanted = group.request.sampling.num_logprobs is not None
    for index, sample in enumerate(ranked[: group.request.n]):
        tokens, stop_token = tuple(sample.tokens[sample.prompt_tokens :]), None
        if sample.finish is FinishReason.STOP and tokens[-1] in group.ends:  # not by the end of its grammar
            tokens, stop_token = tokens[:-1], tokens[-1]
        logprobs = tuple(sample.logprobs) if wanted else ()
        mean = _get_mean_logprob(sample)
        state.news.sequences.append(
            SequenceOutput(group.request.request_id, index, tokens, logprobs, sample.finish, stop_token, mean)
        )


def _get_mean_logprob(sample: Sequence) -> float:
    return sample.logprob_sum / max(sample.num_output, 1)
