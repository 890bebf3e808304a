"""Paged attention of a model on a GPU: rotation with cache write, then decodes and chunks, each by its own program."""

from __future__ import annotations

import math

import torch

from millpond_engine.kernels.gpu import launch as launcher
from millpond_engine.kernels.gpu.configs import (
    GATHER_BLOCK,
    MAX_SEGMENTS,
    SEGMENT_TOKENS,
    Architecture,
    AttentionConfig,
    choose_chunk_config,
    decode_config,
    pad,
    segments_per_program,
)
from millpond_engine.kernels.gpu.device import attention as programs
from millpond_engine.kernels.gpu.device import rotary, step
from millpond_engine.kernels.gpu.launch import LaunchOptions
from millpond_engine.kernels.inputs import AttentionShape, StepInputs


class GpuAttention:
    """Paged attention over the cache of one device.

    Rows counted by `StepInputs.num_decodes` run with split KV whatever else is in the batch, so that their numbers
    do not depend on it.
    """

    def __init__(
        self,
        shape: AttentionShape,
        cache: torch.Tensor,
        rope_table: torch.Tensor,
        *,
        max_decodes: int,
        arch: Architecture,
    ) -> None:
        """Keep views of the cache and scratch for `max_decodes` rows of split contexts."""
        self._shape = shape
        self._rope = rope_table
        self._layers = [(cache[:, layer, 0], cache[:, layer, 1]) for layer in range(shape.num_layers)]
        self._arch = arch
        self._dtype = cache.dtype
        self._decode = decode_config(shape, cache.dtype, arch=arch)
        self._scale = shape.head_dim**-0.5 * math.log2(math.e)
        cells = (max_decodes, shape.num_heads, MAX_SEGMENTS)
        self._partial = torch.empty((*cells, shape.head_dim), dtype=torch.float32, device=cache.device)
        self._stats = torch.empty((*cells, 2), dtype=torch.float32, device=cache.device)
        self._inputs: StepInputs | None = None
        self._slots = torch.empty(0, dtype=torch.int32, device=cache.device)

    def bind(self, inputs: StepInputs) -> None:
        shape, self._inputs = self._shape, inputs
        self._slots = torch.empty(inputs.num_tokens, dtype=torch.int32, device=inputs.positions.device)
        launcher.launch(
            step.find_slots,
            (-(-inputs.num_tokens // GATHER_BLOCK),),
            inputs.rows,
            inputs.query_offsets,
            inputs.positions,
            inputs.block_tables,
            self._slots,
            inputs.rows.shape[0],
            inputs.num_tokens,
            TABLE_STRIDE=inputs.block_tables.stride(0),
            BLOCK_TOKENS=shape.block_tokens,
            BLOCK=GATHER_BLOCK,
            options=LaunchOptions(num_warps=4),
        )

    def __call__(
        self, layer: int, qkv: torch.Tensor, head_norms: tuple[torch.Tensor, torch.Tensor] | None
    ) -> torch.Tensor:
        assert self._inputs is not None
        shape, inputs = self._shape, self._inputs
        keys, values = self._layers[layer]
        self._rotate(qkv, keys, values, head_norms)
        out = torch.empty(
            (qkv.shape[0], shape.num_heads * shape.head_dim), dtype=qkv.dtype, device=qkv.device
        )
        if inputs.num_decodes:
            self._attend_decodes(qkv, out, keys, values)
        if inputs.num_decodes < inputs.rows.shape[0]:
            self._attend_chunks(qkv, out, keys, values)
        return out

    def _rotate(
        self,
        qkv: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        head_norms: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:
        assert self._inputs is not None
        shape, norms = self._shape, head_norms or (self._rope, self._rope)
        launcher.launch(
            rotary.rotate_and_store,
            (qkv.shape[0], shape.num_kv_heads),
            qkv,
            self._inputs.positions,
            self._slots,
            self._rope,
            keys,
            values,
            *norms,
            shape.norm_eps,
            GROUP=shape.group,
            GROUP_PAD=pad(shape.group),
            NUM_KV_HEADS=shape.num_kv_heads,
            HEAD_DIM=shape.head_dim,
            HALF_PAD=pad(shape.head_dim // 2),
            BLOCK_TOKENS=shape.block_tokens,
            BLOCK_STRIDE=keys.stride(0),
            NORMS=head_norms is not None,
            options=LaunchOptions(num_warps=rotate_warps(shape)),
        )

    def _attend_decodes(
        self, qkv: torch.Tensor, out: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        assert self._inputs is not None
        shape, inputs, config = self._shape, self._inputs, self._decode
        rows, each = inputs.num_decodes, segments_per_program(inputs.num_decodes, shape.num_kv_heads)
        launcher.launch(
            programs.attend_decodes,
            (rows, shape.num_kv_heads, MAX_SEGMENTS // each),
            qkv,
            out,
            self._partial,
            self._stats,
            keys,
            values,
            inputs.rows,
            inputs.starts,
            inputs.block_tables,
            each,
            self._scale,
            **self._constants(config, keys),
            SEGMENTS=MAX_SEGMENTS,
            SEGMENT_TILES=SEGMENT_TOKENS // config.tile,
            options=config.options,
        )
        launcher.launch(
            programs.merge_segments,
            (rows, shape.num_heads),
            out,
            self._partial,
            self._stats,
            inputs.rows,
            inputs.starts,
            NUM_HEADS=shape.num_heads,
            HEAD_DIM=shape.head_dim,
            DIM_PAD=pad(shape.head_dim),
            TILE=config.tile,
            SEGMENTS=MAX_SEGMENTS,
            SEGMENT_TILES=SEGMENT_TOKENS // config.tile,
            options=LaunchOptions(num_warps=4),
        )

    def _attend_chunks(
        self, qkv: torch.Tensor, out: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        assert self._inputs is not None
        shape, inputs = self._shape, self._inputs
        rows, tokens = inputs.rows.shape[0] - inputs.num_decodes, inputs.num_tokens - inputs.num_decodes
        config = choose_chunk_config(shape, self._dtype, arch=self._arch, tokens=tokens, rows=rows)
        launcher.launch(
            programs.attend_chunks,
            (tokens // (config.block_m // shape.group) + rows, shape.num_kv_heads),
            qkv,
            out,
            keys,
            values,
            inputs.rows,
            inputs.starts,
            inputs.query_offsets,
            inputs.block_tables,
            inputs.rows.shape[0],
            inputs.num_decodes,
            self._scale,
            **self._constants(config, keys),
            options=config.options,
        )

    def _constants(self, config: AttentionConfig, keys: torch.Tensor) -> dict[str, int]:
        assert self._inputs is not None
        shape = self._shape
        return {
            "GROUP": shape.group,
            "NUM_KV_HEADS": shape.num_kv_heads,
            "HEAD_DIM": shape.head_dim,
            "DIM_PAD": max(16, pad(shape.head_dim)),
            "BLOCK_TOKENS": shape.block_tokens,
            "BLOCK_STRIDE": keys.stride(0),
            "TABLE_STRIDE": self._inputs.block_tables.stride(0),
            "BLOCK_M": config.block_m,
            "TILE": config.tile,
        }


def rotate_warps(shape: AttentionShape) -> int:
    """Warps of the rotation: one for each 256 values of a KV head's queries."""
    return min(8, pad(max(1, pad(shape.group) * pad(shape.head_dim // 2) // 256)))


def gather_tokens(
    tokens: torch.Tensor, *, rows: torch.Tensor, starts: torch.Tensor, offsets: torch.Tensor, num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids (int32) and positions (int64) of a step's tokens from the token table `[max_rows, width]` on the device."""
    ids = torch.empty(num_tokens, dtype=torch.int32, device=tokens.device)
    positions = torch.empty(num_tokens, dtype=torch.int64, device=tokens.device)
    launcher.launch(
        step.gather_tokens,
        (-(-num_tokens // GATHER_BLOCK),),
        rows,
        starts,
        offsets,
        tokens,
        ids,
        positions,
        rows.shape[0],
        num_tokens,
        TOKENS_STRIDE=tokens.stride(0),
        BLOCK=GATHER_BLOCK,
        options=LaunchOptions(num_warps=4),
    )
    return ids, positions
