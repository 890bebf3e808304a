"""The engine's core stays small and torch-free: the limits it was asked to keep."""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
from pathlib import Path

import millpond_engine.core

CORE = Path(millpond_engine.core.__file__).parent
RECORDS = CORE.parent / "records"
_LAYOUT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip


def count_code(path: Path) -> int:
    """Lines of code as a counter sees them: no blank lines, comments, docstrings or strings that describe."""
    source = path.read_text(encoding="utf-8")
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def test_the_counter_counts_code_alone(tmp_path: Path) -> None:
    sample = tmp_path / "sample.py"
    sample.write_text('"""Doc.\n\nMore.\n"""\n\n# why\nx = 1  # so\n"""What x is."""\ny = """a\nb"""\n')
    assert count_code(sample) == 3


def test_the_core_has_at_most_2000_lines_of_code() -> None:
    sizes = {path.name: count_code(path) for path in CORE.rglob("*.py")}
    assert sum(sizes.values()) <= 2000, sizes


def test_no_file_of_it_is_longer_than_300_lines() -> None:
    files = [*CORE.rglob("*.py"), *RECORDS.rglob("*.py")]
    assert {path.name for path in files if len(path.read_text(encoding="utf-8").splitlines()) > 300} == set()


def test_records_have_no_behaviour() -> None:
    """Else the core's limit could be kept by moving its logic there: only properties and a view of tokens."""
    statements = 0
    for path in RECORDS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                statements += sum(1 for part in ast.walk(node) if isinstance(part, ast.stmt)) - 1
            assert not isinstance(node, ast.For | ast.While), f"{path.name} decides something"
    assert statements <= 40


def test_the_core_imports_neither_torch_nor_clock() -> None:
    code = (
        "import sys, millpond_engine.core.scheduler\n"
        "bad = {'torch', 'numpy', 'asyncio', 'socket', 'logging', 'aiohttp'} & set(sys.modules)\n"
        "sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
