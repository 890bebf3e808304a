"""The HTTP surface while steps overlap, as on a GPU: same text, same pool."""

from __future__ import annotations

import asyncio

from tests.support.engine_server import Setup, run_engine

from millpond_common.contract.engine_config import SchedulingConfig
from millpond_engine.fake.cost import CostModel, make_faults

SCHEDULING = SchedulingConfig(max_batch_tokens=64, max_sequences=8)


async def test_answers_equal_those_without_overlap() -> None:
    bodies = [
        {
            "prompt": f"{i} says " * (1 + i * 5),
            "max_tokens": 5 + 3 * i,
            "temperature": 0.8,
            "seed": i,
            "n": 1 + i % 3,
        }
        for i in range(8)
    ]
    answers = []
    for overlap in (False, True):
        async with run_engine(Setup(overlap=overlap, scheduling=SCHEDULING)) as engine:
            got = await asyncio.gather(*[engine.complete(**body) for body in bodies])
            answers.append([[choice["text"] for choice in answer["choices"]] for answer in got])
            await engine.settle()
    assert answers[0] == answers[1]


async def test_clients_that_leave_and_steps_that_fail() -> None:
    setup = Setup(
        overlap=True,
        scheduling=SCHEDULING,
        cost=CostModel(decode_step_seconds=0.002),
        faults=make_faults(failing=[30]),
        output_tokens=500,
    )
    async with run_engine(setup) as engine:

        async def leave(number: int) -> None:
            body = {"prompt": f"{number}" * 50, "max_tokens": 300, "stream": True}
            async with engine.session.post(engine.url + "/v1/completions", json=body) as response:
                if response.status == 200:
                    await response.content.readany()
                    await asyncio.sleep(0.01 * number)
                response.close()

        await asyncio.gather(*[leave(number) for number in range(12)])
        await engine.settle()
        assert (await engine.complete(prompt="still here", max_tokens=9))["usage"]["completion_tokens"] == 9


async def test_eng_045_stops_end_at_once_and_alone() -> None:
    text = "The quick brown fox jumps"
    async with run_engine(Setup(overlap=True, text=text)) as engine:
        stream = await engine.stream(
            "/v1/completions", {"prompt": "x", "max_tokens": 40, "stop": ["own fox"], "n": 2}
        )
        assert [stream.text(0), stream.text(1)] == ["The quick br"] * 2
        await engine.settle()
