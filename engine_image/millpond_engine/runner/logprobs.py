"""Log-probabilities of chosen tokens and their alternatives, from the raw distribution."""

from __future__ import annotations

import torch

from millpond_engine.records.step import TokenLogprobs


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, counts: list[int]) -> list[TokenLogprobs]:
    """Report each row's token and its `counts` most likely alternatives.

    Args:
        logits: raw, float32, `[num_rows, vocabulary]`.
        tokens: chosen ids `[num_rows]`.
        counts: alternatives wanted per row.
    """
    norm = logits.logsumexp(-1)
    chosen = logits.gather(1, tokens.unsqueeze(1))
    ranks = (logits > chosen).sum(-1).add_(1).tolist()
    own = (chosen.squeeze(1) - norm).tolist()
    size = min(max(counts, default=0), logits.shape[1])
    values, ids = logits.topk(size, dim=-1)
    top_ids, top_values = ids.tolist(), (values - norm.unsqueeze(1)).tolist()
    return [
        TokenLogprobs(own[i], ranks[i], tuple(zip(top_ids[i][:count], top_values[i][:count], strict=True)))
        for i, count in enumerate(counts)
    ]


def branches(logits: torch.Tensor, count: int) -> tuple[tuple[int, float], ...]:
    """The most likely next tokens of one row `[vocabulary]` with their log-probabilities, likeliest first."""
    values, ids = logits.log_softmax(-1).topk(min(count, logits.shape[-1]))
    return tuple(zip(ids.tolist(), values.tolist(), strict=True))
