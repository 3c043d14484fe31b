"""Logging with structlog: readable lines on stderr, each with the role of its process."""

import logging
import os
import sys

import structlog

arguments: dict[str, str] = {}
"""Arguments of the latest call of `setup`."""


def setup(role: str, level: str = "info") -> None:
    """Configure structlog for this process. Every event has `role` and the process id."""
    arguments.update(role=role, level=level)
    number = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False),
            structlog.processors.format_exc_info,
            structlog.dev.ConsoleRenderer(colors=False, pad_event_to=28),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(role=role, pid=os.getpid())


def get(name: str) -> structlog.typing.FilteringBoundLogger:
    """Return a logger whose events have `module=name`."""
    return structlog.get_logger(module=name)
