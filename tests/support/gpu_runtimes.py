"""The GPU runner without a GPU: on CPU tensors that compute, and on tensors that only know where they lie."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from millpond_common.contract.engine_config import EngineConfig, KvCacheConfig, SchedulingConfig
from millpond_engine.kernels.gpu.configs import Architecture, detect_architecture
from millpond_engine.kernels.gpu.ops import GpuOps
from millpond_engine.model.config import ModelConfig
from millpond_engine.model.decoder import Decoder
from millpond_engine.model.layers import WeightReader
from millpond_engine.model.load import _LOADERS, load_weights, open_model
from millpond_engine.model.source import Piece
from millpond_engine.model.split import compute_share
from millpond_engine.model.split_ops import SplitOps
from millpond_engine.runner.cuda_load import LoadedModel, make_runner
from millpond_engine.runner.cuda_runner import CudaRunner
from millpond_engine.runner.cuda_runtime import CudaRuntime, DeviceRuntime, Fetched
from millpond_engine.runner.load import make_attention_shape, make_rope
from millpond_engine.runner.memory import PoolSize


@dataclass
class Copied:
    arrays: list[Any]
    since: float

    def wait(self) -> Fetched:
        return Fetched(self.arrays, time.perf_counter() - self.since)


class EagerRuntime:
    """A queue that is always empty: everything happens at once, on the CPU."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.num_replays = 0

    def upload(self, values: Any) -> torch.Tensor:
        return torch.from_numpy(values.copy())

    def mark(self) -> float:
        return time.perf_counter()

    def fetch(self, tensors: Sequence[torch.Tensor], since: float) -> Copied:
        return Copied([tensor.clone().numpy() for tensor in tensors], since)

    @contextmanager
    def beside(self) -> Iterator[None]:
        yield

    def capture(self, body: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        body()

        def replay() -> torch.Tensor:
            self.num_replays += 1
            return body()

        return replay


class FakeRuntime(EagerRuntime):
    """The same queue for tensors without content on a GPU that is not there."""

    device = torch.device("cuda", 0)

    def upload(self, values: Any) -> torch.Tensor:
        return torch.empty(values.shape, dtype=torch.from_numpy(values[:0]).dtype, device=self.device)

    def fetch(self, tensors: Sequence[torch.Tensor], since: float) -> Copied:
        assert all(tensor.device == self.device for tensor in tensors)
        arrays = [np.zeros(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for t in tensors]
        return Copied(arrays, since)


class NoWaiting(TorchDispatchMode):
    """Refuse copies between host and device that would wait: all but those marked as non-blocking."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        used = [x.device.type for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.dim()]
        made = [x.device.type for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        if len({*used, *made}) > 1:
            assert kwargs.get("non_blocking") or True in args[2:3], f"{func} waits for the device"
        return out


class EmptySource:
    """Weights that take no memory."""

    total_bytes = 0

    def __contains__(self, name: str) -> bool:
        return name != "rope_divisors"

    def read_into(self, piece: Piece, target: torch.Tensor) -> int:
        return target.nbytes

    def list_unread(self, read: set[str]) -> list[str]:
        return []

    def close(self) -> None:
        pass


def make_config(path: Path | str, *, host_blocks: int = 8, **options: Any) -> EngineConfig:
    scheduling = SchedulingConfig(max_sequences=options.pop("max_sequences", 4))
    cache = KvCacheConfig(block_tokens=options.pop("block_tokens", 16), host_bytes=host_blocks << 20)
    return EngineConfig(
        model_name="test",
        model_path=str(path),
        scheduling=scheduling,
        kv_cache=cache,
        max_model_tokens=256,
        **options,
    )


def load_here(path: Path, config: EngineConfig, runtime: DeviceRuntime) -> LoadedModel:
    """The GPU path's own loading in float32, onto the runtime's device."""
    opened, device = open_model(path), runtime.device
    model = load_weights(opened, GpuOps(), dtype=torch.float32, device=device)
    shape = make_attention_shape(opened.config, config.kv_cache.block_tokens)
    rope = make_rope(opened.config, model, 256).to(device)
    arch = Architecture.HOPPER if device.type == "cpu" else detect_architecture(device)
    return LoadedModel(model, shape, torch.float32, rope, 256, arch)


class SameRanks:
    """Collectives of ranks that all compute what this one does."""

    def __init__(self, size: int) -> None:
        self._size = size

    def sum(self, x: torch.Tensor) -> None:
        x.mul_(self._size)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x] * self._size)


def load_fake(
    model_config: ModelConfig, config: EngineConfig, dtype: torch.dtype = torch.bfloat16, *, size: int = 1
) -> LoadedModel:
    """A model without content, or the first of several ranks' shares of it, on a GPU that is not there.

    Call it under FakeTensorMode.
    """
    reader = WeightReader(EmptySource(), dtype, FakeRuntime.device, lambda count: None)  # type: ignore[arg-type]
    share = compute_share(model_config, 0, size)
    model: Decoder = _LOADERS[model_config.family](model_config, share, reader, GpuOps())
    if size > 1:
        model.ops = SplitOps(model.ops, share, model_config.vocabulary_size, SameRanks(size))
    rope = torch.empty(256, 2, model_config.head_dim // 2, device=FakeRuntime.device)
    shape = make_attention_shape(share.narrow(model_config), config.kv_cache.block_tokens)
    return LoadedModel(model, shape, dtype, rope, 256, Architecture.HOPPER)


class CountingRuntime(CudaRuntime):
    """A GPU that counts what it repeats."""

    num_replays = 0

    def capture(self, body: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        replay = super().capture(body)

        def count() -> torch.Tensor:
            self.num_replays += 1
            return replay()

        return count


def make_test_runner(path: Path, *, blocks: int = 40, **options: Any) -> tuple[CudaRunner, Any]:
    """The whole GPU runner: under Triton's interpreter on CPU tensors, otherwise on the GPU."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    runtime = EagerRuntime() if interpreted else CountingRuntime(torch.device("cuda", 0))
    config = make_config(path, **options)
    loaded = load_here(path, config, runtime)
    return make_runner(config, loaded, runtime, PoolSize(blocks, "the test")), runtime
