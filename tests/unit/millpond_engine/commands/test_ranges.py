"""Nonsense in flags and configuration is refused with the name of the flag or key and what it may be."""

from __future__ import annotations

from typing import Any

import pytest

from millpond_common.contract.engine_config import ConfigError, parse_engine_config
from millpond_engine.cli import main
from millpond_engine.commands.flags import check_config, list_keys
from millpond_engine.commands.ranges import _lists, _main

BASE = {"modelName": "m", "modelPath": "/m"}


@pytest.mark.parametrize(
    ("flags", "name", "words"),
    [
        (["--fake-blocks", "-1"], "--fake-blocks", "-1 is not in 1"),
        (["--fake-blocks", "0"], "--fake-blocks", "not in 1"),
        (["--fake-load-seconds", "nan"], "--fake-load-seconds", "not in 0"),
        (["--fake-decode-step-seconds", "-0.1"], "--fake-decode-step-seconds", "not in 0"),
        (["--fake-stall-step", "-2"], "--fake-stall-step", "not in 0"),
        (["--port", "70000"], "--port", "70000 is not in 0 to 65535"),
        (["--stuck-seconds", "inf"], "--stuck-seconds", "not in 0.1"),
        (["--max-body-bytes", "0"], "--max-body-bytes", "not in 1024"),
        (["--max-body-bytes", "many"], "--max-body-bytes", "'many' is not a whole number"),
    ],
)
def test_a_flag_out_of_range_is_named(
    capsys: pytest.CaptureFixture[str], flags: list[str], name: str, words: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--runner", "fake", *flags])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert name in error
    assert words in error


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"tensorParallelSize": 65}, "tensorParallelSize is 65; it must be 1 to 64"),
        ({"defaultOutputTokens": 0}, "defaultOutputTokens"),
        ({"blockKeySeed": -1}, "blockKeySeed"),
        ({"drainSeconds": -1}, "drainSeconds"),
        ({"kvCache": {"deviceBytes": 0}}, "kvCache.deviceBytes"),
        ({"kvCache": {"hostBytes": -1}}, "kvCache.hostBytes"),
        ({"kvCache": {"devicePercent": 101}}, "kvCache.devicePercent"),
        ({"scheduling": {"maxQueuedTokens": 0}}, "scheduling.maxQueuedTokens"),
        ({"scheduling": {"classes": [{"name": "a", "reservedKvPercent": 101}]}}, "classes[0].reservedKvPercent"),
        ({"scheduling": {"classes": [{"name": "a", "maxSharePercent": 0}]}}, "classes[0].maxSharePercent"),
        ({"scheduling": {"classes": [{"name": n, "reservedKvPercent": 60} for n in "ab"]}}, "sum of reservedKvPercent"),
        ({"scheduling": {"classes": [{"name": "a", "ttftMilliseconds": 0}]}}, "classes[0].ttftMilliseconds"),
        ({"scheduling": {"classes": [{"name": "a", "admitWhileQueuedClass": "x"}]}}, "which is no class"),
        ({"scheduling": {"tenants": [{"name": "t", "weight": 0}]}}, "tenants[0].weight"),
        ({"scheduling": {"tenants": [{"name": " "}]}}, "tenants[0].name is empty"),
        ({"modelName": ""}, "modelName is empty"),
    ],
)  # fmt: skip
def test_a_key_out_of_range_is_named(changes: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_config(parse_engine_config(BASE | changes))
    assert name in str(caught.value)


def test_every_number_of_the_configuration_has_a_range() -> None:
    full = {"scheduling": {"classes": [{"name": "a"}], "tenants": [{"name": "t"}]}}
    config = parse_engine_config(BASE | full)
    bounded = {item.name for item in (*_main(config), *_lists(config))}
    numbers = {key.name for key in list_keys() if key.type in (int, int | None)}
    assert numbers <= bounded
    for name in ("scheduling.classes[0].priority", "scheduling.tenants[0].maxCachePercent"):
        assert name in bounded


def test_the_message_names_the_file(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("modelName: a\nmodelPath: b\nscheduling: {maxSequences: 0}\n", encoding="utf-8")
    assert main(["serve", "--runner", "fake", "--config", str(file)]) == 2
    error = capsys.readouterr().err
    assert str(file) in error
    assert "scheduling.maxSequences is 0; it must be 1 to 65536" in error
