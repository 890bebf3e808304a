"""Paged attention, rotation and cache write against plain torch, in poisoned memory."""

from __future__ import annotations

import itertools
import os
import random
from typing import Any

import pytest
import torch

from millpond_engine.kernels.gpu import attention as host
from millpond_engine.kernels.gpu import configs
from millpond_engine.kernels.gpu.attention import GpuAttention
from millpond_engine.kernels.gpu.configs import Architecture
from millpond_engine.kernels.inputs import AttentionShape, StepInputs
from millpond_engine.kernels.reference import ReferenceAttention

WIDE = bool(os.environ.get("MILLPOND_WIDE_SWEEP"))
TOLERANCE = {
    torch.float32: {"atol": 3e-5, "rtol": 3e-5},
    torch.bfloat16: {"atol": 3e-2, "rtol": 2e-2},
    torch.float16: {"atol": 5e-3, "rtol": 5e-3},
}
SHAPES: list[Any] = [
    (3, 1, 64, 32),
    (8, 1, 24, 8),
    *(pytest.param(sizes, marks=pytest.mark.slow) for sizes in ((2, 2, 64, 16), (4, 1, 128, 32))),
]
"""heads, KV heads, head size, block"""
if WIDE:
    SHAPES = [
        (group * kv_heads, kv_heads, head_dim, block)
        for group in (1, 3, 4, 8)
        for kv_heads in (1, 3)
        for head_dim in (64, 80, 128, 256)
        for block in (8, 16, 32, 48)
    ]


class World:
    """One cache per implementation, tables with blocks in random order, everything else NaN."""

    def __init__(self, shape: AttentionShape, dtype: torch.dtype, rows: int, longest: int) -> None:
        per_row = -(-longest // shape.block_tokens)
        rope = torch.rand(longest, 2, shape.head_dim // 2) * 2 - 1
        cache = torch.full(shape.cache_shape(rows * per_row), float("nan"), dtype=dtype)
        self.caches = [cache, cache.clone()]
        self.ours = GpuAttention(shape, self.caches[0], rope, max_decodes=rows, arch=Architecture.HOPPER)
        self.oracle = ReferenceAttention(shape, self.caches[1], rope)
        self.tables = torch.randperm(rows * per_row).reshape(rows, per_row).to(torch.int32)
        self.shape, self.dtype = shape, dtype

    def compare(self, spans: list[tuple[int, int, int]], norms: Any = None, *, decodes: int = 0) -> None:
        """Run one step of (row, start, count) on both; outputs and caches must agree."""
        inputs = make_inputs(spans, self.tables, decodes)
        qkv = torch.randn(inputs.num_tokens, self.shape.qkv_size).to(self.dtype)
        self.ours.bind(inputs)
        self.oracle.bind(inputs)
        expected = self.oracle(1, qkv.clone(), norms)
        found = self.ours(1, qkv.clone(), norms)
        assert torch.isfinite(found.float()).all()
        torch.testing.assert_close(found.float(), expected.float(), **TOLERANCE[self.dtype])
        torch.testing.assert_close(
            self.caches[0].float(), self.caches[1].float(), equal_nan=True, **TOLERANCE[self.dtype]
        )

    def fill(self, row: int, tokens: int) -> None:
        """Random keys and values for the row's first tokens."""
        for position in range(tokens):
            block = int(self.tables[row, position // self.shape.block_tokens])
            slot = position % self.shape.block_tokens
            content = torch.randn(self.shape.num_layers, 2, self.shape.num_kv_heads, self.shape.head_dim)
            for cache in self.caches:
                cache[block, :, :, :, slot] = content.to(self.dtype)


def make_inputs(spans: list[tuple[int, int, int]], tables: torch.Tensor, decodes: int = 0) -> StepInputs:
    counts = [count for _, _, count in spans]
    return StepInputs(
        rows=torch.tensor([row for row, _, _ in spans], dtype=torch.int32),
        starts=torch.tensor([start for _, start, _ in spans], dtype=torch.int32),
        query_offsets=torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32),
        positions=torch.cat([torch.arange(start, start + count) for _, start, count in spans]),
        block_tables=tables,
        num_tokens=sum(counts),
        num_decodes=decodes,
    )


def make_shape(heads: int, kv_heads: int, head_dim: int, block: int, layers: int = 2) -> AttentionShape:
    return AttentionShape(layers, heads, kv_heads, head_dim, block, norm_eps=1e-6)


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16] if WIDE else [torch.bfloat16]
)
def test_attention_equals_torch_over_uneven_lengths(
    dtype: torch.dtype, sizes: tuple[int, int, int, int]
) -> None:
    torch.manual_seed(5)
    block = sizes[3]
    lengths = [1, block - 1, block, block + 1, 2 * block, 70] if WIDE else [block - 1, block, 67]
    world = World(make_shape(*sizes), dtype, len(lengths), 140)
    prefix = 0 if WIDE else 58  # of the longest: the interpreter takes long for long chunks
    world.fill(len(lengths) - 1, prefix)
    first = [(row, 0, length) for row, length in enumerate(lengths[:-1])]
    world.compare([*first, (len(lengths) - 1, prefix, lengths[-1] - prefix)])
    world.compare([(row, length, 1) for row, length in enumerate(lengths)], decodes=len(lengths))
    later = [(row, length + 1, 1 + row % 3 * 7) for row, length in enumerate(lengths)]
    mixed = sorted(random.Random(2).sample(later, len(later) - 1), key=lambda span: span[2])
    world.compare(mixed, decodes=sum(count == 1 for _, _, count in mixed))


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_head_norms_are_applied_before_the_rotation(dtype: torch.dtype) -> None:
    world = World(make_shape(4, 2, 48, 16), dtype, 2, 60)
    norms = ((torch.rand(48) + 0.5).to(dtype), (torch.rand(48) + 0.5).to(dtype))
    world.compare([(0, 0, 20), (1, 0, 33)], norms)
    world.compare([(1, 33, 1), (0, 20, 4)], norms, decodes=1)


def test_split_contexts_are_merged() -> None:
    torch.manual_seed(1)
    world = World(make_shape(6, 2, 64, 16), torch.float32, 4, 560)
    contexts = [256, 257, 513, 31]
    for row, context in enumerate(contexts):
        world.fill(row, context - 1)
    world.compare([(row, context - 1, 1) for row, context in enumerate(contexts)], decodes=4)


def test_a_context_of_more_than_all_segments_is_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "MAX_SEGMENTS", 4)
    monkeypatch.setattr(configs, "MAX_SEGMENTS", 4)
    monkeypatch.setattr(host, "SEGMENT_TOKENS", 32)
    torch.manual_seed(3)
    world = World(make_shape(2, 1, 64, 16), torch.float32, 1, 330)
    world.fill(0, 320)
    for context in (32, 33, 129, 320):
        world.compare([(0, context - 1, 1)], decodes=1)


def test_a_row_does_not_depend_on_its_batch_mates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal to the bit alone, in a batch that shares programs otherwise, and beside a chunk."""
    torch.manual_seed(9)
    shape = make_shape(2, 1, 64, 16)
    world = World(shape, torch.bfloat16, 3, 340)
    for row in range(3):
        world.fill(row, 300 + row)
    qkv = torch.randn(5, shape.qkv_size).to(torch.bfloat16)

    def run(spans: list[tuple[int, int, int]], decodes: int, tokens: slice) -> torch.Tensor:
        world.ours.bind(make_inputs(spans, world.tables, decodes))
        return world.ours(0, qkv[tokens].clone(), None).clone()

    alone = run([(0, 300, 1)], 1, slice(0, 1))
    two = [(0, 300, 1), (1, 301, 1)]
    assert torch.equal(run(two, 2, slice(0, 2))[:1], alone)
    monkeypatch.setattr(configs, "PROGRAMS_WANTED", 1)
    assert configs.segments_per_program(2, 1) > 1
    assert torch.equal(run(two, 2, slice(0, 2))[:1], alone)
    assert torch.equal(run([*two, (2, 302, 3)], 2, slice(0, 5))[:1], alone)


def test_a_chunk_does_not_depend_on_how_its_prompt_was_cut() -> None:
    torch.manual_seed(4)
    shape = make_shape(3, 1, 64, 16)
    rope = torch.rand(72, 2, 32)
    qkv = torch.randn(70, shape.qkv_size).to(torch.bfloat16)
    tables = torch.randperm(5).reshape(1, 5).to(torch.int32)
    results = []
    for cuts in ([0, 70], [0, 17, 64, 65, 70]):
        cache = torch.zeros(shape.cache_shape(5), dtype=torch.bfloat16)
        attention = GpuAttention(shape, cache, rope, max_decodes=1, arch=Architecture.HOPPER)
        parts = []
        for start, end in itertools.pairwise(cuts):
            attention.bind(make_inputs([(0, start, end - start)], tables))
            parts.append(attention(0, qkv[start:end].clone(), None).clone())
        results.append(torch.cat(parts))
    torch.testing.assert_close(results[0], results[1], atol=4e-3, rtol=1e-2)


def test_padding_rows_write_nothing_and_answer_zero() -> None:
    world = World(make_shape(4, 2, 64, 16), torch.float32, 2, 60)
    world.compare([(0, 0, 20), (1, 0, 7)])
    before = world.caches[0].clone()
    inputs = make_inputs([(0, 20, 1), (1, 7, 1), (-1, 0, 1), (-1, 0, 1)], world.tables, 4)
    world.ours.bind(inputs)
    qkv = torch.randn(4, world.shape.qkv_size)
    qkv[2:] = float("nan")
    out = world.ours(1, qkv, None)
    assert torch.isfinite(out).all()
    assert not out[2:].any()
    changed = (world.caches[0] != before) & ~(world.caches[0].isnan() & before.isnan())
    assert int(changed.any(-1).sum()) == 2 * 2 * 2  # rows, key and value, KV heads


def test_a_nan_in_the_context_shows_in_the_output() -> None:
    world = World(make_shape(3, 1, 64, 16), torch.bfloat16, 1, 40)
    for decodes, count in ((1, 1), (0, 5)):
        world.ours.bind(make_inputs([(0, 20, count)], world.tables, decodes))
        out = world.ours(0, torch.randn(count, world.shape.qkv_size).to(torch.bfloat16), None)
        assert torch.isnan(out.float()).all()


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 130])
def test_tokens_are_gathered_by_row(rows: int) -> None:
    generator = random.Random(rows)
    table = torch.randint(1000, (rows + 2, 64), dtype=torch.int32)
    spans = [(row, generator.randrange(20), generator.choice([1, 1, 2, 30])) for row in range(rows)]
    generator.shuffle(spans)
    inputs = make_inputs(spans, torch.zeros(rows + 2, 4, dtype=torch.int32))
    ids, positions = host.gather_tokens(
        table,
        rows=inputs.rows,
        starts=inputs.starts,
        offsets=inputs.query_offsets,
        num_tokens=inputs.num_tokens,
    )
    assert torch.equal(positions, inputs.positions)
    assert torch.equal(ids, torch.cat([table[row, start : start + count] for row, start, count in spans]))
