"""Checks of woodfrog's own parts: what is compiled, CRIU, store, runtime directory, daemon. See checks.py."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from woodfrog.doctor.checks import Check, Verdict
from woodfrog.errors import NoDaemonError, WoodfrogError
from woodfrog.image.inspect import human_bytes

LOW_BYTES = 10 << 30


def check_native() -> list[Check]:
    try:
        from woodfrog._native import paths, transfer
    except ImportError as error:
        return [Check("woodfrog", Verdict.FAIL, f"the compiled parts are missing ({error})", "run `make build`")]
    missing = [str(path) for path in (paths.interposer(), paths.keeper()) if not path.is_file()]
    if missing:
        return [Check("woodfrog", Verdict.FAIL, f"{', '.join(missing)} is missing", "run `make build`")]
    from woodfrog import __version__

    return [Check("woodfrog", Verdict.OK, f"{__version__}, compiled parts in {Path(transfer.__file__).parent}")]


def check_criu() -> list[Check]:
    from woodfrog.cpu import criu

    try:
        found = criu.find()
    except WoodfrogError as error:
        return [Check("CRIU", Verdict.FAIL, error.reason, error.advice)]
    finding = f"{found.version_text} at {found.path}"
    if (lacking := found.check()) is not None:
        return [Check("CRIU", Verdict.FAIL, f"{finding}: {lacking}", "run as root, in a container with --privileged")]
    # What is missing for some targets only, although CRIU's own check is content.
    limits = [
        Check("CRIU", Verdict.WARNING, sentence, "use a newer CRIU for such targets (WOODFROG_CRIU)")
        for sentence in found.limitations()
    ]
    return [Check("CRIU", Verdict.OK, f"{finding}, its own check says yes"), *limits]


def check_store(store: str | os.PathLike[str] | None) -> list[Check]:
    from woodfrog.store import space
    from woodfrog.store.open import default_place

    place = os.fspath(store) if store is not None else default_place()
    if place.startswith(("ram:", "s3://")):
        return [Check("store", Verdict.OK, f"{place} (opened when it is needed)")]
    path = Path(place)
    free = space.free_bytes(path)
    there = path
    while not there.exists():
        there = there.parent
    finding = f"{path}: {human_bytes(free)} free"
    if not os.access(there, os.W_OK | os.X_OK):
        return [
            Check("store", Verdict.FAIL, f"{finding}, but {there} may not be written", "choose another: WOODFROG_STORE")
        ]
    if free < LOW_BYTES:
        fix = "remove images (`woodfrog rm`) or choose another disk with WOODFROG_STORE"
        return [Check("store", Verdict.WARNING, finding, fix)]
    return [Check("store", Verdict.OK, finding)]


def check_runtime_directory() -> list[Check]:
    from woodfrog.daemon import runtime_dir

    path = runtime_dir.path()
    try:
        status = path.lstat()
    except FileNotFoundError:
        there = path.parent
        while not there.exists():
            there = there.parent
        if os.access(there, os.W_OK | os.X_OK):
            return [Check("runtime directory", Verdict.OK, f"{path} (made when it is needed)")]
        fix = "set WOODFROG_RUNTIME_DIR to a directory of your own"
        return [Check("runtime directory", Verdict.FAIL, f"{path} cannot be made", fix)]
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        fix = f"chmod 700 {path}, or set WOODFROG_RUNTIME_DIR to a directory of your own"
        return [Check("runtime directory", Verdict.FAIL, f"{path} is not yours alone", fix)]
    return [Check("runtime directory", Verdict.OK, f"{path}")]


def check_daemon() -> list[Check]:
    from woodfrog.daemon.client import Client

    try:
        with Client.connect() as client:
            found = client.call("ping")
    except NoDaemonError:
        return [Check("daemon", Verdict.NOT_APPLICABLE, "not running; it starts when it is needed")]
    pid = found.get("pid", "?") if isinstance(found, dict) else "?"
    return [Check("daemon", Verdict.OK, f"running, pid {pid}")]
