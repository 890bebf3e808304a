"""What a model asks of the machine: a handful of operations behind a protocol, so that one model runs on every device."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Ops(Protocol):
    """Operations over one flattened batch of tokens; every `x` is `[num_tokens, width]`.

    Weights pass through `pack`, `pack_gated` or `vector` once, at load, and come back in the form that
    the other calls read. Results may lie in memory that the next call of the same kind overwrites.
    """

    def pack(self, weight: torch.Tensor) -> Any:
        """Prepare a matrix `[outputs, inputs]`."""
        ...

    def pack_gated(self, weight: torch.Tensor) -> Any:
        """Prepare gates above ups, `[2 * width, inputs]`, for `gated`."""
        ...

    def vector(self, weight: torch.Tensor) -> torch.Tensor:
        """Prepare a norm's weight or a bias."""
        ...

    def embed(self, tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Rows of the table as a new residual stream, `[num_tokens, hidden]`."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Root-mean-square norm over the last dimension, accumulated in float32."""
        ...

    def linear(self, x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
        """`x @ weight.T + bias`."""
        ...

    def linear_add(self, x: torch.Tensor, weight: Any, residual: torch.Tensor) -> None:
        """Add `x @ weight.T` to the residual stream; seen by the stream's next `rms_norm` or `select` at the latest."""
        ...

    def partial(self, x: torch.Tensor, weight: Any) -> torch.Tensor:
        """`x @ weight.T` for a sum over ranks: in float32 where the stream is, in memory that may be written."""
        ...

    def add(self, product: torch.Tensor, residual: torch.Tensor) -> None:
        """Add a product to the residual stream, like `linear_add` one that was computed before."""
        ...

    def select(self, residual: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Some tokens of the residual stream as a new one, by their indices."""
        ...

    def gated(self, x: torch.Tensor, weight: Any) -> torch.Tensor:
        """`silu(gate) * up` of the two halves of `x @ weight.T`."""
        ...

    def scores(self, x: torch.Tensor, weight: Any) -> torch.Tensor:
        """`x @ weight.T` in float32."""
        ...

    def argmax(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Largest value and its index in each row; NaN where a row holds one."""
        ...


class Attend(Protocol):
    """Paged attention of one step: the caller has bound rows, tables, cache and rotation."""

    def __call__(
        self, layer: int, qkv: torch.Tensor, head_norms: tuple[torch.Tensor, torch.Tensor] | None
    ) -> torch.Tensor:
        """Normalize heads if asked, rotate, write keys and values, attend; returns `[num_tokens, query_size]`."""
        ...
