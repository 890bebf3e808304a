"""Choosing one token per row of logits on the device, without a word to the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from millpond_engine.kernels.gpu import launch as launcher
from millpond_engine.kernels.gpu.configs import MAX_SPLITS, SAMPLING_BLOCK
from millpond_engine.kernels.gpu.device import sampling
from millpond_engine.kernels.gpu.launch import LaunchOptions

MIN_TEMPERATURE = 1e-4
"""Lower ones are taken as this: the choice is the same, and values stay far from overflow."""


@dataclass(frozen=True, slots=True)
class DrawInputs:
    """Per row `[num_rows]`, on the device."""

    sharpness: torch.Tensor
    """float32: one over the temperature; 0 is greedy."""
    seeds: torch.Tensor
    """int64."""
    positions: torch.Tensor
    """int64: of the token to choose."""
    top_k: torch.Tensor | None = None
    """int64, 0 is off; absent, with the next two, when no row truncates."""
    top_p: torch.Tensor | None = None
    """float32."""
    min_p: torch.Tensor | None = None
    """float32."""


def choose(logits: torch.Tensor, draw: DrawInputs | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Best value and token id (int64) of each row of float32 logits `[num_rows, vocabulary]`; greedy without `draw`.

    The value is not finite when the row holds a NaN or leaves nothing to choose. The draw is Gumbel-max over
    the truncated logits with noise fixed by (seed, position, token), so a row does not depend on its batch mates.
    """
    num_rows, vocabulary = logits.shape
    splits = choose_splits(num_rows, vocabulary)
    best = torch.empty((num_rows, splits), dtype=torch.float32, device=logits.device)
    ids = torch.empty((num_rows, splits), dtype=torch.int32, device=logits.device)
    unused = best if draw is None else draw.sharpness
    launcher.launch(
        sampling.choose_tokens,
        (num_rows, splits),
        logits,
        unused,
        unused if draw is None else find_thresholds(logits, draw),
        ids if draw is None else draw.seeds,
        ids if draw is None else draw.positions,
        best,
        ids,
        splits,
        VOCABULARY=vocabulary,
        RANDOM=draw is not None,
        BLOCK=SAMPLING_BLOCK,
        options=LaunchOptions(num_warps=4),
    )
    value, split = best.max(1)
    return value, ids.gather(1, split.unsqueeze(1)).squeeze(1).long()


def find_thresholds(logits: torch.Tensor, draw: DrawInputs) -> torch.Tensor:
    """The smallest logit of each row that its truncation leaves, float32; minus infinity where nothing truncates."""
    thresholds = torch.full((logits.shape[0],), float("-inf"), dtype=torch.float32, device=logits.device)
    if draw.top_k is None or draw.top_p is None or draw.min_p is None:
        return thresholds
    launcher.launch(
        sampling.find_thresholds,
        (logits.shape[0],),
        logits,
        draw.sharpness,
        draw.top_k,
        draw.top_p,
        draw.min_p,
        thresholds,
        VOCABULARY=logits.shape[1],
        BLOCK=4 * SAMPLING_BLOCK,
        options=LaunchOptions(num_warps=8),
    )
    return thresholds


def choose_splits(num_rows: int, vocabulary: int) -> int:
    """Programs that share a row: as many as fill a device when rows are few, a power of two."""
    blocks = -(-vocabulary // SAMPLING_BLOCK)
    wanted = max(1, min(MAX_SPLITS, blocks, 256 // max(1, num_rows)))
    return 1 << (wanted.bit_length() - 1)
