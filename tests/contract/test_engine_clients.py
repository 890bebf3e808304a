"""The parsing rules of clients that are not the openai SDK, each in the few lines that decide for it.

Rules: vllm bench serve, sglang bench_serving, genai-perf, guidellm, aiperf and inference-perf, as the HTTP
reference lists them with their traps.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.support.engine_server import Running, Setup, Stream, run_engine

from millpond_engine.fake.cost import make_faults

USER = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def engine() -> AsyncIterator[Running]:
    async with run_engine(Setup()) as running:
        yield running
        await running.settle()


def payloads(stream: Stream) -> list[str]:
    return [message.removeprefix("data: ") for message in stream.messages]


async def test_vllm_bench_counts_tokens_only_from_the_chunk_without_choices(engine: Running) -> None:
    _, models = await engine.get("/v1/models")
    card = json.loads(models)["data"][0]
    assert card["id"]
    assert card["root"]
    body = {
        "model": card["id"],
        "prompt": "hello",
        "temperature": 0.0,
        "repetition_penalty": 1.0,
        "max_tokens": 7,
        "logprobs": None,
        "stream_options": {"include_usage": True},
    }
    stream = await engine.stream("/v1/completions", body)
    tokens, text, first = 0, "", None
    for payload in payloads(stream):
        if payload == "[DONE]":
            continue
        data = json.loads(payload)
        if choices := data.get("choices"):
            first = first if first is not None else choices[0]["text"]
            text += choices[0]["text"] or ""
        elif usage := data.get("usage"):
            tokens = usage["completion_tokens"]
    assert (tokens, len(text)) == (7, 7)
    assert first


async def test_vllm_bench_chat_finds_its_first_token(engine: Running) -> None:
    body = {"messages": USER, "max_completion_tokens": 5, "stream_options": {"include_usage": True}}
    stream = await engine.stream("/v1/chat/completions", body)
    deltas = [c["delta"] for chunk in stream.chunks for c in chunk["choices"]]
    first = next(d for d in deltas if d.get("content") or ("content" in d and "role" not in d))
    assert first["content"]


async def test_sglang_bench_parses_every_line_and_indexes_choices(engine: Running) -> None:
    body = {"prompt": "hello", "temperature": 0.0, "best_of": 1, "max_tokens": 6, "ignore_eos": True}
    stream = await engine.stream("/v1/completions", body)
    text = ""
    for line in stream.raw.decode().split("\n"):
        if not line:
            continue
        chunk = line.removeprefix("data: ")
        if chunk == "[DONE]":
            break
        text += json.loads(chunk)["choices"][0]["text"]
    assert len(text) == 6
    async with engine.session.post(engine.admin + "/flush_cache") as response:
        assert response.status == 200


async def test_genai_perf_ends_at_done_and_never_sees_a_chunk_without_choices(engine: Running) -> None:
    stream = await engine.stream("/v1/chat/completions", {"messages": USER, "max_tokens": 4, "stream": True})
    assert "data: [DONE]" in stream.raw.decode()
    assert all(chunk["choices"][0] is not None for chunk in stream.chunks)


async def test_guidellm_needs_health_text_and_no_unicode_line_ends() -> None:
    async with run_engine(Setup(text="a\u2028b\u0085c\u2029d")) as engine:
        assert (await engine.get("/health"))[0] == 200
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = {"messages": USER, "stop": None, "ignore_eos": False, "stream_options": options}
        stream = await engine.stream("/v1/chat/completions", body)
        text = ""
        for line in stream.raw.decode().splitlines():  # httpx splits lines as str.splitlines does
            if line.startswith("data: ") and line != "data: [DONE]":
                data: dict[str, Any] = json.loads(line.removeprefix("data: "))
                text += "".join(c["delta"].get("content") or "" for c in data["choices"])
        assert text == "a\u2028b\u0085c\u2029d"


async def test_aiperf_checks_type_object_and_the_error_event() -> None:
    async with run_engine(Setup(faults=make_faults(failing=[5]))) as engine:
        stream = await engine.stream("/v1/chat/completions", {"messages": USER})
        assert stream.headers["Content-Type"].startswith("text/event-stream")
        assert {chunk["object"] for chunk in stream.chunks} == {"chat.completion.chunk"}
        assert "event: error" in stream.raw.decode().split("\n")


async def test_inference_perf_joins_content_and_merges_usage(engine: Running) -> None:
    answer = await engine.chat(max_tokens=5, ignore_eos=True)
    assert "".join(choice["message"]["content"] for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 5


async def test_langchain_recognises_overflow_and_reads_cache(engine: Running) -> None:
    status, answer = await engine.post("/v1/completions", {"prompt": "x" * 5000})
    assert status == 400
    assert "context_length_exceeded" in json.dumps(answer)
    good = await engine.chat()
    assert good.get("error") is None
    assert isinstance(good["usage"]["prompt_tokens_details"]["cached_tokens"], int)
