"""Wrong command lines end with one line that says what to write."""

from __future__ import annotations

from pathlib import Path

import pytest

from millpond_gateway.cli import main, parse_options


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--peer", "foo"], "write HOST:PORT"),
        (["--peer", "foo:0"], "write HOST:PORT"),
        (["--peer", "foo:http"], "write HOST:PORT"),
        (["--peer", ":8082"], "write HOST:PORT"),
        (["--peer", "fd00::7:8082"], "write HOST:PORT"),
        (["--port", "70000"], "ports are 0 to 65535"),
        (["--admin-port", "-1"], "whole number"),
        (["--peer-port", "x"], "whole number"),
        (["--workers", "0"], "above 0"),
        (["--workers", "99"], "at most 16"),
        (["--max-requests", "0"], "above 0"),
        (["--max-body-bytes", "1e6"], "whole number"),
        (["--poll-seconds", "nan"], "write a number"),
        (["--poll-seconds", "0"], "above 0"),
        (["--grace-seconds", "-1"], "0 or more"),
        (["--comment-seconds", "inf"], "write a number"),
        (["--price-of-recompute", "-5"], "0 or more"),
        (["--static", "x=https://a"], "TLS towards engines"),
        (["--static", "x=http://a?colour=blue"], "revision=NAME"),
        (["--static", "x=http://a?events=many"], "write a port"),
        (["--weights", "other=blue=1"], "no --static pool"),
        (["--weights", "tiny=blue=1"], "has revision 'blue'"),
        (["--weights", "tiny=blue"], "REVISION=WEIGHT"),
    ],
)
def test_a_flag_that_cannot_work_is_refused_at_start(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as leaving:
        parse_options(["--static", "tiny=http://127.0.0.1:1", *flags])
    assert leaving.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_good_flags_arrive() -> None:
    options = parse_options(
        ["--static", "tiny=http://a:1", "--peer", "[fd00::7]:8082", "--peer", "b:9", "--comment-seconds", "0"]
    )
    assert options.peers == ("[fd00::7]:8082", "b:9")
    assert options.relay.comment_seconds == 0


def test_outside_a_cluster_one_line_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("millpond_gateway.cli.configure_log", lambda: None)  # it outlives the test
    assert main(["--port", "0", "--admin-port", "0"]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert "--static" in error
    assert "KUBECONFIG" in error
