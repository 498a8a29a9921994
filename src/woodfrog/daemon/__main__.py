"""`python -m woodfrog.daemon`: the node daemon. Started by the keeper, which starts it again when it dies."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import select
import signal
import socket
import sys
import threading
from pathlib import Path

from woodfrog.daemon import log as daemon_log
from woodfrog.daemon import runtime_dir
from woodfrog.daemon.node import Node
from woodfrog.daemon.server import Server
from woodfrog.daemon.verbs import Verbs
from woodfrog.errors import UsageError, WoodfrogError
from woodfrog.operations import background
from woodfrog.sizes import parse_size

log = logging.getLogger("woodfrog.daemon")


def main(argv: list[str] | None = None) -> int:
    """Run until told to stop; the exit status."""
    arguments = _parse(argv)
    try:
        directory = runtime_dir.ensure()
        daemon_log.set_up(directory, foreground=arguments.foreground)
        return _serve(directory, arguments.arena)
    except (WoodfrogError, OSError) as failure:
        log.exception("the daemon does not start")
        notify(f"STATUS=failed: {failure}")
        print(f"woodfrog daemon: {failure}", file=sys.stderr)
        return int(failure.exit_code) if isinstance(failure, WoodfrogError) else 1


# How long a thread may keep Python to itself while another wants it (5 ms if nothing is said): a target that stands
# still waits for some ten such changes, each of which can meet a thread that looks chunks up.
SWITCH_INTERVAL_S = 0.0002


def _serve(directory: Path, arena_bytes: int | None) -> int:
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    background.require_settings()
    node = Node(directory, arena_bytes)
    ending = threading.Event()

    def stop() -> None:
        server.stop()
        ending.set()

    server = Server(runtime_dir.daemon_socket(directory), Verbs(node, stop).table())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ending.set())
    node.start()
    # What is there now stays: a full collection in the middle of a checkpoint need not go through it (38 thousand
    # objects, 84 to 160 ms on a busy machine of two cores).
    gc.freeze()
    threading.Thread(target=_watch_keeper, args=(node, ending), name="keeper-watch", daemon=True).start()
    threading.Thread(target=server.serve, name="accept", daemon=True).start()
    log.info("daemon %d serves %s", os.getpid(), directory)
    notify("READY=1")
    ending.wait()
    server.stop()
    server.join_requests()
    if not node.let_gone:
        try:
            node.require_idle()
            node.let_go()
        except WoodfrogError as failure:
            log.info("leaving with the keeper still holding: %s", failure.reason)
    node.close()
    log.info("daemon %d ends", os.getpid())
    return 0


def _watch_keeper(node: Node, ending: threading.Event) -> None:
    """Without a keeper nothing can be handed over any more: end when idle, and leave the start to the next client."""
    parent = os.getppid()
    try:
        if not Path(f"/proc/{parent}/comm").read_text().startswith("woodfrog-keep"):
            return  # started by hand beside a keeper that is somebody else's child
        keeper_fd = os.pidfd_open(parent)
    except OSError:
        return
    poll = select.poll()
    poll.register(keeper_fd, select.POLLIN)
    poll.poll()
    os.close(keeper_fd)
    if node.let_gone:
        return
    try:
        node.require_idle()
    except WoodfrogError as failure:
        log.error("the keeper is gone, and the daemon is needed: %s", failure.reason)
        return
    log.error("the keeper is gone; the daemon ends")
    ending.set()


def notify(message: str) -> None:
    """Tell whoever started us, by the sd_notify protocol. Nobody may be there any more."""
    path = os.environ.get("NOTIFY_SOCKET")
    if not path:
        return
    address = "\0" + path[1:] if path.startswith("@") else path
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        try:
            sender.sendto(message.replace("\n", " ").encode(), address)
        except OSError as failure:
            log.debug("nobody waits for %r: %s", message, failure)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="woodfrog-daemon", description="The woodfrog node daemon.")
    parser.add_argument("--foreground", action="store_true", help="log to stderr as well")
    parser.add_argument("--arena", type=_size, default=os.environ.get("WOODFROG_ARENA"), help="bound of host memory")
    return parser.parse_args(argv)


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except UsageError as failure:
        raise argparse.ArgumentTypeError(failure.reason) from failure


if __name__ == "__main__":
    sys.exit(main())
