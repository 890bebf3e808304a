"""`millpond-engine serve`: wires runner, scheduler, loop and server together."""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import secrets
import sys
import time
from collections.abc import Callable

import structlog
import uvloop

from millpond_common.contract import ports as default_ports
from millpond_common.contract.engine_config import EngineConfig
from millpond_engine import __version__
from millpond_engine.commands.fake import add_fake_flags, make_fake_runner
from millpond_engine.commands.flags import add_config_flags, load_config
from millpond_engine.commands.logs import configure_logs
from millpond_engine.core.scheduler import Scheduler
from millpond_engine.core.settings import make_capacity, make_settings
from millpond_engine.engine.runner import Runner
from millpond_engine.engine.step import Engine, make_epoch
from millpond_engine.loop.recorder import Recorder
from millpond_engine.loop.thread import EngineThread, LoadCancelledError, LoopSettings
from millpond_engine.server.context import ServerContext
from millpond_engine.server.lifecycle import Lifecycle
from millpond_engine.server.limits import ServerLimits
from millpond_engine.server.serve import Ports, serve
from millpond_engine.text.load import load_tokenizer
from millpond_engine.text.tokenizer import Tokenizer

log = structlog.get_logger(__name__)

Progress = Callable[[int, int], None]
"""Told (done, total) while loading, in units of the loader's choice."""
MakeRunner = Callable[[EngineConfig, Progress], Runner]


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `serve`."""
    parser.add_argument(
        "--runner", choices=("torch", "fake"), default="torch", help="what computes (default: torch)"
    )
    parser.add_argument("--host", default="0.0.0.0", help="address of both ports (default: all)")  # noqa: S104
    parser.add_argument(
        "--port", type=int, default=default_ports.ENGINE_HTTP, help="tenant port; 0 takes a free one"
    )
    parser.add_argument("--admin-port", type=int, default=default_ports.ENGINE_ADMIN, help="operator's port")
    parser.add_argument(
        "--tokenizer", metavar="PATH", help="tokenizer file or directory, or `bytes` (default: the model's)"
    )
    parser.add_argument(
        "--served-root", metavar="NAME", help="`root` in /v1/models: where clients find the tokenizer"
    )
    parser.add_argument(
        "--max-body-bytes", type=int, default=ServerLimits().max_body_bytes, help="largest request body"
    )
    parser.add_argument(
        "--stuck-seconds", type=float, default=60.0, help="a longer step fails /health (default: 60)"
    )
    parser.add_argument(
        "--allow-request-template", action="store_true", help="let clients bring a chat template"
    )
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    add_config_flags(parser)
    add_fake_flags(parser)


def run_serve(arguments: argparse.Namespace) -> int:
    """Serve until the process is asked to end; returns the exit code."""
    configure_logs(arguments.log_level)
    fake = arguments.runner == "fake"
    config = load_config(arguments, fallback={"modelName": "fake", "modelPath": "fake"} if fake else {})
    tokenizer = load_tokenizer(arguments.tokenizer or ("bytes" if fake else config.model_path))
    make_runner = _choose_runner(arguments, tokenizer)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code, clean = runner.run(_serve(arguments, config, tokenizer, make_runner))
    for child in multiprocessing.active_children():
        child.kill()
    if not clean:  # the engine thread is inside a load or a step that cannot be interrupted
        sys.stdout.flush()
        os._exit(code)
    return code


async def _serve(
    arguments: argparse.Namespace, config: EngineConfig, tokenizer: Tokenizer, make_runner: MakeRunner
) -> tuple[int, bool]:
    context = make_context(
        config,
        tokenizer,
        make_runner,
        limits=ServerLimits(max_body_bytes=arguments.max_body_bytes),
        settings=LoopSettings(
            max_open_requests=config.scheduling.max_queued_requests + config.scheduling.max_sequences,
            stuck_seconds=arguments.stuck_seconds,
        ),
        allow_request_template=arguments.allow_request_template,
        model_root=arguments.served_root or config.model_path,
    )
    ports = Ports(arguments.host, arguments.port, arguments.host, arguments.admin_port)
    return await serve(context, ports)


def make_context(
    config: EngineConfig,
    tokenizer: Tokenizer,
    make_runner: MakeRunner,
    *,
    limits: ServerLimits | None = None,
    settings: LoopSettings | None = None,
    allow_request_template: bool = False,
    model_root: str = "",
) -> ServerContext:
    """Everything of one engine, not started; call it inside the event loop that will serve."""
    limits = limits or ServerLimits()
    settings = settings or LoopSettings()
    recorder = Recorder(
        config.scheduling, max_model_tokens=config.max_model_tokens, num_devices=config.tensor_parallel_size
    )
    holder: list[EngineThread] = []

    def load() -> Engine:
        return _load_engine(config, make_runner, holder[0])

    thread = EngineThread(load, recorder, settings=settings)
    holder.append(thread)
    lifecycle = Lifecycle(
        thread, drain_seconds=config.drain_seconds, max_open_requests=settings.max_open_requests
    )
    return ServerContext(
        config=config,
        tokenizer=tokenizer,
        thread=thread,
        lifecycle=lifecycle,
        epoch=make_epoch(),
        version=__version__,
        started_at=time.monotonic(),
        created=int(time.time()),
        limits=limits,
        allow_request_template=allow_request_template,
        model_root=model_root,
    )


def _load_engine(config: EngineConfig, make_runner: MakeRunner, thread: EngineThread) -> Engine:
    shown = -10

    def report(done: int, total: int) -> None:
        nonlocal shown
        if thread.stopping:
            raise LoadCancelledError("loading was given up: the process is asked to end")
        percent = 100 * done // max(1, total)
        if percent >= shown + 10:
            shown = percent
            log.info("loading", percent=percent)

    runner = make_runner(config, report)
    info = runner.info
    settings = make_settings(config.scheduling, base_seed=secrets.randbits(48), cache_events=False)
    log.info(
        "engine loaded",
        model=info.model,
        device=info.device,
        dtype=info.dtype,
        num_blocks=info.num_blocks,
        kv_tokens=info.num_blocks * info.block_tokens,
        max_model_tokens=info.max_model_tokens,
        limited_by=info.limited_by,
    )
    return Engine(Scheduler(settings, make_capacity(info)), runner, overlap=info.device.startswith("cuda"))


def _choose_runner(arguments: argparse.Namespace, tokenizer: Tokenizer) -> MakeRunner:
    if arguments.runner == "fake":
        return lambda config, progress: make_fake_runner(arguments, config, tokenizer, progress)
    return _make_torch_runner


def _make_torch_runner(config: EngineConfig, progress: Progress) -> Runner:
    """Import torch only here: help, configuration errors and the fake runner do without it."""
    from millpond_engine.runner import make_torch_runner  # noqa: PLC0415

    runner: Runner = make_torch_runner(config, progress=progress)
    return runner
