"""The client of the API server, against a small server on loopback: what it sends, and which error an answer becomes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from lightkube.config.kubeconfig import KubeConfig, SingleConfig

from millpond_operator.clients.connection import Credentials, load_connection
from millpond_operator.clients.kube import KubeClient
from millpond_operator.desired.kinds import CONFIG_MAP, DEPLOYMENT, LEASE, POD
from millpond_operator.errors import (
    ConflictError,
    ForbiddenError,
    InvalidObjectError,
    KubeError,
    NotFoundError,
    SettingsError,
    ThrottledError,
    UnreachableError,
)

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_connection(server: str, **user: Any) -> SingleConfig:
    config = KubeConfig.from_dict(
        {
            "current-context": "c",
            "clusters": [{"name": "k", "cluster": {"server": server}}],
            "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
            "users": [{"name": "u", "user": user}],
        }
    )
    found = config.get()
    assert found is not None
    return found


@asynccontextmanager
async def serve(answer: Answer, **user: Any) -> AsyncIterator[KubeClient]:
    """A client of a server that gives this answer to everything."""

    async def handle(request: web.Request) -> web.StreamResponse:
        return await answer(request)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    client = KubeClient(make_connection(f"http://127.0.0.1:{port}/prefix/", **user), timeout_seconds=0.3)
    try:
        yield client
    finally:
        await client.close()
        await runner.cleanup()


class Recorder:
    """Notes requests and answers the same to each."""

    def __init__(self, *, status: int = 200, body: Any = None, headers: dict[str, str] | None = None) -> None:
        self.status, self.body, self.headers = status, body, headers
        self.seen: list[tuple[str, str, dict[str, str], bytes]] = []
        self.authorizations: list[str] = []

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.seen.append((request.method, request.path, dict(request.query), body))
        self.authorizations.append(request.headers.get("authorization", ""))
        if isinstance(self.body, str):
            return web.Response(status=self.status, text=self.body, headers=self.headers)
        return web.json_response(self.body or {}, status=self.status, headers=self.headers)


async def test_fields_that_nobody_knows_are_refused_where_users_write_freely() -> None:
    """The API server drops them otherwise: a toleration without its misspelled effect tolerates everything."""
    recorder = Recorder()
    async with serve(recorder) as client:
        await client.create(DEPLOYMENT, "ns", {"x": 1}, manager="m")
        await client.apply(DEPLOYMENT, "ns", "a", {"x": 1}, manager="m", force=True)
    assert [query["fieldValidation"] for _, _, query, _ in recorder.seen] == ["Strict", "Strict"]


async def test_each_verb_is_the_api_servers() -> None:
    recorder = Recorder()
    async with serve(recorder) as client:
        await client.apply(CONFIG_MAP, "ns", "a", {"x": 1}, manager="m", force=True)
        await client.create(CONFIG_MAP, "ns", {"x": 1}, manager="m")
        await client.merge(CONFIG_MAP, "ns", "a", {"x": 1}, manager="m")
        await client.replace(LEASE, "ns", "a", {"x": 1})
        await client.delete(POD, "ns", "a", uid="u")
        await client.get(POD, "ns", "a")
    base = "/prefix/api/v1/namespaces/ns"
    assert [(method, path, query) for method, path, query, _ in recorder.seen] == [
        ("PATCH", f"{base}/configmaps/a", {"fieldManager": "m", "force": "true"}),
        ("POST", f"{base}/configmaps", {"fieldManager": "m"}),
        ("PATCH", f"{base}/configmaps/a", {"fieldManager": "m"}),
        ("PUT", "/prefix/apis/coordination.k8s.io/v1/namespaces/ns/leases/a", {}),
        ("DELETE", f"{base}/pods/a", {}),
        ("GET", f"{base}/pods/a", {}),
    ]
    assert recorder.seen[0][3] == b'{"x":1}'
    assert b'"preconditions":{"uid":"u"}' in recorder.seen[4][3]


async def test_a_list_is_fetched_page_by_page_and_its_selector_arrives_as_it_is() -> None:
    queries: list[dict[str, str]] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        queries.append(dict(request.query))
        number = len(queries)
        more = {"continue": "a+b/c=="} if number == 1 else {}
        items = [{"metadata": {"name": f"p{number}"}}]
        return web.json_response({"metadata": {"resourceVersion": "7", **more}, "items": items})

    async with serve(answer) as client:
        found = await client.list(POD, None, labels="a/b=c,d in (e)", fields="spec.nodeName!=")
    assert [item["metadata"]["name"] for item in found.items] == ["p1", "p2"]
    assert {item["kind"] for item in found.items} == {"Pod"}
    assert found.resource_version == 7
    assert queries[0]["labelSelector"] == "a/b=c,d in (e)"
    assert queries[0]["fieldSelector"] == "spec.nodeName!="
    assert queries[1]["continue"] == "a+b/c=="


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, InvalidObjectError),
        (401, ForbiddenError),
        (403, ForbiddenError),
        (404, NotFoundError),
        (409, ConflictError),
        (418, KubeError),
        (422, InvalidObjectError),
        (500, UnreachableError),
        (503, UnreachableError),
    ],
)
async def test_a_refusal_is_its_typed_error_with_the_servers_words(
    status: int, error: type[KubeError]
) -> None:
    async with serve(Recorder(status=status, body={"message": "because", "reason": "Why"})) as client:
        with pytest.raises(error, match="because") as caught:
            await client.get(POD, "ns", "a")
    assert type(caught.value) is error
    assert (caught.value.status, caught.value.reason) == (status, "Why")


async def test_a_refusal_that_is_no_object_keeps_its_text() -> None:
    async with serve(Recorder(status=502, body="<html>no backend</html>")) as client:
        with pytest.raises(UnreachableError, match="no backend"):
            await client.get(POD, "ns", "a")


@pytest.mark.parametrize(
    ("value", "seconds"), [("7", 7.0), ("Wed, 21 Oct 2026 07:28:00 GMT", 1.0), (None, 1.0)]
)
async def test_a_busy_server_says_how_long_to_wait(value: str | None, seconds: float) -> None:
    headers = {"retry-after": value} if value is not None else None
    async with serve(Recorder(status=429, headers=headers)) as client:
        with pytest.raises(ThrottledError) as caught:
            await client.get(POD, "ns", "a")
    assert caught.value.retry_after_seconds == seconds


async def test_silence_a_cut_and_a_closed_port_are_all_no_answer() -> None:
    async def hang(_request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(5)
        return web.Response()

    async def cut(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    for answer in (hang, cut):
        async with serve(answer) as client:
            with pytest.raises(UnreachableError, match="no answer from the API server to get"):
                await client.get(POD, "ns", "a")
    closed = KubeClient(make_connection("http://127.0.0.1:1"))
    with pytest.raises(UnreachableError):
        await closed.get(POD, "ns", "a")
    await closed.close()


async def test_no_redirect_is_followed_with_the_token() -> None:
    recorder = Recorder(status=307, headers={"location": "http://127.0.0.1:1/elsewhere"}, body={})
    async with serve(recorder, token="t") as client:
        await client.get(POD, "ns", "a")
    assert len(recorder.seen) == 1


async def test_every_call_is_told_with_its_outcome() -> None:
    told: list[tuple[str, str, int]] = []
    recorder = Recorder(status=404)
    async with serve(recorder) as client:
        client._observer = lambda verb, kind, status, _seconds: told.append((verb, kind, status))
        with pytest.raises(NotFoundError):
            await client.get(POD, "ns", "a")
    closed = KubeClient(
        make_connection("http://127.0.0.1:1"),
        observer=lambda verb, kind, status, _: told.append((verb, kind, status)),
    )
    with pytest.raises(UnreachableError):
        await closed.list(POD, None)
    await closed.close()
    assert told == [("get", "Pod", 404), ("list", "Pod", 0)]


async def test_a_rotated_token_is_read_again_after_a_while_and_when_it_was_refused(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("one\n", encoding="utf-8")
    recorder = Recorder(status=200)
    async with serve(recorder, tokenFile=str(file)) as client:
        await client.get(POD, "ns", "a")
        file.write_text("two\n", encoding="utf-8")
        await client.get(POD, "ns", "a")
        recorder.status = 401
        with pytest.raises(ForbiddenError):
            await client.get(POD, "ns", "a")
        recorder.status = 200
        await client.get(POD, "ns", "a")
        file.unlink()
        client._credentials.forget()
        with pytest.raises(UnreachableError, match="token"):
            await client.get(POD, "ns", "a")
    assert recorder.authorizations == ["Bearer one", "Bearer one", "Bearer one", "Bearer two"]


def test_a_token_is_kept_for_a_minute(tmp_path: Path) -> None:
    file, now = tmp_path / "token", [0.0]
    file.write_text("one", encoding="utf-8")
    credentials = Credentials(make_connection("http://k", tokenFile=str(file)), lambda: now[0])
    assert credentials.get_header() == "Bearer one"
    file.write_text("two", encoding="utf-8")
    now[0] = 59.0
    assert credentials.get_header() == "Bearer one"
    now[0] = 60.0
    assert credentials.get_header() == "Bearer two"


def test_a_name_and_a_password_are_sent_as_they_should_be() -> None:
    credentials = Credentials(make_connection("http://k", username="u", password="p"), lambda: 0.0)
    assert credentials.get_header() == "Basic dTpw"
    assert Credentials(make_connection("http://k"), lambda: 0.0).get_header() == ""


def test_a_user_whose_credentials_a_program_makes_is_refused_at_the_start(tmp_path: Path) -> None:
    """The watches could not use them, so it would start and see nothing."""
    file = tmp_path / "config"
    file.write_text(
        """{"current-context": "c", "clusters": [{"name": "k", "cluster": {"server": "https://k"}}],
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}], "users": [{"name": "u", "user":
        {"exec": {"apiVersion": "client.authentication.k8s.io/v1beta1", "command": "login"}}}]}""",
        encoding="utf-8",
    )
    with pytest.raises(SettingsError, match="client certificate"):
        load_connection(file)
    text = file.read_text(encoding="utf-8").replace('{"exec"', '{"token": "t", "exec"')
    file.write_text(text, encoding="utf-8")
    user = load_connection(file).user
    assert user is not None
    assert user.token == "t", "a token beside the program is used"
