"""Every operation in plain torch: slow, obviously right, the oracle of the kernels and the fallback on any device."""

from __future__ import annotations

import torch
from torch.nn import functional

from millpond_engine.kernels.inputs import AttentionShape, StepInputs


class ReferenceOps:
    """Operations over a flattened batch in plain torch."""

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        return weight

    def pack_gated(self, weight: torch.Tensor) -> torch.Tensor:
        return weight

    def vector(self, weight: torch.Tensor) -> torch.Tensor:
        return weight

    def embed(self, tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return table.index_select(0, tokens)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return weight * (wide * scale).to(x.dtype)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return functional.linear(x, weight, bias)

    def linear_add(self, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> None:
        self.add(self.partial(x, weight), residual)

    def partial(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, weight)

    def add(self, product: torch.Tensor, residual: torch.Tensor) -> None:
        residual.add_(product)

    def select(self, residual: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return residual.index_select(0, wanted)

    def gated(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        gate, up = functional.linear(x, weight).chunk(2, dim=-1)
        return functional.silu(gate) * up

    def scores(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, weight).float()

    def argmax(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        best, index = scores.max(-1)
        return best, index


class ReferenceAttention:
    """Dense attention per sequence, gathered through its block table."""

    def __init__(self, shape: AttentionShape, cache: torch.Tensor, rope_table: torch.Tensor) -> None:
        self._shape = shape
        self._cache = cache
        self._rope_table = rope_table
        self._ops = ReferenceOps()
        self._inputs: StepInputs | None = None
        self._rotation: tuple[torch.Tensor, torch.Tensor] | None = None

    def bind(self, inputs: StepInputs) -> None:
        self._inputs = inputs
        cos, sin = self._rope_table[inputs.positions].unbind(1)
        self._rotation = (cos.unsqueeze(1), sin.unsqueeze(1))
        per_row = (inputs.query_offsets[1:] - inputs.query_offsets[:-1]).long()
        token_rows = inputs.rows.long().repeat_interleave(per_row)
        block_tokens = self._shape.block_tokens
        self._blocks = inputs.block_tables[token_rows, inputs.positions // block_tokens].long()
        self._slots = inputs.positions % block_tokens

    def __call__(
        self, layer: int, qkv: torch.Tensor, head_norms: tuple[torch.Tensor, torch.Tensor] | None
    ) -> torch.Tensor:
        assert self._inputs is not None
        shape, inputs = self._shape, self._inputs
        heads = qkv.view(qkv.shape[0], -1, shape.head_dim)
        q, k, v = torch.split(heads, [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
        if head_norms is not None:
            q = self._ops.rms_norm(q, head_norms[0], shape.norm_eps)
            k = self._ops.rms_norm(k, head_norms[1], shape.norm_eps)
        q, k = self._rotate(q), self._rotate(k)
        keys, values = self._cache[:, layer].unbind(1)
        keys[self._blocks, :, self._slots] = k
        values[self._blocks, :, self._slots] = v
        out = torch.empty_like(q)
        offsets, starts = inputs.query_offsets.tolist(), inputs.starts.tolist()
        for index, row in enumerate(inputs.rows.tolist()):
            first, last = offsets[index], offsets[index + 1]
            context = starts[index] + last - first
            table = inputs.block_tables[row, : -(-context // shape.block_tokens)].long()
            out[first:last] = attend_dense(
                q[first:last], _gather(keys, table, context), _gather(values, table, context)
            )
        return out.reshape(qkv.shape[0], -1)

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        assert self._rotation is not None
        cos, sin = self._rotation
        low, high = x.float().chunk(2, dim=-1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)


def attend_dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention whose last query sees the last key.

    `q` is `[num_queries, num_heads, head_dim]`, `k` and `v` `[context, num_kv_heads, head_dim]`.
    """
    num_queries, context, group = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    scale: float = q.shape[-1] ** -0.5
    q, k, v = q.transpose(0, 1).float(), k.transpose(0, 1).float(), v.transpose(0, 1).float()
    k, v = k.repeat_interleave(group, dim=0), v.repeat_interleave(group, dim=0)
    scores = q @ k.transpose(1, 2) * scale
    positions = torch.arange(context, device=q.device)
    hidden = positions[None, :] > positions[context - num_queries :, None]
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return (weights @ v).transpose(0, 1)


def _gather(cache: torch.Tensor, table: torch.Tensor, context: int) -> torch.Tensor:
    """Slots of one sequence in order, `[context, num_kv_heads, head_dim]`; none beyond the context is touched."""
    blocks = cache[table].transpose(1, 2)
    return blocks.reshape(-1, blocks.shape[2], blocks.shape[3])[:context]
