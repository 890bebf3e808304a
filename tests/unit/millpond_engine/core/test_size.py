"""The core stays small and torch-free: the limits it was asked to keep."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import millpond_engine.core

FOLDER = Path(millpond_engine.core.__file__).parent
RECORDS = {"request.py", "step.py", "outputs.py", "settings.py"}
CHECKS = {"integrity.py"}


def count_code(path: Path) -> int:
    """Lines that are neither blank nor comment nor docstring."""
    source = path.read_text()
    texts: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        for child in getattr(node, "body", []) if isinstance(getattr(node, "body", None), list) else []:
            if (
                isinstance(child, ast.Expr)
                and isinstance(child.value, ast.Constant)
                and isinstance(child.value.value, str)
            ):
                texts.update(range(child.lineno, (child.end_lineno or child.lineno) + 1))
    lines = enumerate(source.splitlines(), 1)
    return sum(
        1
        for number, line in lines
        if line.strip() and number not in texts and not line.strip().startswith("#")
    )


def test_no_file_is_longer_than_300_lines():
    assert {path.name for path in FOLDER.glob("*.py") if len(path.read_text().splitlines()) > 300} == set()


def test_the_logic_has_at_most_2000_lines_of_code():
    logic = {path.name: count_code(path) for path in FOLDER.glob("*.py") if path.name not in RECORDS | CHECKS}
    assert sum(logic.values()) <= 2000, logic


def test_the_core_imports_neither_torch_nor_clock():
    code = (
        "import sys, millpond_engine.core.scheduler\n"
        "bad = {'torch', 'numpy', 'asyncio', 'socket', 'logging', 'aiohttp'} & set(sys.modules)\n"
        "sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
