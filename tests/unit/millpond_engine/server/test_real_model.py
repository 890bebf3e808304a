"""The whole engine over HTTP with SmolLM2-135M: text, caches, log-probabilities as a user sees them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
import pytest_asyncio
from tests.support.engine_server import Running, Setup, run_engine

from millpond_common.contract.engine_config import EngineConfig, KvCacheConfig
from millpond_engine.commands.serve import _make_torch_runner
from millpond_engine.text.load import load_tokenizer

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]
QUESTION = "What is the capital of France?"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def real(smollm2_gguf: Path) -> AsyncIterator[Running]:
    config = EngineConfig(
        model_name="smollm2",
        model_path=str(smollm2_gguf),
        device="Cpu",
        dtype="Float32",
        max_model_tokens=1024,
        kv_cache=KvCacheConfig(device_bytes=100_000_000),
    )
    setup = Setup(config=config, make_runner=_make_torch_runner, tokenizer=load_tokenizer(str(smollm2_gguf)))
    async with run_engine(setup) as running:
        yield running
        await running.settle()


async def test_the_model_answers_through_the_sdk(real: Running) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{real.url}/v1", api_key="x", max_retries=0, timeout=120
    ) as client:
        answer = await client.chat.completions.create(
            model="smollm2", messages=[{"role": "user", "content": QUESTION}], temperature=0
        )
        assert answer.choices[0].message.content == "The capital of France is Paris."
        assert answer.choices[0].finish_reason == "stop"
        stream = await client.chat.completions.create(
            model="smollm2", messages=[{"role": "user", "content": QUESTION}], temperature=0, stream=True
        )
        pieces = [choice.delta.content or "" async for chunk in stream for choice in chunk.choices]
        assert "".join(pieces) == "The capital of France is Paris."


async def test_eng_025_a_prompt_twice_gives_the_same_text_from_the_cache(real: Running) -> None:
    body = {"prompt": "A poem about a heron and a mill, in four long lines:\n", "max_tokens": 24}
    first = await real.complete(**body)
    second = await real.complete(**body)
    assert first["choices"][0]["text"] == second["choices"][0]["text"]
    usage = second["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] // 16 * 16 - (
        1 if usage["prompt_tokens"] % 16 == 0 else 0
    )


async def test_eng_047_emoji_and_cjk_stream_whole(real: Running) -> None:
    body = {"prompt": "Emoji of animals: 🐎 🐖 🐓 Japanese: 日本", "max_tokens": 24, "temperature": 0}
    whole = await real.complete(**body)
    stream = await real.stream("/v1/completions", body)
    assert stream.text() == whole["choices"][0]["text"]


async def test_eng_050_051_053_prompt_logprobs_are_whole_cold_warm_and_together(real: Running) -> None:
    body = {
        "prompt": "The mill stands by the pond and turns when the water is high.",
        "max_tokens": 1,
        "prompt_logprobs": 1,
    }
    bodies = [body, body, body | {"echo": True, "logprobs": 1}]
    answers = [await real.complete(**each) for each in bodies]
    rows = [answer["choices"][0]["prompt_logprobs"] for answer in answers]
    assert len(rows[0]) == answers[0]["usage"]["prompt_tokens"]
    assert rows[0][0] is None
    for left, right in zip(rows[0][1:], rows[1][1:], strict=True):
        assert left.keys() == right.keys()
        assert all(math.isclose(left[key]["logprob"], right[key]["logprob"], abs_tol=1e-3) for key in left)
    echoed = answers[2]["choices"][0]["logprobs"]["token_logprobs"]
    assert echoed[0] is None
    assert len(echoed) == answers[2]["usage"]["prompt_tokens"] + 1


async def test_a_row_that_fails_alone_says_why(real: Running) -> None:
    body = {"prompt": "Once", "allowed_token_ids": [2], "min_tokens": 1, "max_tokens": 3}
    status, answer = await real.post("/v1/completions", body)
    assert status == 400
    assert "exclude them all" in answer["error"]["message"]


async def test_a_stop_string_of_a_real_answer(real: Running) -> None:
    answer = await real.chat(QUESTION, stop=["France"])
    assert answer["choices"][0]["message"]["content"] == "The capital of "
    assert answer["choices"][0]["stop_reason"] == "France"


async def test_many_clients_at_once_get_what_each_gets_alone(real: Running) -> None:
    prompts = [f"Number {i} and then number" for i in range(6)]
    alone = [(await real.complete(prompt=p, max_tokens=8))["choices"][0]["text"] for p in prompts]
    together = await asyncio.gather(*[real.complete(prompt=p, max_tokens=8) for p in prompts])
    assert [answer["choices"][0]["text"] for answer in together] == alone


async def test_leaving_in_decode_frees_everything(real: Running) -> None:
    async with real.session.post(
        real.url + "/v1/completions",
        json={"prompt": "Tell a long story.", "max_tokens": 500, "stream": True, "ignore_eos": True},
    ) as response:
        await response.content.readuntil(b"\n\n")
        response.close()
    await real.settle(seconds=10)
