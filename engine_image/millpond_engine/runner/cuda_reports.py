"""Log-probabilities in two halves: tensors now, records when they have come to the host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from millpond_engine.records.step import TokenLogprobs
from millpond_engine.runner.cuda_runtime import Array


@dataclass(frozen=True, slots=True)
class ReportTensors:
    """Log-probability and rank of one token per row, and of the most likely ones; `counts` are wanted per row."""

    counts: list[int]
    own: torch.Tensor
    ranks: torch.Tensor
    top_values: torch.Tensor
    top_ids: torch.Tensor

    def tensors(self) -> list[torch.Tensor]:
        """What has to come to the host, in the order `finish` reads it."""
        return [self.own, self.ranks, self.top_values, self.top_ids]

    def finish(self, arrays: Iterator[Array]) -> list[TokenLogprobs]:
        """One record per row."""
        own, ranks, values, ids = (next(arrays).tolist() for _ in range(4))
        return [
            TokenLogprobs(own[i], ranks[i], tuple(zip(ids[i][:count], values[i][:count], strict=True)))
            for i, count in enumerate(self.counts)
        ]


def report_tokens(logits: torch.Tensor, tokens: torch.Tensor, counts: list[int]) -> ReportTensors:
    """From raw float32 logits `[num_rows, vocabulary]` and ids `[num_rows]`."""
    norm = logits.logsumexp(-1, keepdim=True)
    chosen = logits.gather(1, tokens.unsqueeze(1))
    values, ids = logits.topk(min(max(counts, default=1) or 1, logits.shape[1]), dim=-1)
    return ReportTensors(
        counts, (chosen - norm).squeeze(1), (logits > chosen).sum(-1) + 1, values - norm, ids
    )
