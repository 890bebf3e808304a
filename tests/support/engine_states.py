"""Engine states for tests, those of an idle engine unless told otherwise."""

from __future__ import annotations

from typing import Any

from millpond_common.contract.engine_state import BlockCounts, EngineState, Speeds


def make_engine_state(
    *,
    in_use: int = 0,
    blocks: int = 1000,
    prefill: float | None = 1000.0,
    decode: float | None = None,
    **changes: Any,
) -> EngineState:
    """An idle engine that has measured its prefill speed."""
    values: dict[str, Any] = {
        "epoch": "0" * 16,
        "model": "smol",
        "phase": "Ready",
        "uptime_seconds": 1000.0,
        "version": "1",
        "block_tokens": 16,
        "device": BlockCounts(free=blocks - in_use, cached=0, in_use=in_use),
        "host": BlockCounts(free=0, cached=0, in_use=0),
        "max_model_tokens": 8192,
        "num_running": 0,
        "num_waiting": 0,
        "running_tokens": 0,
        "waiting_tokens": 0,
        "open_requests": 0,
        "cached_value_tokens": 0,
        "speeds": Speeds(prefill_tokens_per_second=prefill, decode_tokens_per_second=decode),
    }
    return EngineState(**(values | changes))
