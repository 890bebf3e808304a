"""The life of the process: start, serve until told to stop, end in order."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

import structlog
from lightkube.config.kubeconfig import SingleConfig

from millpond_operator.clients.gateway import Caller, GatewayClient
from millpond_operator.handlers.watch import run_watches
from millpond_operator.loop.operator import Operator
from millpond_operator.loop.reconciler import Scaler
from millpond_operator.loop.settings import OperatorSettings

LOG = structlog.get_logger(__name__)


async def run_operator(
    settings: OperatorSettings,
    connection: SingleConfig,
    *,
    stop: asyncio.Event,
    gateway: Caller | None = None,
    scaler: Scaler | None = None,
    on_started: Callable[[Operator], None] | None = None,
    handle_signals: bool = False,
) -> None:
    """Run one instance until `stop` is set.

    Args:
        settings: what it was told.
        connection: the API server.
        stop: set by a signal or a test.
        gateway: how gateways are called; by default over HTTP.
        scaler: decides counts instead of the built-in autoscaler.
        on_started: gets the instance once it runs, for tests.
        handle_signals: whether SIGTERM and SIGINT set `stop`; only the main thread can.
    """
    client = GatewayClient() if gateway is None else None
    caller = gateway if gateway is not None else client
    assert caller is not None
    operator = Operator(settings, connection, caller, scaler=scaler)
    await operator.start()
    if on_started is not None:
        on_started(operator)
    LOG.info("started", identity=settings.identity, namespaces=settings.namespaces or "all")
    try:
        await _serve(operator, connection, stop, handle_signals=handle_signals)
    finally:
        await operator.stop()
        if client is not None:
            await client.close()
        LOG.info("stopped", identity=settings.identity)


async def _serve(
    operator: Operator, connection: SingleConfig, stop: asyncio.Event, *, handle_signals: bool
) -> None:
    """Watch until told to stop; a watch that ends by itself ends the process, and Kubernetes restarts it."""
    ready, kopf_stop = asyncio.Event(), asyncio.Event()
    watches = asyncio.create_task(
        run_watches(operator, connection, ready=ready, stop=kopf_stop), name="watches"
    )
    stopping = asyncio.create_task(stop.wait(), name="stop")
    starting = asyncio.create_task(ready.wait(), name="ready")
    await asyncio.wait({watches, stopping, starting}, return_when=asyncio.FIRST_COMPLETED)
    if handle_signals:
        # kopf has put its own handlers in place, which would cancel our tasks in the middle of their work.
        _install_signals(stop)
    await asyncio.wait({watches, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if stop.is_set():
        # kopf cancels every task made after its start when it ends, ours too: so our work ends first.
        await operator.manager.close()
    for task in (stopping, starting):
        task.cancel()
    kopf_stop.set()
    await watches


def _install_signals(stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
