"""The parsers under generated input: never another error than theirs, never another result for another split."""

from __future__ import annotations

import itertools
import json

from hypothesis import given, settings
from hypothesis import strategies as st

from millpond_common.contract.openai import ApiError
from millpond_gateway.proxy.body import parse_body
from millpond_gateway.proxy.errors import BadRequestError
from millpond_gateway.proxy.headers import choose_request_id, make_client_head, make_engine_head
from millpond_gateway.proxy.http1 import RequestReader
from millpond_gateway.proxy.records import ParsedBody
from millpond_gateway.proxy.settings import RelaySettings
from millpond_gateway.proxy.sse import StreamTail
from millpond_gateway.proxy.usage import find_usage

LIMITS = RelaySettings(max_head_bytes=2000, max_body_bytes=500, max_headers=20)
Outcome = tuple[str, bytes, bool, bool]


def read(data: bytes, cuts: list[int]) -> Outcome:
    """Result of feeding the data in pieces."""
    reader = RequestReader(LIMITS)
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    try:
        for start, end in itertools.pairwise(edges):
            if end > start:
                reader.feed(data[start:end])
    except BadRequestError as error:
        return (error.error.code.value, b"", False, False)
    target = reader.head.target if reader.head is not None else b""
    return ("", target + b"|" + reader.take_body(), reader.complete, reader.pipelined)


TOKENS = st.sampled_from(
    [b"POST", b"GET", b" ", b"/v1/x", b"HTTP/1.1", b"HTTP/1.0", b"\r\n", b"\n", b"\r", b"Host: a", b"Host", b":", b"Content-Length: 5", b"Content-Length: ", b"Transfer-Encoding: chunked", b"5\r\nhello\r\n0\r\n\r\n", b"hello", b"0", b"\x00", b"Expect: 100-continue", b"Upgrade: h2c\r\nConnection: upgrade", b"a" * 300, b"\t", b"PRI * HTTP/2.0", b"CONNECT"]
)  # fmt: skip
MESSAGES = st.lists(TOKENS | st.binary(max_size=8), max_size=14).map(b"".join)
GOOD = st.sampled_from(
    [
        b"POST /v1/x HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhello",
        b"POST /v1/x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\n\r\n",
        b"GET http://a/v1/x?b HTTP/1.1\r\nHost: a\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n",
        b"POST /v1/x HTTP/1.1\r\nHost: a\r\nUpgrade: h2c\r\nConnection: Upgrade\r\nContent-Length: 2\r\n\r\nhi",
    ]
)


@given(MESSAGES)
@settings(max_examples=400, deadline=None)
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    read(data, [])


@given(GOOD, st.lists(st.integers(0, 10_000), max_size=6))
@settings(max_examples=200, deadline=None)
def test_a_good_request_reads_the_same_however_it_is_cut(data: bytes, cuts: list[int]) -> None:
    assert read(data, cuts) == read(data, [])
    assert read(data, [])[2]


@given(MESSAGES, st.lists(st.integers(0, 10_000), max_size=4))
@settings(max_examples=300, deadline=None)
def test_what_is_accepted_whole_is_accepted_in_pieces(data: bytes, cuts: list[int]) -> None:
    whole, pieces = read(data, []), read(data, cuts)
    assert whole[:2] == pieces[:2] or whole[0] or pieces[0]  # a limit may strike earlier or later
    if whole[2] and not whole[3]:
        assert pieces[1] == whole[1]


@given(st.binary(max_size=60) | st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["model", "stream", "n", "max_tokens", "messages", "tools", "x"]), inner, max_size=4), max_leaves=8).map(lambda value: json.dumps(value).encode()))  # fmt: skip
@settings(max_examples=400, deadline=None)
def test_any_body_is_parsed_or_refused(body: bytes) -> None:
    result = parse_body(body)
    assert isinstance(result, ParsedBody | ApiError)
    if isinstance(result, ApiError):
        assert result.status == 400
        json.loads(result.to_json())


EVENTS = st.lists(
    st.sampled_from([b'data: {"a": 1}\n\n', b": comment\n\n", b'data: {"usage": {"prompt_tokens": 7, "completion_tokens": 2}}\n\n', b"event: error\ndata: {}\n\n"]),
    max_size=8,
).map(b"".join)  # fmt: skip


@given(EVENTS, st.booleans(), st.lists(st.integers(0, 10_000), max_size=6))
@settings(max_examples=300, deadline=None)
def test_a_stream_s_end_boundary_and_usage_do_not_depend_on_its_pieces(
    events: bytes, done: bool, cuts: list[int]
) -> None:
    data = events + (b"data: [DONE]\n\n" if done else b"")
    tail = StreamTail()
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for start, end in itertools.pairwise(edges):
        if end > start:
            tail.feed(data[start:end])
            assert tail.at_boundary == data[:end].endswith(b"\n\n")
    assert tail.done is done
    assert (tail.find_usage() is not None) is (b'"usage"' in data)


@given(st.text(max_size=200))
@settings(max_examples=200, deadline=None)
def test_text_of_a_model_cannot_pose_as_usage(text: str) -> None:
    forged = '"usage": {"prompt_tokens": 1, "completion_tokens": 1}' + text
    body = json.dumps({"choices": [{"text": forged}]}).encode()
    assert find_usage(body) is None


@given(st.lists(st.tuples(st.from_regex(rb"[a-z-]{1,12}", fullmatch=True), st.from_regex(rb"[!-~]{0,12}", fullmatch=True)), max_size=8))  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_heads_made_here_are_read_back(fields: list[tuple[bytes, bytes]]) -> None:
    lines = b"".join(b"%b: %b\r\n" % field for field in fields if field[0] not in {b"host", b"content-length", b"transfer-encoding", b"upgrade", b"connection", b"expect", b"content-type"})  # fmt: skip
    reader = RequestReader(RelaySettings())
    reader.feed(b"POST /v1/x HTTP/1.1\r\nhost: a\r\n" + lines + b"\r\n")
    assert reader.head is not None
    again = RequestReader(RelaySettings())
    again.feed(
        make_engine_head(
            reader.head, host=b"e", body_bytes=0, request_id=b"r", tenant=b"t", traffic_class=b"c"
        )
    )
    assert again.complete
    head = make_client_head(200, fields, request_id=b"r", content_length=3, chunked=False, close=False)
    assert head.count(b"\r\n\r\n") == 1
    assert head.lower().count(b"content-length: ") == 1


@given(st.binary(max_size=140))
@settings(max_examples=200, deadline=None)
def test_a_request_id_is_visible_ascii_or_our_own(offered: bytes) -> None:
    chosen = choose_request_id(offered, b"made")
    assert chosen == b"made" or (chosen == offered and chosen.isascii() and b"\r" not in chosen)
