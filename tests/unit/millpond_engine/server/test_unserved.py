from __future__ import annotations

import pytest

from millpond_common.contract.engine_config import ConfigError, parse_engine_config
from millpond_engine.commands.serve import refuse_unserved

BASE = {"modelName": "m", "modelPath": "/m"}


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"adapters": [{"name": "sql", "path": "/a"}]}, "adapters"),
        ({"role": "Prefill"}, "role"),
    ],
)
def test_what_is_not_served_is_refused_by_its_key(changes: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        refuse_unserved(parse_engine_config(BASE | changes))


def test_the_rest_is_served() -> None:
    refuse_unserved(parse_engine_config(BASE | {"tensorParallelSize": 2}))
