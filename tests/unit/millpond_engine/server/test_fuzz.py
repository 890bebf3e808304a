"""Bodies nobody meant: a typed answer every time, and the block pool is whole afterwards."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.engine_server import Running, Setup, run_engine

from millpond_engine.server.schema import ChatBody, CompletionBody

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-3, 20),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=12),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
PROMPTS = st.one_of(
    st.text(max_size=40),
    st.lists(st.integers(-1, 300), max_size=6),
    st.lists(st.text(max_size=5), max_size=3),
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "system", "assistant", "tool", "x"]),
            "content": st.text(max_size=20) | VALUES,
        }
    ),
    max_size=3,
)
COMPLETIONS = st.builds(
    lambda known, extra: {**extra, **known},
    st.fixed_dictionaries({"prompt": PROMPTS, "max_tokens": st.integers(-1, 12) | st.none()}),
    st.dictionaries(st.sampled_from(CompletionBody.__struct_fields__), VALUES, max_size=3),
)
CHATS = st.builds(
    lambda known, extra: {**extra, **known},
    st.fixed_dictionaries({"messages": MESSAGES, "max_tokens": st.integers(-1, 12) | st.none()}),
    st.dictionaries(st.sampled_from(ChatBody.__struct_fields__), VALUES, max_size=3),
)


class Fuzzed:
    """One engine in a loop of its own for all examples of a test."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._block = run_engine(Setup(max_model_tokens=256, num_blocks=24))
        self.engine: Running = self.loop.run_until_complete(self._block.__aenter__())

    def send(self, path: str, data: bytes) -> tuple[int, str, bytes]:
        return self.loop.run_until_complete(self._send(path, data))

    async def _send(self, path: str, data: bytes) -> tuple[int, str, bytes]:
        timeout = aiohttp.ClientTimeout(total=20)
        async with self.engine.session.post(
            self.engine.url + path, data=data, headers={"Content-Type": "application/json"}, timeout=timeout
        ) as response:
            return response.status, response.content_type, await response.read()

    def close(self) -> None:
        self.loop.run_until_complete(self.engine.settle())
        self.loop.run_until_complete(self._block.__aexit__(None, None, None))
        self.loop.close()


def check(status: int, kind: str, body: bytes) -> None:
    assert status in {200, 400, 404, 413}, (status, body)
    if status == 200:
        assert kind in {"application/json", "text/event-stream"}
        assert b"event: error" not in body, body
        return
    error = json.loads(body)["error"]
    assert isinstance(error["message"], str)
    assert error["code"] in {
        "invalid_value",
        "unsupported_field",
        "context_length_exceeded",
        "kv_capacity_exceeded",
        "model_not_found",
    }


def fuzz(path: str, strategy: st.SearchStrategy[Any], examples: int) -> None:
    fuzzed = Fuzzed()

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def run(body: Any) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        check(*fuzzed.send(path, data))

    try:
        run()
    finally:
        fuzzed.close()


def test_completions_bodies() -> None:
    fuzz("/v1/completions", COMPLETIONS, 250)


def test_chat_bodies() -> None:
    fuzz("/v1/chat/completions", CHATS, 250)


def test_arbitrary_json_and_bytes() -> None:
    fuzz("/v1/completions", st.one_of(VALUES, st.binary(max_size=60)), 100)
    fuzz("/v1/chat/completions", st.one_of(VALUES, st.binary(max_size=60)), 100)
