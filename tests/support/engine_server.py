"""A whole engine inside the test's event loop: fake runner, real scheduler, real sockets on free ports."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from millpond_common.contract.engine_config import EngineConfig, KvCacheConfig, SchedulingConfig
from millpond_engine.commands.build import MakeRunner, make_context
from millpond_engine.commands.fake import list_preferred, make_fake_info, make_script
from millpond_engine.fake.cost import CostModel, Faults
from millpond_engine.fake.runner import FakeOptions, FakeRunner
from millpond_engine.fake.script import Script
from millpond_engine.loop.kv_publisher import PublisherSettings
from millpond_engine.loop.settings import LoopSettings
from millpond_engine.loop.thread import EngineThread
from millpond_engine.server.context import ServerContext
from millpond_engine.server.limits import ServerLimits
from millpond_engine.server.serve import Ports, Server
from millpond_engine.text.bytes_tokenizer import ByteTokenizer
from millpond_engine.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Setup:
    """What a test may choose about its engine."""

    max_model_tokens: int = 1024
    num_blocks: int = 256
    num_host_blocks: int = 0
    block_tokens: int = 16
    output_tokens: int = 64
    text: str | None = None
    """Every answer says this instead of the story."""
    script: Script | None = None
    cost: CostModel = field(default_factory=CostModel)
    faults: Faults = field(default_factory=Faults)
    scheduling: SchedulingConfig = field(default_factory=SchedulingConfig)
    limits: ServerLimits = field(default_factory=ServerLimits)
    loop: LoopSettings = field(default_factory=LoopSettings)
    drain_seconds: int = 10
    check_kv: bool = True
    events: bool = False
    allow_request_template: bool = False
    tokenizer: Tokenizer = field(default_factory=ByteTokenizer)
    before_load: Callable[[], None] | None = None
    make_runner: MakeRunner | None = None
    """Another runner than the fake one."""
    overlap: bool | None = None
    config: EngineConfig | None = None
    """The whole configuration, instead of the one made of the fields above."""
    default_output_tokens: int | None = None


@dataclass
class Running:
    """A started engine."""

    context: ServerContext
    server: Server
    session: aiohttp.ClientSession
    port: int
    admin_port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def admin(self) -> str:
        return f"http://127.0.0.1:{self.admin_port}"

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
        async with self.session.post(self.url + path, json=body, headers=headers) as response:
            return response.status, await response.json()

    async def complete(self, **body: Any) -> dict[str, Any]:
        status, answer = await self.post("/v1/completions", {"temperature": 0, **body})
        assert status == 200, answer
        return answer

    async def chat(self, content: str = "hello", **body: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": content}]
        status, answer = await self.post(
            "/v1/chat/completions", {"messages": messages, "temperature": 0, **body}
        )
        assert status == 200, answer
        return answer

    async def stream(self, path: str, body: Any, **headers: str) -> Stream:
        async with self.session.post(
            self.url + path, json={"stream": True, **body}, headers=headers
        ) as response:
            return Stream(response.status, response.headers.copy(), await response.read())

    async def get(self, path: str) -> tuple[int, str]:
        async with self.session.get(self.url + path) as response:
            return response.status, await response.text()

    async def call_admin(self, method: str, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
        async with self.session.request(method, self.admin + path, json=body) as response:
            return response.status, await response.json()

    async def state(self) -> dict[str, Any]:
        return json.loads((await self.get("/v1/state"))[1])

    async def settle(self, seconds: float = 5.0) -> None:
        """Wait until nothing is open and no block is used, then check every invariant of the block pool."""
        async with asyncio.timeout(seconds):
            while not await self._is_settled():
                await asyncio.sleep(0.02)
        await asyncio.wrap_future(self.context.thread.call(_check_integrity))
        assert self.context.thread.snapshot.counts.leaked_blocks == 0

    async def _is_settled(self) -> bool:
        if self.context.lifecycle.open_requests:
            return False
        await asyncio.sleep(0.05)  # a request whose bytes are still in the socket counts as open
        snapshot = self.context.thread.snapshot
        counts = snapshot.counts
        live = snapshot.num_open + counts.num_running + counts.num_waiting + counts.used_blocks
        return not live and not self.context.lifecycle.open_requests

    async def wait_for(self, condition: Callable[[], bool], seconds: float = 5.0) -> None:
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.005)


def _check_integrity(thread: EngineThread) -> None:
    thread.engine.scheduler.check_integrity()


@dataclass(frozen=True)
class Stream:
    """A whole streamed answer."""

    status: int
    headers: Mapping[str, str]
    raw: bytes

    @property
    def messages(self) -> list[str]:
        return [m for m in self.raw.decode().split("\n\n") if m]

    @property
    def chunks(self) -> list[dict[str, Any]]:
        data = [m.removeprefix("data: ") for m in self.messages if m.startswith("data: ")]
        return [json.loads(d) for d in data if d != "[DONE]"]

    @property
    def done(self) -> bool:
        return self.raw.endswith(b"data: [DONE]\n\n")

    def texts(self, index: int = 0) -> list[str]:
        choices = [c for chunk in self.chunks for c in chunk["choices"] if c["index"] == index]
        return [c.get("text") or c.get("delta", {}).get("content") or "" for c in choices]

    def text(self, index: int = 0) -> str:
        return "".join(self.texts(index))

    def finish(self, index: int = 0) -> str | None:
        for chunk in self.chunks:
            for choice in chunk["choices"]:
                if choice["index"] == index and choice["finish_reason"]:
                    return str(choice["finish_reason"])
        return None


@asynccontextmanager
async def run_engine(setup: Setup | None = None, *, wait_ready: bool = True) -> AsyncIterator[Running]:
    """Start an engine, and stop it when the block ends."""
    setup = setup or Setup()
    config = setup.config or EngineConfig(
        model_name="fake",
        model_path="fake",
        max_model_tokens=setup.max_model_tokens,
        default_output_tokens=setup.default_output_tokens,
        kv_cache=KvCacheConfig(block_tokens=setup.block_tokens),
        scheduling=setup.scheduling,
        drain_seconds=setup.drain_seconds,
    )

    def make_runner(config: EngineConfig, progress: Callable[[int, int], None]) -> FakeRunner:
        if setup.before_load is not None:
            setup.before_load()
        progress(1, 1)
        script = setup.script or make_script(
            setup.tokenizer, output_tokens=setup.output_tokens, fixed_text=setup.text
        )
        info = make_fake_info(
            config, setup.tokenizer, num_blocks=setup.num_blocks, num_host_blocks=setup.num_host_blocks
        )
        options = FakeOptions(
            cost=setup.cost,
            faults=setup.faults,
            check_kv=setup.check_kv,
            preferred_tokens=list_preferred(setup.tokenizer),
        )
        return FakeRunner(info, script, options)

    events = PublisherSettings("tcp://127.0.0.1:*", "tcp://127.0.0.1:*") if setup.events else None
    context = make_context(
        config,
        setup.tokenizer,
        setup.make_runner or make_runner,
        limits=setup.limits,
        settings=setup.loop,
        allow_request_template=setup.allow_request_template,
        model_root="fake",
        events=events,
        overlap=setup.overlap,
    )
    server = Server(context, Ports("127.0.0.1", 0, "127.0.0.1", 0))
    ports = await server.start()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        running = Running(context, server, session, ports.port, ports.admin_port)
        try:
            if wait_ready:
                await running.wait_for(lambda: context.lifecycle.ready, seconds=120)
            yield running
        finally:
            await server.stop()
            if context.events is not None:
                context.events.stop()
