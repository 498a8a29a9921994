"""Where the compiled parts are that are not Python modules.

They are installed beside the extension modules, so they are found from there: that is right for wheels and for
editable installs, where the sources and the compiled parts lie in different folders.
"""

from __future__ import annotations

from pathlib import Path

from woodfrog._native import wire


def directory() -> Path:
    """The folder that holds everything compiled."""
    return Path(wire.__file__).resolve().parent


def interposer() -> Path:
    """The library that `woodfrog run` preloads into targets."""
    return directory() / "libwoodfrog_interpose.so"


def keeper() -> Path:
    """The program that holds file descriptors for the node daemon."""
    return directory() / "woodfrog-keeper"


def simgpu_dir() -> Path:
    """The folder with the simulated `libcuda.so.1`, for LD_LIBRARY_PATH."""
    return directory() / "simgpu"


def no_io_uring() -> Path:
    """The program that starts another one for which io_uring does not exist (native/launch)."""
    return directory() / "woodfrog-no-io-uring"


def enter() -> Path:
    """The program that stands beside a process while the driver checkpoints it (native/enter)."""
    return directory() / "woodfrog-enter"


def init() -> Path:
    """The program that runs CRIU in a PID namespace and stays there as process 1 (native/init)."""
    return directory() / "woodfrog-init"


def gate() -> Path:
    """The program that CRIU waits for before it makes the first process of a restore (native/gate)."""
    return directory() / "woodfrog-gate"
