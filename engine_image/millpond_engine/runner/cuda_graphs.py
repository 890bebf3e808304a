"""Decode steps recorded once per batch size and repeated: a step costs the host one launch instead of hundreds."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import numpy as np
import torch

from millpond_engine.kernels.inputs import StepInputs
from millpond_engine.runner.cuda_rows import DeviceRows
from millpond_engine.runner.cuda_runtime import Array, DeviceRuntime

Forward = Callable[[StepInputs, torch.Tensor], torch.Tensor]
"""Step inputs and token ids to hidden states `[num_tokens, hidden]`."""
_PADDING_ROW = -1


def graph_sizes(max_sequences: int) -> list[int]:
    """1, 2, 4, every 8 up to 256, every 16 up to 512, and the largest batch itself when it lies between."""
    sizes = {1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), min(max_sequences, 512)}
    return sorted(size for size in sizes if size <= max_sequences)


class DecodeGraphs:
    """Recorded decode steps; a smaller batch is padded with rows that read and write nothing."""

    def __init__(
        self, runtime: DeviceRuntime, rows: DeviceRows, forward: Forward, *, max_sequences: int
    ) -> None:
        self._runtime = runtime
        self._rows = rows
        self._forward = forward
        self.sizes = graph_sizes(max_sequences)
        widest = -(-self.sizes[-1] // 4) * 4
        self._inputs = torch.full((2, widest), _PADDING_ROW, dtype=torch.int32, device=runtime.device)
        self._offsets = torch.arange(widest + 1, dtype=torch.int32, device=runtime.device)
        self._steps: dict[int, Callable[[], torch.Tensor]] = {}

    def record(self) -> None:
        """Record all sizes, the largest first: the others then fit into its memory."""
        for size in reversed(self.sizes):
            self._steps[size] = self._runtime.capture(self._make_body(size))

    def fits(self, num_rows: int) -> bool:
        """Whether a batch of so many decodes can run here."""
        return num_rows <= self.sizes[-1]

    def run(self, rows: Array, starts: Array) -> torch.Tensor:
        """Hidden states `[num_rows, hidden]`, valid until the next run."""
        size = self.sizes[bisect_left(self.sizes, len(rows))]
        padded = np.full((2, self._inputs.shape[1]), _PADDING_ROW, np.int32)
        padded[0, : len(rows)] = rows
        padded[1] = 0
        padded[1, : len(rows)] = starts
        self._inputs.copy_(self._runtime.upload(padded))
        return self._steps[size]()[: len(rows)]

    def _make_body(self, size: int) -> Callable[[], torch.Tensor]:
        def body() -> torch.Tensor:
            inputs, ids = self._rows.gather(
                self._inputs[0, :size],
                self._inputs[1, :size],
                self._offsets[: size + 1],
                num_tokens=size,
                num_decodes=size,
            )
            return self._forward(inputs, ids)

        return body
