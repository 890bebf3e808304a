"""The program as a process: flags, the start-up line, signals, exit codes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from millpond_common.contract.engine_config import EngineConfig, dump_engine_config
from millpond_engine.cli import main
from millpond_engine.commands.flags import HELP, list_keys

SERVE = [sys.executable, "-m", "millpond_engine", "serve", "--runner", "fake", "--host", "127.0.0.1"]
PORTS = ["--port", "0", "--admin-port", "0", "--kv-events-port", "0", "--kv-replay-port", "0"]


class Process:
    """A started engine and the log lines it has written."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[dict[str, Any]] = []
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.lines.append(json.loads(line))

    async def wait_for(self, event: str) -> dict[str, Any]:
        async with asyncio.timeout(30):
            while True:
                for line in self.lines:
                    if line["event"] == event:
                        return line
                assert self.process.returncode is None, self.lines
                await asyncio.sleep(0.01)

    async def exit(self, seconds: float) -> int:
        async with asyncio.timeout(seconds):
            code = await self.process.wait()
            await self._reader
            return code


@asynccontextmanager
async def start(*flags: str) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(*SERVE, *PORTS, *flags, stdout=asyncio.subprocess.PIPE)
    started = Process(process)
    try:
        yield started
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_eng_069_sigterm_lets_streams_finish_and_exits_0() -> None:
    async with start("--fake-decode-step-seconds", "0.01") as engine, aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{(await engine.wait_for('listening'))['port']}"
        await engine.wait_for("engine ready")

        async def stream() -> bytes:
            body = {"prompt": "x", "max_tokens": 50, "stream": True}
            async with session.post(f"{url}/v1/completions", json=body) as response:
                return await response.read()

        tasks = [asyncio.create_task(stream()) for _ in range(5)]
        while json.loads(await (await session.get(f"{url}/v1/state")).text())["numRunning"] < 5:
            await asyncio.sleep(0.01)
        engine.process.send_signal(signal.SIGTERM)
        await engine.wait_for("draining")
        async with session.get(f"{url}/ready") as ready:
            assert ready.status == 503
        async with session.post(f"{url}/v1/completions", json={"prompt": "x"}) as refused:
            assert refused.status == 503
        assert all(body.endswith(b"data: [DONE]\n\n") for body in await asyncio.gather(*tasks))
        assert await engine.exit(10) == 0


async def test_eng_070_the_drain_deadline_ends_streams_and_the_process() -> None:
    flags = ("--fake-decode-step-seconds", "0.02", "--drain-seconds", "0", "--fake-output-tokens", "5000")
    async with start(*flags) as engine, aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{(await engine.wait_for('listening'))['port']}"
        await engine.wait_for("engine ready")
        body = {"prompt": "x", "max_tokens": 4000, "stream": True}
        async with session.post(f"{url}/v1/completions", json=body) as response:
            await response.content.readuntil(b"\n\n")
            engine.process.send_signal(signal.SIGTERM)
            rest = await response.content.read()
        assert b"event: error" in rest
        assert b"[DONE]" not in rest
        assert await engine.exit(10) == 0


async def test_eng_071_sigterm_during_the_load_exits_within_5_seconds() -> None:
    async with start("--fake-load-seconds", "600") as engine:
        await engine.wait_for("loading")
        started = time.monotonic()
        engine.process.send_signal(signal.SIGTERM)
        assert await engine.exit(5) == 0
        assert time.monotonic() - started < 5


async def test_a_failed_load_exits_1_and_says_why() -> None:
    async with start("--fake-fail-load", "the weights are torn") as engine:
        assert await engine.exit(20) == 1
        assert any("the weights are torn" in json.dumps(line) for line in engine.lines)


async def test_a_defect_ends_the_process_with_1() -> None:
    async with start("--fake-crash-step", "3") as engine, aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{(await engine.wait_for('listening'))['port']}"
        await engine.wait_for("engine ready")
        async with session.post(f"{url}/v1/completions", json={"prompt": "x", "stream": True}) as response:
            assert b"event: error" in await response.read()
        assert await engine.exit(10) == 1


async def test_the_start_up_line_says_what_bounds_the_engine(tmp_path: Path) -> None:
    config = tmp_path / "engine.yaml"
    config.write_text("modelName: tiny\nmodelPath: /nowhere\nkvCache: {blockTokens: 32}\n", encoding="utf-8")
    flags = ("--config", str(config), "--fake-blocks", "100", "--max-model-tokens", "2048")
    async with start(*flags) as engine, aiohttp.ClientSession() as session:
        line = await engine.wait_for("engine loaded")
        assert (line["num_blocks"], line["kv_tokens"], line["max_model_tokens"]) == (100, 3200, 2048)
        assert {"model", "dtype", "device", "limited_by"} <= set(line)
        url = f"http://127.0.0.1:{(await engine.wait_for('listening'))['port']}"
        async with session.get(f"{url}/v1/models") as response:
            assert (await response.json())["data"][0]["id"] == "tiny"
        async with session.post(
            f"{url}/v1/completions", json={"prompt": "the secret words", "n": 0}
        ) as response:
            assert response.status == 400
        engine.process.send_signal(signal.SIGINT)
        assert await engine.exit(10) == 0
        assert "secret words" not in json.dumps(engine.lines)


def test_every_key_of_the_file_has_a_flag_and_a_line_of_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert {key.name for key in list_keys()} == set(HELP)
    leaves = _count_leaves(dump_engine_config(EngineConfig(model_name="m", model_path="p")))
    assert len(list(list_keys())) == leaves
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for key in list_keys():
        assert key.flag in text
    for flag in ("--runner", "--port", "--admin-port", "--kv-events-port", "--fake-blocks"):
        assert flag in text


def _count_leaves(data: dict[str, object]) -> int:
    return sum(_count_leaves(value) if isinstance(value, dict) else 1 for value in data.values())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("modelName: a\nmodelPath: b\nkvCache: {blockTokenz: 16}\n", "blockTokenz"),
        ("modelName: a\nmodelPath: b\nmaxModelTokens: many\n", "maxModelTokens"),
        ("modelName: a\nmodelPath: b\nmaxModelTokens: 0\n", "maxModelTokens"),
        ("- a\n", "mapping"),
        ("a: [", "cannot be read"),
    ],
)
def test_a_wrong_configuration_exits_2_and_names_the_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text(text, encoding="utf-8")
    assert main(["serve", "--runner", "fake", "--config", str(file)]) == 2
    assert message in capsys.readouterr().err


async def test_help_and_the_fake_runner_never_import_torch() -> None:
    code = (
        "import sys; from millpond_engine.cli import make_parser; make_parser();"
        "import millpond_engine.commands.serve; print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE, env={**os.environ}
    )
    out, _ = await process.communicate()
    assert out.decode().split() == ["False", "False"]
