"""Runners over the real model and over tiny ones, made once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millpond_common.contract.engine_config import EngineConfig, KvCacheConfig
from millpond_engine.runner import make_torch_runner


def make_runner(
    path: Path, *, blocks: int = 64, host_blocks: int = 24, block_tokens: int = 16, **options: Any
) -> Any:
    """A runner with about that many blocks of its model."""
    from millpond_engine.model.load import choose_dtype, open_model
    from millpond_engine.runner.load import bytes_per_block, choose_device, make_attention_shape

    config = EngineConfig(
        model_name="test", model_path=str(path), **({"dtype": "Float32", "device": "Cpu"} | options)
    )
    model = open_model(path).config
    shape = make_attention_shape(model, block_tokens)
    size = bytes_per_block(shape, choose_dtype(config.dtype, model, choose_device(config.device)))
    cache = KvCacheConfig(
        block_tokens=block_tokens, device_bytes=blocks * size, host_bytes=host_blocks * size
    )
    return make_torch_runner(
        EngineConfig(
            model_name="test",
            model_path=str(path),
            kv_cache=cache,
            **({"dtype": "Float32", "device": "Cpu"} | options),
        )
    )


@pytest.fixture(scope="session")
def runner_of() -> Callable[..., Any]:
    return make_runner


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path) -> Any:
    """The real model in float32 from GGUF."""
    return make_runner(smollm2_gguf, blocks=160, host_blocks=40)
