"""The one place where a program is started, so that a test can look at every launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """How a program is compiled: threads in groups of 32 (64 on AMD), and depth of the load pipeline."""

    num_warps: int
    num_stages: int = 1


Argument = torch.Tensor | int | float


def launch(
    program: Any, grid: tuple[int, ...], *arguments: Argument, options: LaunchOptions, **constants: int | bool
) -> None:
    """Start a Triton program on the current stream."""
    program[grid](*arguments, **constants, num_warps=options.num_warps, num_stages=options.num_stages)
