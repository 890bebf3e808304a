"""Streams, events, pinned memory and graphs of one GPU behind a small face, so that the rest runs without one in tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Fetched:
    """Tensors of a finished step on the host, and the time the device took since its mark."""

    arrays: list[Array]
    seconds: float


class Fetch(Protocol):
    """A copy to the host under way."""

    def wait(self) -> Fetched:
        """Block until the copy is complete."""
        ...


class DeviceRuntime(Protocol):
    """What the runner asks of a device besides tensors. Nothing but `Fetch.wait` waits for the device."""

    device: torch.device

    def upload(self, values: Array) -> torch.Tensor:
        """Copy to the device behind the work already queued; `values` may be reused at once."""
        ...

    def mark(self) -> Any:
        """Note this point in the queue, to time what follows."""
        ...

    def fetch(self, tensors: Sequence[torch.Tensor], since: Any) -> Fetch:
        """Copy to the host behind the work already queued, without holding up what is queued next."""
        ...

    def beside(self) -> AbstractContextManager[None]:
        """Queue transfers apart: they start behind all work queued so far, and later work waits for them."""
        ...

    def capture(self, body: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Record `body` once; the returned call repeats it on the same memory."""
        ...


@dataclass(frozen=True, slots=True)
class CudaFetch:
    """Pinned copies that are complete when `done` is."""

    targets: list[torch.Tensor]
    since: torch.cuda.Event
    done: torch.cuda.Event

    def wait(self) -> Fetched:
        self.done.synchronize()
        seconds = self.since.elapsed_time(self.done) / 1000.0
        return Fetched([target.numpy() for target in self.targets], seconds)


class CudaRuntime:
    """One GPU. Work goes to the stream that is current when a method is called, transfers beside it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._transfers = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch publishes none
        self._results = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch publishes none
        self._pool = torch.cuda.graph_pool_handle()

    def upload(self, values: Array) -> torch.Tensor:
        # torch keeps the pinned copy until the transfer is done
        return torch.from_numpy(values).pin_memory().to(self.device, non_blocking=True)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # as above
        event.record()
        return event

    def fetch(self, tensors: Sequence[torch.Tensor], since: Any) -> CudaFetch:
        self._results.wait_stream(torch.cuda.current_stream(self.device))
        done = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # as above
        targets = []
        with torch.cuda.stream(self._results):
            for tensor in tensors:
                target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                target.copy_(tensor, non_blocking=True)
                tensor.record_stream(self._results)
                targets.append(target)
            done.record()
        return CudaFetch(targets, since, done)

    @contextmanager
    def beside(self) -> Iterator[None]:
        main = torch.cuda.current_stream(self.device)
        self._transfers.wait_stream(main)
        with torch.cuda.stream(self._transfers):
            yield
        main.wait_stream(self._transfers)

    def capture(self, body: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        body()  # compiles programs and lets libraries set up, which a capture must not
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            out = body()

        def replay() -> torch.Tensor:
            graph.replay()
            return out

        return replay


def upload_columns(runtime: DeviceRuntime, columns: Sequence[Array]) -> list[torch.Tensor]:
    """Copy arrays of one dtype and length in one transfer.

    Each starts on a 16-byte boundary: programs are compiled for that, and another form would be compiled otherwise.
    """
    length = columns[0].shape[0]
    padded = np.zeros((len(columns), -(-length // 4) * 4), columns[0].dtype)
    for index, column in enumerate(columns):
        padded[index, :length] = column
    return [column[:length] for column in runtime.upload(padded).unbind(0)]
