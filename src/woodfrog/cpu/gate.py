"""A gate before the first process that CRIU makes, or looks at: a restore may begin while its files of pages are still
being filled, and a dump before its target may be stopped.

Until there CRIU has looked at the machine (and in a restore read its other files), up to a tenth of a second; nothing
has happened to the tree. It waits in its action script (native/gate) for one byte through a pipe. Whoever has the gate
holds the only end that can write, so when that process dies CRIU ends with nothing done.
"""

from __future__ import annotations

import os
import re
import threading

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
    """Closed at first. It is opened or shut once, whichever comes first, from any thread; `close` gives the descriptors
    up. Whoever waits for either is to bound that (cpu.run does), and shuts it when its time is over."""

    def __init__(self) -> None:
        self.is_open = self.is_shut = False
        self._deciding = threading.Lock()
        self.fd, self._writer = os.pipe2(os.O_CLOEXEC)  # fd: CRIU's, to be handed to it
        self.decided, self._decide = os.pipe2(os.O_CLOEXEC)  # decided: can be read from once it is open or shut

    def open(self) -> bool:
        """Let CRIU go on. False: it was shut before."""
        with self._deciding:
            if self.is_shut:
                return False
            self.is_open = True
            os.write(self._writer, b"1")
            os.write(self._decide, b"1")
            return True

    def shut(self) -> bool:
        """CRIU is to end. False: it was let go on before, and goes on. Safe to repeat."""
        with self._deciding:
            self.is_shut = not self.is_open
            writer, self._writer = self._writer, -1
            if writer >= 0:
                os.close(writer)
                os.close(self._decide)
            return self.is_shut

    def close(self) -> None:
        """Safe to repeat."""
        self.shut()
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
            os.close(self.decided)
