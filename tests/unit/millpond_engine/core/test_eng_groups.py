"""Several samples and beams: cases ENG-041 to ENG-043, and best_of."""

from __future__ import annotations

from itertools import pairwise

import pytest
from tests.unit.millpond_engine.core.harness import Loop, expect, make_request, rank_branches

from millpond_engine.core.beam import BeamSearch
from millpond_engine.core.sequence import mix_seed
from millpond_engine.records.capacity import Capacity
from millpond_engine.records.request import BeamParams, FinishReason, RefusalReason, SamplingParams
from millpond_engine.records.settings import ClassRule, SchedulerSettings

CLASSES = (ClassRule("high", priority=1), ClassRule("low", priority=0))


def make_loop(
    num_blocks: int, *, overlap: bool = False, host: int = 0, optimistic: bool = False, **rest
) -> Loop:
    capacity = Capacity(
        num_blocks=num_blocks,
        block_tokens=4,
        max_model_tokens=1024,
        num_host_blocks=host,
        bytes_per_block=1000,
        copy_bytes_per_second=1e9,
    )
    settings = SchedulerSettings(**{"policy": "Fifo", "watermark_percent": 0} | rest)
    return Loop(settings, capacity, overlap=overlap, optimistic=optimistic)


def search_alone(request) -> list:
    """The same beam search without a scheduler."""
    beam, ends = request.beam, frozenset(request.stop.stop_token_ids)
    search = BeamSearch(beam, request.n, request.stop.max_tokens)
    size = len(request.prompt)
    beams = [(list(request.prompt), 0.0)]
    while True:
        survivors = search.advance(
            [total for _, total in beams],
            [rank_branches(tokens, search.count_branches(len(ends))) for tokens, _ in beams],
            num_output=len(beams[0][0]) - size,
            ends=ends,
            get_output=lambda parent, beams=beams: tuple(beams[parent][0][size:]),
        )
        if not survivors:
            return search.results()
        beams = [([*beams[s.parent][0], s.token], s.logprob_sum) for s in survivors]


def assert_beams(loop: Loop, request) -> None:
    for index, hypothesis in enumerate(search_alone(request)):
        outcome = loop.outcomes[request.request_id, index]
        assert outcome.tokens == list(hypothesis.tokens)
        assert outcome.score == pytest.approx(hypothesis.score)
        assert (outcome.finish, outcome.stop_token) == (hypothesis.finish, hypothesis.stop_token)


@pytest.mark.parametrize("overlap", [False, True])
def test_eng_041_beams_keep_pace_with_samples_and_prefill_once(overlap):
    def serve(**rest) -> Loop:
        loop = make_loop(600, overlap=overlap)
        loop.add(make_request("r", 256, 256, **rest))
        loop.run()
        return loop

    samples, beams = serve(n=4), serve(n=4, beam=BeamParams(4))
    assert_beams(beams, beams.requests["r"])
    computing = sum(1 for plan in beams.plans if plan.rows)
    assert computing <= 2 * sum(1 for plan in samples.plans if plan.rows)
    assert all(row.num_tokens == 1 for plan in beams.plans[1:] for row in plan.rows)
    assert max(loop.plans[1].num_tokens for loop in (samples, beams)) <= 4
    copied = sum(len(plan.copies) for plan in beams.plans)
    assert copied <= 3 * 256, "only partial last blocks are copied"


@pytest.mark.parametrize("num_samples", [1, 2, 5])
@pytest.mark.parametrize("prompt", [7, 8, 9])
def test_samples_share_the_prompt_and_differ_by_seed(prompt, num_samples):
    loop = make_loop(100)
    request = make_request("r", prompt, 9, sampling=SamplingParams(seed=5), n=num_samples)
    loop.add(request)
    loop.run()
    for index in range(num_samples):
        assert loop.output("r", index) == expect(request, mix_seed(5, index))
    assert loop.runner.computed_tokens == prompt + 8 + (num_samples - 1) * 9
    loop.assert_idle()


@pytest.mark.parametrize("overlap", [False, True])
def test_eng_043_125_samples_complete_in_waves_on_forty_tails(overlap):
    loop = make_loop(8 + 40, overlap=overlap, max_sequences=256)
    request = make_request("r", 32, 6, sampling=SamplingParams(seed=3), n=125)
    assert loop.add(request) is None
    loop.run()
    for index in range(125):
        assert loop.output("r", index) == expect(request, mix_seed(3, index))
    loop.assert_idle()


@pytest.mark.parametrize("overlap", [False, True])
def test_eng_043_fifty_samples_with_little_host_memory(overlap):
    loop = make_loop(70, overlap=overlap, host=5, preemption="Swap", optimistic=True)
    requests = [make_request(f"r{i}", 10, 14, sampling=SamplingParams(seed=i), n=50) for i in range(2)]
    for request in requests:
        assert loop.add(request) is None
    loop.run()
    for i, request in enumerate(requests):
        for index in range(50):
            assert loop.output(request.request_id, index) == expect(request, mix_seed(i, index))
    loop.assert_idle()


def test_eng_043_beams_that_cannot_run_together_are_refused_with_numbers():
    loop = make_loop(48)
    refusal = loop.add(make_request("r", 32, 40, beam=BeamParams(8)))
    assert refusal is not None
    assert refusal.reason is RefusalReason.KV_CAPACITY_EXCEEDED
    assert loop.add(make_request("rows", 4, 4, beam=BeamParams(300))).reason is RefusalReason.INVALID_VALUE


@pytest.mark.parametrize("penalty", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("stop", [(), tuple(range(0, 1000, 3))])
def test_beams_equal_the_search_alone(width, penalty, stop):
    loop = make_loop(200)
    request = make_request("r", 10, 12, n=width, beam=BeamParams(width, penalty), stop=stop)
    loop.add(request)
    loop.run()
    assert_beams(loop, request)
    loop.assert_idle()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("mode", ["Swap", "Recompute"])
@pytest.mark.parametrize("rest", [{"n": 4}, {"n": 3, "beam": BeamParams(4)}, {"best_of": 4}])
def test_a_group_is_preempted_and_resumed_as_one(rest, mode, overlap):
    loop = make_loop(
        64, overlap=overlap, host=64, preemption=mode, classes=CLASSES, policy="Priority", max_preemptions=9
    )
    group = make_request("group", 11, 30, sampling=SamplingParams(seed=2), class_name="low", **rest)
    rivals = [make_request(f"rival{i}", 236, 3, class_name="high") for i in range(3)]
    loop.add(group)
    for i, rival in enumerate(rivals):
        loop.run_steps(5)
        loop.add(rival)
        while f"rival{i}" not in loop.finished:
            loop.step()
            state = loop.state.groups.get("group")
            assert state is None or mode == "Recompute" or not (state.host_blocks and state.running)
    loop.run()
    assert loop.preemptions["group"] >= 2, "it should have been displaced again after it came back"
    for rival in rivals:
        assert loop.output(rival.request_id) == expect(rival)
    if group.beam:
        assert_beams(loop, group)
    elif group.best_of == 1:
        assert [loop.output("group", i) for i in range(4)] == [
            expect(group, mix_seed(2, i)) for i in range(4)
        ]
    loop.assert_idle()


@pytest.mark.parametrize("num_logprobs", [None, 0])
def test_best_of_returns_the_samples_with_the_highest_mean_logprob(num_logprobs):
    loop = make_loop(100)
    sampling = SamplingParams(seed=1, num_logprobs=num_logprobs)
    request = make_request("r", 6, 7, sampling=sampling, n=2, best_of=6)
    loop.add(request)
    loop.run()
    samples = [expect(request, mix_seed(1, index)) for index in range(6)]
    means = [sum(-(token % 89) / 10 for token in sample) / 7 for sample in samples]
    best = sorted(range(6), key=lambda i: -means[i])[:2]
    assert [loop.output("r", i) for i in range(2)] == [samples[i] for i in best]
    assert [loop.outcomes["r", i].score for i in range(2)] == pytest.approx([means[i] for i in best])
    assert all(loop.outcomes["r", i].num_reports == 1 for i in range(2)), "all comes at the end"
    news = [news for output in loop.outputs for news in output.sequences]
    assert all(len(item.logprobs) == (0 if num_logprobs is None else 7) for item in news)


def test_beams_in_flight_are_not_planned_again():
    loop = make_loop(100, overlap=True)
    loop.add(make_request("r", 6, 7, n=2, beam=BeamParams(2)))
    loop.run()
    steps = [plan.step for plan in loop.plans if plan.rows]
    assert all(later - earlier >= 2 for earlier, later in pairwise(steps))


def test_min_tokens_and_end_tokens():
    loop = make_loop(100)
    stop = list(range(0, 1000, 2))
    requests = [make_request(f"r{i}", 5 + i, 20, stop=stop, min_tokens=i) for i in range(8)]
    for request in requests:
        loop.add(request)
    loop.run()
    for i, request in enumerate(requests):
        outcome = loop.outcomes[request.request_id, 0]
        assert outcome.tokens == expect(request)
        assert len(outcome.tokens) >= i
        if outcome.finish is FinishReason.STOP:
            assert outcome.stop_token in stop
