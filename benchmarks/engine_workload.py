"""The workload that engines are compared on: the same prompts and limits for each of them, from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

KINDS = ("output", "stream", "prefill")
"""Many requests at once, one alone, long prompts."""
NUM_REQUESTS = 64
LONG_PROMPT_TOKENS = 1500
STREAM_PROMPT_TOKENS = 64
STREAM_OUTPUT_TOKENS = 96
_FIRST_WORD, _LAST_WORD = 17, 49_000
"""Ordinary tokens of SmolLM2's vocabulary."""


@dataclass(frozen=True)
class Work:
    """One request: its prompt, and how many tokens to generate, end tokens ignored, greedy."""

    prompt: tuple[int, ...]
    output_tokens: int


def make_works(kind: str, seed: int, num_requests: int) -> list[Work]:
    """The requests of one kind of workload."""
    if kind == "output":
        return make_batch(seed, num_requests)
    return make_stream(seed) if kind == "stream" else make_prefills(seed)


def count_tokens(kind: str, works: list[Work]) -> int:
    """The tokens whose rate a kind of workload is about: all output, output after the first token, prompts."""
    if kind == "prefill":
        return sum(len(work.prompt) for work in works)
    return sum(work.output_tokens for work in works) - (kind == "stream")


def make_batch(seed: int, num_requests: int = NUM_REQUESTS) -> list[Work]:
    """Requests that arrive at once: prompts of 64 to 256 tokens, 32 to 160 output tokens."""
    rng = random.Random(seed)
    return [Work(make_prompt(rng, rng.randint(64, 256)), rng.randint(32, 160)) for _ in range(num_requests)]


def make_stream(seed: int) -> list[Work]:
    """One request alone."""
    return [Work(make_prompt(random.Random(seed), STREAM_PROMPT_TOKENS), STREAM_OUTPUT_TOKENS)]


def make_prefills(seed: int, count: int = 4) -> list[Work]:
    """Long prompts, one output token each."""
    rng = random.Random(seed)
    return [Work(make_prompt(rng, LONG_PROMPT_TOKENS), 1) for _ in range(count)]


def make_prompt(rng: random.Random, length: int) -> tuple[int, ...]:
    """Random ordinary tokens."""
    return tuple(rng.randrange(_FIRST_WORD, _LAST_WORD) for _ in range(length))
