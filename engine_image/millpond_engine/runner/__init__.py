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
        DeviceUnavailableError: the GPUs asked for are not there (`millpond_engine.runner.cuda_device`).
        PoolTooSmallError: no KV block fits (`millpond_engine.runner.memory`).
        RankLostError: another rank of a tensor-parallel engine failed (`millpond_engine.runner.ranks`).
    """
    size = config.tensor_parallel_size
    num_threads = prepare_threads(size=size)
    # here, to keep torch out of the import
    if size > 1:
        from millpond_engine.runner.parallel_runner import make_parallel_runner  # noqa: PLC0415

        return make_parallel_runner(config, num_threads=num_threads, progress=progress)
    from millpond_engine.runner.group import RankGroup  # noqa: PLC0415
    from millpond_engine.runner.load import load_rank  # noqa: PLC0415

    rank, _ = load_rank(config, progress=progress)
    return rank.finish(RankGroup())
