"""What only a GPU can show: the kernel cases on the device, recorded decodes, overlap, the real model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.plan_driver import generate

from millpond_common.contract.engine_config import EngineConfig, KvCacheConfig, SchedulingConfig

ROOT = Path(__file__).resolve().parents[2]
CASES = sorted((ROOT / "tests/unit/millpond_engine/kernels/gpu/interpreted").glob("*_cases.py"))
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("cases", CASES, ids=lambda path: path.stem)
def test_cases_pass_on_the_device(cases: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases)]
    run = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert "passed" in run.stdout


def make_runner(path: Path, device: str, dtype: str) -> Any:
    from millpond_engine.runner import make_torch_runner

    return make_torch_runner(
        EngineConfig(
            model_name="test",
            model_path=str(path),
            device=device,  # type: ignore[arg-type]
            dtype=dtype,  # type: ignore[arg-type]
            max_model_tokens=2048,
            scheduling=SchedulingConfig(max_sequences=16),
            kv_cache=KvCacheConfig(device_bytes=256 << 20, host_bytes=64 << 20),
        )
    )


@pytest.mark.model
@pytest.mark.parametrize("budget", [4096, 100])
def test_the_real_model_gives_the_tokens_of_the_cpu_runner(smollm2_float32: Path, budget: int) -> None:
    """Greedy in float32: prompts from 1 to 700 tokens, so that contexts are split and decodes recorded."""
    prompts = [
        [(7 * i + j * j) % 40_000 + 3 for j in range(length)] for i, length in enumerate((1, 17, 300, 700))
    ]
    ours = make_runner(smollm2_float32, "Cuda", "Float32")
    assert ours.info.device.startswith("cuda")
    theirs = make_runner(smollm2_float32, "Cpu", "Float32")
    assert generate(ours, prompts, 24, budget=budget) == generate(theirs, prompts, 24)


@pytest.mark.model
def test_auto_takes_the_gpu_and_sizes_the_pool_from_its_memory(smollm2_float32: Path) -> None:
    from millpond_engine.runner import make_torch_runner

    config = EngineConfig(model_name="test", model_path=str(smollm2_float32), max_model_tokens=2048)
    runner = make_torch_runner(config)
    assert runner.info.device.startswith("cuda")
    assert runner.info.num_blocks * runner.info.bytes_per_block < torch.cuda.mem_get_info()[1]
    assert runner.info.num_blocks > 1000
    assert runner.info.copy_bytes_per_second > 1e9
