"""Reports, probes and references: asked when needed, remembered as long as they count."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.support.operator_builders import make_container, make_pod

from millpond_common.contract.gateway_report import (
    EndpointReport,
    GatewayReport,
    PoolReport,
    ProbeRequest,
    ProbeResult,
)
from millpond_operator.desired.kinds import SECRET
from millpond_operator.errors import ForbiddenError, GatewayCallError, NotFoundError, UnreachableError
from millpond_operator.observe.probes import Prober, ProbeTarget
from millpond_operator.observe.progress import FetchProgress
from millpond_operator.observe.references import ReferenceChecker
from millpond_operator.observe.reports import ReportCache


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Caller:
    def __init__(self) -> None:
        self.reports = 0
        self.synced = True
        self.routed: tuple[str, ...] = ()
        self.failure: str | None = None
        self.answer = ProbeResult(ok=True, status=200, message="", seconds=0.1)
        self.probes: list[str] = []

    async def fetch_report(self, address: str) -> GatewayReport:
        self.reports += 1
        await asyncio.sleep(0)
        if self.failure is not None:
            raise GatewayCallError(self.failure)
        endpoints = tuple(EndpointReport(uid, uid, "r", "both", True, 0, 0) for uid in self.routed)
        return GatewayReport(
            address, "1", 0.0, 0.0, self.synced, (PoolReport("smol", endpoints), PoolReport("other", ()))
        )

    async def probe(self, address: str, request: ProbeRequest) -> ProbeResult:
        self.probes.append(f"{address} {request.pod_uid}")
        if self.failure is not None:
            raise GatewayCallError(self.failure)
        return self.answer

    async def probe_engine(self, address: str, model: str, *, timeout_seconds: float) -> ProbeResult:
        assert timeout_seconds > 0
        self.probes.append(f"direct {address} {model}")
        return self.answer


async def test_a_pool_without_gateway_is_asked_directly() -> None:
    caller, clock = Caller(), Clock()
    prober = Prober(caller, clock, on_answer=lambda _pool: None)
    prober.ask(ProbeTarget(("ns", "smol"), make_pod("p", address="10.0.0.7"), None, "smol"))
    await settle()
    assert caller.probes == ["direct 10.0.0.7 smol"]
    answer = prober.get_answer(make_pod("p"))
    assert answer is not None
    assert answer.ok


async def test_one_report_serves_all_pools_of_a_namespace_until_it_is_too_old() -> None:
    caller, clock = Caller(), Clock()
    cache = ReportCache(caller, clock)
    pods = [make_pod("gw-0"), make_pod("gw-1")]
    views = await asyncio.gather(
        *(cache.fetch_view("ns", name, pods, max_age=10) for name in ("smol", "other", "none"))
    )
    assert caller.reports == 2
    assert [(view.num_reporting, len(view.reports)) for view in views] == [(2, 2), (2, 2), (2, 0)]
    clock.now += 11
    await cache.fetch_view("ns", "smol", pods, max_age=10)
    assert caller.reports == 4


async def test_a_silent_or_unsynced_gateway_reports_nothing() -> None:
    caller, clock = Caller(), Clock()
    cache = ReportCache(caller, clock)
    caller.failure = "connection refused"
    view = await cache.fetch_view("ns", "smol", [make_pod("gw-0")], max_age=1)
    assert (view.num_ready, view.num_reporting, view.error) == (1, 0, "connection refused")
    caller.failure, caller.synced = None, False
    clock.now += 2
    assert (await cache.fetch_view("ns", "smol", [make_pod("gw-0")], max_age=1)).num_reporting == 0
    assert (await cache.fetch_view("ns", "smol", [make_pod("gw-1", ready=False)], max_age=1)).num_ready == 0


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_an_answer_counts_for_one_start_of_a_replica() -> None:
    caller, clock, told = Caller(), Clock(), []
    prober = Prober(caller, clock, on_answer=told.append)
    pod = make_pod("p")
    target = ProbeTarget(("ns", "smol"), pod, "10.0.0.2")
    prober.ask(target)
    prober.ask(target)
    await settle()
    assert caller.probes == ["10.0.0.2 uid-p"]
    assert told == [("ns", "smol")]
    answer = prober.get_answer(pod)
    assert answer is not None
    assert answer.ok
    prober.ask(target)
    await settle()
    assert len(caller.probes) == 1
    again = make_pod("p", ready_since=pod.created_at + 90)
    assert prober.get_answer(again) is None, "it was unready in between"
    prober.forget_others(set())
    assert prober.get_answer(pod) is None


async def test_a_failed_answer_is_asked_again_after_a_while() -> None:
    caller, clock = Caller(), Clock()
    prober = Prober(caller, clock, on_answer=lambda _pool: None, retry_seconds=5)
    caller.failure = "connection refused"
    target = ProbeTarget(("ns", "smol"), make_pod("p"), "10.0.0.2")
    for seconds in (0, 1, 5):
        clock.now += seconds
        prober.ask(target)
        await settle()
    assert len(caller.probes) == 2
    answer = prober.get_answer(make_pod("p"))
    assert answer is not None
    assert (answer.ok, answer.message) == (False, "connection refused")
    await prober.close()


class LogKube:
    def __init__(self) -> None:
        self.calls = 0
        self.answer: str | Exception = "noise\nfetch: a.bin: 10 %\nfetch: a.bin: 40 %, 16 GiB of 40 GiB\n"

    async def fetch_log(self, namespace: str, pod: str, container: str, *, tail_lines: int) -> str:
        assert (namespace, container) == ("ns", "fetch-model")
        assert pod
        assert tail_lines
        self.calls += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


async def test_op_048_progress_is_read_now_and_then_while_a_model_is_fetched() -> None:
    kube, clock = LogKube(), Clock()
    progress = FetchProgress(kube, clock)  # type: ignore[arg-type]
    fetching = make_pod("p", containers=(make_container(name="fetch-model", is_init=True),))
    assert await progress.fetch_lines("ns", [make_pod("q")]) == {}
    assert kube.calls == 0
    for _ in range(3):
        assert await progress.fetch_lines("ns", [fetching]) == {"uid-p": "a.bin: 40 %, 16 GiB of 40 GiB"}
    assert kube.calls == 1
    clock.now += 20
    kube.answer = UnreachableError("the kubelet is away")
    assert await progress.fetch_lines("ns", [fetching]) == {"uid-p": "a.bin: 40 %, 16 GiB of 40 GiB"}
    assert kube.calls == 2


async def test_a_fetch_that_has_told_nothing_yet_is_asked_again_soon() -> None:
    kube, clock = LogKube(), Clock()
    kube.answer = ""
    progress = FetchProgress(kube, clock)  # type: ignore[arg-type]
    fetching = make_pod("p", containers=(make_container(name="fetch-model", is_init=True),))
    assert await progress.fetch_lines("ns", [fetching]) == {}
    kube.answer = "fetch: Unreachable: https://hub.example: ConnectError: refused; trying again\n"
    assert await progress.fetch_lines("ns", [fetching]) == {}, "but not at once"
    clock.now += 3
    (line,) = (await progress.fetch_lines("ns", [fetching])).values()
    assert line.endswith("refused; trying again")
    assert kube.calls == 2


async def test_without_the_right_to_read_logs_nobody_asks_again_soon() -> None:
    kube, clock = LogKube(), Clock()
    kube.answer = ForbiddenError("no")
    progress = FetchProgress(kube, clock)  # type: ignore[arg-type]
    fetching = make_pod("p", containers=(make_container(name="fetch-model", is_init=True),))
    for _ in range(3):
        clock.now += 20
        assert await progress.fetch_lines("ns", [fetching]) == {}
    assert kube.calls == 1


class Kube:
    def __init__(self, **existing: Any) -> None:
        self.existing = existing
        self.calls: list[str] = []

    async def get_metadata(self, _kind: object, _namespace: str, name: str) -> dict[str, Any]:
        self.calls.append(name)
        answer = self.existing.get(name)
        if isinstance(answer, Exception):
            raise answer
        if answer is None:
            raise NotFoundError(name)
        return {}


async def test_op_004_missing_secrets_are_found_by_name_and_looked_up_again_later() -> None:
    kube, clock = Kube(there=True, hidden=ForbiddenError("no")), Clock()
    checker = ReferenceChecker(kube, clock)  # type: ignore[arg-type]
    assert await checker.list_missing(SECRET, "ns", ["there", "hidden", "missing"]) == ("missing",)
    await checker.list_missing(SECRET, "ns", ["missing"])
    assert kube.calls.count("missing") == 1
    kube.existing["missing"] = True
    clock.now += 11
    assert await checker.list_missing(SECRET, "ns", ["missing"]) == ()


async def test_what_is_missing_and_what_may_not_be_read_are_told_apart_by_one_look() -> None:
    kube = Kube(there=True, hidden=ForbiddenError("no"))
    checker = ReferenceChecker(kube, Clock())  # type: ignore[arg-type]
    names = ("there", "hidden", "missing")
    assert await checker.list_missing(SECRET, "ns", names) == ("missing",)
    assert await checker.list_forbidden(SECRET, "ns", names) == ("hidden",)
    assert sorted(kube.calls) == sorted(names)


async def test_an_object_of_the_operator_s_own_is_looked_for_now_and_then() -> None:
    clock = Clock()
    kube = Kube(hidden=ForbiddenError("no"))
    checker = ReferenceChecker(kube, clock)  # type: ignore[arg-type]
    assert await checker.find_own(SECRET, "ns", "own") == (True, None)
    secret = {"metadata": {"namespace": "ns", "name": "own"}, "data": {"key": "x"}}
    checker.note_own(SECRET, secret)
    metadata_only = {"apiVersion": "v1", "kind": "Secret", "metadata": secret["metadata"]}
    assert await checker.find_own(SECRET, "ns", "own") == (True, metadata_only)
    assert await checker.find_own(SECRET, "ns", "hidden") == (False, None)
    assert await checker.find_own(SECRET, "ns", "hidden") == (False, None)
    assert kube.calls == ["own", "hidden"]
    clock.now += 61
    assert await checker.find_own(SECRET, "ns", "own") == (True, None)
    clock.now += 600
    await checker.find_own(SECRET, "ns", "hidden")
    assert kube.calls == ["own", "hidden", "own", "hidden"]


async def test_a_report_marks_the_pools_whose_routes_it_changes_and_no_others() -> None:
    caller, clock, marked = Caller(), Clock(), []
    cache = ReportCache(caller, clock, mark=lambda namespace, pool: marked.append((namespace, pool)))
    gateway = make_pod("g", address="10.0.0.1")

    async def fetch() -> list[tuple[str, str]]:
        marked.clear()
        clock.now += 10.0
        await cache.fetch_view("ns", "smol", [gateway], max_age=1.0)
        return sorted(marked)

    both = [("ns", "other"), ("ns", "smol")]
    assert await fetch() == [], "the first report answers who asked for it"
    assert await fetch() == []
    caller.routed = ("uid-a",)
    assert await fetch() == [("ns", "smol")]
    caller.failure = "timed out"
    assert await fetch() == [], "one lost call says nothing"
    assert await fetch() == both
    assert await fetch() == []
    caller.failure = None
    assert await fetch() == both
    caller.synced = False
    assert await fetch() == both
