"""Drain, pause, sleep, aborts and caches: the operator's port."""

from __future__ import annotations

import asyncio
import json
import threading

from tests.support.engine_server import Running, Setup, run_engine

from millpond_engine.fake.cost import CostModel, make_faults

SLOW = CostModel(decode_step_seconds=0.01)


async def start_streams(engine: Running, number: int, max_tokens: int) -> list[asyncio.Task]:
    body = {"prompt": "x", "max_tokens": max_tokens}
    tasks = [asyncio.create_task(engine.stream("/v1/completions", body)) for _ in range(number)]
    await engine.wait_for(lambda: engine.context.thread.snapshot.counts.num_running == number)
    return tasks


async def test_eng_069_a_drain_refuses_new_requests_and_lets_running_ones_finish() -> None:
    async with run_engine(Setup(cost=SLOW)) as engine:
        tasks = await start_streams(engine, 5, 40)
        assert (await engine.call_admin("POST", "/drain"))[0] == 200
        assert (await engine.get("/ready"))[0] == 503
        assert (await engine.get("/health"))[0] == 200
        async with engine.session.post(engine.url + "/v1/completions", json={"prompt": "x"}) as refused:
            assert refused.status == 503
            assert int(refused.headers["retry-after"]) >= 1
            assert (await refused.json())["error"]["code"] == "draining"
        assert (await engine.state())["phase"] == "Draining"
        streams = await asyncio.gather(*tasks)
        assert all(stream.done and stream.finish() == "length" for stream in streams)
        assert await asyncio.wait_for(engine.server.wait(), 5) == 0
        await engine.settle()


async def test_eng_062_070_at_the_drain_deadline_streams_end_with_an_error_event() -> None:
    async with run_engine(Setup(cost=SLOW, drain_seconds=0, output_tokens=1000)) as engine:
        tasks = await start_streams(engine, 3, 900)
        await engine.call_admin("POST", "/drain")
        assert await asyncio.wait_for(engine.server.wait(), 5) == 0
        for stream in await asyncio.gather(*tasks):
            assert not stream.done
            assert stream.finish() is None
            assert stream.messages[-1].startswith("event: error\n")
            assert b"abort" not in stream.raw
        await engine.settle()


async def test_eng_070_a_stuck_step_does_not_keep_the_error_events_back() -> None:
    setup = Setup(drain_seconds=0, faults=make_faults(stalling=[6], stall_seconds=4))
    async with run_engine(setup) as engine:
        body = {"prompt": "x", "max_tokens": 50}
        task = asyncio.create_task(engine.stream("/v1/completions", body))
        await asyncio.sleep(0.5)  # the fake model has reached the long step
        await engine.call_admin("POST", "/drain")
        stream = await asyncio.wait_for(task, 2)
        assert stream.messages[-1].startswith("event: error\n")
        assert await asyncio.wait_for(engine.server.wait(), 2) == 0


async def test_while_loading_health_is_good_and_requests_are_told_to_wait() -> None:
    gate = threading.Event()
    async with run_engine(Setup(before_load=lambda: assert_true(gate.wait(20))), wait_ready=False) as engine:
        assert (await engine.get("/health"))[0] == 200
        assert (await engine.get("/ready")) == (503, "Loading")
        status, answer = await engine.post("/v1/completions", {"prompt": "x"})
        assert (status, answer["error"]["code"]) == (503, "overloaded")
        assert (await engine.get("/metrics"))[0] == 200
        assert (await engine.state())["phase"] == "Loading"
        gate.set()
        await engine.wait_for(lambda: engine.context.lifecycle.ready)
        assert (await engine.get("/ready"))[0] == 200
        assert (await engine.state())["loadSeconds"] > 0


def assert_true(value: bool) -> None:
    assert value


async def test_a_failed_load_ends_with_code_1() -> None:
    def fail() -> None:
        raise ValueError("no such model")

    async with run_engine(Setup(before_load=fail), wait_ready=False) as engine:
        assert await asyncio.wait_for(engine.server.wait(), 5) == 1
        assert (await engine.state())["phase"] == "Failed"
        assert (await engine.get("/health"))[0] == 503


async def test_pause_keep_freezes_and_resume_goes_on() -> None:
    async with run_engine(Setup(cost=SLOW)) as engine:
        tasks = await start_streams(engine, 2, 30)
        await engine.call_admin("POST", "/pause?mode=keep")
        steps = engine.context.thread.snapshot.num_steps
        late = asyncio.create_task(engine.stream("/v1/completions", {"prompt": "y", "max_tokens": 3}))
        await asyncio.sleep(0.1)
        assert engine.context.thread.snapshot.num_steps == steps
        assert (await engine.get("/ready"))[0] == 503
        await engine.call_admin("POST", "/resume")
        assert all(stream.done for stream in await asyncio.gather(*tasks, late))


async def test_pause_wait_finishes_what_runs_and_abort_ends_it() -> None:
    async with run_engine(Setup(cost=SLOW, output_tokens=500)) as engine:
        tasks = await start_streams(engine, 2, 10)
        await engine.call_admin("POST", "/pause?mode=wait")
        assert all(stream.done for stream in await asyncio.gather(*tasks))
        await engine.call_admin("POST", "/continue_generation")
        tasks = await start_streams(engine, 2, 400)
        await engine.call_admin("POST", "/pause?mode=abort")
        assert not any(stream.done for stream in await asyncio.gather(*tasks))
        await engine.call_admin("POST", "/resume")
        await engine.complete(prompt="again")
        assert (await engine.call_admin("POST", "/pause?mode=nap"))[0] == 400


async def test_sleep_gives_everything_back_and_waking_serves_again() -> None:
    async with run_engine(Setup()) as engine:
        await engine.complete(prompt="x" * 64)
        assert (await engine.call_admin("POST", "/sleep?level=1"))[1] == {"status": "asleep"}
        assert (await engine.call_admin("GET", "/is_sleeping"))[1] == {"is_sleeping": True}
        status, answer = await engine.post("/v1/completions", {"prompt": "x"})
        assert (status, answer["error"]["code"]) == (503, "asleep")
        assert (await engine.get("/ready"))[0] == 503
        assert (await engine.get("/health"))[0] == 200
        assert (await engine.call_admin("POST", "/flush_cache"))[0] == 503
        await engine.call_admin("POST", "/wake_up")
        answer = await engine.complete(prompt="x" * 64)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_requests_can_be_aborted_by_the_id_of_their_response() -> None:
    async with run_engine(Setup(cost=SLOW, output_tokens=1000)) as engine:
        async with engine.session.post(
            engine.url + "/v1/completions", json={"prompt": "x", "max_tokens": 900, "stream": True}
        ) as response:
            line = await response.content.readuntil(b"\n")
            request_id = json.loads(line.removeprefix(b"data: "))["id"]
            _, answer = await engine.call_admin("POST", "/abort_requests", {"request_ids": [request_id]})
            assert answer["num_aborted"] == 1
            rest = await response.content.read()
            assert b"event: error" in rest
            assert b"[DONE]" not in rest
        assert (await engine.call_admin("POST", "/abort_requests", {"request_ids": ["nobody"]}))[1][
            "num_aborted"
        ] == 0
        assert (await engine.call_admin("POST", "/abort_request", {}))[0] == 400
        await engine.settle()


async def test_the_prefix_cache_can_be_dropped() -> None:
    async with run_engine(Setup()) as engine:
        for method, path in (
            ("POST", "/reset_prefix_cache"),
            ("POST", "/flush_cache"),
            ("GET", "/flush_cache"),
        ):
            await engine.complete(prompt="x" * 64)
            await engine.settle()
            assert (await engine.state())["device"]["cached"] > 0
            assert (await engine.call_admin(method, path))[1] == {"success": True}
            assert (await engine.state())["device"]["cached"] == 0


async def test_information_for_operators_and_bench_clients() -> None:
    async with run_engine(Setup()) as engine:
        status, info = await engine.call_admin("GET", "/server_info")
        assert (status, info["state"]["phase"], info["config"]["modelName"]) == (200, "Ready", "fake")
        assert (await engine.call_admin("GET", "/model_info"))[1]["is_generation"] is True
        for path in ("/start_profile", "/stop_profile"):
            assert (await engine.call_admin("POST", path))[0] == 200
        assert json.loads((await engine.get("/load"))[1]) == {"server_load": 0}
        assert (await engine.get("/ping"))[0] == 200
        assert "version" in json.loads((await engine.get("/version"))[1])
        assert (await engine.get("/health_generate"))[0] == 200
        _, models = await engine.get("/v1/models")
        card = json.loads(models)["data"][0]
        assert (card["id"], card["root"], card["max_model_len"]) == ("fake", "fake", 1024)
        assert json.loads((await engine.get("/v1/models/fake"))[1]) == card
        assert (await engine.get("/v1/models/other"))[0] == 404
        await engine.settle()


async def test_tokenize_and_detokenize() -> None:
    async with run_engine(Setup()) as engine:
        _, answer = await engine.post("/tokenize", {"prompt": "hé", "return_token_strs": True})
        assert (answer["count"], answer["max_model_len"]) == (3, 1024)
        assert answer["token_strs"][0] == "h"
        _, back = await engine.post("/detokenize", {"tokens": answer["tokens"]})
        assert back == {"prompt": "hé"}
        assert (await engine.post("/detokenize", {"tokens": [999]}))[0] == 400
        assert (await engine.post("/tokenize", {}))[0] == 400
