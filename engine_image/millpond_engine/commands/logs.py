"""JSON lines on standard output; prompts never reach a log call, so there is nothing to filter."""

from __future__ import annotations

import contextlib
import logging
import sys

import structlog


class _LineLogger:
    """Writes lines; a closed or broken output never ends the thread that logs."""

    def __init__(self, *_: object) -> None:
        """Takes and needs no name."""

    def msg(self, message: str) -> None:
        """Write one line."""
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.write(message + "\n")
            sys.stdout.flush()

    debug = info = warning = error = critical = exception = msg


def configure_logs(level: str) -> None:
    """One JSON object per line, for structlog's and the standard library's loggers alike."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[*shared, structlog.processors.format_exc_info, structlog.processors.JSONRenderer()],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        logger_factory=_LineLogger,
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                structlog.processors.JSONRenderer(),
            ],
        )
    )
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
