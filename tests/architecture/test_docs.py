"""Documentation against the code: links lead somewhere, and every reason a user may meet is explained."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from millpond_common.contract.openai import ErrorCode
from millpond_common.contract.reasons import ConditionReason, ScalingReason

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs" / "how-to"
LINK = re.compile(r"\]\(([^)\s]+)\)")
WELL = {
    "Answering",
    "Complete",
    "Healthy",
    "ModelLoaded",
    "ModelFits",
    "ModelFetching",
    "WithinLimits",
    "Scaling",
}
WELL |= {"FixedReplicas", "ExternalScaler"}
"""Reasons of conditions that need no cure."""


def list_pages() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, check=True, capture_output=True, text=True)
    return [ROOT / name for name in listed.stdout.split() if (ROOT / name).exists()]


def list_first_column(page: str) -> set[str]:
    """Words in backticks of the first column of the page's tables."""
    lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
    return {
        word
        for line in lines
        if line.startswith("| `")
        for word in re.findall(r"`(\w+)`", line.split("|")[1])
    }


def make_anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower().strip()).replace(" ", "-")


@pytest.mark.parametrize("page", list_pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        if link.startswith(("http:", "https:", "mailto:")):
            continue
        place, _, anchor = link.partition("#")
        target = (page.parent / place).resolve() if place else page
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {make_anchor(heading) for heading in headings}, link


def test_every_reason_of_a_condition_is_explained_and_none_is_invented() -> None:
    known = {str(reason) for reason in ConditionReason}
    scaling = {str(reason) for reason in ScalingReason}
    told = list_first_column("debug-not-ready.md")
    assert told <= known
    assert known - told - scaling - WELL == {"ModelSizeUnknown", "DeviceMemoryUnknown"}
    page = (DOCS / "debug-not-ready.md").read_text(encoding="utf-8")
    assert "`ModelSizeUnknown` and `DeviceMemoryUnknown` say" in page


def test_every_reason_of_a_scaling_decision_is_explained() -> None:
    assert {str(reason) for reason in ScalingReason} <= list_first_column("autoscale.md")


def test_error_codes_of_the_how_to_exist() -> None:
    lines = (DOCS / "debug-requests.md").read_text(encoding="utf-8").splitlines()
    answers = [line.split("|")[1] for line in lines if re.match(r"\| [45]\d\d ", line)]
    codes = {code for answer in answers for code in re.findall(r"`([a-z_]+)`", answer)}
    assert codes
    assert codes <= {str(code) for code in ErrorCode}
