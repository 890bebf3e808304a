from __future__ import annotations

import pytest
from tests.support.engine_server import Running, Setup, run_engine

TEXT = "The quick brown fox jumps over the lazy dog"


async def test_a_plain_completion_has_every_field(engine: Running) -> None:
    answer = await engine.complete(prompt="hello", max_tokens=8)
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    choice = answer["choices"][0]
    assert (choice["index"], choice["finish_reason"], choice["stop_reason"]) == (0, "length", None)
    assert choice["logprobs"] is None
    assert len(choice["text"]) == 8
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 8,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


async def test_sixteen_tokens_by_default_and_the_end_token_stops() -> None:
    async with run_engine(Setup(text="abc")) as engine:
        answer = await engine.complete(prompt="hello")
        assert answer["choices"][0]["text"] == "abc"
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["choices"][0]["stop_reason"] is None
        assert answer["usage"]["completion_tokens"] == 4  # the end token was generated, too
    async with run_engine() as engine:
        assert (await engine.complete(prompt="hello"))["usage"]["completion_tokens"] == 16


async def test_a_stream_joins_to_the_whole_answer(engine: Running) -> None:
    whole = await engine.complete(prompt="hello", max_tokens=30)
    stream = await engine.stream("/v1/completions", {"prompt": "hello", "max_tokens": 30, "temperature": 0})
    assert stream.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert stream.headers["Cache-Control"] == "no-cache"
    assert stream.text() == whole["choices"][0]["text"]
    assert stream.finish() == "length"
    assert stream.done
    assert all("usage" not in chunk for chunk in stream.chunks)
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in stream.chunks}) == 1


async def test_usage_comes_in_a_last_chunk_without_choices_when_asked_for(engine: Running) -> None:
    body = {"prompt": "hello", "max_tokens": 4, "stream_options": {"include_usage": True}}
    stream = await engine.stream("/v1/completions", body)
    assert stream.chunks[-1]["choices"] == []
    assert stream.chunks[-1]["usage"]["completion_tokens"] == 4
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    stream = await engine.stream("/v1/completions", body)
    counts = [chunk["usage"]["completion_tokens"] for chunk in stream.chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 4


async def test_several_prompts_and_choices_are_numbered_by_prompt_then_choice(engine: Running) -> None:
    answer = await engine.complete(prompt=["one", "two"], n=2, max_tokens=6)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == 6  # each prompt once, whatever n
    assert answer["usage"]["completion_tokens"] == 24
    alone = await engine.complete(prompt="two", max_tokens=6)
    assert answer["choices"][2]["text"] == alone["choices"][0]["text"]


@pytest.mark.parametrize("prompt", ["hey", ["hey"], [104, 101, 121], [[104, 101, 121]]])
async def test_the_four_forms_of_a_prompt_are_one(engine: Running, prompt: object) -> None:
    answer = await engine.complete(prompt=prompt, max_tokens=6, echo=True)
    assert answer["choices"][0]["text"].startswith("hey")
    assert answer["usage"]["prompt_tokens"] == 3


async def test_cached_tokens_are_exact_in_answers_and_streams(engine: Running) -> None:
    prompt = "x" * 100
    assert (await engine.complete(prompt=prompt))["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert (await engine.complete(prompt=prompt))["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
    body = {"prompt": prompt, "stream_options": {"include_usage": True}}
    stream = await engine.stream("/v1/completions", body)
    assert stream.chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
    await engine.settle()
    assert (await engine.state())["prefixHitTokens"] == 192, (
        "what the autoscaler takes the victim's worth from"
    )


async def test_eng_045_a_stop_string_ends_a_stream_without_showing_a_piece() -> None:
    async with run_engine(Setup(text=TEXT)) as engine:
        stream = await engine.stream(
            "/v1/completions", {"prompt": "x", "max_tokens": 60, "stop": ["own fox"]}
        )
        assert stream.text() == "The quick br"
        assert stream.finish() == "stop"
        last = stream.chunks[-1]["choices"][0]
        assert last["stop_reason"] == "own fox"
        assert stream.done
        await engine.settle()


async def test_eng_046_every_token_is_released_at_once_when_it_cannot_be_a_stop() -> None:
    async with run_engine(Setup(text=TEXT)) as engine:
        stream = await engine.stream(
            "/v1/completions", {"prompt": "x", "max_tokens": 60, "stop": ["<|end|>"]}
        )
        assert [text for text in stream.texts() if text] == list(TEXT)


async def test_eng_048_min_tokens_defers_a_stop() -> None:
    async with run_engine(Setup(text="ab stop cd stop ef")) as engine:
        answer = await engine.complete(prompt="x", max_tokens=60, stop="stop", min_tokens=10)
        assert answer["choices"][0]["text"] == "ab stop cd "
        answer = await engine.complete(prompt="x", max_tokens=60, stop="stop")
        assert answer["choices"][0]["text"] == "ab "


async def test_a_stop_can_be_kept_in_the_output() -> None:
    async with run_engine(Setup(text=TEXT)) as engine:
        body = {"prompt": "x", "max_tokens": 60, "stop": "quick", "include_stop_str_in_output": True}
        assert (await engine.complete(**body))["choices"][0]["text"] == "The quick"


async def test_a_stop_of_one_choice_does_not_end_the_others() -> None:
    async with run_engine(Setup()) as engine:
        body = {"prompt": "x", "max_tokens": 40, "n": 3, "temperature": 1, "seed": 7}
        free = await engine.complete(**body)
        texts = [choice["text"] for choice in free["choices"]]
        assert len(set(texts)) > 1
        stop = texts[0][10:14]
        answer = await engine.complete(**body, stop=stop)
        for text, choice in zip(texts, answer["choices"], strict=True):
            ended = stop in text
            assert choice["text"] == (text[: text.index(stop)] if ended else text)
            assert choice["finish_reason"] == ("stop" if ended else "length")
        await engine.settle()


async def test_stop_token_ids_name_the_token() -> None:
    async with run_engine(Setup(text=TEXT)) as engine:
        answer = await engine.complete(prompt="x", max_tokens=60, stop_token_ids=[ord("q")])
        choice = answer["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("The ", "stop", ord("q"))


async def test_ignore_eos_reads_on() -> None:
    async with run_engine(Setup(output_tokens=5)) as engine:
        answer = await engine.complete(prompt="x", max_tokens=12, ignore_eos=True)
        assert answer["usage"]["completion_tokens"] == 12
        assert answer["choices"][0]["finish_reason"] == "length"


async def test_eng_047_no_replacement_character_that_the_text_lacks() -> None:
    text = "ď 🐎 日本語 👩\u200d👩\u200d👧 \u2028\u0085 end"
    async with run_engine(Setup(text=text)) as engine:
        stream = await engine.stream("/v1/completions", {"prompt": "x", "max_tokens": 200})
        assert stream.text() == text
        assert b"\xe2\x80\xa8" not in stream.raw  # U+2028 and U+0085 would split lines for some clients
        assert b"\xc2\x85" not in stream.raw
        assert stream.raw.decode().splitlines() == stream.raw.decode().split("\n")[:-1]


async def test_logprobs_are_four_lists_of_one_length(engine: Running) -> None:
    answer = await engine.complete(prompt="abc", max_tokens=5, logprobs=2)
    logprobs = answer["choices"][0]["logprobs"]
    text = answer["choices"][0]["text"]
    assert logprobs["tokens"] == list(text)
    assert {len(values) for values in logprobs.values()} == {5}
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4]
    assert all(len(top) == 2 for top in logprobs["top_logprobs"])
    zero = await engine.complete(prompt="abc", max_tokens=5, logprobs=0)
    assert all(
        list(top) == [token]
        for top, token in zip(zero["choices"][0]["logprobs"]["top_logprobs"], text, strict=True)
    )


@pytest.mark.parametrize("echo", [False, True])
async def test_the_tokens_of_one_character_begin_where_it_does(echo: bool) -> None:
    async with run_engine(Setup(text="dé🐎x")) as engine:
        body = {"prompt": "ä<|im_end|>z", "max_tokens": 8, "logprobs": 0, "echo": echo, "temperature": 0}
        [choice] = (await engine.complete(**body))["choices"]
        stream = await engine.stream("/v1/completions", body)
    prompt = [0, 0, 1, 11] if echo else []
    own = [0, 1, 1, 2, 2, 2, 2, 3]
    assert choice["text"] == ("ä<|im_end|>z" if echo else "") + "dé🐎x"
    expected = prompt + [(12 if echo else 0) + place for place in own]
    assert choice["logprobs"]["text_offset"] == expected
    chunks = [c["logprobs"] for chunk in stream.chunks for c in chunk["choices"] if c["logprobs"]]
    assert [place for chunk in chunks for place in chunk["text_offset"]] == expected
    assert stream.text() == choice["text"]


async def test_streamed_logprobs_belong_to_the_tokens_of_their_chunk(engine: Running) -> None:
    whole = await engine.complete(prompt="abc", max_tokens=9, logprobs=1, stop=["zzz"])
    body = {"prompt": "abc", "max_tokens": 9, "logprobs": 1, "temperature": 0, "stop": ["zzz"]}
    stream = await engine.stream("/v1/completions", body)
    parts = [
        choice["logprobs"] for chunk in stream.chunks for choice in chunk["choices"] if choice["logprobs"]
    ]
    joined = {key: [value for part in parts for value in part[key]] for key in parts[0]}
    assert joined == whole["choices"][0]["logprobs"]


async def test_tokens_can_be_named_by_id(engine: Running) -> None:
    answer = await engine.complete(
        prompt="abc", max_tokens=2, logprobs=1, return_tokens_as_token_ids=True, return_token_ids=True
    )
    choice = answer["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]
    assert choice["prompt_token_ids"] == list(b"abc")


async def test_eng_053_echoed_logprobs_begin_with_null_and_cover_the_prompt(engine: Running) -> None:
    answer = await engine.complete(prompt="abcdef", max_tokens=3, echo=True, logprobs=1)
    choice = answer["choices"][0]
    assert choice["text"].startswith("abcdef")
    assert len(choice["logprobs"]["tokens"]) == 9
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert all(value is not None for value in choice["logprobs"]["token_logprobs"][1:])
    one = await engine.complete(prompt="a", max_tokens=1, prompt_logprobs=1)
    assert one["choices"][0]["prompt_logprobs"] == [None]


async def test_eng_050_prompt_logprobs_are_whole_with_a_warm_cache(engine: Running) -> None:
    prompt = "y" * 50
    answers = [await engine.complete(prompt=prompt, max_tokens=1, prompt_logprobs=2) for _ in range(2)]
    rows = [answer["choices"][0]["prompt_logprobs"] for answer in answers]
    assert rows[0] == rows[1]
    assert len(rows[0]) == 50
    assert rows[0][1][str(ord("y"))] == {"logprob": -0.125, "rank": 1, "decoded_token": "y"}


async def test_eng_060_echo_of_nothing_but_the_prompt(engine: Running) -> None:
    answer = await engine.complete(prompt="abcd", max_tokens=0, echo=True, logprobs=2)
    choice = answer["choices"][0]
    assert choice["text"] == "abcd"
    assert choice["logprobs"]["tokens"] == list("abcd")
    assert choice["logprobs"]["token_logprobs"][1:] == [-0.125] * 3
    assert answer["usage"]["completion_tokens"] == 0
    plain = await engine.complete(prompt="abcd", max_tokens=0, echo=True)
    assert (plain["choices"][0]["text"], plain["choices"][0]["finish_reason"]) == ("abcd", "length")
    stream = await engine.stream("/v1/completions", {"prompt": "abcd", "max_tokens": 0, "echo": True})
    assert (stream.text(), stream.finish(), stream.done) == ("abcd", "length", True)


async def test_beam_search_and_best_of_return_n_choices(engine: Running) -> None:
    beams = await engine.complete(prompt="abc", max_tokens=6, use_beam_search=True, n=3)
    assert len({choice["text"] for choice in beams["choices"]}) == 3
    best = await engine.complete(prompt="abc", max_tokens=6, best_of=4, n=2, temperature=1.0)
    assert len(best["choices"]) == 2
    assert best["usage"]["completion_tokens"] == 12


async def test_a_seed_repeats_and_choices_differ(engine: Running) -> None:
    body = {"prompt": "abc", "max_tokens": 12, "temperature": 1.0, "seed": 11, "n": 4}
    first, second = await engine.complete(**body), await engine.complete(**body)
    texts = [choice["text"] for choice in first["choices"]]
    assert texts == [choice["text"] for choice in second["choices"]]
    assert len(set(texts)) > 1


async def test_truncation_keeps_the_tail(engine: Running) -> None:
    answer = await engine.complete(prompt="abcdef", max_tokens=1, echo=True, truncate_prompt_tokens=2)
    assert answer["choices"][0]["text"].startswith("ef")
    assert answer["usage"]["prompt_tokens"] == 2
