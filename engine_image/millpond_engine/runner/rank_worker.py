"""A rank other than 0, as a process: load a share of the model, then do every step that rank 0 does.

It ends when rank 0 does: its pipe then ends, which a thread of its own waits for, even inside a step.
"""

from __future__ import annotations

import os
import select
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import structlog

from millpond_engine.engine.runner import PendingStep, Runner
from millpond_engine.runner.ranks import Order, RankSpec, Report


def main(number: int) -> int:
    """Serve the pipe with this file descriptor; returns the exit code."""
    pipe: Connection[Any, Any] = Connection(number)
    threading.Thread(target=_end_with_rank_0, args=(number,), daemon=True).start()
    try:
        spec = msgspec.msgpack.decode(pipe.recv_bytes(), type=RankSpec)
        _configure_logs(spec.rank)
        runner = _load(spec, pipe)
        _follow(runner, pipe)
    except EOFError:
        return 0
    except Exception as error:  # noqa: BLE001 - whatever it is, rank 0 says it and ends the engine
        pipe.send_bytes(msgspec.msgpack.encode(Report(False, f"{type(error).__name__}: {error}")))
        return 1
    return 0


def _load(spec: RankSpec, pipe: Connection[Any, Any]) -> Runner:
    # here, so that the pipe is watched while torch is imported
    from millpond_engine.runner.collectives import TorchCollectives  # noqa: PLC0415
    from millpond_engine.runner.group import RankGroup  # noqa: PLC0415
    from millpond_engine.runner.load import load_rank  # noqa: PLC0415

    rank, share = load_rank(spec.config, rank=spec.rank, size=spec.size)
    pipe.send_bytes(msgspec.msgpack.encode(Report(True)))
    pipe.recv_bytes()  # all ranks have loaded
    collectives = TorchCollectives(Path(spec.folder), rank=spec.rank, size=spec.size, device=rank.device)
    return rank.finish(RankGroup(share, collectives))


def _follow(runner: Runner, pipe: Connection[Any, Any]) -> None:
    """Do what rank 0 orders; at most one step is in flight when the next one starts."""
    decoder = msgspec.msgpack.Decoder(Order)
    pending: PendingStep | None = None
    while True:
        order = decoder.decode(pipe.recv_bytes())
        if order.poison:
            runner.poison_blocks(order.poison)  # type: ignore[attr-defined]  # of torch runners, for tests
        if order.plan is not None:
            previous, pending = pending, runner.launch(order.plan)
            if previous is not None:
                previous.result()
        if order.masks is not None:
            assert pending is not None, "masks belong to a step"
            pending.choose(order.masks)


def _end_with_rank_0(number: int) -> None:
    poll = select.poll()
    poll.register(number, select.POLLHUP)
    poll.poll()
    os._exit(0)


def _configure_logs(rank: int) -> None:
    """One JSON object per line on standard output, as rank 0 writes them; warnings and worse."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(30),
    )
    structlog.contextvars.bind_contextvars(rank=rank)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
