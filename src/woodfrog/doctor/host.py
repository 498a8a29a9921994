"""Checks of the host: kernel, privileges, limits, huge pages, container. See checks.py."""

from __future__ import annotations

import os
import platform
import re
import resource
from pathlib import Path

from woodfrog.doctor.checks import Check, Verdict, read
from woodfrog.image.inspect import human_bytes

# pidfd_open (5.3), pidfd_getfd and close_range (5.6, 5.9), CAP_CHECKPOINT_RESTORE (5.9) are used.
MINIMUM_KERNEL = (5, 9)
CAP_SYS_ADMIN, CAP_SYS_PTRACE, CAP_CHECKPOINT_RESTORE = 21, 19, 40  # linux/capability.h
# One descriptor per handle of 2 MiB or more: a target with 50 000 of them is large and has been seen.
WANTED_OPEN_FILES = 65536


def check_kernel() -> list[Check]:
    release, architecture = platform.release(), platform.machine()
    version = tuple(int(part) for part in re.findall(r"\d+", release)[:2])
    finding = f"{release} on {architecture}"
    if version < MINIMUM_KERNEL:
        return [Check("kernel", Verdict.FAIL, finding, "use Linux 5.9 or newer")]
    if architecture not in ("x86_64", "aarch64"):
        return [Check("kernel", Verdict.WARNING, f"{finding}, which is not tested", "")]
    return [Check("kernel", Verdict.OK, finding)]


def check_privileges() -> list[Check]:
    if os.geteuid() == 0:
        missing = [name for name, bit in _NEEDED.items() if not effective_capabilities() >> bit & 1]
        if missing:
            fix = "give the container these capabilities, or run it privileged"
            return [Check("privileges", Verdict.WARNING, f"root without {', '.join(missing)}", fix)]
        return [Check("privileges", Verdict.OK, "root")]
    capabilities = effective_capabilities()
    if capabilities >> CAP_CHECKPOINT_RESTORE & 1:
        return [Check("privileges", Verdict.OK, "not root, with CAP_CHECKPOINT_RESTORE")]
    finding = f"user {os.geteuid()} without CAP_CHECKPOINT_RESTORE: images cannot hold the CPU side"
    return [Check("privileges", Verdict.WARNING, finding, "run the daemon as root; suspend and resume work without")]


_NEEDED = {
    "CAP_SYS_ADMIN": CAP_SYS_ADMIN,
    "CAP_SYS_PTRACE": CAP_SYS_PTRACE,
    "CAP_CHECKPOINT_RESTORE": CAP_CHECKPOINT_RESTORE,
}


def effective_capabilities() -> int:
    match = re.search(r"^CapEff:\s*([0-9a-f]+)", read("/proc/self/status"), re.MULTILINE)
    return int(match[1], 16) if match else 0


def check_open_files() -> list[Check]:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard == resource.RLIM_INFINITY or hard >= WANTED_OPEN_FILES:
        text = "unlimited" if hard == resource.RLIM_INFINITY else f"up to {hard}"
        return [Check("open files", Verdict.OK, text)]
    fix = f"raise the hard limit to {WANTED_OPEN_FILES} or more (LimitNOFILE=, /etc/security/limits.conf)"
    return [Check("open files", Verdict.WARNING, f"at most {hard}: one is needed for each GPU allocation", fix)]


def check_locked_memory() -> list[Check]:
    if os.geteuid() == 0 and effective_capabilities() >> 14 & 1:  # CAP_IPC_LOCK
        return [Check("locked memory", Verdict.OK, "unlimited for root")]
    hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    if hard == resource.RLIM_INFINITY:
        return [Check("locked memory", Verdict.OK, "unlimited")]
    # The driver pins through its own kernel module, outside of this limit; CRIU and io_uring are inside of it.
    fix = "raise it (LimitMEMLOCK=infinity) if the daemon reports that memory cannot be registered"
    return [Check("locked memory", Verdict.WARNING, f"at most {human_bytes(hard)}", fix)]


def check_file_io() -> list[Check]:
    from woodfrog._native import transfer

    trouble = transfer.uring_trouble()
    if transfer.file_io() == "uring" and trouble is None:
        return [Check("disk I/O", Verdict.OK, "io_uring")]
    if trouble is None:
        return [Check("disk I/O", Verdict.OK, "by threads, as WOODFROG_FILE_IO says")]
    # Seldom more than a fifth of the bandwidth, but twice that of chunks that lie scattered in packs.
    fix = "allow io_uring to the daemon (kernel.io_uring_disabled=0; a seccomp profile with io_uring_setup and _enter)"
    return [Check("disk I/O", Verdict.WARNING, f"by threads, which is slower on a fast disk: {trouble}", fix)]


def check_memory_stores() -> list[Check]:
    """Of the tmpfs that `ram:` stores are on. Nothing is wrong without, it is only slower."""
    for line in read("/proc/mounts").splitlines():
        _, place, kind, options, *_ = line.split()
        if (place, kind) == ("/dev/shm", "tmpfs"):
            huge = re.search(r"huge=(always|within_size|advise)", options)
            if huge:
                return [Check("stores in memory", Verdict.OK, f"in huge pages ({huge[0]})")]
            better = "mount -o remount,huge=within_size /dev/shm makes `ram:` stores faster"
            return [Check("stores in memory", Verdict.OK, f"in small pages: {better}")]
    return [Check("stores in memory", Verdict.NOT_APPLICABLE, "/dev/shm is no tmpfs of its own")]


def check_huge_pages() -> list[Check]:
    place = "/sys/kernel/mm/transparent_hugepage"
    anonymous, shared = chosen(read(f"{place}/enabled")), chosen(read(f"{place}/shmem_enabled"))
    found = []
    if not anonymous:
        return [Check("huge pages", Verdict.WARNING, "this kernel has no transparent huge pages", "copies are slower")]
    if anonymous == "never":
        fix = f"echo madvise > {place}/enabled (the driver's part of a checkpoint is then up to 1.6 times as fast)"
        found.append(Check("huge pages", Verdict.WARNING, "transparent huge pages are off", fix))
    else:
        found.append(Check("huge pages", Verdict.OK, f"transparent huge pages: {anonymous}"))
    if shared in ("always", "within_size", "advise", "force"):
        found.append(Check("huge pages, shared", Verdict.OK, f"shared memory: {shared}"))
    else:
        fix = f"echo advise > {place}/shmem_enabled (the host arena is shared memory)"
        found.append(Check("huge pages, shared", Verdict.WARNING, f"shared memory: {shared or 'unknown'}", fix))
    return found


def chosen(setting: str) -> str:
    """`madvise` of "always [madvise] never"."""
    match = re.search(r"\[(\w+)\]", setting)
    return match[1] if match else ""


def check_container() -> list[Check]:
    first = read("/proc/1/comm")
    contained = Path("/.dockerenv").exists() or Path("/run/.containerenv").exists() or "container" in os.environ
    if not contained:
        return [
            Check("container", Verdict.NOT_APPLICABLE, f"not in a container as far as can be seen (process 1: {first})")
        ]
    if first in ("systemd", "init", "tini", "dumb-init", "catatonit", "docker-init", "s6-svscan"):
        return [Check("container", Verdict.OK, f"process 1 is {first}, which reaps")]
    finding = f"process 1 is {first}, which may not reap orphans: their pids stay taken and restores fail"
    return [Check("container", Verdict.WARNING, finding, "start the container with an init (docker run --init)")]
