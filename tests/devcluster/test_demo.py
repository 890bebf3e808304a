"""A demo that cannot go on names its step, the reason and what to do, never a traceback."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest

from demo import install
from demo.steps import step
from images.errors import NoSpaceError


def test_a_full_disk_under_the_images_fails_the_step_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build = Mock(side_effect=NoSpaceError("18 GiB are free under /var/lib: free some and run again"))
    monkeypatch.setattr(install, "build", build)
    with pytest.raises(SystemExit), step("the three images"):
        install.push_images(Mock(host_address=None, registry="registry:5000", kubeconfig=Path("none")))
    said = capsys.readouterr().err
    assert "FAILED at step: the three images" in said
    assert "operator image: 18 GiB are free under /var/lib: free some and run again" in said
