"""Random choice: the right distribution, the right support, and nothing but the row's own numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from millpond_engine.runner.draw import DrawParams, draw
from millpond_engine.runner.sampling_table import draw_uniforms

NUM_DRAWS = 20_000


def _params(
    rows: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 1,
) -> DrawParams:
    uniform = draw_uniforms(np.full(rows, seed, np.uint64), np.arange(rows))
    return DrawParams(
        torch.full((rows,), temperature),
        torch.full((rows,), top_k),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
        torch.from_numpy(uniform),
    )


def _counts(logits: torch.Tensor, **options: float) -> torch.Tensor:
    chosen = draw(logits.repeat(NUM_DRAWS, 1), _params(NUM_DRAWS, **options))  # type: ignore[arg-type]
    return torch.bincount(chosen, minlength=logits.shape[-1]).double()


def _assert_follows(counts: torch.Tensor, expected: torch.Tensor) -> None:
    """Chi-square against the expected probabilities, bounded far beyond chance, and no count where there is none."""
    assert counts[expected == 0].sum() == 0
    wanted = expected[expected > 0].double() * NUM_DRAWS
    statistic = float(((counts[expected > 0] - wanted) ** 2 / wanted).sum())
    degrees = wanted.numel() - 1
    assert statistic < degrees + 6 * (2 * max(degrees, 1)) ** 0.5


LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -1.5, -3.0, float("-inf")])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    _assert_follows(_counts(LOGITS, temperature=temperature), (LOGITS / temperature).softmax(-1))


def test_top_k_keeps_the_k_likeliest() -> None:
    expected = LOGITS.softmax(-1)
    expected[3:] = 0
    _assert_follows(_counts(LOGITS, top_k=3), expected / expected.sum())


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    weights = LOGITS.softmax(-1)
    reach = float(weights[:3].sum())
    for top_p, size in ((reach - 0.01, 3), (reach + 0.01, 4), (1e-9, 1)):
        expected = weights.clone()
        expected[size:] = 0
        _assert_follows(_counts(LOGITS, top_p=top_p), expected / expected.sum())


def test_min_p_keeps_shares_of_the_likeliest() -> None:
    expected = LOGITS.softmax(-1)
    expected[expected < 0.2 * expected[0]] = 0
    _assert_follows(_counts(LOGITS, min_p=0.2), expected / expected.sum())


def test_top_p_counts_what_top_k_left() -> None:
    weights = LOGITS.softmax(-1)[:4]
    weights = weights / weights.sum()
    size = int((weights.cumsum(-1) < 0.8).sum()) + 1
    expected = torch.zeros(8)
    expected[:size] = weights[:size] / weights[:size].sum()
    _assert_follows(_counts(LOGITS, top_k=4, top_p=0.8), expected)


def test_a_flat_distribution_beyond_the_candidates_is_drawn_whole() -> None:
    logits = torch.zeros(5000)
    logits[::2] = 0.1
    chosen = draw(logits.repeat(2000, 1), _params(2000, top_p=0.9))
    weights = logits.softmax(-1)
    size = int((weights.sort(descending=True).values.cumsum(-1) < 0.9).sum()) + 1
    assert len(set(chosen.tolist())) > 1024  # more than the candidates looked at first
    even = float((chosen % 2 == 0).double().mean())
    kept_even = 2500 * float(weights[0]) / (2500 * float(weights[0]) + (size - 2500) * float(weights[1]))
    assert even == pytest.approx(kept_even, abs=0.05)


def test_temperature_zero_takes_the_likeliest_beside_random_rows() -> None:
    params = _params(3)
    params.temperature[1] = 0.0
    assert draw(LOGITS.repeat(3, 1), params)[1] == 0


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    logits = torch.randn(50, 300)
    params = _params(50, top_p=0.95)
    together = draw(logits, params)
    alone = torch.cat([draw(logits[i : i + 1], params.select(torch.tensor([i]))) for i in range(50)])
    assert torch.equal(together, alone)


def test_uniforms_are_uniform_and_differ_by_seed_and_position() -> None:
    seeds, positions = np.meshgrid(np.arange(100, dtype=np.uint64), np.arange(100))
    values = draw_uniforms(seeds.ravel(), positions.ravel())
    assert len(np.unique(values)) == 10_000
    assert values.min() >= 0
    assert values.max() < 1
    counts = np.histogram(values, bins=20, range=(0, 1))[0]
    assert ((counts - 500) ** 2 / 500).sum() < 19 + 6 * (2 * 19) ** 0.5
    neighbours = np.corrcoef(values[:-1], values[1:])[0, 1]
    assert abs(neighbours) < 0.05


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-9])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_the_lowest_temperatures_take_the_likeliest_token(temperature: float, top_p: float) -> None:
    logits = torch.tensor([[-3.0, 20.0, 31.0, 7.0]])
    assert draw(logits, _params(1, temperature=temperature, top_p=top_p)).item() == 2
