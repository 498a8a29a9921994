"""The daemon's log: daemon.log in the runtime directory, rotated by size, mode 0600."""

from __future__ import annotations

import logging
import logging.handlers
import os
import sys
from pathlib import Path

MAX_LOG_BYTES = 4 << 20
KEPT_LOGS = 3


def set_up(directory: Path, *, foreground: bool) -> None:
    """Log to daemon.log, and to stderr as well when in the foreground."""
    root = logging.getLogger()
    root.setLevel(os.environ.get("WOODFROG_LOG_LEVEL", "INFO").upper())
    path = directory / "daemon.log"
    os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    handlers: list[logging.Handler] = [
        logging.handlers.RotatingFileHandler(path, maxBytes=MAX_LOG_BYTES, backupCount=KEPT_LOGS, encoding="utf-8")
    ]
    if foreground:
        handlers.append(logging.StreamHandler(sys.stderr))
    form = logging.Formatter("%(asctime)s %(levelname).1s %(process)d %(threadName)s %(name)s: %(message)s")
    for handler in handlers:
        handler.setFormatter(form)
        root.addHandler(handler)
