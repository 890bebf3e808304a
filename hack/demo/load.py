"""Streams under load, each judged: complete, explicitly failed, lost, duplicated or falsely completed.

Every request asks for an exact number of tokens with greedy sampling, so a stream can be checked
to the last chunk: the text of one prompt is always the same, whoever serves it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import httpx

MAX_WAIT_SECONDS = 30.0
"""The longest a stream waits before it comes back, whatever it was told."""


class Verdict(StrEnum):
    """How one stream ended."""

    COMPLETE = "complete"
    FAILED = "failed"
    """An explicit error: an HTTP status or an error event."""
    LOST = "lost"
    """Ended without [DONE] and without an error."""
    FALSE = "falsely completed"
    """[DONE] although tokens are missing or differ."""
    DUPLICATED = "duplicated"
    """More tokens than were asked for."""


@dataclass(frozen=True, slots=True)
class StreamResult:
    """One judged stream."""

    verdict: Verdict
    prompt: str
    text: str
    seconds: float
    first_token_seconds: float | None
    cached_tokens: int
    detail: str = ""
    retry_after_seconds: float | None = None
    """Set when the request was refused before its first byte and told when to come back."""


@dataclass(slots=True)
class Tally:
    """Counts over many streams, and the first detail of each bad kind."""

    counts: Counter[Verdict] = field(default_factory=Counter)
    details: dict[Verdict, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    """First complete text of each prompt: the others must equal it."""
    first_token_seconds: list[float] = field(default_factory=list)
    num_waits: int = 0
    """How often a stream was told to come back later, and did."""

    def add(self, result: StreamResult) -> None:
        """Count one stream; a complete one whose text differs from its twins is a false completion."""
        verdict = result.verdict
        detail = result.detail
        if verdict is Verdict.COMPLETE and self.texts.setdefault(result.prompt, result.text) != result.text:
            verdict, detail = Verdict.FALSE, "text differs from an earlier stream of the same prompt"
        self.counts[verdict] += 1
        self.details.setdefault(verdict, detail)
        if result.first_token_seconds is not None:
            self.first_token_seconds.append(result.first_token_seconds)

    @property
    def total(self) -> int:
        """Streams judged so far."""
        return self.counts.total()

    def __str__(self) -> str:
        """All counts, zeros included, so that "lost = 0" can be read off."""
        return ", ".join(f"{verdict.value} = {self.counts[verdict]}" for verdict in Verdict)


def make_body(model: str, prompt: str, tokens: int) -> dict[str, object]:
    """Chat request for exactly `tokens` greedy tokens."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def stream_once(client: httpx.AsyncClient, *, model: str, prompt: str, tokens: int) -> StreamResult:
    """Run one stream to its end and judge it. Never raises for what a server can do wrong."""
    started = time.monotonic()
    reading = _Reading()
    try:
        async with client.stream(
            "POST", "/v1/chat/completions", json=make_body(model, prompt, tokens)
        ) as response:
            if response.status_code != 200:
                body = (await response.aread()).decode(errors="replace")
                reading.error = f"HTTP {response.status_code}: {body[:200]}"
                reading.retry_after = read_retry_after(response)
            else:
                async for line in response.aiter_lines():
                    reading.take(line, time.monotonic() - started)
    except httpx.HTTPError as error:
        reading.broken = f"{type(error).__name__}: {error}"
    verdict, detail = reading.judge(tokens)
    elapsed = time.monotonic() - started
    return StreamResult(
        verdict, prompt, reading.text, elapsed, reading.first, reading.cached, detail, reading.retry_after
    )


def read_retry_after(response: httpx.Response) -> float | None:
    """Seconds after which an overloaded server wants the request again, if it said so."""
    told = response.headers.get("retry-after", "")
    return float(told) if response.status_code in {429, 503} and told.isdecimal() else None


@dataclass(slots=True)
class _Reading:
    """What one stream has said so far."""

    text: str = ""
    first: float | None = None
    completion: int | None = None
    cached: int = 0
    done: bool = False
    error: str = ""
    broken: str = ""
    retry_after: float | None = None

    def take(self, line: str, elapsed: float) -> None:
        if not line.startswith("data: "):
            return
        if line == "data: [DONE]":
            self.done = True
            return
        event = json.loads(line[6:])
        if "error" in event:
            self.error = str(event["error"].get("message", event["error"]))
            return
        for choice in event.get("choices", ()):
            content = choice.get("delta", {}).get("content") or ""
            if content and self.first is None:
                self.first = elapsed
            self.text += content
        if usage := event.get("usage"):
            self.completion = usage["completion_tokens"]
            self.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)

    def judge(self, tokens: int) -> tuple[Verdict, str]:
        if self.error:
            return Verdict.FAILED, self.error
        if not self.done:
            return Verdict.LOST, self.broken or "the stream ended without [DONE] and without an error"
        if self.completion == tokens:
            return Verdict.COMPLETE, ""
        kind = Verdict.DUPLICATED if (self.completion or 0) > tokens else Verdict.FALSE
        return kind, f"{self.completion} of {tokens} tokens"


async def run_load(
    base_url: str,
    *,
    model: str,
    prompts: Sequence[str],
    tokens: int,
    concurrency: int,
    stop: asyncio.Event,
    limit: int = 100_000,
    tally: Tally | None = None,
    timeout_seconds: float = 600,
    patience: int = 0,
) -> Tally:
    """Keep `concurrency` streams open over the prompts in turn until `stop` is set or `limit` streams have begun.

    A stream that is told to come back later does so up to `patience` times, as OpenAI's own clients do.
    """
    tally = tally or Tally()
    begun = iter(range(limit))
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    async with httpx.AsyncClient(base_url=base_url, timeout=timeout_seconds, limits=limits) as client:

        async def worker() -> None:
            while not stop.is_set() and (number := next(begun, None)) is not None:
                prompt = prompts[number % len(prompts)]
                result = await stream_once(client, model=model, prompt=prompt, tokens=tokens)
                for _ in range(patience):
                    if result.retry_after_seconds is None:
                        break
                    tally.num_waits += 1
                    await asyncio.sleep(min(result.retry_after_seconds, MAX_WAIT_SECONDS))
                    result = await stream_once(client, model=model, prompt=prompt, tokens=tokens)
                tally.add(result)

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(worker())
    return tally
