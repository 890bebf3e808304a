"""kopf only watches: the right resources, silent settings, handlers that return nothing."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

from lightkube.config.kubeconfig import KubeConfig, SingleConfig

from millpond_operator.handlers.watch import make_connection_info, make_registry, make_settings
from millpond_operator.loop.resync import WATCHED


class FakeOperator:
    def __init__(self) -> None:
        self.events: list[tuple[str, Any, str]] = []

    def take_event(self, kind: Any, event_type: str | None, obj: dict[str, Any]) -> None:
        self.events.append((kind.plural, event_type, obj["metadata"]["name"]))


def make_connection(**user: Any) -> SingleConfig:
    config = KubeConfig.from_dict(
        {
            "current-context": "c",
            "clusters": [
                {
                    "name": "k",
                    "cluster": {"server": "https://10.0.0.1:6443", "certificate-authority-data": "QQ=="},
                }
            ],
            "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
            "users": [{"name": "u", "user": user}],
        }
    )
    found = config.get()
    assert found is not None
    return found


def list_handlers(operator: FakeOperator) -> list[Any]:
    registry = make_registry(operator, make_connection(token="t"))  # type: ignore[arg-type]
    return list(registry._watching.get_all_handlers())


def test_every_kind_is_watched_by_its_full_name_and_by_events_only() -> None:
    operator = FakeOperator()
    registry = make_registry(operator, make_connection(token="t"))  # type: ignore[arg-type]
    handlers = registry._watching.get_all_handlers()
    selectors = {
        (h.selector.group, h.selector.version, h.selector.any_name or h.selector.plural) for h in handlers
    }
    assert selectors == {(kind.group, kind.version, kind.plural) for kind in WATCHED}
    # Finalizers and annotations come with handlers of other sorts.
    assert list(registry._changing.get_all_handlers()) == []
    assert list(registry._spawning.get_all_handlers()) == []


def test_handlers_pass_on_and_return_nothing() -> None:
    operator = FakeOperator()
    for handler in list_handlers(operator):
        result = handler.fn(event={"type": "ADDED", "object": {"metadata": {"name": "x"}}}, memo=None)
        assert inspect.isawaitable(result)
        assert asyncio.run(result) is None  # type: ignore[arg-type]
    assert len(operator.events) == len(WATCHED)


def test_dead_streams_are_noticed_and_nothing_is_posted() -> None:
    for namespaced in (True, False):
        settings = make_settings(namespaced=namespaced, inactivity_seconds=70)
        assert settings.watching.server_timeout
        assert settings.watching.client_timeout > settings.watching.server_timeout
        assert settings.watching.connect_timeout
        assert settings.watching.inactivity_timeout == 70
        assert settings.posting.enabled is False
        assert settings.scanning.disabled is namespaced


def test_credentials_are_those_of_the_rest_of_the_operator() -> None:
    info = make_connection_info(make_connection(token="t"))
    assert (info.server, info.token, info.ca_data) == ("https://10.0.0.1:6443", "t", "QQ==")
    certificate = {"client-certificate-data": "Qg==", "client-key-data": "Qw=="}
    info = make_connection_info(make_connection(**certificate))
    assert (info.certificate_data, info.private_key_data) == ("Qg==", "Qw==")
