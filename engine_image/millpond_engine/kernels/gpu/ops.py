"""A model's operations on a GPU: products by the vendor's library, everything between them by our programs."""

from __future__ import annotations

import torch
from torch.nn import functional

from millpond_engine.kernels.gpu import launch as launcher
from millpond_engine.kernels.gpu.configs import pad, row_options
from millpond_engine.kernels.gpu.device import norms
from millpond_engine.kernels.gpu.launch import LaunchOptions
from millpond_engine.kernels.gpu.sampling import choose

_GATE_BLOCK = 1024


class GpuOps:
    """Operations over a flattened batch.

    The residual stream is float32. `linear_add` leaves its product aside: the norm that follows adds it and norms
    in one pass over the stream, so the stream is up to date only after the next `rms_norm` of it. Not thread-safe.
    """

    def __init__(self) -> None:
        self._pending: tuple[torch.Tensor, torch.Tensor] | None = None

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        return weight

    def pack_gated(self, weight: torch.Tensor) -> torch.Tensor:
        return weight

    def vector(self, weight: torch.Tensor) -> torch.Tensor:
        return weight

    def embed(self, tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        self._pending = None
        return functional.embedding(tokens, table).float()

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        delta = self._take_pending(x)
        out = torch.empty(x.shape, dtype=weight.dtype, device=x.device)
        width = x.shape[1]
        launcher.launch(
            norms.add_rms_norm,
            (x.shape[0],),
            x,
            x if delta is None else delta,
            weight,
            out,
            eps,
            WIDTH=width,
            BLOCK=pad(width),
            ADD=delta is not None,
            options=row_options(pad(width)),
        )
        return out

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return functional.linear(x, weight, bias)

    def linear_add(self, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> None:
        self.add(self.partial(x, weight), residual)

    def partial(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, weight)

    def add(self, product: torch.Tensor, residual: torch.Tensor) -> None:
        assert self._pending is None, "a norm comes between two additions to the stream"
        self._pending = (residual, product)

    def select(self, residual: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        delta = self._take_pending(residual)
        chosen = residual.index_select(0, wanted)
        if delta is not None:
            self._pending = (chosen, delta.index_select(0, wanted))
        return chosen

    def gated(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        both = functional.linear(x, weight)
        width = both.shape[1] // 2
        out = torch.empty((both.shape[0], width), dtype=both.dtype, device=both.device)
        grid = (both.shape[0], -(-width // _GATE_BLOCK))
        options = LaunchOptions(num_warps=4)
        launcher.launch(norms.silu_mul, grid, both, out, WIDTH=width, BLOCK=_GATE_BLOCK, options=options)
        return out

    def scores(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.float32:
            return functional.linear(x, weight)
        if x.is_cuda and torch.version.hip is None:  # accumulated in float32 and never rounded to 16 bits
            return torch.mm(x, weight.t(), out_dtype=torch.float32)
        return functional.linear(x, weight).float()

    def argmax(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return choose(scores)

    def _take_pending(self, residual: torch.Tensor) -> torch.Tensor | None:
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        assert pending[0] is residual, "what was added to one stream is read from another"
        return pending[1]
