"""Catalogues of templates for targets whose launches are followed: made of the code that they load, as it appears.

The folder kernels/ in the runtime directory is the hand-over (native/interpose/shadow_image.hpp): targets put images
there, and find catalogues. Each is made by a process of its own, with little priority: analysing takes seconds of
processor time, and what is analysed is the target's, not ours. Must never keep an operation waiting.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import re
import select
import stat
import subprocess
import sys
import threading
from pathlib import Path

from woodfrog.errors import RefusedError

log = logging.getLogger(__name__)

FOLDER = "kernels"
LIMIT_S = 900.0  # for one image
_NICE = 10
_IMAGE = re.compile(r"[0-9a-f]{64}\.image")
_IN_MOVED_TO = 0x80  # linux/inotify.h
_EVENT_BYTES = 64 << 10


class Catalogues:
    """A thread that makes what is missing; images that lie there already are taken up first."""

    def __init__(self, directory: Path) -> None:
        self.folder = _ensure(directory / FOLDER)
        self._fd = _watch(self.folder)
        self._stop_read, self._stop_write = os.pipe2(os.O_CLOEXEC)
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="catalogues", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Make no more; what is being made is given up."""
        with self._lock:
            self._stopping = True
            if self._process is not None:
                self._process.kill()
        os.write(self._stop_write, b"x")
        if self._thread.ident is not None:
            self._thread.join()
        for fd in (self._fd, self._stop_read, self._stop_write):
            os.close(fd)

    def _run(self) -> None:
        while not self._stopping:
            for path in sorted(self.folder.iterdir()):
                if _IMAGE.fullmatch(path.name) and not self._stopping:
                    self._make(path)
            # What came meanwhile has left its event.
            ready, _, _ = select.select([self._fd, self._stop_read], [], [])
            if self._fd in ready:
                os.read(self._fd, _EVENT_BYTES)

    def _make(self, image: Path) -> None:
        key = image.stem
        command = [sys.executable, "-m", "woodfrog.kernels.image_catalogue", str(self.folder), key]
        with self._lock:
            if self._stopping:
                return
            self._process = process = subprocess.Popen(
                ["nice", "-n", str(_NICE), *command], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE
            )
        try:
            _, said = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            _, said = process.communicate()
        finally:
            with self._lock:
                self._process = None
        if said:
            log.info("catalogue of %s: %s", key, said.decode(errors="replace").strip())
        if process.returncode and not self._stopping:
            log.warning("the code %s could not be analysed (exit code %d)", key, process.returncode)
        if not self._stopping and image.exists():
            # Not again at every start; its launches count as writes of everything.
            with contextlib.suppress(FileNotFoundError):
                image.rename(image.with_suffix(".failed"))


def _ensure(folder: Path) -> Path:
    with contextlib.suppress(FileExistsError):  # looked at next
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise RefusedError(f"{folder} is not a folder of this user alone, and what is in it is loaded as code")
    return folder


def _watch(folder: Path) -> int:
    """An inotify descriptor that tells of files renamed into the folder."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd: int = libc.inotify_init1(os.O_CLOEXEC)
    if fd < 0 or libc.inotify_add_watch(fd, os.fsencode(folder), _IN_MOVED_TO) < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{folder} cannot be watched: {os.strerror(error)}")
    return fd
