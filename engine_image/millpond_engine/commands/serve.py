"""`millpond-engine serve`: the flags, the choice of runner, and the process."""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import sys
from pathlib import Path

import uvloop

from millpond_common.contract import ports as default_ports
from millpond_common.contract.engine_config import ConfigError, EngineConfig
from millpond_engine.commands.build import MakeRunner, Progress, make_context
from millpond_engine.commands.failure import LoadWitness, classify_failure
from millpond_engine.commands.fake import add_fake_flags, make_fake_runner
from millpond_engine.commands.flags import add_config_flags, load_config
from millpond_engine.commands.logs import configure_logs
from millpond_engine.commands.ranges import PORT, number, whole
from millpond_engine.engine.runner import Runner
from millpond_engine.loop.kv_publisher import PublisherSettings
from millpond_engine.loop.settings import LoopSettings
from millpond_engine.server.limits import ServerLimits
from millpond_engine.server.serve import Ports, serve
from millpond_engine.termination import HELP, choose_termination_path, write_termination_message
from millpond_engine.text.load import load_tokenizer
from millpond_engine.text.tokenizer import Tokenizer, TokenizerError


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `serve`."""
    parser.add_argument(
        "--runner", choices=("torch", "fake"), default="torch", help="what computes (default: torch)"
    )
    parser.add_argument("--host", default="0.0.0.0", help="address of both ports (default: all)")  # noqa: S104
    parser.add_argument(
        "--port", type=PORT, default=default_ports.ENGINE_HTTP, help="tenant port; 0 takes a free one"
    )
    parser.add_argument("--admin-port", type=PORT, default=default_ports.ENGINE_ADMIN, help="operator's port")
    parser.add_argument(
        "--kv-events-port",
        type=PORT,
        default=default_ports.ENGINE_KV_EVENTS,
        help="events; 0 takes a free one",
    )
    parser.add_argument(
        "--kv-replay-port", type=PORT, default=default_ports.ENGINE_KV_REPLAY, help="replay and snapshot"
    )
    parser.add_argument(
        "--kv-events",
        choices=("map", "array", "off"),
        default="map",
        help="form of KV events: map names blocks by their keys alone; array is vLLM's, with the tokens of all that is"
        " cached, for networks that keep everybody else out (default: map)",
    )
    parser.add_argument(
        "--tokenizer", metavar="PATH", help="tokenizer file or directory, or `bytes` (default: the model's)"
    )
    parser.add_argument(
        "--served-root", metavar="NAME", help="`root` in /v1/models: where clients find the tokenizer"
    )
    parser.add_argument(
        "--max-body-bytes",
        type=whole(1024, 1 << 32),
        default=ServerLimits().max_body_bytes,
        help="largest request body",
    )
    parser.add_argument(
        "--stuck-seconds",
        type=number(0.1, 86_400),
        default=60.0,
        help="a longer step fails /health (default: 60)",
    )
    parser.add_argument(
        "--allow-request-template", action="store_true", help="let clients bring a chat template"
    )
    parser.add_argument("--termination-message", type=Path, metavar="FILE", help=HELP)
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    add_config_flags(parser)
    add_fake_flags(parser)


def run_serve(arguments: argparse.Namespace) -> int:
    """Serve until the process is asked to end; returns the exit code."""
    last_word = choose_termination_path(arguments.termination_message)
    try:
        code, clean, failure = _run(arguments)
    except (ConfigError, TokenizerError) as error:
        write_termination_message(last_word, classify_failure(error), str(error))
        raise
    if code and failure is not None:
        write_termination_message(
            last_word, classify_failure(failure), f"{type(failure).__name__}: {failure}"
        )
    for child in multiprocessing.active_children():
        child.kill()
    if not clean:  # the engine thread is inside a load or a step that cannot be interrupted
        sys.stdout.flush()
        os._exit(code)
    return code


def _run(arguments: argparse.Namespace) -> tuple[int, bool, Exception | None]:
    """(exit code, everything ended in order, why the last load failed)."""
    fake = arguments.runner == "fake"
    config = load_config(arguments, fallback={"modelName": "fake", "modelPath": "fake"} if fake else {})
    if not fake:
        refuse_unserved(config)
    tokenizer = load_tokenizer(arguments.tokenizer or ("bytes" if fake else config.model_path))
    witness = LoadWitness(_choose_runner(arguments, tokenizer))
    configure_logs(arguments.log_level)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code, clean = runner.run(_serve(arguments, config, tokenizer, witness.make_runner))
    return code, clean, witness.error


async def _serve(
    arguments: argparse.Namespace, config: EngineConfig, tokenizer: Tokenizer, make_runner: MakeRunner
) -> tuple[int, bool]:
    host = "*" if arguments.host in {"0.0.0.0", "::"} else arguments.host  # noqa: S104
    events = None
    if arguments.kv_events != "off":
        events = PublisherSettings(
            endpoint=f"tcp://{host}:{arguments.kv_events_port or '*'}",
            replay_endpoint=f"tcp://{host}:{arguments.kv_replay_port or '*'}",
            form=arguments.kv_events,
        )
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
        events=events,
    )
    ports = Ports(arguments.host, arguments.port, arguments.host, arguments.admin_port)
    try:
        return await serve(context, ports)
    finally:
        if context.events is not None:
            context.events.stop()


def _choose_runner(arguments: argparse.Namespace, tokenizer: Tokenizer) -> MakeRunner:
    if arguments.runner == "fake":
        return lambda config, progress: make_fake_runner(arguments, config, tokenizer, progress)
    return _make_torch_runner


def refuse_unserved(config: EngineConfig) -> None:
    """Refuse what the configuration can say and this release does not run, rather than ignore it.

    Raises:
        ConfigError: with the key and what to write.
    """
    if config.adapters:
        raise ConfigError("engine configuration: adapters: this release serves no adapters; remove them")
    if config.role != "Both":
        raise ConfigError(
            "engine configuration: role: this release does not split prefill and decode; write Both"
        )


def _make_torch_runner(config: EngineConfig, progress: Progress) -> Runner:
    """Import torch only here: help, configuration errors and the fake runner do without it."""
    from millpond_engine.runner import make_torch_runner  # noqa: PLC0415

    runner: Runner = make_torch_runner(config, progress=progress)
    return runner
