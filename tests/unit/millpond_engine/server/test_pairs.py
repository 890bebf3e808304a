"""Every pair of fields in one body: answered or refused, never a failure of ours, and the pool is whole after it."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from tests.support.engine_server import Running, Setup, run_engine

COMPLETIONS: dict[str, list[Any]] = {
    "prompt": ["a", [65], ["ab", "c"], [[65, 66], [67]], "ab" * 100],
    "echo": [True],
    "max_tokens": [0, 1, 5],
    "logprobs": [0, 2],
    "prompt_logprobs": [0, 1],
    "n": [2],
    "best_of": [3],
    "use_beam_search": [True],
    "length_penalty": [0, -1],
    "stream": [True],
    "stream_options": [{"include_usage": True}],
    "stop": [["o"], "e"],
    "include_stop_str_in_output": [True],
    "min_tokens": [3],
    "ignore_eos": [True],
    "stop_token_ids": [[101]],
    "allowed_token_ids": [[256], [101, 102]],
    "bad_words": [["e"]],
    "logit_bias": [{"256": 100}],
    "return_token_ids": [True],
    "return_tokens_as_token_ids": [True],
    "truncate_prompt_tokens": [1, -1],
    "temperature": [0],
    "seed": [5],
    "cache_salt": ["x"],
    "skip_special_tokens": [False],
    "response_format": [
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [1, "two"]}}},
    ],
    "structured_outputs": [{"regex": "a+b?"}, {"json": {"type": "integer"}, "disable_any_whitespace": True}],
}
CHAT: dict[str, list[Any]] = {
    name: values for name, values in COMPLETIONS.items() if name not in ("prompt", "echo", "logprobs")
} | {
    "logprobs": [True],
    "top_logprobs": [2],
    "max_completion_tokens": [1],
    "tools": [[{"type": "function", "function": {"name": "f"}}]],
    "tool_choice": ["required", "none", {"type": "function", "function": {"name": "f"}}],
    "parallel_tool_calls": [False],
    "continue_final_message": [True],
    "add_generation_prompt": [False],
    "messages": [[{"role": "assistant", "content": "a"}], [{"role": "tool", "content": None}]],
}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call> more'


def list_pairs(fields: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """Every choice of values for every two fields."""
    return [
        {first: a, second: b}
        for first, second in itertools.combinations(fields, 2)
        for a in fields[first]
        for b in fields[second]
    ]


async def ask(engine: Running, path: str, body: dict[str, Any]) -> str:
    """What was wrong with the answer, or nothing."""
    async with engine.session.post(engine.url + path, json=body) as response:
        data = await response.read()
    whole = response.status == 400 or not body.get("stream") or data.endswith(b"data: [DONE]\n\n")
    return "" if response.status in (200, 400) and whole else f"{body}: {response.status} {data[-200:]!r}"


async def ask_all(path: str, text: str, bodies: list[dict[str, Any]]) -> list[str]:
    async with run_engine(Setup(text=text, check_kv=False)) as engine:
        found: list[str] = []
        for first in range(0, len(bodies), 32):
            found += await asyncio.gather(*[ask(engine, path, body) for body in bodies[first : first + 32]])
        await engine.settle()
    return [wrong for wrong in found if wrong]


async def test_every_pair_of_fields_of_completions() -> None:
    bodies = [{"prompt": "hi", "max_tokens": 4} | pair for pair in list_pairs(COMPLETIONS)]
    # three that once were a 500 together
    bodies.append({"prompt": "hi", "max_tokens": 0, "echo": True, "prompt_logprobs": 1})
    assert await ask_all("/v1/completions", "hello there", bodies) == []


async def test_every_pair_of_fields_of_chat() -> None:
    user = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    bodies = [user | pair for pair in list_pairs(CHAT)]
    assert await ask_all("/v1/chat/completions", CALL, bodies) == []


async def test_an_echoed_prompt_without_output_has_its_log_probabilities() -> None:
    async with run_engine(Setup()) as engine:
        answer = await engine.complete(prompt="abc", echo=True, max_tokens=0, prompt_logprobs=1)
    [choice] = answer["choices"]
    assert choice["text"] == "abc"
    assert [row is None for row in choice["prompt_logprobs"]] == [True, False, False]
