"""Compiled paged attention against plain torch, over shapes that do not divide evenly, in poisoned memory."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

from millpond_engine.kernels.cpu.build import VARIANTS, runs
from millpond_engine.kernels.cpu.library import CpuLibrary, load_library
from millpond_engine.kernels.cpu.ops import CpuAttention, supports
from millpond_engine.kernels.inputs import AttentionShape, StepInputs
from millpond_engine.kernels.reference import ReferenceAttention

TOLERANCE = {torch.float32: {"atol": 2e-5, "rtol": 2e-5}, torch.bfloat16: {"atol": 2e-2, "rtol": 2e-2}}


@pytest.fixture(scope="module", params=[v for v in VARIANTS if runs(v)], ids=lambda variant: variant.name)
def library(request: pytest.FixtureRequest) -> CpuLibrary:
    return load_library(request.param)


class World:
    """One cache per implementation, tables with blocks in random order, everything else NaN."""

    def __init__(
        self, library: CpuLibrary, shape: AttentionShape, dtype: torch.dtype, rows: int, longest: int
    ) -> None:
        per_row = -(-longest // shape.block_tokens)
        rope = torch.rand(longest, 2, shape.head_dim // 2) * 2 - 1
        caches = [torch.full(shape.cache_shape(rows * per_row), float("nan"), dtype=dtype) for _ in range(2)]
        self.ours = CpuAttention(library, shape, caches[0], rope)
        self.oracle = ReferenceAttention(shape, caches[1], rope)
        self.tables = torch.randperm(rows * per_row).reshape(rows, per_row).to(torch.int32)
        self.shape, self.dtype = shape, dtype

    def compare(self, spans: list[tuple[int, int, int]], norms: Any = None, layer: int = 1) -> None:
        """Run one step of (row, start, count) on both; outputs must agree."""
        counts = [count for _, _, count in spans]
        inputs = StepInputs(
            rows=torch.tensor([row for row, _, _ in spans], dtype=torch.int32),
            starts=torch.tensor([start for _, start, _ in spans], dtype=torch.int32),
            query_offsets=torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32),
            positions=torch.cat([torch.arange(start, start + count) for _, start, count in spans]),
            block_tables=self.tables,
            num_tokens=sum(counts),
        )
        qkv = torch.randn(sum(counts), self.shape.qkv_size).to(self.dtype)
        self.ours.bind(inputs)
        self.oracle.bind(inputs)
        expected = self.oracle(layer, qkv.clone(), norms and tuple(norm.to(self.dtype) for norm in norms))
        found = self.ours(layer, qkv.to(self.ours.input_dtype, copy=True), norms)
        assert torch.isfinite(found.float()).all()
        torch.testing.assert_close(found.float(), expected.float(), **TOLERANCE[self.dtype])


def _shape(heads: int, kv_heads: int, head_dim: int, block: int) -> AttentionShape:
    return AttentionShape(2, heads, kv_heads, head_dim, block, norm_eps=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block"),
    [(9, 3, 64, 16), (4, 4, 32, 16), (8, 1, 128, 32), (26, 2, 96, 48), (2, 1, 256, 16)],
)
def test_attention_equals_torch_over_uneven_lengths(
    library: CpuLibrary, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, block: int
) -> None:
    torch.manual_seed(5)
    lengths = [1, 2, block - 1, block, block + 1, 2 * block - 1, 2 * block, 97]
    world = World(library, _shape(heads, kv_heads, head_dim, block), dtype, len(lengths), 140)
    world.compare([(row, 0, length) for row, length in enumerate(lengths)])
    world.compare([(row, length, 1) for row, length in enumerate(lengths)])
    later = [(row, length + 1, 1 + row % 3 * 7) for row, length in enumerate(lengths)]
    world.compare(random.Random(2).sample(later, 5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_norms_are_applied_before_the_rotation(library: CpuLibrary, dtype: torch.dtype) -> None:
    world = World(library, _shape(4, 2, 64, 16), dtype, 2, 60)
    norms = (torch.rand(64) + 0.5, torch.rand(64) + 0.5)
    world.compare([(0, 0, 20), (1, 0, 33)], norms)
    world.compare([(1, 33, 1), (0, 20, 4)], norms)


def test_a_position_does_not_depend_on_how_its_prompt_was_cut(library: CpuLibrary) -> None:
    shape = _shape(6, 2, 64, 16)
    rope = torch.rand(80, 2, 32)
    qkv = torch.randn(77, shape.qkv_size).to(torch.bfloat16)
    tables = torch.randperm(5).reshape(1, 5).to(torch.int32)
    results = []
    for cuts in ([0, 77], [0, 1, 17, 32, 40, 77], list(range(78))):
        attention = CpuAttention(
            library, shape, torch.zeros(shape.cache_shape(5), dtype=torch.bfloat16), rope
        )
        parts = []
        for start, end in itertools.pairwise(cuts):
            one = torch.tensor([start], dtype=torch.int32)
            offsets = torch.tensor([0, end - start], dtype=torch.int32)
            attention.bind(
                StepInputs(
                    torch.zeros(1, dtype=torch.int32),
                    one,
                    offsets,
                    torch.arange(start, end),
                    tables,
                    end - start,
                )
            )
            part = qkv[start:end].to(attention.input_dtype, copy=True)
            parts.append(attention(0, part, None).clone())
        results.append(torch.cat(parts))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_a_nan_in_the_context_shows_in_the_output(library: CpuLibrary) -> None:
    shape = _shape(3, 1, 64, 16)
    cache = torch.zeros(shape.cache_shape(2), dtype=torch.bfloat16)
    attention = CpuAttention(library, shape, cache, torch.rand(32, 2, 32))
    cache[0] = float("nan")
    one = torch.tensor([20], dtype=torch.int32)
    offsets, rows = torch.tensor([0, 1], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    attention.bind(
        StepInputs(rows, one, offsets, torch.tensor([20]), torch.tensor([[0, 1]], dtype=torch.int32), 1)
    )
    qkv = torch.randn(1, shape.qkv_size).to(attention.input_dtype)
    assert torch.isnan(attention(0, qkv, None).float()).all()


def test_shapes_outside_the_kernels_are_told() -> None:
    assert supports(_shape(9, 3, 64, 16), (576, 1536), torch.bfloat16)
    assert not supports(_shape(9, 3, 72, 16), (576, 1536), torch.bfloat16)
    assert not supports(_shape(9, 3, 64, 8), (576, 1536), torch.bfloat16)
    assert not supports(_shape(9, 3, 64, 16), (577, 1536), torch.bfloat16)
    assert not supports(_shape(9, 3, 64, 16), (576, 1536), torch.float16)
