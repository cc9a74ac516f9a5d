"""The keeper's own log file. Must never write to the terminal of `podium up`, nor stop the keeper when it cannot write.

Temporal's SDK logs each failed activity with a traceback. Ours fail on purpose, for instance to be asked again once a
key is there; such a failure is one line.
"""

from __future__ import annotations

import logging
import logging.handlers
from pathlib import Path
from typing import Final

LOG_BYTES_MAX: Final = 5 * 1024 * 1024


def log_to(path: Path) -> None:
    """Sends this process's log to a file (mode 600, one predecessor `.1`). Raises OSError if it cannot be opened."""
    handler = logging.handlers.RotatingFileHandler(path, maxBytes=LOG_BYTES_MAX, backupCount=1, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    path.chmod(0o600)
    # A full disk would otherwise put a traceback on standard error for every line that is lost.
    logging.raiseExceptions = False
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("engine.keeper").setLevel(logging.INFO)
    logging.getLogger("temporalio.activity").addFilter(_without_traceback)


def _without_traceback(record: logging.LogRecord) -> bool:
    """Makes one line of a failure that our activities raised; anything else keeps its traceback."""
    from temporalio.exceptions import ApplicationError  # noqa: PLC0415  # heavy, and loaded by whoever logs there

    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, ApplicationError):
        record.msg, record.args = f"{error.type}: {record.getMessage()}", ()
        record.exc_info = record.exc_text = None
    return True
