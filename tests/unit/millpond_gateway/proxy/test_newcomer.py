"""What a hostile client and a draining engine once got away with."""

from __future__ import annotations

import pytest

from millpond_common.contract.openai import ApiError, ErrorCode
from millpond_gateway.proxy.body import parse_body
from millpond_gateway.proxy.sse import StreamTail


def test_a_body_nested_without_end_is_a_bad_request() -> None:
    body = b'{"model":"m","prompt":"x","zzz":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    answer = parse_body(body)
    assert isinstance(answer, ApiError)
    assert answer.code is ErrorCode.INVALID_VALUE


@pytest.mark.parametrize("cut", [0, 3, 11, 13, 20])
def test_an_error_event_of_the_engine_is_seen_however_it_is_cut(cut: int) -> None:
    data = b'data: {"choices":[]}\n\nevent: error\ndata: {"error":{"message":"draining"}}\n\n'
    tail = StreamTail()
    at = data.index(b"event:") + cut
    tail.feed(data[:at])
    tail.feed(data[at:])
    assert tail.failed
    assert not tail.done


def test_text_about_errors_is_no_error_event() -> None:
    tail = StreamTail()
    tail.feed(b'data: {"choices":[{"delta":{"content":"\\nevent: error\\n"}}]}\n\n')
    assert not tail.failed
