"""A gate before the first process that CRIU makes: a restore may begin while its files of pages are still being filled.

Until there CRIU has looked at the machine and read its other files, a tenth of a second; none of the tree exists. It
waits in its action script (native/gate) for one byte through a pipe. Whoever fills the files holds the only end that
can write, so when that process dies CRIU ends with nothing restored.
"""

from __future__ import annotations

import os
import re

# native/gate/gate.c
VARIABLE = "WOODFROG_GATE"
_WAITED = re.compile(r"^woodfrog-gate: waited ([0-9.]+) s$", re.MULTILINE)


def is_possible() -> bool:
    """Whether CRIU's script may open CRIU's descriptors: not where CRIU has rights that its user has not."""
    return os.geteuid() == 0


def waited_s(log: str) -> float:
    """How long CRIU, whose log that is, waited at its gate."""
    found = _WAITED.search(log)
    return float(found[1]) if found else 0.0


class Gate:
    """Closed at first. `open` or `shut` it from any thread, once; `close` gives the descriptors up."""

    def __init__(self) -> None:
        self.fd, self._writer = os.pipe2(os.O_CLOEXEC)  # fd: CRIU's, to be handed to it

    def open(self) -> None:
        """Let CRIU go on."""
        os.write(self._writer, b"1")

    def shut(self) -> None:
        """CRIU is to end, unless it was let go on. Safe to repeat."""
        writer, self._writer = self._writer, -1
        if writer >= 0:
            os.close(writer)

    def close(self) -> None:
        """Safe to repeat."""
        self.shut()
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
