"""What a request costs its tenant by the pool's price list."""

from __future__ import annotations

from typing import Final

from millpond_gateway.routing.records import Usage
from millpond_gateway.world.records import PoolPricing

_MILLION: Final = 1_000_000


def compute_cost(usage: Usage, pricing: PoolPricing) -> float:
    """Cost in the price list's currency; tokens found in a cache have their own price."""
    cached = min(usage.cached_tokens or 0, usage.prompt_tokens)
    return (
        (usage.prompt_tokens - cached) * pricing.input_per_million
        + cached * pricing.cached_input_per_million
        + usage.output_tokens * pricing.output_per_million
    ) / _MILLION
