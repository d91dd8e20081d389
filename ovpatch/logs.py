"""The logger ``ovpatch``, which is silent without a handler and never writes to stdout."""

from __future__ import annotations

import logging
import os
import sys
from typing import Final

# Without this handler, logging would print warnings of a library that the application has not configured.
logger: Final = logging.getLogger("ovpatch")
logger.addHandler(logging.NullHandler())

_FORMAT: Final = "[ovpatch%(where)s] %(levelname)s: %(message)s"


class _RankFilter(logging.Filter):
    """A filter that keeps all records and adds the rank, if any, to each."""

    def filter(self, record: logging.LogRecord) -> bool:
        # The launcher may set RANK after this module was imported.
        rank = os.environ.get("RANK")
        record.where = f" rank {rank}" if rank is not None else ""
        return True


def make_stderr_handler() -> logging.Handler:
    """Return a handler that writes to stderr and names the rank."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(_FORMAT))
    handler.addFilter(_RankFilter())
    handler.set_name("ovpatch-stderr")
    return handler


def log_to_stderr(level: str) -> None:
    """Send records of ``level`` and above to stderr; an empty level does nothing."""
    if not level:
        return
    if all(handler.get_name() != "ovpatch-stderr" for handler in logger.handlers):
        logger.addHandler(make_stderr_handler())
    logger.setLevel(level.upper())


def log_visibly(message: str, level: int = logging.ERROR) -> None:
    """Log a message on stderr even if logging is not configured yet, as during ``import torch``."""
    has_handler = any(not isinstance(handler, logging.NullHandler) for handler in logger.handlers)
    if has_handler or logging.getLogger().handlers:
        logger.log(level, "%s", message)
        return
    # The handler serves this message only, so that the script's own configuration stays in charge.
    handler = make_stderr_handler()
    logger.addHandler(handler)
    try:
        logger.log(level, "%s", message)
    finally:
        logger.removeHandler(handler)
