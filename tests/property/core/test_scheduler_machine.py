"""Random requests, aborts and steps against every invariant, with a runner that checks what it reads."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tests.unit.millpond_engine.core.harness import CountingGrammar, Loop, expect, make_request
from tests.unit.millpond_engine.core.test_eng_groups import assert_beams

from millpond_engine.core.sequence import mix_seed
from millpond_engine.records.capacity import Capacity
from millpond_engine.records.request import BeamParams, FinishReason, SamplingParams
from millpond_engine.records.settings import ClassRule, SchedulerSettings, TenantRule

CLASSES = (
    ClassRule("interactive", priority=10, ttft_seconds=0.1, reserved_percent=20),
    ClassRule("batch", priority=0, max_share_percent=80, gate_class="interactive", gate_below=3),
)
TENANTS = (TenantRule("a", weight=3, max_cache_percent=30), TenantRule("b", max_concurrency=2))
POLICIES = ("FairShare", "Fifo", "Priority", "Deadline", "LongestPrefix")

scheduler_settings = st.builds(
    SchedulerSettings,
    max_batch_tokens=st.sampled_from([1, 3, 8, 64]),
    max_sequences=st.sampled_from([2, 4, 8]),
    policy=st.sampled_from(POLICIES),
    preemption=st.sampled_from(["Auto", "Swap", "Recompute", "Reject"]),
    classes=st.sampled_from([(), CLASSES]),
    tenants=st.sampled_from([(), TENANTS]),
    prefix_cache=st.booleans(),
    max_bypasses=st.sampled_from([0, 2, 16]),
    max_preemptions=st.sampled_from([0, 1, 3]),
    watermark_percent=st.sampled_from([0, 5]),
)
capacities = st.builds(
    Capacity,
    num_blocks=st.sampled_from([10, 14, 30]),
    block_tokens=st.sampled_from([1, 2, 4]),
    max_model_tokens=st.just(60),
    num_host_blocks=st.sampled_from([0, 5, 40]),
    bytes_per_block=st.just(1000),
    copy_bytes_per_second=st.sampled_from([0.0, 1e5, 1e9]),
)
shapes = st.one_of(
    st.just({}),
    st.builds(dict, n=st.integers(2, 5)),
    st.builds(dict, best_of=st.integers(2, 3)),
    st.builds(
        dict,
        n=st.integers(1, 2),
        beam=st.builds(BeamParams, st.integers(2, 3), st.sampled_from([0.5, 1.0, 2.0])),
    ),
)


class SchedulerMachine(RuleBasedStateMachine):
    """The loop checks the state after each step; this class drives it and checks the answers at the end."""

    @initialize(
        settings=scheduler_settings, capacity=capacities, overlap=st.booleans(), optimistic=st.booleans()
    )
    def begin(self, settings, capacity, overlap, optimistic):
        self.loop = Loop(settings, capacity, overlap=overlap, optimistic=optimistic)
        self.left: set[str] = set()
        self.number = 0

    @rule(
        base=st.integers(0, 2),
        shared=st.integers(0, 20),
        own=st.integers(0, 4),
        max_tokens=st.integers(0, 14),
        shape=shapes,
        seed=st.integers(0, 3),
        stop=st.sampled_from([(), tuple(range(0, 1000, 9))]),
        min_tokens=st.sampled_from([0, 3]),
        prompt_logprobs=st.sampled_from([None, None, 0]),
        class_name=st.sampled_from(["interactive", "batch"]),
        tenant=st.sampled_from(["a", "b", "c"]),
        priority=st.integers(0, 2),
        length=st.sampled_from([None, None, 1, 4, 9]),
    )
    def arrive(
        self, base, shared, own, max_tokens, shape, seed, stop, min_tokens, prompt_logprobs, length, **rest
    ):
        self.number += 1
        prompt = [base * 100 + i for i in range(shared)] + [500 + self.number + i for i in range(own)]
        request = make_request(
            f"r{self.number}",
            prompt or [base],
            max(max_tokens, 1) if shape else max_tokens,
            sampling=SamplingParams(temperature=0.0, seed=seed, num_prompt_logprobs=prompt_logprobs),
            stop=stop,
            min_tokens=min_tokens,
            namespace=("public" if base else rest["tenant"],),
            arrival_seconds=self.loop.now,
            grammar=CountingGrammar(length) if length and "beam" not in shape else None,
            **shape,
            **rest,
        )
        self.loop.add(request)
        self.loop.check_now()

    @precondition(lambda self: self.loop.scheduler.has_work())
    @rule(steps=st.integers(1, 6))
    def steps(self, steps):
        for _ in range(steps):
            if self.loop.scheduler.has_work() or self.loop.flight:
                self.loop.step()

    @precondition(lambda self: self.loop.state.groups)
    @rule(choice=st.integers(0, 1000))
    def leave(self, choice):
        names = list(self.loop.state.groups)
        name = names[choice % len(names)]
        assert self.loop.abort(name)
        self.left.add(name)
        self.loop.scheduler.check_integrity()

    @precondition(lambda self: self.loop.state.running)
    @rule(choice=st.integers(0, 1000))
    def stop_one(self, choice):
        sequence = list(self.loop.state.running)[choice % len(self.loop.state.running)]
        if self.loop.scheduler.stop_sequence(
            sequence.group.request.request_id, sequence.index, self.loop.now
        ):
            self.left.add(sequence.group.request.request_id)
        self.loop.scheduler.check_integrity()

    @rule()
    def reset(self):
        self.loop.scheduler.reset_prefix_cache()
        self.loop.scheduler.check_integrity()

    def teardown(self):
        if not hasattr(self, "loop"):
            return
        loop = self.loop
        if loop.scheduler.has_work() or loop.flight:
            loop.run(max_steps=20_000)
        loop.assert_idle()
        loop.scheduler.counts()
        for name, request in loop.requests.items():
            if name not in self.left and name not in loop.refusals:
                self.check_answer(name, request)

    def check_answer(self, name, request):
        loop = self.loop
        assert name in loop.finished
        assert (
            loop.preemptions.get(name, 0) <= max(loop.settings.max_preemptions, 0)
            or request.n > 1
            or request.best_of > 1
        )
        if request.sampling.num_prompt_logprobs is not None:
            told = [entry.logprob for entry in loop.prompt_logprobs[name]]
            assert told == [-float(position) for position in range(1, len(request.prompt))]
        if request.beam is not None:
            assert_beams(loop, request)
        elif request.best_of == 1:
            for index in range(request.n):
                wanted = expect(request, mix_seed(request.sampling.seed, index))
                length = request.grammar.length if request.grammar else len(wanted) + 1
                assert loop.output(name, index) == wanted[:length]
                if len(wanted) >= length:
                    assert loop.outcomes[name, index].finish is FinishReason.STOP


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=120,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,
)
