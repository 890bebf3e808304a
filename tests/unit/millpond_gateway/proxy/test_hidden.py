from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond_gateway.proxy.body import parse_body
from millpond_gateway.proxy.hidden import UsageFilter, ask_usage
from millpond_gateway.proxy.records import ParsedBody

USAGE = b'data: {"id":"x","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}'
TEXT = b'data: {"id":"x","choices":[{"text":"\\"usage\\" \\"choices\\":[]"}]}'
WITH_NULL = b'data: {"choices":[{"text":"a"}],"usage":null}'
DONE = b"data: [DONE]"


def test_gw_101_usage_is_asked_of_the_engine_and_nothing_else_changes() -> None:
    body = b' {"model": "m", "stream": true, "seed": 1e3, "x": 12345678901234567890}'
    asked = ask_usage(body, has_options=False)
    assert asked == body.replace(b"{", b'{"stream_options":{"include_usage":true},', 1)
    assert json.loads(asked)["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(
    ("options", "hides"),
    [
        ("null", True),
        ("{}", True),
        ('{"include_usage": false}', True),
        ('{"include_usage": null, "other": 1}', True),
        ('{"include_usage": true}', False),
        ('{"continuous_usage_stats": true}', False),
        ("5", False),
        ('{"include_usage": "yes"}', False),
    ],
)
def test_gw_101_options_that_are_there_are_kept(options: str, hides: bool) -> None:
    body = (
        b'{"model":"m","prompt":[1.50,"stream_options"],"stream":true,"stream_options":%b}' % options.encode()
    )
    parsed = parse_body(body)
    assert isinstance(parsed, ParsedBody)
    assert parsed.hides_usage is hides
    if hides:
        asked: dict[str, Any] = json.loads(ask_usage(body, has_options=True))
        given_options = json.loads(options) or {}
        assert asked["stream_options"] == {**given_options, "include_usage": True}
        assert b'[1.50,"stream_options"]' in ask_usage(body, has_options=True)


def test_a_request_without_a_stream_is_left_alone() -> None:
    parsed = parse_body(b'{"model":"m","prompt":"x"}')
    assert isinstance(parsed, ParsedBody)
    assert not parsed.hides_usage


@given(
    events=st.lists(st.sampled_from([USAGE, TEXT, WITH_NULL, DONE, b": waiting"]), max_size=8),
    blank=st.sampled_from([b"\n\n", b"\r\n\r\n"]),
    cuts=st.lists(st.integers(0, 800), max_size=8),
)
def test_gw_101_the_usage_event_alone_is_taken_out_however_reads_are_cut(
    events: list[bytes], blank: bytes, cuts: list[int]
) -> None:
    data = b"".join(event + blank for event in events)
    stops = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    hiding = UsageFilter()
    passed = b"".join(hiding.feed(data[start:stop]) for start, stop in pairwise(stops) if stop > start)
    assert passed + hiding.take_rest() == b"".join(event + blank for event in events if event != USAGE)


def test_gw_062_an_event_longer_than_a_usage_event_is_not_kept_back() -> None:
    hiding = UsageFilter()
    long = b'data: {"choices":[{"text":"' + b"a" * 200_000
    assert hiding.feed(long) == long
    assert not hiding.at_boundary
    assert hiding.feed(b'"}]}\n\n' + USAGE + b"\n\n" + DONE + b"\n\n") == b'"}]}\n\n' + DONE + b"\n\n"
    assert hiding.at_boundary
