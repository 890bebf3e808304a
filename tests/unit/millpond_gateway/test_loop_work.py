"""What one request costs the loop that relays every other one."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import yaml

from millpond_common.contract.blockkey import KeyScope
from millpond_gateway.app.prompt import make_prompt_keys
from millpond_gateway.proxy.body import parse_body
from millpond_gateway.proxy.hidden import ask_usage
from millpond_gateway.proxy.records import ParsedBody

ROOT = Path(__file__).resolve().parents[3]
SCOPE = KeyScope(model="m", block_tokens=16)


def make_body(num_bytes: int) -> bytes:
    text = "lorem ipsum " * (num_bytes // 12)
    return json.dumps(
        {"model": "m", "stream": True, "messages": [{"role": "user", "content": text}]}
    ).encode()


def find_best_seconds(work: Callable[[], object], tries: int = 7) -> float:
    """The least time of several: what the work takes when nothing else gets in between."""
    seconds = []
    for _ in range(tries):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def take_in(body: bytes) -> bytes:
    """Everything the loop does with a body before it is sent."""
    parsed = parse_body(body)
    assert isinstance(parsed, ParsedBody)
    assert make_prompt_keys(parsed, SCOPE, SCOPE.compute_root(), 4.0).keys
    return ask_usage(body, has_options=parsed.has_stream_options)


def test_gw_095_a_body_of_one_megabyte_holds_the_loop_up_for_less_than_five_milliseconds() -> None:
    body = make_body(1_000_000)
    assert find_best_seconds(lambda: take_in(body)) < 0.005


def test_gw_094_a_prompt_of_220_kilobytes_takes_less_of_the_loop_than_a_tenth_of_the_bound() -> None:
    body = make_body(220_000)
    assert find_best_seconds(lambda: take_in(body)) < 0.002


def test_gw_064_a_call_that_blocks_the_loop_is_found_by_lint_and_its_lag_by_an_alert(tmp_path: Path) -> None:
    source = tmp_path / "blocking.py"
    source.write_text("import time\n\n\nasync def relay() -> None:\n    time.sleep(1)\n")
    found = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--config", ROOT / "pyproject.toml", source],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "ASYNC251" in found.stdout
    alerts = yaml.safe_load((ROOT / "charts/millpond/files/alerts.yaml").read_text())
    rules = [rule for group in alerts["groups"] for rule in group["rules"]]
    assert any("millpond_gateway_loop_lag_seconds" in rule["expr"] for rule in rules)
