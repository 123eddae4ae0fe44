"""Logs of a service: JSON lines, or readable text on a terminal, always on stderr.

Every line names service and instance. What concerns a request or a transfer carries them as
`request_id` and `transfer`, given with the call or bound to the logger. The standard library's
loggers (asyncio's, grpc's) come out through the same formatter.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Literal

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

LogFormat = Literal["auto", "json", "text"]


def configure_logs(service: str, instance: str, log_format: LogFormat, level: str) -> None:
    """Send all logs of this process to stderr; called once, before the first line."""

    def name_service(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        event.setdefault("service", service)
        event.setdefault("instance", instance)
        return event

    as_text = log_format == "text" or (log_format == "auto" and sys.stderr.isatty())
    before: list[Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        name_service,
    ]
    if as_text:
        last: list[Processor] = [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
    else:
        last = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=before,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    # gRPC's C core writes to stderr past us, and tells each lost connection there. It reads this
    # when the first server or channel is made.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *before,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """A logger; name it after the module that speaks."""
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(name)
    return logger
