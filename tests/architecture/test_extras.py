"""Each image's requirements suffice for its program, and bring no torch where none belongs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PROGRAMS = {
    "operator": ("operator", "millpond_operator"),
    "gateway": ("gateway", "millpond_gateway"),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_program_runs_with_its_own_requirements_alone(program: str, tmp_path: Path) -> None:
    folder, package = PROGRAMS[program]
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    python = venv / "bin/python"
    install = [
        sys.executable,
        "-m",
        "uv",
        "pip",
        "install",
        "--quiet",
        "--python",
        str(python),
        "--require-hashes",
        "--no-deps",
    ]
    subprocess.run([*install, "-r", f"requirements/{program}.txt"], cwd=ROOT, check=True)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'common'}:{ROOT / folder}", "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [str(python), "-m", package, "--help"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout.lower()
    missing = subprocess.run(
        [str(python), "-c", "import torch"], env=environment, capture_output=True, check=False
    )
    assert missing.returncode != 0
