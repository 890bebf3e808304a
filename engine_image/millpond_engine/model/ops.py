"""What a model asks of the machine: a handful of operations behind a protocol, so that one model runs on every device."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Ops(Protocol):
    """Operations over one flattened batch of tokens; every `x` is `[num_tokens, width]`."""

    def pack(self, weight: torch.Tensor) -> Any:
        """Bring a `[outputs, inputs]` matrix into the form that `linear` reads fastest; may take it over."""
        ...

    def linear(self, x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
        """`x @ weight.T + bias`."""
        ...

    def embed(self, tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Rows of the table, `[num_tokens, hidden]`."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Root-mean-square norm over the last dimension, accumulated in float32."""
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add `x` to `residual` in place, and return its norm."""
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`silu(gate) * up` for `[num_tokens, 2 * width]` holding both side by side."""
        ...


class Attend(Protocol):
    """Paged attention of one step: the caller has bound rows, tables, cache and rotation."""

    def __call__(
        self, layer: int, qkv: torch.Tensor, head_norms: tuple[torch.Tensor, torch.Tensor] | None
    ) -> torch.Tensor:
        """Normalize heads if asked, rotate, write keys and values, attend; returns `[num_tokens, query_size]`."""
        ...
