from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import pytest
from tests.support.engine_server import Running, Setup, run_engine

from millpond_common.contract import headers
from millpond_common.contract.engine_config import ClassConfig, SchedulingConfig
from millpond_engine.fake.cost import CostModel
from millpond_engine.server.limits import ServerLimits
from millpond_engine.text.bytes_tokenizer import ByteTokenizer

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"prompt": "hi"}

BAD_COMPLETIONS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "prompt", "invalid_value"),
    ({"prompt": ""}, "prompt", "invalid_value"),
    ({"prompt": []}, "prompt", "invalid_value"),
    ({"prompt": [[]]}, "prompt", "invalid_value"),
    ({"prompt": ["a", 1]}, "prompt", "invalid_value"),
    ({"prompt": ["a", [1]]}, "prompt", "invalid_value"),
    ({"prompt": [259]}, "prompt", "invalid_value"),
    ({"prompt": [-1]}, "prompt", "invalid_value"),
    ({"prompt": ["x"] * 300}, "prompt", "invalid_value"),
    ({"prompt": {"text": "a"}}, "prompt", "invalid_value"),
    (COMPLETION | {"max_tokens": 0}, "max_tokens", "invalid_value"),
    (COMPLETION | {"max_tokens": -1}, "max_tokens", "invalid_value"),
    (COMPLETION | {"max_tokens": "7"}, "max_tokens", "invalid_value"),
    (COMPLETION | {"max_tokens": 1.5}, "max_tokens", "invalid_value"),
    (COMPLETION | {"n": 0}, "n", "invalid_value"),
    (COMPLETION | {"n": 10**6}, "n", "invalid_value"),
    (COMPLETION | {"n": 10**30}, "n", "invalid_value"),
    (COMPLETION | {"temperature": -0.1}, "temperature", "invalid_value"),
    (COMPLETION | {"temperature": 2.1}, "temperature", "invalid_value"),
    (COMPLETION | {"top_p": 0}, "top_p", "invalid_value"),
    (COMPLETION | {"top_p": 1.1}, "top_p", "invalid_value"),
    (COMPLETION | {"top_k": -2}, "top_k", "invalid_value"),
    (COMPLETION | {"min_p": 1.1}, "min_p", "invalid_value"),
    (COMPLETION | {"presence_penalty": 3}, "presence_penalty", "invalid_value"),
    (COMPLETION | {"frequency_penalty": -3}, "frequency_penalty", "invalid_value"),
    (COMPLETION | {"repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
    (COMPLETION | {"repetition_penalty": 1e-38}, "repetition_penalty", "invalid_value"),
    (COMPLETION | {"seed": 1 << 63}, "seed", "invalid_value"),
    (COMPLETION | {"logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
    (COMPLETION | {"logit_bias": {"259": 1}}, "logit_bias", "invalid_value"),
    (COMPLETION | {"logit_bias": {"1": 101}}, "logit_bias", "invalid_value"),
    (COMPLETION | {"stop": ["a"] * 5}, "stop", "invalid_value"),
    (COMPLETION | {"stop": [""]}, "stop", "invalid_value"),
    (COMPLETION | {"stop": ["x" * 2000]}, "stop", "invalid_value"),
    (COMPLETION | {"stop_token_ids": [259]}, "stop_token_ids", "invalid_value"),
    (COMPLETION | {"min_tokens": 17}, "min_tokens", "invalid_value"),
    (COMPLETION | {"logprobs": 21}, "logprobs", "invalid_value"),
    (COMPLETION | {"logprobs": -1}, "logprobs", "invalid_value"),
    (COMPLETION | {"prompt_logprobs": 21}, "prompt_logprobs", "invalid_value"),
    (COMPLETION | {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "invalid_value"),
    (COMPLETION | {"use_beam_search": True, "stream": True}, "use_beam_search", "invalid_value"),
    (COMPLETION | {"best_of": 1000}, "best_of", "invalid_value"),
    (COMPLETION | {"best_of": 3, "stream": True}, "best_of", "invalid_value"),
    (COMPLETION | {"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    (COMPLETION | {"cache_salt": ""}, "cache_salt", "invalid_value"),
    (COMPLETION | {"cache_salt": "x" * 1025}, "cache_salt", "invalid_value"),
    (COMPLETION | {"priority": 1 << 40}, "priority", "invalid_value"),
    (COMPLETION | {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "invalid_value"),
    (COMPLETION | {"allowed_token_ids": []}, "allowed_token_ids", "invalid_value"),
    (COMPLETION | {"allowed_token_ids": [999]}, "allowed_token_ids", "invalid_value"),
    (COMPLETION | {"bad_words": [""]}, "bad_words", "invalid_value"),
    (COMPLETION | {"suffix": "x"}, "suffix", "unsupported_field"),
    (COMPLETION | {"prompt_embeds": "AAAA"}, "prompt_embeds", "unsupported_field"),
    (COMPLETION | {"guided_regex": "a+"}, "guided_regex", "unsupported_field"),
    (COMPLETION | {"guided_surprise": 1}, "guided_surprise", "unsupported_field"),
    *[
        (COMPLETION | {name: "x"}, name, "unsupported_field")
        for name in ("regex", "ebnf", "grammar", "json_schema", "structural_tag", "stop_regex", "lora_path")
    ],
    (COMPLETION | {"logits_processors": ["x"]}, "logits_processors", "unsupported_field"),
    (COMPLETION | {"functions": [{"name": "f"}]}, "functions", "unsupported_field"),
    (COMPLETION | {"function_call": "auto"}, "function_call", "unsupported_field"),
    (COMPLETION | {"modalities": ["text", "audio"]}, "modalities", "unsupported_field"),
    (COMPLETION | {"audio": {"voice": "alloy"}}, "audio", "unsupported_field"),
    (COMPLETION | {"model": "other"}, "model", "model_not_found"),
]

BAD_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "messages", "invalid_value"),
    ({"messages": []}, "messages", "invalid_value"),
    ({"messages": [{"role": "user"}] * 5000}, "messages", "invalid_value"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "invalid_value"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "invalid_value"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content",
        "unsupported_field",
    ),
    (CHAT | {"max_tokens": 0}, "max_tokens", "invalid_value"),
    (CHAT | {"max_completion_tokens": -5}, "max_completion_tokens", "invalid_value"),
    (CHAT | {"top_logprobs": 2}, "top_logprobs", "invalid_value"),
    (CHAT | {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
    (CHAT | {"tool_choice": "auto"}, "tool_choice", "invalid_value"),
    (CHAT | {"tools": [{"function": {"name": "f"}}], "tool_choice": "maybe"}, "tool_choice", "invalid_value"),
    (
        CHAT | {"tools": [{"function": {"name": "f"}}], "tool_choice": {"function": {"name": "g"}}},
        "tool_choice",
        "invalid_value",
    ),
    (CHAT | {"tools": [{"type": "retrieval", "function": {"name": "f"}}]}, "tools", "unsupported_field"),
    (CHAT | {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "invalid_value"),
]


def _name(case: Any) -> str:
    return str(case)[:60] if isinstance(case, dict) else str(case)


@pytest.mark.parametrize(("body", "param", "code"), BAD_COMPLETIONS, ids=_name)
async def test_a_bad_completion_names_its_field(engine: Running, body: Any, param: str, code: str) -> None:
    status, answer = await engine.post("/v1/completions", body)
    assert status == (404 if code == "model_not_found" else 400), answer
    assert (answer["error"]["param"], answer["error"]["code"]) == (param, code)
    assert set(answer["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(("body", "param", "code"), BAD_CHATS, ids=_name)
async def test_a_bad_chat_names_its_field(engine: Running, body: Any, param: str, code: str) -> None:
    status, answer = await engine.post("/v1/chat/completions", body)
    assert status == 400, answer
    assert (answer["error"]["param"], answer["error"]["code"]) == (param, code)


async def test_eng_044_n_of_zero_is_refused_before_any_stream(engine: Running) -> None:
    stream = await engine.stream("/v1/completions", COMPLETION | {"n": 0})
    assert (stream.status, stream.headers["Content-Type"].split(";")[0]) == (400, "application/json")
    assert json.loads(stream.raw)["error"]["param"] == "n"


async def test_eng_061_guided_json_is_refused_by_name(engine: Running) -> None:
    for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
        status, answer = await engine.post(path, body | {"guided_json": {"type": "object"}})
        assert (status, answer["error"]["param"]) == (400, "guided_json")
        assert (await engine.post(path, body | {"guided_json": None}))[0] == 200
    text = {"messages": [{"role": "user", "content": 'say "guided_json": 1'}]}
    assert (await engine.post("/v1/chat/completions", text))[0] == 200


async def test_null_means_absent_for_every_optional_field(engine: Running) -> None:
    from millpond_engine.server.schema import ChatBody, CompletionBody

    nulls = dict.fromkeys(CompletionBody.__struct_fields__)
    assert (await engine.post("/v1/completions", nulls | {"prompt": "x"}))[0] == 200
    nulls = dict.fromkeys(ChatBody.__struct_fields__)
    assert (await engine.post("/v1/chat/completions", nulls | CHAT))[0] == 200
    assert (await engine.post("/v1/completions", COMPLETION | {"stream_options": {}}))[0] == 200
    assert (await engine.post("/v1/completions", COMPLETION | {"nobody_knows": [1]}))[0] == 200


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'{"prompt": "\xff"}', b"\x00", b"[" * 5000, b'{"prompt": NaN}']
)
async def test_broken_bodies_are_400(engine: Running, body: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        json_type = {"Content-Type": "application/json"}
        async with engine.session.post(engine.url + path, data=body, headers=json_type) as response:
            assert response.status == 400, await response.text()
            assert (await response.json())["error"]["type"] == "BadRequestError"


async def test_half_characters_in_a_prompt_do_no_harm(engine: Running) -> None:
    data = b'{"prompt": "a\\ud800b", "max_tokens": 2}'
    json_type = {"Content-Type": "application/json"}
    async with engine.session.post(engine.url + "/v1/completions", data=data, headers=json_type) as response:
        assert response.status in {200, 400}


async def test_another_content_type_is_400(engine: Running) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "application/json; charset=latin-1"):
        data = json.dumps(COMPLETION).encode()
        headers_given = {"Content-Type": kind}
        async with engine.session.post(
            engine.url + "/v1/completions", data=data, headers=headers_given
        ) as response:
            assert response.status == 400


async def test_a_compressed_body_is_415_whatever_it_would_become(engine: Running) -> None:
    data = gzip.compress(b'{"prompt": "' + b"x" * 50_000_000 + b'"}')
    given = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    async with engine.session.post(engine.url + "/v1/completions", data=data, headers=given) as response:
        assert response.status == 415
        assert (await response.json())["error"]["param"] == "Content-Encoding"


async def test_unknown_paths_and_methods_have_the_error_shape(engine: Running) -> None:
    for path in ("/v1/responses", "/v1/embeddings", "/nope"):
        status, answer = await engine.post(path, {})
        assert (status, answer["error"]["code"]) == (404, "not_found")
    async with engine.session.get(engine.url + "/v1/completions") as response:
        assert response.status == 405
        assert (await response.json())["error"]["code"] == "method_not_allowed"


async def test_operator_paths_do_not_exist_for_tenants(engine: Running) -> None:
    for path in ("/drain", "/sleep", "/wake_up", "/pause", "/resume", "/abort_requests", "/flush_cache"):
        assert (await engine.post(path, {}))[0] == 404


async def test_a_large_body_is_413_and_a_slow_one_408() -> None:
    limits = ServerLimits(max_body_bytes=10_000, body_seconds=0.2)
    async with run_engine(Setup(limits=limits)) as engine:
        status, answer = await engine.post("/v1/completions", {"prompt": "x" * 20_000})
        assert (status, answer["error"]["code"]) == (413, "payload_too_large")

        async def endless() -> Any:
            while True:
                yield b" " * 1000
                await asyncio.sleep(0)

        json_type = {"Content-Type": "application/json"}
        async with engine.session.post(
            engine.url + "/v1/completions", data=endless(), headers=json_type
        ) as response:
            assert response.status == 413

        reader, writer = await asyncio.open_connection("127.0.0.1", engine.port)
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 50\r\n\r\n{"
        writer.write(head)
        line = await asyncio.wait_for(reader.readline(), 5)
        assert b" 408 " in line
        writer.close()


async def test_a_connection_without_a_request_is_closed() -> None:
    async with run_engine(Setup(limits=ServerLimits(idle_connection_seconds=0.2))) as engine:
        for start in (b"", b"POST /v1/comple"):
            reader, writer = await asyncio.open_connection("127.0.0.1", engine.port)
            writer.write(start)
            assert await asyncio.wait_for(reader.read(), 5) == b""
            writer.close()


@pytest.mark.parametrize(
    ("prompt_tokens", "limit", "generated"),
    [
        (129, None, None),
        (129, 1, None),
        (128, None, None),
        (128, 1, None),
        (127, 2, None),
        (127, 1, 1),
        (127, None, 1),
    ],
    ids=["ENG-056", "ENG-056-limit", "ENG-057", "ENG-057-limit", "over", "ENG-058", "ENG-059"],
)
async def test_eng_056_057_058_059_the_edge_of_the_context(
    prompt_tokens: int, limit: int | None, generated: int | None
) -> None:
    async with run_engine(Setup(max_model_tokens=128, output_tokens=500)) as engine:
        _, empty = await engine.post("/tokenize", {"messages": [{"role": "user", "content": ""}]})
        content = "x" * (prompt_tokens - empty["count"])
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": limit}
        status, answer = await engine.post("/v1/chat/completions", body)
        if generated is None:
            assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
            assert str(prompt_tokens) in answer["error"]["message"]
            assert "-" not in answer["error"]["message"]
        else:
            assert status == 200, answer
            assert answer["usage"]["completion_tokens"] == generated
            assert answer["choices"][0]["finish_reason"] == "length"
        await engine.settle()


async def test_eng_057_a_full_prompt_is_served_when_nothing_is_generated() -> None:
    async with run_engine(Setup(max_model_tokens=128)) as engine:
        answer = await engine.complete(prompt="x" * 128, max_tokens=0, echo=True, logprobs=0)
        assert len(answer["choices"][0]["logprobs"]["tokens"]) == 128


async def test_eng_005_006_what_never_fits_the_pool_is_400_at_once() -> None:
    async with run_engine(Setup(num_blocks=63, max_model_tokens=4096)) as engine:
        status, answer = await engine.post("/v1/completions", {"prompt": "x" * 1024, "max_tokens": 1})
        assert (status, answer["error"]["code"]) == (400, "kv_capacity_exceeded")
        status, answer = await engine.post("/v1/completions", {"prompt": "x" * 1000, "max_tokens": 24})
        assert (status, answer["error"]["code"]) == (400, "kv_capacity_exceeded")
        assert (await engine.post("/v1/completions", {"prompt": "x" * 10}))[0] == 200
        await engine.settle()


async def test_a_full_queue_is_503_with_retry_after_before_any_stream() -> None:
    setup = Setup(
        scheduling=SchedulingConfig(max_sequences=1, max_queued_requests=1),
        cost=CostModel(decode_step_seconds=0.02),
    )
    async with run_engine(setup) as engine:
        body = {"prompt": "x", "max_tokens": 30}
        streams = await asyncio.gather(*[engine.stream("/v1/completions", body) for _ in range(6)])
        refused = [stream for stream in streams if stream.status == 503]
        assert refused
        assert all(int(stream.headers["retry-after"]) >= 1 for stream in refused)
        assert all(json.loads(stream.raw)["error"]["code"] == "overloaded" for stream in refused)
        assert sum(stream.done for stream in streams) == 6 - len(refused)
        await engine.settle()


async def test_trusted_headers_that_are_no_names_are_refused(engine: Running) -> None:
    for name, value in ((headers.TENANT, "a b"), (headers.CLASS, "x" * 200), (headers.DEADLINE, "soon")):
        status, answer = await engine.post("/v1/completions", COMPLETION, **{name: value})
        assert (status, answer["error"]["param"]) == (400, name)


async def test_every_response_carries_request_id_and_epoch(engine: Running) -> None:
    given = {headers.REQUEST_ID: "abc-1"}
    stream = await engine.stream("/v1/completions", COMPLETION, **given)
    assert stream.headers[headers.REQUEST_ID] == "abc-1"
    assert stream.headers[headers.EPOCH] == engine.context.epoch
    async with engine.session.post(engine.url + "/v1/completions", json={}) as response:
        assert response.headers[headers.REQUEST_ID].startswith("req-")
        assert response.headers[headers.EPOCH] == engine.context.epoch
    bad = {headers.REQUEST_ID: "x" * 500}
    stream = await engine.stream("/v1/completions", COMPLETION, **bad)
    assert stream.headers[headers.REQUEST_ID].startswith("req-")


async def test_a_class_nobody_declared_is_served_as_the_default_and_said_so() -> None:
    classes = (ClassConfig(name="interactive"), ClassConfig(name="batch"))
    async with run_engine(Setup(scheduling=SchedulingConfig(classes=classes))) as engine:
        for asked, served in (("batch", "batch"), ("weird", "interactive"), ("", "interactive")):
            stream = await engine.stream("/v1/completions", COMPLETION, **{headers.CLASS: asked})
            assert (stream.status, stream.headers[headers.CLASS]) == (200, served)
        for tier in ("auto", "default", "flex", "priority", "nonsense"):
            body = CHAT | {
                "service_tier": tier,
                "max_tokens": 2,
            }  # OpenAI's own names, read by the gateway alone
            async with engine.session.post(engine.url + "/v1/chat/completions", json=body) as response:
                assert (response.status, response.headers[headers.CLASS]) == (200, "interactive")
        await engine.settle()


async def test_a_request_id_is_denied_until_it_was_seen(engine: Running) -> None:
    assert json.loads((await engine.get("/v1/requests/r-1"))[1])["phase"] == "Unknown"
    await engine.post("/v1/completions", COMPLETION, **{headers.REQUEST_ID: "r-1"})
    state = json.loads((await engine.get("/v1/requests/r-1"))[1])
    assert (state["phase"], state["epoch"]) == ("Finished", engine.context.epoch)


async def test_messages_hold_no_prompt_text(engine: Running) -> None:
    secret = "my secret prompt"
    for body in ({"prompt": secret, "n": 0}, {"prompt": [secret, 1]}, {"prompt": secret * 100}):
        status, answer = await engine.post("/v1/completions", body)
        assert status == 400
        assert "secret" not in json.dumps(answer)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "x" * 100_000}, "prompt"),
        ("/v1/completions", {"prompt": "x" * 100_000, "truncate_prompt_tokens": 5}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 100_000}]}, "messages"),
        ("/tokenize", {"prompt": "x" * 100_000}, "prompt"),
    ],
)
async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    engine: Running, path: str, body: Any, param: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> list[int]:
        raise AssertionError("tokenized")

    monkeypatch.setattr(ByteTokenizer, "encode", refuse)
    status, answer = await engine.post(path, body)
    assert status == 400, answer
    assert (answer["error"]["code"], answer["error"]["param"]) == ("context_length_exceeded", param)
    assert "shorten it" in answer["error"]["message"]


async def test_of_many_prompts_the_first_that_is_too_long_ends_the_work(
    engine: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    encode = ByteTokenizer.encode

    def count(self: ByteTokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
        calls.append(len(text))
        return encode(self, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(ByteTokenizer, "encode", count)
    status, answer = await engine.post("/v1/completions", {"prompt": ["hi", *["x" * 2000] * 200]})
    assert (status, answer["error"]["code"], calls) == (400, "context_length_exceeded", [2, 2000])


async def test_detokenize_takes_a_bounded_list(engine: Running) -> None:
    limit = ServerLimits().max_detokenized_tokens
    status, answer = await engine.post("/detokenize", {"tokens": [65] * (limit + 1)})
    assert (status, answer["error"]["param"]) == (400, "tokens")
    assert (await engine.post("/detokenize", {"tokens": [65] * limit}))[1] == {"prompt": "A" * limit}


async def test_fields_that_ask_for_nothing_are_taken_and_old_function_calls_in_messages_are_not(
    engine: Running,
) -> None:
    nothing = {"functions": [], "function_call": "none", "modalities": ["text"], "regex": None}
    status, _ = await engine.post("/v1/chat/completions", CHAT | nothing)
    assert status == 200
    called = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
    status, answer = await engine.post("/v1/chat/completions", {"messages": [*CHAT["messages"], called]})
    assert (status, answer["error"]["param"]) == (400, "messages[1].function_call")
