"""The command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from millpond_operator import cli
from millpond_operator.cli import main, make_parser, make_settings
from millpond_operator.errors import SettingsError

REQUIRED = ["--engine-image=e:1", "--gateway-image=g:1", "--operator-namespace=sys"]


def parse(*arguments: str) -> object:
    return make_settings(make_parser().parse_args([*REQUIRED, *arguments]))


def test_defaults_serve_the_whole_cluster() -> None:
    settings = make_settings(make_parser().parse_args(REQUIRED))
    assert settings.is_cluster_wide
    assert settings.plan.build.engine_image == "e:1"
    assert settings.lease.namespace == settings.plan.build.operator_namespace == "sys"


def test_namespaces_may_be_repeated() -> None:
    settings = make_settings(
        make_parser().parse_args([*REQUIRED, "--namespace=a", "--namespace=b", "--namespace=a"])
    )
    assert settings.namespaces == ("a", "b")


def test_each_flag_has_a_variable_and_wins_over_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLPOND_ENGINE_IMAGE", "from-env")
    monkeypatch.setenv("MILLPOND_GATEWAY_IMAGE", "from-env")
    monkeypatch.setenv("MILLPOND_NAMESPACE", "x,y")
    monkeypatch.setenv("MILLPOND_GATEWAY_REPLICAS", "5")
    settings = make_settings(make_parser().parse_args(["--operator-namespace=sys", "--gateway-image=flag"]))
    assert settings.plan.build.engine_image == "from-env"
    assert settings.plan.build.gateway_image == "flag"
    assert settings.namespaces == ("x", "y")
    assert settings.plan.build.gateway_replicas == 5


@pytest.mark.parametrize("flag", ["--gateway-replicas=0", "--resync-seconds=0", "--max-parallel=-1"])
def test_nonsense_is_refused(flag: str) -> None:
    with pytest.raises(SettingsError, match="must be above 0"):
        parse(flag)


def test_gateways_get_environment_for_traces() -> None:
    settings = make_settings(
        make_parser().parse_args([*REQUIRED, "--gateway-env=OTEL_EXPORTER_OTLP_ENDPOINT=http://a:4318/x=y"])
    )
    (variable,) = settings.plan.build.gateway_env
    assert (variable.name, variable.value) == ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://a:4318/x=y")


@pytest.mark.parametrize("text", ["A", "=x", "1A=x", "A B=x", "POD_NAME=x"])
def test_an_environment_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="--gateway-env"):
        parse(f"--gateway-env={text}")


def test_a_missing_cluster_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "configure_logging", lambda **_: None)
    assert main([*REQUIRED, f"--kubeconfig={tmp_path / 'none'}"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "--kubeconfig" in error


def test_help_names_every_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert text.count("[MILLPOND_") >= 20


def test_logs_are_json_lines() -> None:
    """In a process of its own: logging is global, and this test's output ends with it."""
    code = (
        "import logging; from millpond_operator.log import configure_logging;"
        "configure_logging(level='info', as_json=True); logging.getLogger('kopf.x').warning('hello %s', 'world')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    line = json.loads(done.stdout.splitlines()[-1])
    assert (line["event"], line["level"]) == ("hello world", "warning")
