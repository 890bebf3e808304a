"""Structured output of the real model at temperature 1: always valid, and nobody beside it notices."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pydantic
import pytest
import pytest_asyncio
from tests.support.engine_server import Running, Setup, run_engine

from millpond_common.contract.engine_config import EngineConfig, KvCacheConfig, SchedulingConfig
from millpond_engine.commands.serve import _make_torch_runner
from millpond_engine.text.load import load_tokenizer

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]

TEXT = {"type": "string", "maxLength": 12}
SCHEMAS: dict[str, dict[str, Any]] = {
    "person": {
        "type": "object",
        "properties": {"name": TEXT, "age": {"type": "integer", "minimum": 0, "maximum": 130}, "member": {"type": "boolean"}},
        "required": ["name", "age", "member"],
        "additionalProperties": False,
    },
    "optional and nested": {
        "type": "object",
        "properties": {
            "place": {
                "type": "object",
                "properties": {"lat": {"type": "number", "minimum": -90, "maximum": 90}, "name": {"anyOf": [TEXT, {"type": "null"}]}},
                "required": ["name"],
                "additionalProperties": False,
            },
            "note": TEXT,
        },
        "required": ["place"],
        "additionalProperties": False,
    },
    "list": {"type": "array", "items": {"enum": ["red", "green", 3, None]}, "minItems": 2, "maxItems": 4},
    "references": {
        "$defs": {"item": {"type": "object", "properties": {"id": {"type": "string", "pattern": "^[a-f0-9]{4}$"}}, "required": ["id"], "additionalProperties": False}},
        "type": "object",
        "properties": {"first": {"$ref": "#/$defs/item"}, "day": {"type": "string", "format": "date"}},
        "required": ["first", "day"],
        "additionalProperties": False,
    },
    "choice of shapes": {
        "anyOf": [
            {"type": "object", "properties": {"kind": {"const": "circle"}, "radius": {"type": "integer", "minimum": 1, "maximum": 99}}, "required": ["kind", "radius"], "additionalProperties": False},
            {"type": "object", "properties": {"kind": {"const": "square"}, "side": {"type": "number", "exclusiveMinimum": 0, "maximum": 9}}, "required": ["kind", "side"], "additionalProperties": False},
        ]
    },
}  # fmt: skip
QUESTION = "Describe something small as JSON."


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def real(smollm2_gguf: Path) -> AsyncIterator[Running]:
    config = EngineConfig(
        model_name="smollm2",
        model_path=str(smollm2_gguf),
        device="Cpu",
        dtype="Float32",
        max_model_tokens=512,
        kv_cache=KvCacheConfig(device_bytes=200_000_000),
        scheduling=SchedulingConfig(max_sequences=24),
    )
    setup = Setup(config=config, make_runner=_make_torch_runner, tokenizer=load_tokenizer(str(smollm2_gguf)))
    async with run_engine(setup) as running:
        yield running
        await running.settle()


def make_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}


@pytest.mark.parametrize(
    "name", ["person", *(pytest.param(name, marks=pytest.mark.slow) for name in list(SCHEMAS)[1:])]
)
async def test_every_seed_gives_what_validates(real: Running, name: str) -> None:
    body = {"temperature": 1, "max_tokens": 250, "response_format": make_format(SCHEMAS[name])}
    answers = await asyncio.gather(*[real.chat(QUESTION, seed=seed, n=2, **body) for seed in range(4)])
    choices = [choice for answer in answers for choice in answer["choices"]]
    for choice in choices:
        assert choice["finish_reason"] == "stop", choice
        jsonschema.validate(
            json.loads(choice["message"]["content"]), SCHEMAS[name], format_checker=jsonschema.FormatChecker()
        )
    assert len({choice["message"]["content"] for choice in choices}) > 1  # it is drawn, not spelled out


async def test_a_mixed_batch_leaves_the_others_as_they_are_alone(real: Running) -> None:
    free = [
        {"prompt": f"{i}. The old mill by the river", "max_tokens": 24, "temperature": i % 2, "seed": i, "logprobs": 1, "n": 1 + i % 2}
        for i in range(6)
    ]  # fmt: skip
    bound: list[dict[str, Any]] = [
        {"prompt": "A date: ", "structured_outputs": {"regex": "[0-9]{4}-[01][0-9]-[0-3][0-9]"}},
        {"prompt": "A color: ", "structured_outputs": {"choice": ["red", "green", "blue"]}},
        {"prompt": "SQL: ", "structured_outputs": {"grammar": 'root ::= "SELECT " [a-z]{1,8} " FROM " [a-z]{1,8}'}},
        {"prompt": "JSON: ", "response_format": make_format(SCHEMAS["list"]), "frequency_penalty": 1, "repetition_penalty": 1.2},
        {"prompt": "JSON: ", "response_format": make_format(SCHEMAS["person"]), "top_p": 0.8, "min_p": 0.02, "top_k": 30},
        {"prompt": "More: ", "response_format": make_format(SCHEMAS["list"]), "logit_bias": {"30": 5.0}, "logprobs": 2},
    ]  # fmt: skip
    alone = [await real.complete(**body) for body in free]
    tasks = [real.complete(**({"temperature": 1, "seed": 9, "max_tokens": 200} | body)) for body in bound]
    together = await asyncio.gather(*[real.complete(**body) for body in free], *tasks)
    for one, other in zip(alone, together, strict=False):
        for ours, theirs in zip(one["choices"], other["choices"], strict=True):
            assert ours["text"] == theirs["text"]
            assert ours["logprobs"]["tokens"] == theirs["logprobs"]["tokens"]
    date, color, sql, listed, person, more = [answer["choices"][0]["text"] for answer in together[6:]]
    assert re.fullmatch(r"[0-9]{4}-[01][0-9]-[0-3][0-9]", date)
    assert color in ("red", "green", "blue")
    assert re.fullmatch(r"SELECT [a-z]{1,8} FROM [a-z]{1,8}", sql)
    for text, name in ((listed, "list"), (person, "person"), (more, "list")):
        jsonschema.validate(json.loads(text), SCHEMAS[name])


async def test_a_constrained_answer_does_not_depend_on_cache_batch_or_stream(real: Running) -> None:
    body = {
        "messages": [{"role": "user", "content": f"{QUESTION} {'Think well. ' * 12}"}],
        "temperature": 1,
        "seed": 4,
    }
    body |= {"response_format": make_format(SCHEMAS["person"]), "max_tokens": 200}
    status, first = await real.post("/v1/chat/completions", body)
    assert status == 200
    _, again = await real.post("/v1/chat/completions", body)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    *_, stream = await asyncio.gather(
        *[real.chat(f"{i} things", max_tokens=20) for i in range(5)],
        real.stream("/v1/chat/completions", body),
    )
    text = first["choices"][0]["message"]["content"]
    assert again["choices"][0]["message"]["content"] == text
    assert stream.text() == text
    assert stream.finish() == "stop"


async def test_the_sdk_parses_what_the_model_says(real: Running) -> None:
    class Animal(pydantic.BaseModel):
        name: str = pydantic.Field(max_length=20)
        legs: int = pydantic.Field(ge=0, le=8)

    async with openai.AsyncOpenAI(
        base_url=f"{real.url}/v1", api_key="x", max_retries=0, timeout=120
    ) as client:
        answer = await client.chat.completions.parse(
            model="smollm2",
            messages=[{"role": "user", "content": "Name an animal."}],
            response_format=Animal,
            seed=1,
        )
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, Animal)
    assert 0 <= parsed.legs <= 8
