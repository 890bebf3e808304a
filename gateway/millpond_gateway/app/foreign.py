"""What an engine that is not ours tells of itself: vLLM's metrics, and the list of models that others have too. Pure.

The load they report is not used: it is older than the gateway's own count of what it sent.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

_CACHE: Final = re.compile(r"^vllm:cache_config_info\{([^}]*)\}", re.MULTILINE)
_LABEL: Final = re.compile(r'(\w+)="([^"]*)"')
_START: Final = re.compile(r"^process_start_time_seconds ([0-9.e+]+)$", re.MULTILINE)


class ForeignFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What was told; None for everything else."""

    epoch: str | None = None
    """When its process started: another value is another life of the engine."""
    block_tokens: int | None = None
    num_blocks: int | None = None
    max_model_tokens: int | None = None


class _Model(msgspec.Struct):
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model] = []


def read_foreign(metrics: str, models: bytes) -> ForeignFacts:
    """Facts from a page of metrics and an answer of `/v1/models`; what is unreadable is left out."""
    cache = _CACHE.search(metrics)
    labels = dict(_LABEL.findall(cache[1])) if cache else {}
    start = _START.search(metrics)
    block_tokens, num_blocks = _count(labels.get("block_size")), _count(labels.get("num_gpu_blocks"))
    return ForeignFacts(
        epoch=f"start-{start[1]}" if start else None,
        block_tokens=block_tokens,
        num_blocks=num_blocks,
        max_model_tokens=_find_limit(models),
    )


def _find_limit(models: bytes) -> int | None:
    try:
        read = msgspec.json.decode(models, type=_Models)
    except msgspec.MsgspecError:
        return None
    return min((model.max_model_len for model in read.data if model.max_model_len), default=None)


def _count(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() and int(text) > 0 else None
