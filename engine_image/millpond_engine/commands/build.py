"""Wires runner, scheduler, loop and server of one engine together."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import replace

import structlog

from millpond_common.contract.engine_config import EngineConfig
from millpond_common.version import __version__
from millpond_engine.commands.scheduling import make_settings
from millpond_engine.core.scheduler import Scheduler
from millpond_engine.engine.runner import Runner
from millpond_engine.engine.step import Engine, Masker, make_epoch
from millpond_engine.grammar import make_grammars
from millpond_engine.loop.kv_publisher import KvPublisher, PublisherSettings
from millpond_engine.loop.kv_resident import ResidentBlocks
from millpond_engine.loop.recorder import Recorder
from millpond_engine.loop.settings import LoadCancelledError, LoopSettings
from millpond_engine.loop.thread import EngineThread
from millpond_engine.server.context import ServerContext
from millpond_engine.server.lifecycle import Lifecycle
from millpond_engine.server.limits import ServerLimits
from millpond_engine.text.tokenizer import Tokenizer

log = structlog.get_logger(__name__)

Progress = Callable[[int, int], None]
"""Told (done, total) while loading, in units of the loader's choice."""
MakeRunner = Callable[[EngineConfig, Progress], Runner]


def make_context(
    config: EngineConfig,
    tokenizer: Tokenizer,
    make_runner: MakeRunner,
    *,
    limits: ServerLimits | None = None,
    settings: LoopSettings | None = None,
    allow_request_template: bool = False,
    model_root: str = "",
    events: PublisherSettings | None = None,
    overlap: bool | None = None,
) -> ServerContext:
    """Everything of one engine, not started; call it inside the event loop that will serve."""
    limits = limits or ServerLimits()
    settings = settings or LoopSettings()
    recorder = Recorder(
        config.scheduling,
        max_model_tokens=config.max_model_tokens,
        num_devices=config.tensor_parallel_size,
        price=config.price,
    )
    epoch = make_epoch()
    grammars = make_grammars(tokenizer)
    masker = None if grammars is None else grammars.masker
    publisher = None if events is None else _make_publisher(config, events, epoch)
    holder: list[EngineThread] = []

    def load() -> Engine:
        ends = tokenizer.facts.eos_token_ids
        return _load_engine(config, make_runner, holder[0], ends=ends, overlap=overlap, masker=masker)

    thread = EngineThread(load, recorder, settings=settings, events=publisher)
    holder.append(thread)
    lifecycle = Lifecycle(
        thread, drain_seconds=config.drain_seconds, max_open_requests=settings.max_open_requests
    )
    return ServerContext(
        config=config,
        tokenizer=tokenizer,
        thread=thread,
        lifecycle=lifecycle,
        epoch=epoch,
        version=__version__,
        started_at=time.monotonic(),
        created=int(time.time()),
        limits=limits,
        allow_request_template=allow_request_template,
        model_root=model_root,
        events=publisher,
        grammars=grammars,
    )


def _make_publisher(config: EngineConfig, settings: PublisherSettings, epoch: str) -> KvPublisher | None:
    """A started publisher; None, with a warning, when its ports are taken: events are hints, serving goes on."""
    resident = ResidentBlocks(
        model=config.model_name, block_tokens=config.kv_cache.block_tokens, seed=config.block_key_seed
    )
    try:
        publisher = KvPublisher(settings, resident, epoch=epoch)
    except OSError as error:
        log.warning("no KV events: the port cannot be bound", endpoint=settings.endpoint, error=str(error))
        return None
    publisher.start()
    log.info("kv events", endpoint=publisher.endpoint, replay_endpoint=publisher.replay_endpoint)
    return publisher


def _load_engine(
    config: EngineConfig,
    make_runner: MakeRunner,
    thread: EngineThread,
    *,
    ends: tuple[int, ...],
    overlap: bool | None,
    masker: Masker | None,
) -> Engine:
    """Load the runner and join it to a new scheduler; steps overlap where a device works beside the CPU.

    Text ends at the end tokens of the model's configuration and at those of its tokenizer: many models name the
    end of a document in one and the end of a turn in the other.
    """
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
    settings = make_settings(config.scheduling, base_seed=secrets.randbits(48))
    log.info(
        "engine loaded",
        model=info.model,
        device=info.device,
        dtype=info.dtype,
        tensor_parallel_size=config.tensor_parallel_size,
        num_blocks=info.num_blocks,
        kv_tokens=info.num_blocks * info.block_tokens,
        max_model_tokens=info.max_model_tokens,
        limited_by=info.limited_by,
    )
    if overlap is None:
        overlap = info.device.startswith("cuda")
    known = [token for token in (*info.eos_token_ids, *ends) if token < info.vocabulary_size]
    capacity = replace(info, eos_token_ids=tuple(dict.fromkeys(known)))
    return Engine(Scheduler(settings, capacity), runner, overlap=overlap, masker=masker)
