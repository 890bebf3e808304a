"""Random choice from a truncated distribution, one uniform number per row."""

from __future__ import annotations

from dataclasses import dataclass

import torch

MIN_TEMPERATURE = 1e-4
"""Lower ones draw as this one does, which is the likeliest token but for ties: scores divided by less overflow."""
NUM_CANDIDATES = 1024
"""Most likely tokens looked at first; rows whose truncation reaches further are sorted whole."""


@dataclass(frozen=True, slots=True)
class DrawParams:
    """Per row `[num_rows]`: temperature and truncation, and the uniform number in [0, 1)."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    """int64; 0 is off."""
    top_p: torch.Tensor
    min_p: torch.Tensor
    uniform: torch.Tensor
    """float64."""

    def select(self, rows: torch.Tensor) -> DrawParams:
        """The same for some of the rows."""
        return DrawParams(
            self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows], self.uniform[rows]
        )


def draw(logits: torch.Tensor, params: DrawParams) -> torch.Tensor:
    """Choose one token per row of `[num_rows, vocabulary]` float32 logits; temperature 0 takes the likeliest.

    Truncation in this order: min-p (share of the likeliest token's probability), top-k, then top-p
    (Holtzman et al., 2020) over what is left. Each row depends on its own values alone.
    """
    chosen = logits.argmax(-1)
    truncated = (params.top_k > 0) | (params.top_p < 1.0) | (params.min_p > 0.0)
    random = params.temperature > 0
    for wanted, choose in ((random & ~truncated, _draw_plain), (random & truncated, _draw_truncated)):
        rows = wanted.nonzero().squeeze(1)
        if rows.numel():
            part = params.select(rows)
            temperature = part.temperature.clamp(min=MIN_TEMPERATURE).unsqueeze(1)
            chosen[rows] = choose(logits[rows] / temperature, part)
    return chosen


def _draw_plain(scaled: torch.Tensor, params: DrawParams) -> torch.Tensor:
    return _invert(scaled.softmax(-1), params.uniform)


def _draw_truncated(scaled: torch.Tensor, params: DrawParams) -> torch.Tensor:
    size = min(scaled.shape[1], max(NUM_CANDIDATES, int(params.top_k.max())))
    chosen, complete = _draw_from_top(scaled, params, size)
    rest = (~complete).nonzero().squeeze(1)
    if rest.numel():
        chosen[rest] = _draw_from_top(scaled[rest], params.select(rest), scaled.shape[1])[0]
    return chosen


def _draw_from_top(scaled: torch.Tensor, params: DrawParams, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw among the `size` likeliest tokens; the second value tells for which rows those were enough."""
    values, ids = scaled.topk(size, dim=-1)
    weights = (values - scaled.logsumexp(-1, keepdim=True)).exp()
    ranks = torch.arange(size, device=scaled.device)
    by_min_p = weights >= params.min_p.unsqueeze(1) * weights[:, :1]
    by_top_k = (params.top_k.unsqueeze(1) == 0) | (ranks < params.top_k.unsqueeze(1))
    kept = weights.masked_fill(~(by_min_p & by_top_k), 0.0)
    bounded = ~by_min_p[:, -1] | ((params.top_k > 0) & (params.top_k <= size)) | (size == scaled.shape[1])
    mass = torch.where(bounded, kept.sum(-1), torch.ones_like(params.top_p))
    before = kept.cumsum(-1) - kept
    by_top_p = (before < (params.top_p * mass).unsqueeze(1)) | (params.top_p >= 1.0).unsqueeze(1)
    by_top_p[:, 0] = True
    complete = bounded | ~by_top_p[:, -1]
    return ids.gather(1, _invert(kept.masked_fill(~by_top_p, 0.0), params.uniform).unsqueeze(1)).squeeze(
        1
    ), complete


def _invert(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Index at which the running sum of each row passes `uniform` times its total; weights of 0 are never taken."""
    sums = weights.double().cumsum(-1)
    goal = uniform.unsqueeze(1) * sums[:, -1:]
    found = torch.searchsorted(sums, goal, right=True)
    last = torch.searchsorted(sums, sums[:, -1:].contiguous())  # rounding may carry the goal to the very end
    return torch.minimum(found, last).squeeze(1).clamp(max=weights.shape[1] - 1)  # NaN is found nowhere
