"""Working on stores through processes that are killed, and judging afterwards what must be true whatever was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import store_images
from store_images import CHUNK_BYTES
from store_worker import data_of

from woodfrog.store.open import open_store

WORKER = Path(__file__).resolve().parent / "store_worker.py"


class Rounds:
    """A worker and its two stores, `directory`/store and `directory`/other unless the URLs say otherwise."""

    def __init__(self, directory: Path, url: str | None = None, other: str | None = None) -> None:
        self._directory = directory
        self._urls = {"store": url or str(directory / "store"), "other": other or str(directory / "other")}
        self._errors = (directory / "errors").open("wb")
        environment = {**os.environ, "STORE_URL": self._urls["store"], "OTHER_URL": self._urls["other"]}
        self._worker = subprocess.Popen(
            [sys.executable, str(WORKER), str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
        )
        self.images_checked = 0

    def begin(self, action: str, seed: int, **environment: str) -> int:
        """The process id of the child that does it."""
        settings = " ".join(f"{name}={value}" for name, value in environment.items())
        return int(self._say(f"{action} {seed} {settings}"))

    def end(self, pid: int, *, kill: bool) -> int:
        """Its exit status: negative for a signal."""
        if kill:
            os.kill(pid, signal.SIGKILL)  # it is not reaped before `wait`, so the number is its own
        return int(self._say(f"wait {pid}"))

    def run(self, action: str, seed: int, **environment: str) -> int:
        return self.end(self.begin(action, seed, **environment), kill=False)

    def errors(self) -> str:
        return (self._directory / "errors").read_text()

    def check(self) -> None:
        """Every image that was announced and not taken away is there and whole, every other one that is listed is
        whole, and verify agrees. An index that a test took away may be missing until a repair."""
        announced, lost = self._log()
        for where, url in self._urls.items():
            with open_store(url, chunk_bytes=CHUNK_BYTES) as store:
                if where in lost:
                    assert store.repair(store_images.digests, wait_s=60).all_well
                assert store.verify(store_images.digests, wait_s=60) == []
                there = store_images.references(store)
                for reference in there:
                    data = store_images.read(store, reference)
                    seed = announced[where].get(reference, -1)
                    assert seed < 0 or data == data_of(seed), f"{reference} is another image now"
                    self.images_checked += 1
                for reference in announced[where]:
                    assert reference in there, f"{reference} in {where} was announced and is gone"
                assert list(store.tier.spool.iterdir()) == [], "leftovers are removed at opening"
        if lost:
            with (self._directory / "log").open("a") as log:
                log.write("found store index 0\n")

    def close(self) -> None:
        assert self._worker.stdin is not None
        assert self._worker.stdout is not None
        self._worker.stdin.close()
        self._worker.wait()
        self._worker.stdout.close()
        self._errors.close()

    def _log(self) -> tuple[dict[str, dict[str, int]], set[str]]:
        announced: dict[str, dict[str, int]] = {"store": {}, "other": {}}
        lost: set[str] = set()
        path = self._directory / "log"
        for line in path.read_text().splitlines() if path.exists() else ():
            what, where, reference, seed = line.split()
            if what == "there":
                assert reference not in announced[where] or int(seed) < 0, f"the number of {reference} was used twice"
                announced[where].setdefault(reference, int(seed))
            elif what == "going":
                announced[where].pop(reference, None)
            elif what == "lost":
                lost.add(where)
            else:
                lost.discard(where)
        return announced, lost

    def _say(self, line: str) -> str:
        assert self._worker.stdin is not None
        assert self._worker.stdout is not None
        self._worker.stdin.write(line + "\n")
        self._worker.stdin.flush()
        answer = self._worker.stdout.readline()
        assert answer, f"the worker ended: {self.errors()}"
        return answer
