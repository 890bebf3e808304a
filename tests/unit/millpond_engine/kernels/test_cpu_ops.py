"""The other compiled operations against plain torch."""

from __future__ import annotations

import math

import pytest
import torch

from millpond_engine.kernels.cpu.build import GENERIC, VARIANTS, choose_variant, runs
from millpond_engine.kernels.cpu.library import load_library
from millpond_engine.kernels.cpu.ops import CpuOps
from millpond_engine.kernels.reference import ReferenceOps

TOLERANCE = {torch.float32: {"atol": 1e-4, "rtol": 1e-4}, torch.bfloat16: {"atol": 3e-2, "rtol": 2e-2}}
SIZES = [(1, 64, 32), (3, 66, 50), (13, 576, 100), (25, 130, 17), (400, 70, 96)]
"""rows, inputs, outputs"""


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(params=[v for v in (*VARIANTS, GENERIC) if runs(v)], ids=lambda variant: variant.name)
def ops(request: pytest.FixtureRequest, dtype: torch.dtype) -> CpuOps:
    return CpuOps(load_library(request.param), dtype)


def _inputs(ops: CpuOps, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Random values of a dtype, in the one that the kernels read."""
    return torch.randn(shape).to(dtype).to(ops.input_dtype)


@pytest.mark.parametrize(("rows", "inputs", "outputs"), SIZES)
def test_products_equal_torch(ops: CpuOps, dtype: torch.dtype, rows: int, inputs: int, outputs: int) -> None:
    torch.manual_seed(1)
    x = _inputs(ops, rows, inputs, dtype=dtype)
    weight = (torch.randn(outputs, inputs) / math.sqrt(inputs)).to(dtype)
    bias, residual = torch.randn(outputs), torch.randn(rows, outputs)
    exact = x.double() @ weight.double().T
    packed = ops.pack(weight)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(ops.linear(x, packed).double(), exact, **tolerance)
    torch.testing.assert_close(ops.linear(x, packed, bias).double(), exact + bias, **tolerance)
    torch.testing.assert_close(ops.scores(x, packed).double(), exact, atol=1e-4, rtol=1e-4)
    before = residual.clone()
    ops.linear_add(x, packed, residual)
    torch.testing.assert_close(residual.double(), before + exact, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("rows", "inputs", "outputs"), SIZES)
def test_gated_products_equal_torch(
    ops: CpuOps, dtype: torch.dtype, rows: int, inputs: int, outputs: int
) -> None:
    torch.manual_seed(2)
    x = _inputs(ops, rows, inputs, dtype=dtype)
    weight = (torch.randn(2 * outputs, inputs) / math.sqrt(inputs)).to(dtype)
    weight[:3] *= 100  # gates far below and above zero
    expected = ReferenceOps().gated(x.float(), weight.float())
    torch.testing.assert_close(ops.gated(x, ops.pack_gated(weight)).float(), expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("width", [16, 72, 100])
def test_norms_and_embeddings_equal_torch(ops: CpuOps, dtype: torch.dtype, rows: int, width: int) -> None:
    x, weight = torch.randn(rows, width) * 3, torch.rand(width) + 0.5
    expected = ReferenceOps().rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5).float(), expected, **TOLERANCE[dtype])
    table = torch.randn(9, width).to(dtype)
    tokens = torch.randint(9, (rows,), dtype=torch.int32)
    assert torch.equal(ops.embed(tokens, table), table[tokens.long()].float())


def test_a_row_does_not_depend_on_its_batch_mates(ops: CpuOps, dtype: torch.dtype) -> None:
    x = _inputs(ops, 70, 576, dtype=dtype)
    packed = ops.pack(torch.randn(96, 576).to(dtype))
    alone = torch.cat([ops.linear(row.unsqueeze(0), packed).clone() for row in x])
    assert torch.equal(ops.linear(x, packed), alone)


def test_argmax_takes_the_first_of_equal_values_and_shows_nan(ops: CpuOps) -> None:
    scores = torch.randn(4, 1000)
    scores[1, 700] = scores[1, 300] = 50.0
    scores[2, 999] = float("nan")
    scores[3, 17] = float("-inf")
    best, index = ops.argmax(scores)
    assert index[1] == 300
    assert math.isnan(best[2])
    for row in (0, 1, 3):
        assert (best[row], index[row]) == (scores[row].max(), scores[row].argmax())


def test_the_variant_follows_the_processor() -> None:
    everything = frozenset().union(*(variant.cpu_flags for variant in VARIANTS))
    assert choose_variant("x86_64", everything | {"AuthenticAMD"}).name == "avx512bf16"
    assert choose_variant("x86_64", everything | {"GenuineIntel"}).name == "avx512"
    assert choose_variant("x86_64", everything - {"avx512_bf16"}).name == "avx512"
    assert choose_variant("x86_64", frozenset({"avx2", "fma", "bmi2", "f16c"})).name == "avx2"
    assert choose_variant("x86_64", frozenset({"sse2"})) is GENERIC
    assert choose_variant("aarch64", frozenset()) is GENERIC
