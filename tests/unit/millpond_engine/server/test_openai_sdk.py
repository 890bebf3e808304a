"""The openai SDK against the engine, unchanged: what its users see."""

from __future__ import annotations

from collections.abc import AsyncIterator

import openai
import pytest
from tests.support.engine_server import Running, Setup, run_engine

from millpond_engine.fake.cost import make_faults

CALL_TEXT = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Brno"}}\n</tool_call>'
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}},
}
USER = [{"role": "user", "content": "hello"}]


def make_client(engine: Running) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="unused", max_retries=0)


@pytest.fixture
async def client(engine: Running) -> AsyncIterator[openai.AsyncOpenAI]:
    async with make_client(engine) as made:
        yield made


async def test_chat(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="fake", messages=USER, max_tokens=8, temperature=0)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


async def test_chat_stream_equals_the_whole(client: openai.AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(model="fake", messages=USER, max_tokens=30, temperature=0)
    stream = await client.chat.completions.create(
        model="fake",
        messages=USER,
        max_tokens=30,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    pieces, usage = [], None
    async for chunk in stream:
        usage = chunk.usage or usage
        pieces += [choice.delta.content or "" for choice in chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert usage is not None
    assert usage.completion_tokens == 30


async def test_the_stream_helper_accumulates(client: openai.AsyncOpenAI) -> None:
    async with client.chat.completions.stream(model="fake", messages=USER, n=2) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    assert len(final.choices) == 2
    assert all(choice.message.content for choice in final.choices)


async def test_completions_with_logprobs(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="fake", prompt="abc", max_tokens=5, logprobs=3, echo=True)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.top_logprobs is not None
    assert len(logprobs.tokens) == len(logprobs.top_logprobs) == 8


async def test_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["fake"]
    assert (await client.models.retrieve("fake")).owned_by == "millpond"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other")


async def test_errors_become_the_sdks_exceptions(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model="fake", messages=USER, n=0)
    assert bad.value.param == "n"
    with pytest.raises(openai.BadRequestError) as long:
        await client.completions.create(model="fake", prompt="x" * 5000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(model="gpt-9", messages=USER)


async def test_a_streamed_tool_call() -> None:
    async with run_engine(Setup(text=CALL_TEXT)) as engine, make_client(engine) as client:
        async with client.chat.completions.stream(model="fake", messages=USER, tools=[TOOL]) as stream:  # type: ignore[list-item]
            async for _ in stream:
                pass
            choice = (await stream.get_final_completion()).choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.tool_calls is not None
        assert choice.message.tool_calls[0].function.arguments == '{"city": "Brno"}'


async def test_a_broken_stream_raises() -> None:
    async with run_engine(Setup(faults=make_faults(failing=[6]))) as engine, make_client(engine) as client:
        stream = await client.chat.completions.create(model="fake", messages=USER, stream=True)
        with pytest.raises(openai.APIError, match="told to fail"):
            async for _ in stream:
                pass


async def test_a_drain_is_retried_by_the_sdk_elsewhere() -> None:
    async with run_engine(Setup()) as engine, make_client(engine) as client:
        engine.context.lifecycle.start_drain()
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(model="fake", messages=USER)
        assert caught.value.status_code == 503
        assert int(caught.value.response.headers["retry-after"]) <= 120
