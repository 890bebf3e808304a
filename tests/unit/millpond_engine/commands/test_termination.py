"""The last word of a failed engine: one JSON line, in a pod or where a flag says, and nowhere else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from millpond_common.contract.engine_config import ConfigError
from millpond_common.contract.reasons import ConditionReason
from millpond_engine.commands.failure import classify_failure
from millpond_engine.model.errors import ModelFormatError, ModelTooLargeError
from millpond_engine.runner.memory import AvailableMemory, PoolTooSmallError, check_weights_fit
from millpond_engine.termination import POD_PATH, choose_termination_path, write_termination_message

SERVE = [sys.executable, "-m", "millpond_engine", "serve", "--runner", "fake", "--host", "127.0.0.1",
         "--port", "0", "--admin-port", "0", "--kv-events", "off"]  # fmt: skip


def test_the_pods_file_is_written_in_a_pod_alone(tmp_path: Path) -> None:
    in_pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    assert choose_termination_path(None, {}) is None
    assert choose_termination_path(None, in_pod) == POD_PATH
    assert choose_termination_path(tmp_path / "x", {}) == tmp_path / "x"


def test_a_message_is_one_line_that_kubernetes_keeps_whole(tmp_path: Path) -> None:
    write_termination_message(tmp_path / "log", "ModelLoad", "é\n" * 4000)
    text = (tmp_path / "log").read_text(encoding="utf-8")
    assert text.count("\n") == 1
    assert len(text.encode()) <= 4096 * 6  # escapes; what counts is that the JSON is whole
    assert json.loads(text)["message"].startswith("é\né")
    write_termination_message(tmp_path / "no" / "such" / "folder", "ModelLoad", "x")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ModelTooLargeError("x"), ConditionReason.MODEL_TOO_LARGE),
        (PoolTooSmallError("x"), ConditionReason.MODEL_TOO_LARGE),
        (MemoryError(), ConditionReason.MODEL_TOO_LARGE),
        (RuntimeError("CUDA out of memory. Tried to allocate"), ConditionReason.MODEL_TOO_LARGE),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), ConditionReason.MODEL_TOO_LARGE),
        (ModelFormatError("x"), ConditionReason.MODEL_LOAD),
        (ConfigError("x"), ConditionReason.CONFIG_ERROR),
    ],
)
def test_failures_have_the_operators_reasons(error: Exception, reason: ConditionReason) -> None:
    assert classify_failure(error) is reason


def test_weights_larger_than_the_memory_are_refused_with_both_sizes() -> None:
    check_weights_fit(1 << 30, AvailableMemory(1 << 30, "the machine"))
    with pytest.raises(ModelTooLargeError, match=r"2\.0 GiB and the cgroup limit leaves 1\.0 GiB"):
        check_weights_fit(2 << 30, AvailableMemory(1 << 30, "the cgroup limit"))


@pytest.mark.parametrize(
    ("flags", "code", "reason", "words"),
    [
        (["--fake-fail-load", "the weights are cut off"], 1, "ModelLoad", "the weights are cut off"),
        (["--max-model-tokens", "0"], 2, "ConfigError", "maxModelTokens"),
        (["--tokenizer", "/no/such/tokenizer"], 2, "ModelLoad", "/no/such/tokenizer"),
    ],
)
def test_a_failed_start_leaves_its_reason(
    tmp_path: Path, flags: list[str], code: int, reason: str, words: str
) -> None:
    log = tmp_path / "termination-log"
    done = subprocess.run(
        [*SERVE, "--termination-message", str(log), *flags], capture_output=True, timeout=60, check=False
    )
    assert done.returncode == code
    told = json.loads(log.read_text(encoding="utf-8"))
    assert told["reason"] == reason
    assert words in told["message"]
