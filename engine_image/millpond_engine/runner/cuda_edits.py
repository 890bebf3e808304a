"""Changes to many rows' logits at once on the device: bans, bias, penalties.

The same rules as `edits.edit_logits`, without a look at the tokens from the host: the last one may not be there yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from millpond_engine.records.step import NewRow
from millpond_engine.runner.cuda_rows import DeviceRows
from millpond_engine.runner.cuda_runtime import Array, DeviceRuntime
from millpond_engine.runner.masks import NO_MASKS, RowMasks

_BANNED = float("-inf")
_ANY = -1
"""Matches every token in the head of a bad word."""


@dataclass(frozen=True, slots=True)
class EditedRow:
    """One row to edit: its line in the logits, its parameters, and the position of the token to choose."""

    index: int
    info: NewRow
    position: int


class LogitEditor:
    """Edits logits `[num_rows, vocabulary]` in place; every call queues work and returns."""

    def __init__(self, rows: DeviceRows, runtime: DeviceRuntime) -> None:
        self._rows = rows
        self._runtime = runtime

    def edit(self, logits: torch.Tensor, edited: Sequence[EditedRow], masks: RowMasks = NO_MASKS) -> None:
        """Apply in this order: masks, allowed ids, bad words, end tokens below `min_tokens`, bias, penalties."""
        self._mask(logits, edited, masks)
        self._keep_allowed(logits, edited)
        self._ban_words(logits, edited)
        self._add(logits, list_bans(edited))
        self._add(logits, [(row.index, *pair) for row in edited for pair in row.info.sampling.logit_bias])
        self._penalize(logits, [row for row in edited if _penalizes(row.info)])

    def _mask(self, logits: torch.Tensor, edited: Sequence[EditedRow], masks: RowMasks) -> None:
        """The masks travel as bits and are spread out on the device."""
        rows: Array = np.array([row.info.row for row in edited], np.int64)
        masked = masks.find(rows)
        if not masked:
            return
        vocabulary = logits.shape[1]
        bits = self._runtime.upload(masks.pack(rows[masked], vocabulary)).unsqueeze(2)
        places = torch.arange(8, dtype=torch.uint8, device=logits.device)
        allowed = bits.bitwise_right_shift(places).bitwise_and_(1).flatten(1)[:, :vocabulary]
        banned = allowed.eq(0)
        if len(masked) == logits.shape[0]:
            logits.masked_fill_(banned, _BANNED)
            return
        lines = self._runtime.upload(np.array([edited[place].index for place in masked], np.int64))
        logits.index_copy_(0, lines, logits.index_select(0, lines).masked_fill_(banned, _BANNED))

    def _keep_allowed(self, logits: torch.Tensor, edited: Sequence[EditedRow]) -> None:
        pairs = [(row.index, token) for row in edited for token in row.info.sampling.allowed_token_ids]
        if pairs:
            lines, tokens = self._upload_pairs(pairs)
            kept = logits[lines, tokens]
            logits.index_fill_(0, lines, _BANNED)
            logits.index_put_((lines, tokens), kept)

    def _ban_words(self, logits: torch.Tensor, edited: Sequence[EditedRow]) -> None:
        """A word is banned where the tokens before the choice are its head."""
        words = [(row, word) for row in edited for word in row.info.sampling.bad_words if word]
        words = [(row, word) for row, word in words if len(word) - 1 <= row.position]
        if not words:
            return
        longest = max(len(word) for _, word in words) - 1
        heads = np.full((len(words), longest), _ANY, np.int64)
        for line, (_, word) in enumerate(words):
            heads[line, longest - len(word) + 1 :] = word[:-1]
        facts = np.array([(row.index, word[-1], row.info.row, row.position) for row, word in words], np.int64)
        lines, last, rows, positions = self._runtime.upload(np.ascontiguousarray(facts.T)).unbind(0)
        wanted = self._runtime.upload(heads)
        columns = positions.unsqueeze(1) + torch.arange(-longest, 0, device=logits.device)
        before = self._rows.tokens[rows.unsqueeze(1), columns.clamp_min(0)]
        complete = ((wanted == _ANY) | (wanted == before)).all(1)
        amounts = torch.zeros(len(words), dtype=logits.dtype, device=logits.device)
        logits.index_put_((lines, last), amounts.masked_fill(complete, _BANNED), accumulate=True)

    def _add(self, logits: torch.Tensor, entries: list[tuple[int, int, float]]) -> None:
        if entries:
            lines, tokens = self._upload_pairs([entry[:2] for entry in entries])
            amounts = self._runtime.upload(np.array([entry[2] for entry in entries], np.float32))
            logits.index_put_((lines, tokens), amounts, accumulate=True)

    def _penalize(self, logits: torch.Tensor, edited: Sequence[EditedRow]) -> None:
        """Repetition counts prompt and output, presence and frequency the output alone."""
        if not edited:
            return
        facts = np.array(
            [(row.index, row.info.row, row.info.prompt_tokens, row.position) for row in edited], np.int64
        )
        lines, rows, prompts, positions = self._runtime.upload(np.ascontiguousarray(facts.T)).unbind(0)
        names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
        factors = np.array(
            [[getattr(row.info.sampling, name) for row in edited] for name in names], np.float32
        )
        repetition, presence, frequency = self._runtime.upload(factors).unsqueeze(2).unbind(0)
        longest = max(row.position for row in edited)
        tokens = self._rows.tokens.index_select(0, rows)[:, :longest].long()
        place = torch.arange(longest, device=logits.device)
        known = place < positions.unsqueeze(1)
        generated = known & (place >= prompts.unsqueeze(1))
        values = logits.index_select(0, lines)
        seen = torch.zeros_like(values).scatter_add_(1, tokens, known.to(values.dtype))
        punished = torch.where(values > 0, values / repetition, values * repetition)
        values = torch.where(seen > 0, punished, values)
        counts = torch.zeros_like(values).scatter_add_(1, tokens, generated.to(values.dtype))
        values -= frequency * counts + presence * (counts > 0)
        logits.index_copy_(0, lines, values)

    def _upload_pairs(self, pairs: Sequence[tuple[int, ...]]) -> tuple[torch.Tensor, torch.Tensor]:
        columns: Array = np.ascontiguousarray(np.array(pairs, np.int64).T)
        lines, tokens = self._runtime.upload(columns).unbind(0)
        return lines, tokens


def list_bans(edited: Sequence[EditedRow]) -> list[tuple[int, int, float]]:
    """(line, token, minus infinity) for the ends of sequence of rows below their least output."""
    return [
        (row.index, token, _BANNED)
        for row in edited
        if row.position - row.info.prompt_tokens < row.info.min_tokens
        for token in row.info.stop_token_ids
    ]


def _penalizes(info: NewRow) -> bool:
    sampling = info.sampling
    return bool(sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0)
