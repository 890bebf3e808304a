"""The operator of this checkout, run against a cluster in a thread of the test process."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections import Counter
from pathlib import Path
from typing import Any

from millpond_operator.clients.connection import load_connection
from millpond_operator.clients.gateway import Caller
from millpond_operator.desired.settings import BuildSettings
from millpond_operator.handlers.run import run_operator
from millpond_operator.loop.lease import LeaseSettings
from millpond_operator.loop.operator import Operator
from millpond_operator.loop.reconciler import Outcome
from millpond_operator.loop.settings import OperatorSettings
from millpond_operator.plan.settings import PlanSettings

START_SECONDS = 60.0


def make_lease(namespace: str) -> LeaseSettings:
    """A Lease that is looked at often, and that no pause of a busy machine loses: who stops gives it up at once."""
    return LeaseSettings(namespace=namespace, duration=60.0, deadline=40.0, period=0.5)


def make_settings(
    namespace: str, *, identity: str = "test", engine_image: str = "millpond-engine:test", **changes: Any
) -> OperatorSettings:
    """Settings of an operator that serves one namespace and keeps its Lease there."""
    # No real node has this much CPU, so no real kubelet runs the pods that a FakeKubelet tends.
    build = BuildSettings(
        engine_image=engine_image,
        gateway_image="millpond-gateway:test",
        gateway_replicas=1,
        gateway_cpu="4000",
        gateway_role_kind="Role",
        operator_namespace=namespace,
    )
    settings = OperatorSettings(
        plan=PlanSettings(
            build=build,
            moving_recheck_seconds=0.5,
            settled_recheck_seconds=5.0,
            draining_recheck_seconds=1.0,
        ),
        lease=make_lease(namespace),
        identity=identity,
        namespaces=(namespace,),
        listen_host="127.0.0.1",
        metrics_port=0,
        health_port=0,
    )
    return dataclasses.replace(settings, **changes)


class RunningOperator:
    """One instance in a thread of its own, since kopf cancels every younger task of its loop when it ends."""

    def __init__(self, kubeconfig: Path, settings: OperatorSettings, gateway: Caller) -> None:
        self._kubeconfig = kubeconfig
        self.settings = settings
        self._gateway = gateway
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"operator {settings.identity}", daemon=True)
        self.operator: Operator | None = None
        self.failure: BaseException | None = None
        self._begun: Counter[str] = Counter()
        self._ended: Counter[str] = Counter()
        """Rounds by pool."""

    def start(self) -> RunningOperator:
        """Start and wait until it runs."""
        self._thread.start()
        assert self._started.wait(START_SECONDS), "the operator did not start"
        return self

    def stop(self) -> None:
        """Stop as on SIGTERM and wait for the end."""
        if self._loop is not None and self._stop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(START_SECONDS)
        assert not self._thread.is_alive(), "the operator did not stop"
        if self.failure is not None:
            raise self.failure

    def resync(self) -> None:
        """Do one full resync now."""
        assert self.operator is not None
        assert self._loop is not None
        asyncio.run_coroutine_threadsafe(self.operator.resync.run_once(), self._loop).result(START_SECONDS)

    def mark(self, name: str) -> None:
        """Have a pool looked at."""
        assert self.operator is not None
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self.operator.mark, self.settings.namespaces[0], name)

    def look(self, name: str, *, times: int = 1) -> None:
        """Have a pool looked at, and wait until looks that began after this call have ended, their writes included."""
        assert self._loop is not None
        for _ in range(times):
            asyncio.run_coroutine_threadsafe(self._look(name), self._loop).result()

    async def _look(self, name: str) -> None:
        assert self.operator is not None
        wanted = self._begun[name] + 1
        self.operator.mark(self.settings.namespaces[0], name)
        async with asyncio.timeout(START_SECONDS):
            while self._ended[name] < wanted:
                await asyncio.sleep(0.01)

    def _count_looks(self, operator: Operator) -> None:
        reconcile = operator.manager.reconcile

        async def counted(namespace: str, name: str) -> Outcome | None:
            self._begun[name] += 1
            try:
                return await reconcile(namespace, name)
            finally:
                self._ended[name] += 1

        operator.manager.reconcile = counted

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # noqa: BLE001 - the test's thread raises it
            self.failure = error
            self._started.set()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        connection = load_connection(self._kubeconfig)

        def note(operator: Operator) -> None:
            self._count_looks(operator)
            self.operator = operator
            self._started.set()

        await run_operator(self.settings, connection, stop=self._stop, gateway=self._gateway, on_started=note)
