"""Changes to one row's logits before the choice: bans, bias, penalties."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from millpond_engine.records.step import NewRow

_BANNED = float("-inf")


def edit_logits(logits: torch.Tensor, row: NewRow, tokens: np.ndarray[Any, np.dtype[np.int32]]) -> None:
    """Change the row's logits `[vocabulary]` in place; `tokens` are all tokens before the one to choose.

    Order: allowed ids, bad words, end tokens below `min_tokens`, bias, penalties. Presence and
    frequency count generated tokens only; repetition (Keskar et al., 2019) counts the prompt too.
    """
    sampling = row.sampling
    if sampling.allowed_token_ids:
        allowed = torch.tensor(sampling.allowed_token_ids, device=logits.device)
        kept = logits[allowed]
        logits.fill_(_BANNED)
        logits[allowed] = kept
    for word in sampling.bad_words:
        if completes(word, tokens):
            logits[word[-1]] = _BANNED
    if row.stop_token_ids and len(tokens) - row.prompt_tokens < row.min_tokens:
        logits[torch.tensor(row.stop_token_ids, device=logits.device)] = _BANNED
    for token, bias in sampling.logit_bias:
        logits[token] += bias
    _penalize(logits, row, tokens)


def completes(word: tuple[int, ...], tokens: np.ndarray[Any, np.dtype[np.int32]]) -> bool:
    """Whether the last token of `word` would complete it behind `tokens`."""
    head = word[:-1]
    return (
        bool(word) and len(tokens) >= len(head) and (not head or tuple(tokens[-len(head) :].tolist()) == head)
    )


def _penalize(logits: torch.Tensor, row: NewRow, tokens: np.ndarray[Any, np.dtype[np.int32]]) -> None:
    sampling = row.sampling
    if sampling.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(tokens)).long().to(logits.device)
        values = logits[seen]
        logits[seen] = torch.where(
            values > 0, values / sampling.repetition_penalty, values * sampling.repetition_penalty
        )
    if sampling.presence_penalty or sampling.frequency_penalty:
        ids, counts = np.unique(tokens[row.prompt_tokens :], return_counts=True)
        penalty = sampling.frequency_penalty * counts + sampling.presence_penalty
        logits[torch.from_numpy(ids).long().to(logits.device)] -= torch.from_numpy(penalty).to(logits)
