"""What the shell is offered for a TARGET or an IMAGE.

Runs at every press of the tab key: it must be quick, must start no daemon, and must never print or fail.
"""

from __future__ import annotations

import os
import re
from pathlib import Path


def images(incomplete: str) -> list[str]:
    """References in the default store, if that is a directory, from the names in it alone."""
    configured = os.environ.get("WOODFROG_STORE")
    store = Path(configured) if configured else Path.home() / ".local" / "share" / "woodfrog" / "store"
    try:
        names = [f"{entry.parent.name}@{entry.name}" for entry in store.glob("images/*/*")]
    except OSError:
        return []
    pattern = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}@[1-9][0-9]*")
    return sorted(name for name in names if name.startswith(incomplete) and pattern.fullmatch(name))


def targets(incomplete: str) -> list[str]:
    """Names of running targets, from the daemon if there is one."""
    from woodfrog.daemon.client import Client
    from woodfrog.errors import WoodfrogError

    try:
        with Client.connect() as client:
            rows = client.call("ps")
    except (WoodfrogError, OSError):
        return []
    return sorted(row["name"] for row in rows if row.get("name", "").startswith(incomplete))
