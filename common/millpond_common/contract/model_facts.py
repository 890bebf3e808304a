"""What the fetch step tells about a model's size, so that the operator can judge memory before an engine is started.

It travels twice: as a line of the step's log as soon as it is known (`fetch: model {…}`), and in the step's termination
message (`{"reason": "Fetched", "message": …, "model": {…}}`), which stays in the pod's status.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

LINE_PREFIX = "model "
"""Begins the log line, after the step's own `fetch: `."""
FETCHED = "Fetched"
"""Reason of the termination message of a fetch that succeeded."""

WeightType = Literal["BFloat16", "Float16", "Float32"]
BYTES = {"BFloat16": 2, "Float16": 2, "Float32": 4}
"""Bytes of one number."""


class ModelFacts(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """Sizes of a decoder-only transformer. All are positive: what is not known is not told."""

    num_parameters: int
    """Numbers in all weights."""
    dtype: WeightType
    """Type the weights were published in; quantized files count as BFloat16, which they are expanded to."""
    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_model_tokens: int
    """Longest sequence the model was made for."""


def dump_facts(facts: ModelFacts) -> str:
    """One line of JSON."""
    return msgspec.json.encode(facts).decode()


def parse_facts(data: Any) -> ModelFacts | None:
    """Read facts from JSON text or its decoded form; None when they are absent, damaged or not all positive."""
    try:
        facts = (
            msgspec.json.decode(data, type=ModelFacts)
            if isinstance(data, str)
            else msgspec.convert(data, ModelFacts)
        )
    except (msgspec.DecodeError, msgspec.ValidationError):
        return None
    numbers = (
        facts.num_parameters,
        facts.num_layers,
        facts.num_kv_heads,
        facts.head_dim,
        facts.max_model_tokens,
    )
    return facts if min(numbers) > 0 else None


def read_termination(message: str) -> ModelFacts | None:
    """Facts in a termination message of the fetch step; None for any other message."""
    try:
        told = msgspec.json.decode(message)
    except msgspec.DecodeError:
        return None
    if not isinstance(told, dict) or told.get("reason") != FETCHED:
        return None
    return parse_facts(told.get("model"))
