"""Torch runner: rows of state, paged KV tensors, sampling.

`make_torch_runner` loads torch; importing this package does not.
"""

from __future__ import annotations

from collections.abc import Callable

from millpond_common.contract.engine_config import EngineConfig
from millpond_engine.engine.runner import Runner
from millpond_engine.runner.threads import prepare_threads

__all__ = ["make_torch_runner"]


def make_torch_runner(config: EngineConfig, *, progress: Callable[[int, int], None] | None = None) -> Runner:
    """Load the model that the configuration names; `progress` gets (loaded bytes, total bytes).

    Raises:
        ModelError: the model cannot be read or run (`millpond_engine.model.errors`).
        PoolTooSmallError: no KV block fits (`millpond_engine.runner.memory`).
    """
    prepare_threads()
    from millpond_engine.runner.load import make_torch_runner as load  # noqa: PLC0415 - keeps torch out of the import

    return load(config, progress=progress)
