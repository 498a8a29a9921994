"""The node daemon put together: what is started in which order, and what the verbs find.

The sockets are there at once; what takes long (driver, arena, recovery) runs on a thread, and the verbs that need it
wait. One daemon a runtime directory: a lock file says so.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from pathlib import Path

from woodfrog.cpu import criu as criu_module
from woodfrog.daemon import numa, runtime_dir
from woodfrog.daemon.agents import Agents
from woodfrog.daemon.arena import ArenaPool, default_size_bytes
from woodfrog.daemon.catalogues import Catalogues
from woodfrog.daemon.devices import Devices
from woodfrog.daemon.keeper_client import KeeperClient
from woodfrog.daemon.metrics import Metrics
from woodfrog.daemon.promotions import Promotions
from woodfrog.daemon.recovery import Recovery
from woodfrog.daemon.standby import StandbyPool
from woodfrog.daemon.targets import Targets
from woodfrog.errors import NoDaemonError, NotFoundError, RefusedError, WoodfrogError
from woodfrog.image.repository import ImageRepository
from woodfrog.operations import room
from woodfrog.operations.context import Context
from woodfrog.operations.history import Baselines, History
from woodfrog.operations.phases import as_woodfrog_error
from woodfrog.target import limits
from woodfrog.target.reaper import Reaper, become_subreaper

log = logging.getLogger(__name__)


class Node:
    """Everything that this daemon holds. `start`, then verbs; `close` lets go of what is its own."""

    def __init__(self, directory: Path, arena_bytes: int | None) -> None:
        self.directory = directory
        self._arena_bytes = arena_bytes
        self._lock_fd = _lock(directory)
        limits.raise_open_file_limit()
        become_subreaper()
        self.keeper = KeeperClient(runtime_dir.keeper_socket(directory))
        self.reaper = Reaper()
        self.metrics = Metrics()
        self.devices = Devices()
        self.agents = Agents(runtime_dir.agent_socket(directory))
        self.targets = Targets(self.agents)
        self.history = History()
        self.baselines = Baselines()
        self.catalogues = Catalogues(directory, pids=lambda: self.agents.links())
        self._criu: criu_module.Criu | None = None
        self._stores: dict[str, ImageRepository] = {}
        self._lock = threading.Lock()
        self._context: Context | None = None
        self._recovery: Recovery | None = None
        self._standby: StandbyPool | None = None
        self._promotions: Promotions | None = None
        self._failure: WoodfrogError | None = None
        self._started = threading.Event()
        self.let_gone = False  # the keeper holds nothing of ours any more

    def start(self) -> None:
        """Begin; returns at once."""
        self.devices.start()
        self.agents.start()
        self.catalogues.start()
        threading.Thread(target=self._bring_up, name="bring-up", daemon=True).start()

    @property
    def started(self) -> bool:
        return self._started.is_set()

    @property
    def context(self) -> Context:
        """What operations use; waits until the daemon is up, and raises what kept it from coming up."""
        self._started.wait()
        if self._failure is not None:
            raise self._failure
        assert self._context is not None
        return self._context

    @property
    def recovery(self) -> Recovery:
        self._started.wait()
        if self._recovery is None:
            raise self._failure or NoDaemonError("the daemon is not up")
        return self._recovery

    @property
    def standby(self) -> StandbyPool:
        self._started.wait()
        if self._standby is None:
            raise self._failure or NoDaemonError("the daemon is not up")
        return self._standby

    @property
    def promotions(self) -> Promotions:
        self._started.wait()
        if self._promotions is None:
            raise self._failure or NoDaemonError("the daemon is not up")
        return self._promotions

    def _bring_up(self) -> None:
        try:
            arenas = ArenaPool.open(self.keeper, self._arena_sizes())
            self._context = Context(
                runtime_directory=self.directory,
                keeper=self.keeper,
                agents=self.agents,
                arenas=arenas,
                devices=self.devices,
                reaper=self.reaper,
                store=self.store,
                criu=self.criu,
                name_of=self.targets.name_of,
                suspended=self.targets.suspended,
                history=self.history,
                baselines=self.baselines,
            )
            self._recovery = Recovery(self._context, self.keeper, self.targets)
            self._recovery.run()
            self._standby = StandbyPool(self._context, self.targets)
            self._standby.watch_all()
            self._promotions = Promotions(self._context, self.targets, self.metrics)
            for notes in self._recovery.promoting:
                self._promotions.start(notes)
            log.info("ready: arena of %d MiB", arenas.size_bytes >> 20)
            if self._arena_bytes is not None:
                # Whoever names a size has set that memory aside; the default is a bound, taken when it is needed.
                spare_bytes = room.host_available_bytes() - room.host_total_bytes() // 4
                arenas.grow_in_background(min(self._arena_bytes, max(0, spare_bytes)))
        except (WoodfrogError, RuntimeError, OSError) as failure:
            log.exception("the daemon could not come up")
            self._failure = as_woodfrog_error(failure, "start")
        finally:
            self._started.set()

    def _arena_sizes(self) -> dict[int, int]:
        nodes = [node for node in self.devices.nodes() if node != numa.UNBOUND]
        size_bytes = self._arena_bytes or default_size_bytes(room.host_total_bytes(), self.devices.total_bytes)
        return numa.divide(size_bytes, nodes)

    def store(self, path: str) -> ImageRepository:
        """The store at that path or URL (empty: the default one), opened once."""
        with self._lock:
            store = self._stores.get(path)
            if store is None or not store.is_current():
                store = self._stores[path] = ImageRepository(path or None)
            return store

    def criu(self) -> criu_module.Criu:
        """CRIU, looked for once."""
        with self._lock:
            if self._criu is None:
                self._criu = criu_module.find()
            return self._criu

    def require_idle(self) -> None:
        """RefusedError while a target depends on this daemon or an operation is under way."""
        self.targets.forget_dead()
        busy = [
            f"{operation} of process {pid}" if pid > 0 else f"{operation} into a PID namespace"
            for pid, operation in self.targets.operations.items()
        ]
        held = [
            f"{notes.name} (process {notes.pid})"
            for table in (self.targets.suspended, self.targets.frozen)
            for notes in list(table.values())
        ]
        if busy or held:
            raise RefusedError(
                f"the daemon is needed: {', '.join(busy + held)}",
                advice="resume or kill suspended targets, `woodfrog standby --end`, and wait for what is under way",
            )

    def let_go(self) -> None:
        """Give the arena back, so that the keeper holds nothing. Only when idle."""
        if self._context is not None:
            self._context.arenas.close()
        for record in self.keeper.list():
            if record.key.startswith(("arena:", "promote:")):  # a target that is promoted no more runs on as it is
                try:
                    self.keeper.drop(record.key)
                except NotFoundError:
                    log.warning("the keeper had no %s any more", record.key)
        self.let_gone = True

    def close(self) -> None:
        self.catalogues.close()
        self.agents.stop()
        self.reaper.close()
        self.keeper.close()
        for name in ("daemon.sock", "agent.sock"):
            (self.directory / name).unlink(missing_ok=True)
        os.close(self._lock_fd)


def _lock(directory: Path) -> int:
    """The lock that says that this directory has a daemon; held until the descriptor is closed."""
    fd = os.open(directory / "daemon.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise RefusedError(f"another daemon serves {directory}", advice="use it, or set WOODFROG_RUNTIME_DIR") from None
    return fd
