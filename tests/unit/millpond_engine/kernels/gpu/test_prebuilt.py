"""Triton's driver module without a compiler: built ahead, found by its source's digest, loaded as Triton loads it."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from millpond_engine.kernels.gpu.prebuilt import compile_driver, find_prebuilt
from millpond_engine.runner.cuda_device import explain_missing_compiler

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")


@pytest.fixture(scope="module")
def triton() -> Path:
    spec = importlib.util.find_spec("triton")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


@pytest.fixture(scope="module")
def built(triton: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_driver(triton, tmp_path_factory.mktemp("kernels"))


def _make_fake_driver(module: Path, folder: Path) -> None:
    """A library with every symbol of the GPU's driver that the module wants: there is no GPU here."""
    listing = subprocess.run(
        ["nm", "-D", "--undefined-only", module], capture_output=True, text=True, check=True
    )
    names = re.findall(r"U (cu[A-Z]\w*)", listing.stdout)
    assert names
    source = folder / "fake.c"
    source.write_text("".join(f"int {name}(void) {{ return 1; }}\n" for name in names))
    flags = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(folder / "libcuda.so.1")]
    subprocess.run(["gcc", str(source), *flags], check=True)


def test_the_module_asks_for_the_gpus_driver_and_nothing_else(built: Path) -> None:
    wanted = subprocess.run(["readelf", "-d", built], capture_output=True, text=True, check=True).stdout
    assert "[libcuda.so.1]" in wanted


@pytest.mark.parametrize("with_module", [True, False])
def test_triton_loads_it_where_there_is_no_compiler(built: Path, tmp_path: Path, with_module: bool) -> None:
    _make_fake_driver(built, tmp_path)
    code = (
        "import sys\nfrom pathlib import Path\nimport triton\n"
        "from millpond_engine.kernels.gpu.prebuilt import find_prebuilt, use_prebuilt\n"
        "found = find_prebuilt(Path(triton.__file__).parent)\n"
        "if found: use_prebuilt(found)\n"
        "from triton.backends.nvidia.driver import CudaUtils\n"
        "print(CudaUtils().load_binary)\n"
    )
    environ = {
        "PATH": str(tmp_path),
        "HOME": str(tmp_path),
        "LD_LIBRARY_PATH": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(sys.path),
        "MILLPOND_KERNELS": str(built.parent) if with_module else "",
    }
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environ, check=False
    )
    if with_module:
        assert "load_binary" in done.stdout, done.stderr
    else:
        assert "Failed to find C compiler" in done.stderr


def test_another_triton_does_not_get_it(built: Path, triton: Path, tmp_path: Path) -> None:
    assert find_prebuilt(triton, built.parent) == built
    other = tmp_path / "triton" / "backends" / "nvidia"
    other.mkdir(parents=True)
    (other / "driver.c").write_text("another source")
    assert find_prebuilt(tmp_path / "triton", built.parent) is None
    assert find_prebuilt(tmp_path, built.parent) is None


def test_with_the_module_no_compiler_is_missed(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.delenv("MILLPOND_KERNELS", raising=False)
    assert "no C compiler" in (explain_missing_compiler() or "")
    monkeypatch.setenv("MILLPOND_KERNELS", str(built.parent))
    assert explain_missing_compiler() is None
