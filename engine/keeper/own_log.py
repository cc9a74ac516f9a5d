"""The keeper's own log file. Must never write to the terminal of `podium up`, nor stop a keeper that cannot write."""

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
