"""Making a runner from a configuration: what it tells, what it refuses, what it costs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millpond_common.contract.engine_config import EngineConfig, KvCacheConfig
from millpond_engine.kernels.cpu import build
from millpond_engine.runner import make_torch_runner
from millpond_engine.runner.memory import PoolTooSmallError


def test_the_facts_of_a_loaded_model(tiny_model: Callable[[str], Any], runner_of: Callable[..., Any]) -> None:
    info = runner_of(tiny_model("llama-vectors")[0], blocks=33, host_blocks=5).info
    assert (info.num_blocks, info.num_host_blocks, info.block_tokens) == (33, 5, 16)
    assert (info.vocabulary_size, info.dtype, info.device, info.eos_token_ids) == (
        211,
        "float32",
        "cpu",
        (3,),
    )
    assert info.bytes_per_block == 2 * 3 * 2 * 16 * 32 * 4
    assert "kvCache.deviceBytes" in info.limited_by


def test_a_pool_without_room_is_refused(tiny_model: Callable[[str], Any]) -> None:
    config = EngineConfig(
        model_name="t",
        model_path=str(tiny_model("llama")[0]),
        device="Cpu",
        kv_cache=KvCacheConfig(device_bytes=10),
    )
    with pytest.raises(PoolTooSmallError):
        make_torch_runner(config)


def test_without_a_compiler_plain_torch_gives_the_same_tokens(
    tiny_model: Callable[[str], Any],
    runner_of: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    from tests.support.plan_driver import generate

    from millpond_engine.kernels.cpu.library import load_library

    path, prompts = tiny_model("llama-vectors")[0], [list(range(5, 40)), [9]]
    compiled = generate(runner_of(path), prompts, 8)
    load_library.cache_clear()
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    plain = runner_of(path)
    monkeypatch.undo()
    load_library.cache_clear()
    assert generate(plain, prompts, 8) == compiled


def test_a_compiler_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    failing = tmp_path / "cxx"
    failing.write_text("#!/bin/sh\necho 'no such option' >&2\nexit 3\n")
    failing.chmod(0o755)
    monkeypatch.setenv("CXX", str(failing))
    with pytest.raises(build.KernelBuildError, match="no such option"):
        build.compile_variant(build.GENERIC, tmp_path / "out.so")


def test_importing_the_package_does_not_load_torch() -> None:
    code = "import millpond_engine.runner, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.model
def test_the_real_model_needs_little_memory_beyond_weights_and_kv(smollm2_gguf: Path) -> None:
    code = f"""
import re
from pathlib import Path
from millpond_common.contract.engine_config import EngineConfig, KvCacheConfig
from millpond_engine.runner import make_torch_runner
from millpond_engine.records.step import NewRow, RowStep, StepPlan
from millpond_engine.records.request import SamplingParams
config = EngineConfig(model_name="m", model_path={str(smollm2_gguf)!r}, dtype="BFloat16", device="Cpu",
                      kv_cache=KvCacheConfig(device_bytes=100 << 20))
runner = make_torch_runner(config)
row = NewRow(0, SamplingParams(temperature=0.0), 0, tuple(range(20, 276)), 256, tuple(range(17)))
runner.launch(StepPlan(0, (RowStep(0, 0, 256),), (row,))).result()
# Not ru_maxrss: across fork and exec that keeps the high-water mark of the parent, here the whole test session's.
print(int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    weights, kv = 270 << 20, 100 << 20
    assert int(done.stdout.split()[-1]) - weights - kv < 1 << 30
