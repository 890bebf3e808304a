from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from tests.support.engine_server import Running, Setup, Stream, run_engine

from millpond_engine.text.bytes_tokenizer import ByteTokenizer

USER = [{"role": "user", "content": "hello"}]
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}},
]
CALL_TEXT = 'I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Brno"}}\n</tool_call>'


def deltas(stream: Stream) -> list[dict[str, Any]]:
    return [choice["delta"] for chunk in stream.chunks for choice in chunk["choices"]]


async def test_a_plain_answer_has_every_field(engine: Running) -> None:
    answer = await engine.chat(max_tokens=6)
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    message = answer["choices"][0]["message"]
    assert (message["role"], message["refusal"]) == ("assistant", None)
    assert "tool_calls" not in message
    assert len(message["content"]) == 6
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


async def test_a_stream_is_role_then_text_then_finish_then_usage(engine: Running) -> None:
    body = {"messages": USER, "max_tokens": 5, "temperature": 0, "stream_options": {"include_usage": True}}
    stream = await engine.stream("/v1/chat/completions", body)
    chunks = stream.chunks
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in chunks[1:-1])
    assert chunks[-2]["choices"][0] == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
    }
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 5
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    assert stream.done
    whole = await engine.chat(max_tokens=5)
    assert stream.text() == whole["choices"][0]["message"]["content"]


async def test_each_choice_has_its_role_and_its_end(engine: Running) -> None:
    body = {"messages": USER, "max_tokens": 5, "n": 3}
    stream = await engine.stream("/v1/chat/completions", body)
    for index in range(3):
        of_index = [c for chunk in stream.chunks for c in chunk["choices"] if c["index"] == index]
        assert [("role" in c["delta"]) for c in of_index].count(True) == 1
        assert "role" in of_index[0]["delta"]
        assert [c["finish_reason"] for c in of_index if c["finish_reason"]] == ["length"]


async def test_no_limit_means_what_is_left_of_the_context() -> None:
    async with run_engine(Setup(max_model_tokens=128, output_tokens=1000)) as engine:
        usage = (await engine.chat())["usage"]
        assert usage["total_tokens"] == 128
    async with run_engine(Setup(max_model_tokens=128, output_tokens=1000, default_output_tokens=9)) as engine:
        assert (await engine.chat())["usage"]["completion_tokens"] == 9


async def test_max_completion_tokens_wins(engine: Running) -> None:
    answer = await engine.chat(max_tokens=3, max_completion_tokens=7)
    assert answer["usage"]["completion_tokens"] == 7


async def test_developer_is_system_and_parts_are_joined(engine: Running) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = {"messages": [{"role": "developer", "content": "be nice"}, {"role": "user", "content": parts}]}
    _, given = await engine.post("/tokenize", body)
    body = {"messages": [{"role": "system", "content": "be nice"}, {"role": "user", "content": "a\nb"}]}
    _, same = await engine.post("/tokenize", body)
    assert given["tokens"] == same["tokens"]


async def test_tool_calls_are_parsed_and_passed_to_the_template() -> None:
    async with run_engine(Setup(text=CALL_TEXT)) as engine:
        answer = await engine.chat(tools=TOOLS)
        choice = answer["choices"][0]
        call = choice["message"]["tool_calls"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "I look.\n"
        assert (call["type"], call["function"]["name"]) == ("function", "get_weather")
        assert json.loads(call["function"]["arguments"]) == {"city": "Brno"}
        with_tools = (await engine.post("/tokenize", {"messages": USER, "tools": TOOLS}))[1]["count"]
        without = (await engine.post("/tokenize", {"messages": USER}))[1]["count"]
        assert with_tools > without
        history = [
            *USER,
            {"role": "assistant", "content": None, "tool_calls": choice["message"]["tool_calls"]},
            {"role": "tool", "tool_call_id": call["id"], "content": "sunny"},
        ]
        status, _ = await engine.post("/v1/chat/completions", {"messages": history, "tools": TOOLS})
        assert status == 200


async def test_eng_063_a_streamed_tool_call_finishes_as_tool_calls() -> None:
    async with run_engine(Setup(text=CALL_TEXT)) as engine:
        stream = await engine.stream("/v1/chat/completions", {"messages": USER, "tools": TOOLS})
        assert stream.finish() == "tool_calls"
        calls = [delta["tool_calls"][0] for delta in deltas(stream) if "tool_calls" in delta]
        assert calls[0]["function"] == {"name": "get_weather", "arguments": ""}
        assert calls[0]["id"].startswith("call_")
        assert "id" not in calls[1]
        assert json.loads("".join(c["function"]["arguments"] for c in calls)) == {"city": "Brno"}
        assert stream.text() == "I look.\n"
        assert stream.done


async def test_one_call_at_most_where_the_client_wants_no_parallel_ones() -> None:
    async with run_engine(Setup(text=f"{CALL_TEXT}\n{CALL_TEXT}")) as engine:
        for most, number in ((None, 2), (True, 2), (False, 1)):
            body = {"messages": USER, "tools": TOOLS, "parallel_tool_calls": most}
            answer = await engine.chat(tools=TOOLS, parallel_tool_calls=most, max_tokens=200)
            stream = await engine.stream("/v1/chat/completions", body)
            assert len(answer["choices"][0]["message"]["tool_calls"]) == number
            indices = {d["tool_calls"][0]["index"] for d in deltas(stream) if "tool_calls" in d}
            assert indices == set(range(number))


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        ('{"city": "Brno"}', 200),
        ({"city": "Brno"}, 200),
        ("", 200),
        ("null", 200),
        (None, 200),
        ('{"city": ', 400),
        ('"Brno"', 400),
        ("[1]", 400),
        ('{"x": NaN}', 400),
        ("[" * 100_000, 400),
        ('{"half": "\\ud83d"}', 200),
    ],
)
async def test_arguments_in_the_history_are_an_object_or_a_400(
    engine: Running, arguments: object, status: int
) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    history = [*USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "x"}]
    got, answer = await engine.post("/v1/chat/completions", {"messages": history, "max_tokens": 1})
    assert got == status, answer
    if status == 400:
        assert answer["error"]["param"] == "messages[1].tool_calls.function.arguments"


async def test_a_template_for_tools_is_taken_where_there_are_tools() -> None:
    class TwoTemplates(ByteTokenizer):
        def __init__(self) -> None:
            super().__init__()
            plain, tool = "plain", "{{ tools[0].function.name }} <tool_call>"
            self._facts = replace(self._facts, chat_template=plain, tool_template=tool)

    async with run_engine(Setup(text=CALL_TEXT, tokenizer=TwoTemplates())) as engine:
        for tools, prompt in ((None, "plain"), (TOOLS, "get_weather <tool_call>")):
            _, answer = await engine.post("/tokenize", {"messages": USER, "tools": tools})
            assert bytes(answer["tokens"]).decode() == prompt
        answer = await engine.chat(tools=TOOLS)
        assert answer["choices"][0]["finish_reason"] == "tool_calls"
        assert (await engine.chat())["choices"][0]["finish_reason"] == "stop"


async def test_tool_choice_none_leaves_text_alone() -> None:
    async with run_engine(Setup(text=CALL_TEXT)) as engine:
        answer = await engine.chat(tools=TOOLS, tool_choice="none")
        assert answer["choices"][0]["message"]["content"] == CALL_TEXT
        assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        ({"type": "function", "function": {"name": "get_time"}}, '{"zone": "UTC"}}\n</tool_call>'),
        ("required", 'get_time", "arguments": {"zone": "UTC"}}\n</tool_call>'),
    ],
)
async def test_a_forced_call_is_begun_in_the_prompt(choice: Any, text: str) -> None:
    async with run_engine(Setup(text=text)) as engine:
        answer = await engine.chat(tools=TOOLS, tool_choice=choice)
        message = answer["choices"][0]["message"]
        assert message["tool_calls"][0]["function"]["name"] == "get_time"
        assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"zone": "UTC"}
        assert message["content"] is None


async def test_chat_logprobs_carry_true_bytes() -> None:
    async with run_engine(Setup(text="é!")) as engine:
        answer = await engine.chat(logprobs=True, top_logprobs=2)
        content = answer["choices"][0]["logprobs"]["content"]
        assert b"".join(bytes(entry["bytes"]) for entry in content) == "é!".encode()
        assert all(len(entry["top_logprobs"]) == 2 for entry in content)
        body = {"messages": USER, "logprobs": True, "temperature": 0}
        stream = await engine.stream("/v1/chat/completions", body)
        parts = [
            c["logprobs"]["content"] for chunk in stream.chunks for c in chunk["choices"] if c["logprobs"]
        ]
        assert len(parts) == 3  # one chunk per token, also for the half character whose text is empty
        assert b"".join(bytes(entry["bytes"]) for part in parts for entry in part) == "é!".encode()


async def test_a_template_of_the_client_needs_the_operators_consent(engine: Running) -> None:
    status, answer = await engine.post("/v1/chat/completions", {"messages": USER, "chat_template": "x"})
    assert (status, answer["error"]["param"]) == (400, "chat_template")
    async with run_engine(Setup(allow_request_template=True)) as consenting:
        body = {"messages": USER, "chat_template": "{{ nothing.there }}"}
        status, answer = await consenting.post("/v1/chat/completions", body)
        assert (status, answer["error"]["code"]) == (400, "invalid_value")
        body = {"messages": USER, "chat_template": "{{ color }}", "chat_template_kwargs": {"color": "red"}}
        status, answer = await consenting.post("/v1/chat/completions", body)
        assert (status, answer["usage"]["prompt_tokens"]) == (200, 3)


async def test_the_last_message_can_be_continued(engine: Running) -> None:
    messages = [*USER, {"role": "assistant", "content": "Once upon"}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    _, answer = await engine.post("/tokenize", body)
    _, text = await engine.post("/detokenize", {"tokens": answer["tokens"]})
    assert text["prompt"].endswith("<|im_start|>assistant\nOnce upon")
