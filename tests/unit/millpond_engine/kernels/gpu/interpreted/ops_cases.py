"""A model's other operations and the choice of tokens against plain torch."""

from __future__ import annotations

import math

import pytest
import torch

from millpond_engine.kernels.gpu import sampling
from millpond_engine.kernels.gpu.ops import GpuOps
from millpond_engine.kernels.gpu.sampling import DrawInputs, choose, find_thresholds
from millpond_engine.kernels.reference import ReferenceOps

TOLERANCE = {torch.float32: {"atol": 1e-5, "rtol": 1e-5}, torch.bfloat16: {"atol": 3e-2, "rtol": 2e-2}}


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param  # type: ignore[no-any-return]


@pytest.mark.parametrize("width", [16, 72, 1100])
def test_the_norm_adds_what_was_left_aside(dtype: torch.dtype, width: int) -> None:
    ops, plain = GpuOps(), ReferenceOps()
    table = torch.randn(9, width).to(dtype)
    matrix = (torch.randn(width, 24) / 5).to(dtype)
    weight, x = (torch.rand(width) + 0.5).to(dtype), torch.randn(3, 24).to(dtype)
    residual = ops.embed(torch.tensor([4, 0, 8], dtype=torch.int32), table)
    expected = table[[4, 0, 8]].float()
    first = ops.rms_norm(residual, weight, 1e-5)
    torch.testing.assert_close(
        first.float(), plain.rms_norm(expected, weight.float(), 1e-5), **TOLERANCE[dtype]
    )
    for _ in range(2):
        ops.linear_add(x, matrix, residual)
        plain.linear_add(x.float(), matrix.float(), expected)
        found = ops.rms_norm(residual, weight, 1e-5)
        torch.testing.assert_close(residual, expected, **TOLERANCE[dtype])
        torch.testing.assert_close(
            found.float(), plain.rms_norm(expected, weight.float(), 1e-5), **TOLERANCE[dtype]
        )
    ops.linear_add(x, matrix, residual)
    plain.linear_add(x.float(), matrix.float(), expected)
    wanted = torch.tensor([2, 0])
    found = ops.rms_norm(ops.select(residual, wanted), weight, 1e-5)
    torch.testing.assert_close(
        found.float(), plain.rms_norm(expected[wanted], weight.float(), 1e-5), **TOLERANCE[dtype]
    )


@pytest.mark.parametrize("width", [17, 1030])
def test_gates_equal_torch(dtype: torch.dtype, width: int) -> None:
    x, weight = torch.randn(2, 8).to(dtype), torch.randn(2 * width, 8).to(dtype)
    weight[:3] *= 40  # gates far below and above zero
    expected = ReferenceOps().gated(x.float(), weight.float())
    torch.testing.assert_close(GpuOps().gated(x, weight).float(), expected, atol=0.5, rtol=3e-2)
    exact = torch.nn.functional.silu((x @ weight.T)[:, :width].float()) * (x @ weight.T)[:, width:].float()
    torch.testing.assert_close(GpuOps().gated(x, weight).float(), exact, **TOLERANCE[dtype])


@pytest.mark.parametrize("rows", [1, 4, 70])
def test_greedy_takes_the_first_of_equal_values_and_shows_what_is_wrong(rows: int) -> None:
    scores = torch.randn(rows, 5003)
    scores[0, 4700] = scores[0, 300] = 50.0
    if rows > 3:
        scores[1, 4999] = float("nan")
        scores[2] = float("-inf")
        scores[3, 17] = float("-inf")
    best, index = choose(scores)
    assert (best[0], index[0]) == (50.0, 300)
    if rows > 3:
        assert math.isnan(best[1])
        assert best[2] == float("-inf")
        assert torch.equal(best[3:], scores[3:].amax(-1))
        assert torch.equal(index[3:], scores[3:].argmax(-1))


def _draw(rows: int, **columns: torch.Tensor) -> DrawInputs:
    given = {
        "sharpness": torch.ones(rows),
        "seeds": torch.arange(rows) * 7_919_000_017 + 5,
        "positions": torch.full((rows,), 40),
    }
    return DrawInputs(**(given | columns))


def test_a_draw_is_fixed_by_seed_position_and_token() -> None:
    scores = torch.randn(1, 3000).expand(6, -1).contiguous()
    draw = _draw(6, seeds=torch.tensor([1, 1, 2, 1 << 40, 1, 1]), positions=torch.tensor([5, 5, 5, 5, 6, 5]))
    best, together = choose(scores, draw)
    assert torch.isfinite(best).all()
    assert together[0] == together[1] == together[5]
    assert len({int(together[i]) for i in (0, 2, 3, 4)}) > 1
    for row in range(6):
        alone = _draw(1, seeds=draw.seeds[row : row + 1], positions=draw.positions[row : row + 1])
        assert choose(scores[:1], alone)[1] == together[row]


@pytest.mark.slow
def test_draws_follow_the_distribution() -> None:
    """Chi-square over 8 tokens, 7 degrees of freedom: 24.3 is passed by chance once in a thousand seeds."""
    logits = torch.tensor([1.0, 0.5, 0.0, -0.5, 2.0, float("-inf"), 1.5, -1.0])
    rows, sharpness = 200, 0.8
    _, chosen = choose(
        logits.expand(rows, -1).contiguous(), _draw(rows, sharpness=torch.full((rows,), sharpness))
    )
    expected = (logits * sharpness).softmax(0) * rows
    counts = torch.bincount(chosen, minlength=8).float()
    assert counts[5] == 0
    real = expected > 0
    assert float(((counts - expected)[real] ** 2 / expected[real]).sum()) < 24.3


def test_a_row_of_temperature_zero_is_greedy_among_random_ones() -> None:
    scores = torch.randn(3, 2000)
    _, chosen = choose(scores, _draw(3, sharpness=torch.tensor([1.0, 0.0, 1.0])))
    assert chosen[1] == scores[1].argmax()


def _kept(scores: torch.Tensor, sharpness: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Which tokens are left, by sorting: min-p, then top-k, then top-p over the rest."""
    weights, order = (scores * sharpness).softmax(0).sort(descending=True, stable=True)
    kept = weights >= min_p * weights[0]
    if top_k:
        kept &= torch.arange(len(kept)) < top_k
    left = torch.where(kept, weights, torch.zeros(()))
    if top_p < 1.0:
        kept &= (left.cumsum(0) - left) < top_p * left.sum()
    return torch.zeros(len(kept), dtype=torch.bool).scatter(0, order, kept)


CUTS = [
    (1.0, 0, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0),
    (0.5, 50, 1.0, 0.0),
    (2.0, 0, 0.7, 0.0),
    (1.0, 0, 1.0, 0.1),
    (1.3, 40, 0.9, 0.02),
    (1.0, 5000, 0.999, 0.0),
]
"""one over temperature, top-k, top-p, min-p"""


def test_thresholds_leave_what_sorting_leaves() -> None:
    torch.manual_seed(8)
    scores = torch.randn(len(CUTS), 1500) * 3
    scores[:, 70] = float("-inf")
    columns = [torch.tensor(column) for column in zip(*CUTS, strict=True)]
    draw = _draw(
        len(CUTS),
        sharpness=columns[0],
        top_k=columns[1],
        top_p=columns[2],
        min_p=columns[3],
    )
    found = scores >= find_thresholds(scores, draw).unsqueeze(1)
    for row, cut in enumerate(CUTS):
        expected = _kept(scores[row], *cut)
        assert torch.equal(found[row], expected), (cut, int(found[row].sum()), int(expected.sum()))
    _, chosen = choose(scores, draw)
    assert found[torch.arange(len(CUTS)), chosen].all()
    assert chosen[1] == scores[1].argmax()


def test_rows_share_a_device_when_they_are_few() -> None:
    assert sampling.choose_splits(1, 150_000) == 16
    assert sampling.choose_splits(256, 150_000) == 1
    assert sampling.choose_splits(1, 100) == 1
