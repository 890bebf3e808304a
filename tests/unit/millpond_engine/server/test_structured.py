"""Structured output over HTTP with the fake runner, which says whatever its masks leave: every form, every refusal."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import jsonschema
import openai
import pydantic
import pytest
import pytest_asyncio
from tests.support.engine_server import Running, Setup, run_engine

from millpond_common.contract import headers
from millpond_common.contract.engine_config import SchedulingConfig
from millpond_engine.fake.cost import CostModel
from millpond_engine.grammar import service

pytestmark = pytest.mark.asyncio(loop_scope="module")

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "find", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
PATHS = {
    "/v1/completions": {"prompt": "x", "max_tokens": 300},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 300},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[Running]:
    async with run_engine(Setup()) as running:
        yield running
        await running.settle()


def get_text(choice: dict[str, Any]) -> str:
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


@pytest.mark.parametrize("path", PATHS)
async def test_every_form_is_followed_on_both_endpoints(engine: Running, path: str) -> None:
    async def ask(**fields: Any) -> str:
        status, answer = await engine.post(path, PATHS[path] | fields)
        assert status == 200, answer
        choice = answer["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
        return get_text(choice)

    jsonschema.validate(json.loads(await ask(response_format=FORMAT)), SCHEMA)
    jsonschema.validate(json.loads(await ask(structured_outputs={"json": SCHEMA})), SCHEMA)
    jsonschema.validate(json.loads(await ask(structured_outputs={"json": json.dumps(SCHEMA)})), SCHEMA)
    compact = await ask(structured_outputs={"json": SCHEMA, "disable_any_whitespace": True})
    assert compact == json.dumps(json.loads(compact), separators=(",", ":"))
    assert isinstance(json.loads(await ask(response_format={"type": "json_object"})), dict)
    assert isinstance(json.loads(await ask(structured_outputs={"json_object": True})), dict)
    assert (await ask(structured_outputs={"regex": "x{2}[0-9]"}))[:2] == "xx"
    assert await ask(structured_outputs={"choice": ["red", "green"]}) in ("red", "green")
    assert await ask(structured_outputs={"grammar": 'root ::= "a" | "b" "c"'}) in ("a", "bc")
    assert await ask(structured_outputs={"grammar": 'start: "a" "z"'}) == "az"
    assert await ask(response_format={"type": "text"})


@pytest.mark.parametrize(
    "choice", ['a "quoted" one', "back\\slash", "two\nlines", "caf\u00e9 \U0001f986", "</s>", "%json {}"]
)
async def test_a_choice_is_said_to_the_letter(engine: Running, choice: str) -> None:
    answer = await engine.complete(prompt="x", max_tokens=100, structured_outputs={"choice": [choice]})
    assert answer["choices"][0]["text"] == choice


async def test_a_text_that_keeps_to_its_grammar_is_said_as_it_would_be_without() -> None:
    text = '{"name": "Ann", "age": 3, "tags": ["b"]}'
    async with run_engine(Setup(text=text)) as engine:
        answer = await engine.chat(response_format=FORMAT)
        assert answer["choices"][0]["message"]["content"] == text


@pytest.mark.parametrize("path", PATHS)
async def test_a_stream_joins_to_the_whole_answer(engine: Running, path: str) -> None:
    body = PATHS[path] | {"response_format": FORMAT, "n": 2, "temperature": 0}
    _, whole = await engine.post(path, body)
    stream = await engine.stream(path, body)
    for index in range(2):
        assert stream.text(index) == get_text(whole["choices"][index])
        assert stream.finish(index) == "stop"
    assert stream.done


async def test_the_limit_cuts_with_length_and_a_stop_string_with_stop(engine: Running) -> None:
    body = {"prompt": "x", "response_format": FORMAT}
    cut = (await engine.complete(**body, max_tokens=5))["choices"][0]
    assert (cut["finish_reason"], len(cut["text"])) == ("length", 5)
    stopped = (await engine.complete(**body, max_tokens=300, stop="age"))["choices"][0]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", "age")


async def test_ends_are_the_grammars_whatever_else_is_asked_for(engine: Running) -> None:
    body = {"prompt": "x", "max_tokens": 40}
    for fields in ({"ignore_eos": True}, {"min_tokens": 30}, {"ignore_eos": True, "min_tokens": 30}):
        answer = await engine.complete(**body, **fields, structured_outputs={"regex": "a{2,4}"})
        assert answer["choices"][0]["text"] == "aaaa"
        assert answer["choices"][0]["finish_reason"] == "stop"
    answer = await engine.complete(**body, structured_outputs={"regex": "a{2,4}"})
    assert answer["choices"][0]["text"] == "aa"  # the fake ends as soon as it may


async def test_best_of_and_logprobs_report_the_last_token_too(engine: Running) -> None:
    for fields in ({"n": 2, "best_of": 4}, {"logprobs": 2}, {"n": 3, "logprobs": 0}):
        body = {"prompt": "x", "max_tokens": 300, "structured_outputs": {"json": SCHEMA}} | fields
        _, answer = await engine.post("/v1/completions", body)
        for choice in answer["choices"]:
            jsonschema.validate(json.loads(choice["text"]), SCHEMA)
            if "logprobs" in fields:
                assert "".join(choice["logprobs"]["tokens"]) == choice["text"]


@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", {"find", "now"}), ({"type": "function", "function": {"name": "find"}}, {"find"})],
)
@pytest.mark.parametrize("parallel", [None, False])
async def test_a_forced_call_has_arguments_by_its_schema(
    engine: Running, choice: Any, names: set[str], parallel: bool | None
) -> None:
    fields = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": parallel, "max_tokens": 300}
    answer = (await engine.chat(**fields))["choices"][0]
    assert answer["finish_reason"] == "tool_calls"
    for call in answer["message"]["tool_calls"]:
        assert call["function"]["name"] in names
        schema = SCHEMA if call["function"]["name"] == "find" else {"maxProperties": 0}
        jsonschema.validate(json.loads(call["function"]["arguments"]), schema)
    assert answer["message"]["content"] is None


async def test_several_calls_may_follow_each_other_when_they_may_be_parallel() -> None:
    call = '{"name": "now", "arguments": {}}\n</tool_call>'
    text = f'now", "arguments": {{}}}}\n</tool_call>\n<tool_call>\n{call}'
    async with run_engine(Setup(text=text)) as engine:
        for parallel, number in ((None, 2), (False, 1)):
            answer = await engine.chat(
                tools=TOOLS, tool_choice="required", parallel_tool_calls=parallel, max_tokens=300
            )
            assert len(answer["choices"][0]["message"]["tool_calls"]) == number


async def test_beside_tools_a_format_leaves_the_choice_of_text_or_call() -> None:
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    for text, reason in ((call, "tool_calls"), ('{"name": "Ann", "age": 3, "tags": ["b"]}', "stop")):
        async with run_engine(Setup(text=text)) as engine:
            answer = (await engine.chat(tools=TOOLS, response_format=FORMAT, max_tokens=300))["choices"][0]
            assert answer["finish_reason"] == reason
            assert answer["message"]["content"] == (None if reason == "tool_calls" else text)


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


MANY = {"type": "object", "properties": {f"p{i}": {} for i in range(1001)}}
REFUSED: list[tuple[dict[str, Any], str, str, str]] = [
    ({"response_format": {"type": "yaml"}}, "response_format", "unsupported_field", "json_object"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "invalid_value", "needs json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, "response_format", "invalid_value", "needs schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format.json_schema.name", "invalid_value", "name"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "", "schema": {}}}}, "response_format", "invalid_value", "64"),
    ({"response_format": "json"}, "response_format", "invalid_value", "object"),
    ({"response_format": FORMAT | {"json_schema": {"name": "n", "schema": {"not": {}}}}}, "response_format", "invalid_value", "not"),
    ({"structured_outputs": {}}, "structured_outputs", "invalid_value", "exactly one"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "invalid_value", "regex and choice"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs", "invalid_value", "exactly one"),
    ({"structured_outputs": {"regexp": "a"}}, "structured_outputs", "invalid_value", "regexp"),
    ({"structured_outputs": {"regex": "["}}, "structured_outputs", "invalid_value", "unclosed"),
    ({"structured_outputs": {"regex": " "}}, "structured_outputs", "invalid_value", "empty"),
    ({"structured_outputs": {"regex": "a" * 8193}}, "structured_outputs", "invalid_value", "8192"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs", "invalid_value", "1 to 1024"),
    ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs", "invalid_value", "empty"),
    ({"structured_outputs": {"choice": ["a" * 140_000]}}, "structured_outputs", "invalid_value", "131072"),
    ({"structured_outputs": {"choice": "ab"}}, "structured_outputs.choice", "invalid_value", "array"),
    ({"structured_outputs": {"grammar": "nonsense"}}, "structured_outputs", "invalid_value", "grammar cannot"),
    ({"structured_outputs": {"grammar": "x" * 20_000}}, "structured_outputs", "invalid_value", "16384"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs", "invalid_value", "not JSON"),
    ({"structured_outputs": {"json": "[1]"}}, "structured_outputs", "invalid_value", "object"),
    ({"structured_outputs": {"json": deep(120)}}, "structured_outputs", "invalid_value", "nested"),
    ({"structured_outputs": {"json": MANY}}, "structured_outputs", "invalid_value", "1001 properties"),
    ({"structured_outputs": {"json": {"enum": ["x" * 200_000]}}}, "structured_outputs", "invalid_value", "131072"),
    ({"structured_outputs": {"json": {"x-guidance": {"lenient": True}}}}, "structured_outputs", "unsupported_field", "x-guidance"),
    ({"structured_outputs": {"json": {"uniqueItems": True}}}, "structured_outputs", "invalid_value", "uniqueItems"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs", "unsupported_field", "structural_tag"),
    ({"structured_outputs": {"json": {}, "whitespace_pattern": "x"}}, "structured_outputs", "unsupported_field", "disable_any_whitespace"),
    ({"structured_outputs": {"regex": "a", "disable_any_whitespace": True}}, "structured_outputs", "invalid_value", "remove it"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs", "invalid_value", "one of the two"),
    ({"structured_outputs": {"regex": "a"}, "use_beam_search": True}, "use_beam_search", "invalid_value", "structured_outputs"),
    ({"guided_json": SCHEMA}, "guided_json", "unsupported_field", "structured_outputs"),
    ({"guided_choice": ["a"]}, "guided_choice", "unsupported_field", "structured_outputs"),
]  # fmt: skip
CHAT_REFUSED: list[tuple[dict[str, Any], str, str, str]] = [
    ({"tool_choice": "required", "response_format": FORMAT}, "response_format", "invalid_value", "tool_choice"),
    ({"tool_choice": "required", "use_beam_search": True}, "use_beam_search", "invalid_value", "tool_choice"),
    ({"structured_outputs": {"regex": "a"}}, "structured_outputs", "invalid_value", "tool_choice to none"),
    ({"tool_choice": "required", "tools": [{"function": {"name": "f", "parameters": {"not": {}}}}]}, "tools", "invalid_value", "not"),
    ({"tool_choice": "required", "tools": [{"function": {"name": "f", "parameters": {"type": "array"}}}]}, "tools", "invalid_value", "of type object"),
    ({"tool_choice": "required", "tools": [{"function": {"name": "f", "parameters": {"properties": deep(120)}}}]}, "tools", "invalid_value", "nested"),
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("fields", "param", "code", "word"), REFUSED, ids=lambda value: str(value)[:60])
async def test_what_cannot_be_followed_is_refused_by_name(
    engine: Running, path: str, fields: dict[str, Any], param: str, code: str, word: str
) -> None:
    steps = engine.context.thread.snapshot.num_steps
    status, answer = await engine.post(path, PATHS[path] | fields)
    assert status == 400, answer
    assert (answer["error"]["param"], answer["error"]["code"]) == (param, code)
    assert word in answer["error"]["message"]
    assert len(answer["error"]["message"]) < 600
    assert engine.context.thread.snapshot.num_steps == steps  # nothing was scheduled for it


@pytest.mark.parametrize(("fields", "param", "code", "word"), CHAT_REFUSED, ids=lambda value: str(value)[:60])
async def test_what_contradicts_tools_is_refused_by_name(
    engine: Running, fields: dict[str, Any], param: str, code: str, word: str
) -> None:
    body = PATHS["/v1/chat/completions"] | {"tools": TOOLS} | fields
    status, answer = await engine.post("/v1/chat/completions", body)
    assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, param, code)
    assert word in answer["error"]["message"]


async def test_a_grammar_that_never_ends_is_refused(engine: Running) -> None:
    body = {"prompt": "x", "structured_outputs": {"grammar": "start: a\na: b\nb: a"}}
    status, answer = await engine.post("/v1/completions", body)
    assert (status, answer["error"]["param"]) == (400, "structured_outputs")


async def test_an_engine_without_the_library_refuses_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millpond_engine.grammar.importlib.util.find_spec", lambda name: None)
    async with run_engine(Setup(text='{"name": "now", "arguments": {}}\n</tool_call>')) as bare:
        for fields, param in (
            ({"response_format": FORMAT}, "response_format"),
            ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ):
            for path, body in PATHS.items():
                status, answer = await bare.post(path, body | fields)
                assert (status, answer["error"]["code"]) == (400, "unsupported_field")
                assert answer["error"]["param"] == param
        answer = await bare.chat(response_format={"type": "text"})
        assert answer["choices"][0]["finish_reason"] == "stop"


async def test_eng_002_a_request_whose_grammar_has_just_become_ready_is_served_beside_a_long_prompt() -> None:
    scheduling = SchedulingConfig(max_batch_tokens=8, max_sequences=8)
    setup = Setup(
        scheduling=scheduling, max_model_tokens=4096, num_blocks=400, check_kv=False,
        cost=CostModel(decode_step_seconds=0.002),
    )  # fmt: skip
    async with run_engine(setup) as engine:
        gate = asyncio.Event()
        grammars = engine.context.grammars
        assert grammars is not None
        compile_now = grammars._compile

        async def compile_late(*arguments: Any) -> Any:
            await gate.wait()
            return await compile_now(*arguments)

        grammars._compile = compile_late  # type: ignore[method-assign]
        bound = asyncio.create_task(
            engine.complete(prompt="abc", max_tokens=4, structured_outputs={"regex": "b{2}"})
        )
        long = asyncio.create_task(engine.complete(prompt="x" * 3000, max_tokens=1))
        await engine.wait_for(lambda: engine.context.thread.snapshot.counts.num_running == 1, 30)
        fresh = await engine.complete(prompt="new", max_tokens=2)  # waits for nobody's grammar
        assert fresh["choices"][0]["text"]
        assert not bound.done()
        assert not long.done()
        gate.set()
        assert (await bound)["choices"][0]["text"] == "bb"
        assert not long.done()
        await long
        await engine.settle()


async def test_tenants_share_no_compiled_grammar(engine: Running) -> None:
    body = {"prompt": "x", "structured_outputs": {"regex": "tenants"}, "max_tokens": 20}
    assert engine.context.grammars is not None
    kept = engine.context.grammars.num_kept
    for tenant, number in (("a", 1), ("a", 1), ("b", 2)):
        status, _ = await engine.post("/v1/completions", body, **{headers.TENANT: tenant})
        assert status == 200
        assert engine.context.grammars.num_kept == kept + number


async def test_too_many_waiting_grammars_are_told_to_come_back() -> None:
    async with run_engine(Setup()) as engine:
        grammars = engine.context.grammars
        assert grammars is not None
        grammars._limits = service.GrammarLimits(max_waiting=0)
        status, answer = await engine.post(
            "/v1/completions", {"prompt": "x", "structured_outputs": {"regex": "a"}}
        )
        assert (status, answer["error"]["code"]) == (503, "overloaded")


async def test_the_sdk_parses_into_its_own_types(engine: Running) -> None:
    class Person(pydantic.BaseModel):
        name: str
        age: int
        tags: list[str]

    class Now(pydantic.BaseModel):
        zone: str

    client = openai.AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="x", max_retries=0, timeout=60)
    async with client:
        messages: list[Any] = [{"role": "user", "content": "x"}]
        answer = await client.chat.completions.parse(
            model="fake", messages=messages, response_format=Person, max_tokens=400
        )
        assert isinstance(answer.choices[0].message.parsed, Person)
        called = await client.chat.completions.parse(
            model="fake",
            messages=messages,
            tools=[openai.pydantic_function_tool(Now)],
            tool_choice="required",
            max_tokens=400,
        )
        calls = called.choices[0].message.tool_calls
        assert calls
        assert all(isinstance(call.function.parsed_arguments, Now) for call in calls)
        async with client.chat.completions.stream(
            model="fake", messages=messages, response_format=Person, max_tokens=400
        ) as stream:
            final = await stream.get_final_completion()
        assert isinstance(final.choices[0].message.parsed, Person)
