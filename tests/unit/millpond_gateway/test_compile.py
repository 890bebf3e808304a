"""What is compiled, and what may be: the list in gateway/compile.py."""

from __future__ import annotations

import ast
import importlib
import os
from pathlib import Path

import pytest

from millpond_gateway.app.form import COMPILED, INTERPRETED, find_form
from millpond_gateway.app.memory import find_allocator
from millpond_gateway.cli import main

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "gateway" / "millpond_gateway"
FORM = os.environ.get("MILLPOND_GATEWAY_FORM", INTERPRETED)


def read_modules() -> list[str]:
    tree = ast.parse((ROOT / "gateway" / "compile.py").read_text(encoding="utf-8"))
    [value] = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id == "MODULES"
    ]
    return list(ast.literal_eval(value))


MODULES = read_modules()


def test_the_list_is_in_order_and_names_what_exists() -> None:
    assert sorted(set(MODULES)) == MODULES
    assert [module for module in MODULES if not (PACKAGE / module).is_file()] == []


@pytest.mark.parametrize("module", MODULES)
def test_no_compiled_module_defines_what_mypyc_would_change(module: str) -> None:
    """Struct: its options and field types are lost. Dataclass: slots are not. asyncio.Protocol: its methods get slow."""
    tree = ast.parse((PACKAGE / module).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            bases = {ast.unparse(base) for base in node.bases}
            assert not bases & {"msgspec.Struct", "asyncio.Protocol"}, node.name
            decorators = {ast.unparse(decorator).partition("(")[0] for decorator in node.decorator_list}
            assert "dataclass" not in decorators, node.name


@pytest.mark.parametrize("module", MODULES)
def test_the_form_under_test_is_the_one_that_was_asked_for(module: str) -> None:
    loaded = importlib.import_module(f"millpond_gateway.{module[:-3].replace('/', '.')}")
    suffix = Path(loaded.__file__ or "").suffix
    assert suffix == (".so" if FORM == COMPILED else ".py")


def test_the_command_line_tells_the_form(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    assert find_form() == FORM
    assert capsys.readouterr().out.endswith(f"({FORM}, {find_allocator()})\n")
