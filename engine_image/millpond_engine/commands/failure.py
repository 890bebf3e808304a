"""Why an engine could not start, in the operator's words."""

from __future__ import annotations

from millpond_common.contract.engine_config import ConfigError, EngineConfig
from millpond_common.contract.reasons import ConditionReason
from millpond_engine.commands.build import MakeRunner, Progress
from millpond_engine.engine.runner import Runner
from millpond_engine.loop.settings import LoadCancelledError
from millpond_engine.model.errors import ModelTooLargeError
from millpond_engine.runner.memory import PoolTooSmallError

_NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")
"""How torch says it: only a GPU's has an exception of its own."""


def classify_failure(error: BaseException) -> ConditionReason:
    """The reason of a failed start."""
    if isinstance(error, ConfigError):
        return ConditionReason.CONFIG_ERROR
    if isinstance(error, (ModelTooLargeError, PoolTooSmallError, MemoryError)):
        return ConditionReason.MODEL_TOO_LARGE
    if isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _NO_MEMORY):
        return ConditionReason.MODEL_TOO_LARGE
    return ConditionReason.MODEL_LOAD


class LoadWitness:
    """Remembers why the last load failed, for the process's last word."""

    def __init__(self, make_runner: MakeRunner) -> None:
        self._make_runner = make_runner
        self.error: Exception | None = None

    def make_runner(self, config: EngineConfig, progress: Progress) -> Runner:
        """Make the runner as asked, and note a failure."""
        self.error = None
        try:
            return self._make_runner(config, progress)
        except LoadCancelledError:
            raise
        except Exception as error:
            self.error = error
            raise
