"""Every option that woodfrog gives to CRIU, with its reason, in one place.

From a request to an argument list. Must never look at the machine or at another process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

DUMP_LOG = "dump.log"
DUMP_STATISTICS = "stats-dump"
RESTORE_LOG = "restore.log"
RESTORE_PID = "restored.pid"

# CRIU's default is 1 MiB. Deleted files that are still open are common in numerical programs (shared memory of
# PyTorch's DataLoader workers, temporary files), and they are part of the target's state however large they are.
GHOST_LIMIT_BYTES = 64 << 30

# 3: errors, warnings and information with times; 4 (everything) costs measurable time with thousands of mappings.
_VERBOSITY = 3


def common(
    *, images: Path, work: Path, plugins: Path, log: str, shell_job: bool, connections: bool, unprivileged: bool
) -> list[str]:
    """Options that dump and restore must agree on, or that mean the same for both."""
    arguments = [
        "--no-default-config",  # a configuration file of the machine must not change what an image means
        "--images-dir",
        str(images),
        "--work-dir",
        str(work),
        "--log-file",
        log,
        f"-v{_VERBOSITY}",
        # An empty folder keeps CRIU's cuda plugin out: the driver's checkpoint is woodfrog's own affair.
        "--libdir",
        str(plugins),
        # Locks of the tree on files; nobody outside the tree can see a difference, the tree would.
        "--file-locks",
        # Datagram sockets to outside (syslog, a resolver) are connected again by path.
        "--ext-unix-sk",
        *tcp(connections),
        # The target comes back in the daemon's own control group: the old one may not exist here, and inside containers
        # the hierarchy is not writable.
        "--manage-cgroups=ignore",
    ]
    if shell_job:
        # The tree's session leader is not in the tree: it was started from a shell, without a session of its own.
        arguments.append("--shell-job")
    if unprivileged:
        arguments.append("--unprivileged")
    return arguments


def tcp(connections: bool) -> list[str]:
    """What becomes of established TCP connections; `connections`: all of them are between processes of the tree."""
    if connections:
        # Both ends stand still, are saved and come back together, so there is no packet to keep away meanwhile: what
        # was on its way is sent again. Without it the ranks of torchrun would lose their store.
        return ["--tcp-established", "--network-lock", "skip"]
    # They come back closed, as after a dropped line. Saving them would mean blocking the peer, which leave-running
    # cannot, and the peer of an image restored tomorrow is gone anyway.
    return ["--tcp-close"]


def dump(
    program: Path,
    *,
    pid: int,
    images: Path,
    work: Path,
    plugins: Path,
    leave_running: bool,
    shell_job: bool,
    connections: bool,
    unprivileged: bool,
    freeze_timeout_s: int,
    ghost_limit_bytes: int = GHOST_LIMIT_BYTES,
    passed_over: Sequence[str] = (),
    script: Path | None = None,
) -> list[str]:
    """`leave_running` False leaves the tree stopped, not killed: it is the only copy until the image is durable."""
    return [
        str(program),
        "dump",
        "--tree",
        str(pid),
        *common(
            images=images,
            work=work,
            plugins=plugins,
            log=DUMP_LOG,
            shell_job=shell_job,
            connections=connections,
            unprivileged=unprivileged,
        ),
        "--leave-running" if leave_running else "--leave-stopped",
        # Without it a large file that was deleted while open refuses the dump.
        "--ghost-limit",
        str(ghost_limit_bytes),
        # A deleted file that still has another name is kept by a hard link beside it. CRIU removes these links when the
        # tree runs on, so such an image could not be restored: there the dump has to refuse.
        *([] if leave_running else ["--link-remap"]),
        "--timeout",
        str(max(1, freeze_timeout_s)),
        # Mappings of these files come back by --inherit-fd; CRIU saves neither their contents nor a path.
        *(argument for name in passed_over for argument in ("--external", name)),
        *_script(script),
    ]


def file_name(descriptor: int) -> str:
    """CRIU's name for the file of a descriptor of ours: file[mount id:inode], in hexadecimal."""
    lines = Path(f"/proc/self/fdinfo/{descriptor}").read_text().splitlines()
    mount = next(int(line.split()[1]) for line in lines if line.startswith("mnt_id:"))
    return f"file[{mount:x}:{os.fstat(descriptor).st_ino:x}]"


def inherited(descriptors: Mapping[str, int]) -> list[str]:
    """For a restore: what stands for the files that its dump passed over, by their names then."""
    return [argument for name, fd in descriptors.items() for argument in ("--inherit-fd", f"fd[{fd}]:{name}")]


def restore(
    program: Path,
    *,
    images: Path,
    work: Path,
    plugins: Path,
    shell_job: bool,
    connections: bool,
    unprivileged: bool,
    script: Path | None = None,
    extra: Sequence[str] = (),
) -> list[str]:
    """The tree comes back detached: CRIU ends, and the tree's root becomes a child of the nearest subreaper."""
    return [
        str(program),
        "restore",
        *common(
            images=images,
            work=work,
            plugins=plugins,
            log=RESTORE_LOG,
            shell_job=shell_job,
            connections=connections,
            unprivileged=unprivileged,
        ),
        "--restore-detached",
        "--pidfile",
        RESTORE_PID,
        "--link-remap",
        *_script(script),
        *extra,
    ]


def _script(script: Path | None) -> list[str]:
    """Run between CRIU's stages; it goes on when that says so (native/gate)."""
    return ["--action-script", str(script)] if script is not None else []
