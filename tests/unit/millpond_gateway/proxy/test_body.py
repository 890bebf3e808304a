"""What the gateway reads of a body."""

from __future__ import annotations

from millpond_gateway.proxy.body import parse_body
from millpond_gateway.proxy.records import ParsedBody


def test_a_forgotten_prompt_leaves_its_size() -> None:
    body = b'{"model": "m", "stream": true, "prompt": "hello", "tools": [1]}'
    parsed = parse_body(body)
    assert isinstance(parsed, ParsedBody)
    left = parsed.forget_prompt()
    assert (left.prompt, left.template) == (b"", b"")
    assert left.num_prompt_bytes == len(parsed.prompt) + len(parsed.template) > 7
    assert (left.model, left.stream, left.num_bytes) == ("m", True, len(body))
