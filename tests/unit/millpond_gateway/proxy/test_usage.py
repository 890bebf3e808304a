"""Token counts found inside answers."""

from __future__ import annotations

import pytest

from millpond_gateway.proxy.usage import find_usage
from millpond_gateway.routing.records import Usage

ONE = b'{"id":"x","choices":[{"text":"a"}],"usage":{"prompt_tokens":7,"completion_tokens":2}}'
DETAILS = (
    b'{"usage" : {"prompt_tokens":9,"completion_tokens":null,"prompt_tokens_details":{"cached_tokens":4}}}'
)


@pytest.mark.parametrize(
    ("data", "usage"),
    [
        (ONE, Usage(prompt_tokens=7, output_tokens=2)),
        (DETAILS, Usage(prompt_tokens=9, cached_tokens=4)),
        (ONE + DETAILS, Usage(prompt_tokens=9, cached_tokens=4)),  # the last one counts
        (DETAILS + b'data: {"usage":null}\n\n', Usage(prompt_tokens=9, cached_tokens=4)),
        (ONE[30:], Usage(prompt_tokens=7, output_tokens=2)),  # the end of an answer is enough
        (b'{"usage":null}', None),
        (b'{"usage":{"prompt_tokens":7', None),
        (b'{"usage":{"prompt_tokens":"7"}}', None),
        (b'{"choices":[{"text":"\\"usage\\":{\\"prompt_tokens\\":1}"}]}', None),  # text cannot pose as usage
        (b"", None),
    ],
)
def test_the_last_usage_object_is_found(data: bytes, usage: Usage | None) -> None:
    assert find_usage(data) == usage
