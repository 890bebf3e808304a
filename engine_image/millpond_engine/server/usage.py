"""Token counts of a call: the prompt once whatever `n`, cached tokens exactly, completions summed."""

from __future__ import annotations

from typing import Any


def make_usage(*, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """The `usage` object; `cached_tokens` is always there."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
