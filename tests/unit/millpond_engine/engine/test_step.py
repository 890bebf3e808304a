"""The step over the real scheduler and the fake runner, with and without overlap, in virtual time."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from millpond_engine.core.scheduler import Scheduler
from millpond_engine.engine.runner import RunnerInfo
from millpond_engine.engine.step import Engine, make_epoch
from millpond_engine.fake.clock import VirtualClock
from millpond_engine.fake.cost import CostModel, make_faults
from millpond_engine.fake.runner import FakeOptions, FakeRunner
from millpond_engine.fake.script import StoryScript, make_story
from millpond_engine.records.outputs import Preempted
from millpond_engine.records.request import FinishReason, Request, SamplingParams, StopParams
from millpond_engine.records.settings import SchedulerSettings

STORY = make_story([tuple(range(10, 40)), tuple(range(50, 75))], end_token=1, output_tokens=20)


@dataclass
class World:
    """An engine, its clock and everything it has said."""

    engine: Engine
    runner: FakeRunner
    clock: VirtualClock
    tokens: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    finishes: dict[tuple[str, int], FinishReason] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    preemptions: list[Preempted] = field(default_factory=list)
    num_steps: int = 0

    def step(self) -> None:
        report = self.engine.step()
        self.num_steps += 1
        if report is None:
            return
        if report.failure:
            self.failures.append(report.failure)
        self.preemptions += report.output.preemptions
        for output in report.output.sequences:
            key = (output.request_id, output.index)
            self.tokens.setdefault(key, []).extend(output.tokens)
            if output.finish:
                self.finishes[key] = output.finish

    def run(self, limit: int = 2000) -> None:
        for _ in range(limit):
            if not self.engine.has_work():
                break
            self.step()
        assert not self.engine.has_work()
        self.engine.scheduler.check_integrity()
        counts = self.engine.scheduler.counts()
        assert counts.used_blocks == 0


def make_world(
    *,
    overlap: bool,
    num_blocks: int = 64,
    num_host_blocks: int = 0,
    faults: tuple[int, ...] = (),
    **settings: object,
) -> World:
    info = RunnerInfo(
        model="fake",
        vocabulary_size=100,
        max_model_tokens=256,
        block_tokens=4,
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        bytes_per_block=64,
        dtype="none",
        device="fake",
        eos_token_ids=(1,),
        limited_by="test",
        copy_bytes_per_second=1e9,
    )
    clock = VirtualClock()
    cost = CostModel(prefill_tokens_per_second=1000, decode_step_seconds=0.01)
    options = FakeOptions(cost, make_faults(failing=faults), check_kv=True)
    runner = FakeRunner(info, STORY, options, clock=clock)
    scheduler = Scheduler(SchedulerSettings(max_batch_tokens=16, **settings), info)  # type: ignore[arg-type]
    return World(Engine(scheduler, runner, overlap=overlap, clock=clock.now), runner, clock)


def make_request(name: str, prompt: tuple[int, ...], max_tokens: int = 30, **fields: object) -> Request:
    return Request(
        request_id=name,
        prompt=prompt,
        sampling=SamplingParams(temperature=0.0),
        stop=StopParams(max_tokens=max_tokens),
        arrival_seconds=0.0,
        **fields,  # type: ignore[arg-type]
    )


def expect(script: StoryScript, prompt: tuple[int, ...], length: int) -> list[int]:
    start = script.start(prompt, None)
    return [script.next_token(start, position) for position in range(length)]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_blocks", [64, 14], ids=["roomy", "preempting"])
def test_every_sequence_says_its_script_and_the_pool_is_whole(overlap: bool, num_blocks: int) -> None:
    world = make_world(overlap=overlap, num_blocks=num_blocks)
    prompts = {f"r{i}": tuple(range(2, 5 + 3 * i)) for i in range(6)}
    for name, prompt in prompts.items():
        assert world.engine.add(make_request(name, prompt)) is None
    world.run()
    for name, prompt in prompts.items():
        assert world.tokens[name, 0] == expect(STORY, prompt, 20)
        assert world.finishes[name, 0] is FinishReason.STOP


@pytest.mark.parametrize("overlap", [False, True])
def test_a_limit_and_an_abort_end_where_they_should(overlap: bool) -> None:
    world = make_world(overlap=overlap)
    world.engine.add(make_request("short", (5, 6, 7), max_tokens=3))
    world.engine.add(make_request("gone", (8, 9, 10)))
    for _ in range(4):
        world.step()
    assert world.engine.abort("gone")
    assert not world.engine.abort("gone")
    world.run()
    assert world.tokens["short", 0] == expect(STORY, (5, 6, 7), 3)
    assert world.finishes["short", 0] is FinishReason.LENGTH
    assert ("gone", 0) not in world.finishes


@pytest.mark.parametrize("overlap", [False, True])
def test_a_failed_step_ends_its_requests_and_later_ones_run(overlap: bool) -> None:
    world = make_world(overlap=overlap, faults=(3,))
    world.engine.add(make_request("lost", (5, 6, 7)))
    world.run()
    assert len(world.failures) == 1
    assert "told to fail" in world.failures[0]
    assert world.finishes["lost", 0] is FinishReason.ERROR
    world.engine.add(make_request("fine", (5, 6, 7)))
    world.run()
    assert world.tokens["fine", 0] == expect(STORY, (5, 6, 7), 20)


def test_overlap_hides_nothing_and_keeps_one_step_in_flight() -> None:
    world = make_world(overlap=True)
    world.engine.add(make_request("a", (5, 6, 7), max_tokens=4))
    world.step()
    assert world.tokens == {}  # the pipe fills
    world.step()
    assert len(world.tokens["a", 0]) == 1
    world.run()
    assert world.tokens["a", 0] == expect(STORY, (5, 6, 7), 4)


def test_virtual_time_is_the_cost_models() -> None:
    world = make_world(overlap=False)
    world.engine.add(make_request("a", tuple(range(2, 18)), max_tokens=5))
    world.run()
    assert world.clock.now() == pytest.approx(5 * 0.01 + 16 / 1000)


def test_one_choice_can_be_ended_alone() -> None:
    world = make_world(overlap=False)
    request = make_request("n", (5, 6, 7), max_tokens=20, n=2, best_of=2)
    world.engine.add(request)
    for _ in range(5):
        world.step()
    assert world.engine.stop_sequence("n", 0)
    world.run()
    assert len(world.tokens["n", 0]) < len(world.tokens["n", 1]) == 20


def test_epochs_differ() -> None:
    assert len({make_epoch() for _ in range(100)}) == 100
    assert all(len(make_epoch()) == 16 for _ in range(3))
