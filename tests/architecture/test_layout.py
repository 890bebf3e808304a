from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def test_the_standard_operator_module_is_not_shadowed() -> None:
    assert not (ROOT / "operator/__init__.py").exists()
    # -S: a start-up hook of some package could have loaded the real module before the guard looks.
    code = "import collections, operator; operator.itemgetter"
    subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, check=True)


def test_layers_hold() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_a_broken_layer_would_be_found(tmp_path: Path) -> None:
    """The contract can fail: a decision that imports asyncio is refused."""
    package = tmp_path / "millpond_sample"
    package.mkdir()
    (package / "__init__.py").write_text("import asyncio\n", encoding="utf-8")
    contract = {c["name"]: c for c in PYPROJECT["tool"]["importlinter"]["contracts"]}["decisions are pure"]
    config = tmp_path / ".importlinter"
    config.write_text(
        "[importlinter]\nroot_package = millpond_sample\ninclude_external_packages = True\n"
        "[importlinter:contract:pure]\nname = pure\ntype = forbidden\nsource_modules = millpond_sample\n"
        "forbidden_modules =\n    " + "\n    ".join(contract["forbidden_modules"]) + "\n",
        encoding="utf-8",
    )
    linter = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run(
        [str(linter), "--config", str(config)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "asyncio" in done.stdout


def test_pins_carry_hashes_and_no_address() -> None:
    for path in tracked("requirements"):
        text = path.read_text(encoding="utf-8")
        assert "://" not in text, path.name
        requirements = re.findall(r"^[A-Za-z0-9_.-]+==", text, flags=re.MULTILINE)
        assert requirements, path.name
        assert text.count("--hash=sha256:") >= len(requirements), path.name


def test_every_test_lives_under_tests() -> None:
    strays = [p for p in tracked("*.py") if p.name.startswith("test_") and ROOT / "tests" not in p.parents]
    assert strays == []


@pytest.mark.parametrize(
    "program", ["operator/millpond_operator", "gateway/millpond_gateway", "engine_image/millpond_engine"]
)
def test_programs_have_the_same_face(program: str) -> None:
    package = ROOT / program
    for name in ("cli.py", "__main__.py", "py.typed", "../Dockerfile", "../README.md"):
        assert (package / name).exists(), f"{program}/{name}"


def test_no_source_file_is_two_ideas_long() -> None:
    long = {
        str(p.relative_to(ROOT)): n
        for p in tracked("*.py")
        if ROOT / "tests" not in p.parents and (n := len(p.read_text(encoding="utf-8").splitlines())) > 400
    }
    assert long == {}
