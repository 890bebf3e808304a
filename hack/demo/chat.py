"""Ask one question through the gateway and print the answer as it streams."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

import httpx

from demo.errors import DemoError


@dataclass(frozen=True, slots=True)
class Answer:
    """A streamed answer and what it cost."""

    text: str
    prompt_tokens: int
    cached_tokens: int
    first_token_seconds: float
    endpoint: str


def ask(
    base_url: str, model: str, question: str, *, max_tokens: int = 64, system: str = "", show: bool = True
) -> Answer:
    """Stream one chat answer.

    Raises:
        DemoError: the gateway refuses, or the stream breaks.
    """
    messages = ([{"role": "system", "content": system}] if system else []) + [
        {"role": "user", "content": question}
    ]
    body = {
        "model": model,
        "messages": messages,
        "stream": True,
        "temperature": 0,
        "max_tokens": max_tokens,
        "stream_options": {"include_usage": True},
    }
    started = time.monotonic()
    first: float | None = None
    text, done = "", False
    usage: dict[str, Any] = {}
    try:
        with httpx.stream("POST", f"{base_url}/v1/chat/completions", json=body, timeout=180) as response:
            if response.status_code != 200:
                raise DemoError(
                    f"the gateway answered HTTP {response.status_code}: {response.read().decode()[:500]}"
                )
            endpoint = response.headers.get("x-millpond-endpoint", "")
            for line in response.iter_lines():
                done = done or line == "data: [DONE]"
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise DemoError(f"the stream broke: {event['error'].get('message')}")
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    if piece := choice["delta"].get("content"):
                        first = first if first is not None else time.monotonic() - started
                        text += piece
                        print(piece, end="", flush=True) if show else None
    except httpx.HTTPError as error:
        raise DemoError(f"the gateway did not answer: {error}") from error
    print(flush=True) if show else None
    if not done or first is None:
        raise DemoError("the stream ended without [DONE]")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return Answer(text, usage.get("prompt_tokens", 0), cached, first, endpoint)
