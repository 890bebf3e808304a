"""Rotary position embedding: inverse frequencies of every scaling variant, and the table of cosines and sines.

Su et al., "RoFormer" (2021); NTK-aware scaling; Peng et al., "YaRN" (2023); Llama 3.1's wavelength bands.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from millpond_engine.model.errors import UnsupportedModelError
from millpond_engine.model.fields import Fields


@dataclass(frozen=True, slots=True)
class RopeSettings:
    """Base and scaling of the rotation."""

    theta: float = 10_000.0
    kind: str = "default"
    """default, linear, dynamic, yarn or llama3."""
    factor: float = 1.0
    original_context_tokens: int = 0
    """Context of the pre-training, where the variant needs it; 0 when unknown."""
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def scaled_context(self, context_tokens: int) -> int:
        """The longest sequence: linear, dynamic and yarn stretch a context that names only the original."""
        if self.kind in {"linear", "dynamic"} and self.factor > 1.0:
            return int(context_tokens * self.factor)
        if self.kind == "yarn" and self.original_context_tokens in {0, context_tokens}:
            return int(context_tokens * self.factor)
        return context_tokens


_KINDS = {"default", "linear", "dynamic", "yarn", "llama3"}


def rope_from_hf(data: Mapping[str, Any]) -> RopeSettings:
    """Read `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before).

    Raises:
        UnsupportedModelError: an unknown variant.
    """
    nested = data.get("rope_parameters") or data.get("rope_scaling") or {}
    if not isinstance(nested, Mapping) or any(isinstance(value, Mapping) for value in nested.values()):
        raise UnsupportedModelError("config.json: rope scaling that is not one set of names and numbers")
    own, outer = Fields(nested, "config.json: rope scaling"), Fields(data, "config.json")
    kind = str(nested.get("rope_type") or nested.get("type") or "default")
    if kind not in _KINDS:
        raise UnsupportedModelError(
            f"rope scaling {kind!r} is not supported; supported: {', '.join(sorted(_KINDS))}"
        )
    if own.number("partial_rotary_factor", outer.number("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedModelError("partial rotary embeddings are not supported")
    original = outer.count("original_max_position_embeddings", outer.count("max_position_embeddings", 0))
    return RopeSettings(
        theta=own.number("rope_theta", outer.number("rope_theta", 10_000.0)) or 10_000.0,
        kind=kind,
        factor=own.number("factor", 1.0) or 1.0,
        original_context_tokens=own.count("original_max_position_embeddings", original),
        low_frequency_factor=own.number("low_freq_factor", 1.0) or 1.0,
        high_frequency_factor=own.number("high_freq_factor", 4.0) or 4.0,
        beta_fast=own.number("beta_fast", 32.0) or 32.0,
        beta_slow=own.number("beta_slow", 1.0) or 1.0,
        attention_factor=own.number("attention_factor", -1.0) if nested.get("attention_factor") else None,
        mscale=own.number("mscale", 0.0),
        mscale_all_dim=own.number("mscale_all_dim", 0.0),
        truncate=bool(nested.get("truncate", True)),
    )


def rope_from_gguf(fields: Mapping[str, Any], arch: str) -> RopeSettings:
    """Read the `rope` keys of GGUF; Llama 3 bands come as the tensor `rope_freqs.weight` instead.

    Raises:
        UnsupportedModelError: an unknown variant.
    """
    kind = str(fields.get(f"{arch}.rope.scaling.type") or "default").lower()
    kind = "default" if kind == "none" else kind
    if kind not in _KINDS:
        raise UnsupportedModelError(
            f"rope scaling {kind!r} is not supported; supported: {', '.join(sorted(_KINDS))}"
        )
    known = Fields(fields, "the GGUF metadata")
    context = known.count(f"{arch}.context_length", 0)
    return RopeSettings(
        theta=known.number(f"{arch}.rope.freq_base", 10_000.0) or 10_000.0,
        kind=kind,
        factor=known.number(f"{arch}.rope.scaling.factor", 1.0) or 1.0,
        original_context_tokens=known.count(f"{arch}.rope.scaling.original_context_length", context),
    )


def compute_inverse_frequencies(
    settings: RopeSettings, head_dim: int, max_tokens: int, divisors: torch.Tensor | None = None
) -> tuple[torch.Tensor, float]:
    """Inverse frequencies `[head_dim / 2]` in float32, and the factor on cosines and sines.

    `max_tokens` is the longest sequence this engine will run. Keys stay in the cache across steps,
    so the dynamic variant is fixed at that length instead of growing with each sequence.
    `divisors` are frequencies' own factors `[head_dim / 2]`, as GGUF files of Llama 3 carry them.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / settings.theta**exponents
    if divisors is not None:
        return plain / divisors, 1.0
    if settings.kind == "linear":
        return plain / settings.factor, 1.0
    if settings.kind == "dynamic":
        return 1.0 / _dynamic_theta(settings, head_dim, max_tokens) ** exponents, 1.0
    if settings.kind == "llama3":
        return _llama3(settings, plain), 1.0
    if settings.kind == "yarn":
        return _yarn(settings, plain, head_dim)
    return plain, 1.0


def make_rope_table(inverse: torch.Tensor, factor: float, max_tokens: int) -> torch.Tensor:
    """Cosines and sines `[max_tokens, 2, head_dim / 2]` in float32."""
    angles = torch.outer(torch.arange(max_tokens, dtype=torch.float32), inverse)
    return torch.stack((angles.cos(), angles.sin()), dim=1).mul_(factor).contiguous()


def _dynamic_theta(settings: RopeSettings, head_dim: int, max_tokens: int) -> float:
    original = settings.original_context_tokens or max_tokens
    if max_tokens <= original:
        return settings.theta
    stretch = settings.factor * max_tokens / original - (settings.factor - 1.0)
    return float(settings.theta * stretch ** (head_dim / (head_dim - 2)))


def _llama3(settings: RopeSettings, plain: torch.Tensor) -> torch.Tensor:
    """Leave short wavelengths, divide long ones, blend between the two bands."""
    wavelength = 2 * math.pi / plain
    low, high = settings.low_frequency_factor, settings.high_frequency_factor
    blend = ((settings.original_context_tokens / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * plain / settings.factor + blend * plain


def _yarn(settings: RopeSettings, plain: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, float]:
    """Interpolate slow dimensions, keep fast ones, ramp between; temper attention by the factor."""
    low, high = (
        _yarn_dimension(settings, head_dim, beta) for beta in (settings.beta_fast, settings.beta_slow)
    )
    if settings.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    inverse = plain / settings.factor * ramp + plain * (1 - ramp)
    return inverse, _yarn_attention_factor(settings)


def _yarn_dimension(settings: RopeSettings, head_dim: int, rotations: float) -> float:
    """The dimension that makes `rotations` full turns over the original context."""
    context = settings.original_context_tokens
    return head_dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(settings.theta))


def _yarn_attention_factor(settings: RopeSettings) -> float:
    if settings.attention_factor is not None:
        return settings.attention_factor

    def temper(mscale: float) -> float:
        return 1.0 if settings.factor <= 1 else 0.1 * mscale * math.log(settings.factor) + 1.0

    if settings.mscale and settings.mscale_all_dim:
        return temper(settings.mscale) / temper(settings.mscale_all_dim)
    return temper(1.0)
