"""Catalogues of templates for targets whose launches are followed: made of the code that they load, as it appears.

The folder kernels/ in the runtime directory is the hand-over (native/interpose/shadow_image.hpp): targets put images
there, and find catalogues. Each is made by a process of its own, with little priority: analysing takes processor time,
and what is analysed is the target's, not ours. A program may load dozens of images at once, as torch.compile makes
them, and one of a library that takes minutes: several are made at a time, small ones first. Must never keep an
operation waiting.
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
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from woodfrog.errors import RefusedError
from woodfrog.target import procfs

log = logging.getLogger(__name__)

FOLDER = "kernels"
LIMIT_S = 900.0  # for one image
_NICE = 10
# At a time: most processors stay the targets'.
_MAKERS = max(1, min(4, (os.cpu_count() or 1) // 4))
_IMAGE = re.compile(r"[0-9a-f]{64}\.image")
_IN_MOVED_TO = 0x80  # linux/inotify.h
_EVENT_BYTES = 64 << 10


class Catalogues:
    """A thread that makes what is missing; images that lie there already are taken up first."""

    def __init__(self, directory: Path, pids: Callable[[], Iterable[int]] = tuple) -> None:
        """`pids`: the targets that there are, whose environment says where their compilers keep what they make."""
        self.folder = _ensure(directory / FOLDER)
        self._pids = pids
        self._fd = _watch(self.folder)
        self._stop_read, self._stop_write = os.pipe2(os.O_CLOEXEC)
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._in_hand: set[str] = set()
        self._lock = threading.Lock()
        self._stopping = False
        self._makers = ThreadPoolExecutor(_MAKERS, thread_name_prefix="catalogue")
        self._thread = threading.Thread(target=self._run, name="catalogues", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Make no more; what is being made is given up."""
        with self._lock:
            self._stopping = True
            for process in self._processes:
                process.kill()
        os.write(self._stop_write, b"x")
        if self._thread.ident is not None:
            self._thread.join()
        self._makers.shutdown(cancel_futures=True)
        for fd in (self._fd, self._stop_read, self._stop_write):
            os.close(fd)

    def _run(self) -> None:
        while not self._stopping:
            sizes = {path: _size(path) for path in self.folder.iterdir() if _IMAGE.fullmatch(path.name)}
            for path in sorted(sizes, key=lambda path: (sizes[path], path.name)):
                with self._lock:
                    if self._stopping or path.stem in self._in_hand:
                        continue
                    self._in_hand.add(path.stem)
                self._makers.submit(self._make, path)
            # What came meanwhile has left its event.
            ready, _, _ = select.select([self._fd, self._stop_read], [], [])
            if self._fd in ready:
                os.read(self._fd, _EVENT_BYTES)

    def _make(self, image: Path) -> None:
        try:
            self._made(image)
        except OSError as error:
            log.warning("no catalogue of %s: %s", image.stem, error)
        finally:
            with self._lock:
                self._in_hand.discard(image.stem)

    def _made(self, image: Path) -> None:
        from woodfrog.kernels import triton_cache  # a fifth of a daemon's start, which few daemons need

        key = image.stem
        command = [sys.executable, "-m", "woodfrog.kernels.image_catalogue", str(self.folder), key]
        environment = {**os.environ, triton_cache.FOLDERS: os.pathsep.join(map(str, self._caches()))}
        with self._lock:
            if self._stopping:
                return
            process = subprocess.Popen(
                ["nice", "-n", str(_NICE), *command],
                stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment,
            )  # fmt: skip
            self._processes.add(process)
        try:
            _, said = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            _, said = process.communicate()
        finally:
            with self._lock:
                self._processes.discard(process)
        if said:
            log.info("catalogue of %s: %s", key, said.decode(errors="replace").strip())
        if process.returncode and not self._stopping:
            log.warning("the code %s could not be analysed (exit code %d)", key, process.returncode)
        if not self._stopping and image.exists():
            # Not again at every start; its launches count as writes of everything.
            with contextlib.suppress(FileNotFoundError):
                image.rename(image.with_suffix(".failed"))

    def _caches(self) -> list[Path]:
        from woodfrog.kernels import triton_cache

        found: dict[Path, None] = {}
        for pid in self._pids():
            text = None
            with contextlib.suppress(PermissionError):  # it has other rights than we; its code has no templates then
                text = procfs.text(pid, "environ")
            entries = (text or "").split("\0")
            environment = dict(entry.split("=", 1) for entry in entries if "=" in entry)
            found.update(dict.fromkeys(triton_cache.folders(environment)))
        return list(found)


def _size(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):  # it has just been dealt with
        return path.stat().st_size
    return 0


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
