"""A forward pass and what is wanted of it: what lies between a step's launch and the choice of its tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from millpond_engine.records.step import RowStep


@dataclass(frozen=True, slots=True)
class Forward:
    """What the model has computed for the rows of a step; empty where the plan has none."""

    steps: tuple[RowStep, ...] = ()
    hidden: torch.Tensor | None = None
    """`[num_wanted, hidden]`: behind the last token of sampled rows, then of all tokens of reported ones."""
    sampled: tuple[int, ...] = ()
    reported: tuple[int, ...] = ()
