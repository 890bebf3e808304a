"""The kernels' numbers: the cases run under Triton's interpreter, in a process of their own.

The interpreter is chosen when Triton is imported, so a process that also compiles kernels cannot use it.
`make test-kernels` runs the wide sweeps.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = sorted((Path(__file__).parent / "interpreted").glob("*_cases.py"))
ROOT = Path(__file__).resolve().parents[5]
TIMEOUT_SECONDS = 1800 if os.environ.get("MILLPOND_WIDE_SWEEP") else 580


@pytest.mark.timeout(TIMEOUT_SECONDS + 20)
@pytest.mark.parametrize("chosen", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_cases_pass_under_the_interpreter(chosen: str) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", chosen, *map(str, CASES)]
    run = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert "passed" in run.stdout
    assert "skipped" not in run.stdout
