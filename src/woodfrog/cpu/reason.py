"""CRIU's log → one sentence with the cause, and the way out.

CRIU logs what it was doing, and an error makes every caller up the stack add a line of its own; the first error line is
the cause, the last ones only say that something failed. Some lines are harmless although they are called errors, and a
few causes are only warnings. The table below is ordered: the first entry whose pattern is found wins, so entries for
causes come before entries for consequences. Each pattern is a message of CRIU 4.1/4.2; tests hold real excerpts of logs
for most of them. Must never guess: an unknown message is shown as it is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from woodfrog.cpu import pages_by

# "(00.012345)   1234: Error (criu/files-reg.c:2174): File …"; "pie: " before the pid, and in the parasite no time
_LINE = re.compile(r"^(?:\([\d.]+\))?\s*(?:pie:\s*)?(?:\d+:\s*)?(Error|Warn)\s+\(([^)]*)\):\s*(.*)$")
# Said on every run where the daemon lacks CAP_SYS_RESOURCE; CRIU goes on with the limit it has.
_HARMLESS = re.compile(r"Can't setup RLIMIT_NOFILE for self")
# Messages that only say that something further down failed.
_CONSEQUENCES = re.compile(
    r"^(Dumping FAILED|Restoring FAILED|Dump \w+ \(pid|Collect \w+ \(pid|Unable to open fd=|Unable to detach|"
    r"\d+ (exited|killed by|stopped by)|`- Can't open vma|Message reply from daemon is trimmed)",
)


class Kind(Enum):
    """What sort of error the caller should raise."""

    FAILED = "failed"
    REFUSED = "refused"  # something about the target or the machine; trying again will not help
    NO_SPACE = "no_space"
    TIMEOUT = "timeout"
    BAD_IMAGE = "bad_image"


@dataclass(frozen=True)
class Reason:
    sentence: str
    advice: str
    kind: Kind = Kind.REFUSED


@dataclass(frozen=True)
class _Known:
    pattern: re.Pattern[str]
    sentence: str  # may use the pattern's named groups
    advice: str
    kind: Kind = Kind.REFUSED


def _known(pattern: str, sentence: str, advice: str, kind: Kind = Kind.REFUSED) -> _Known:
    return _Known(re.compile(pattern, re.MULTILINE), sentence, advice, kind)


_KIND_OF_FILE_ADVICE = "Let the target close it before the checkpoint, or use suspend, which needs no CRIU."

TABLE: tuple[_Known, ...] = (
    _known(
        r"No space left on device|Disk quota exceeded",
        "The disk filled up while the CPU side was being saved.",
        "Free space, or choose another store with --store.",
        Kind.NO_SPACE,
    ),
    _known(
        r"Unexpected EOF on|Read \d+ bytes while \d+ expected|Can't read pages data|Image corrupted|"
        r"Failed getting raw image fd|Magic doesn't match|[Bb]ad (?:file )?magic|Can't open file \S+\.img|"
        r"Image version mismatch",
        "The CPU side of the image is damaged or incomplete.",
        "`woodfrog verify` says which parts; use another image.",
        Kind.BAD_IMAGE,
    ),
    # Files
    _known(
        r"File (?P<path>\S+) has bad size (?P<now>\d+) \(expect (?P<then>\d+)\)",
        "{path} had {then} bytes at the checkpoint and has {now} now.",
        "Put the file back as it was, and restore again.",
    ),
    _known(
        r"File (?P<path>\S+) has bad build-ID",
        "{path} is another version than at the checkpoint.",
        "Install the version that the target was using (the image's manifest lists the system), and restore again.",
    ),
    _known(
        r"File (?P<path>\S+) has bad mode (?P<now>\w+) \(expect (?P<then>\w+)\)",
        "{path} has other permissions (or is another kind of file) than at the checkpoint: {now} instead of {then}.",
        "chmod it back, and restore again.",
    ),
    _known(
        r"Can't link (?P<link>\S+/link_remap\.\d+) -> (?P<path>\S+): No such file",
        "The deleted file {path}, which the target had open, is gone for good: its last link {link} was removed.",
        "Use an image from before it was deleted.",
    ),
    _known(
        r"Can't open file (?P<path>\S+?)(?: on restore)?: (?P<why>No such file or directory|Not a directory)",
        "{path}, which the target had open, does not exist here.",
        "Put it back at the same path, and restore again.",
    ),
    _known(
        r"Can't open file (?P<path>\S+?)(?: on restore)?: (?P<why>Permission denied|Read-only file system)",
        "{path}, which the target had open, cannot be opened here ({why}).",
        "Make it accessible as it was at the checkpoint, and restore again.",
    ),
    _known(
        r"Can't create link remap for (?P<path>\S+?)\. Use",
        "{path} was deleted while the target has it open, and still exists under another name.",
        "Such a file can only be saved with --stop; or let the target close it first.",
    ),
    _known(
        r"Can't dump ghost file (?P<path>\S+) of (?P<size>\d+) size",
        "The target has a deleted file of {size} bytes open ({path}), more than the limit.",
        "Let the target close it, or use suspend, which needs no image.",
    ),
    _known(
        r"Can't dump file \d+ of that type \[\w+\] \((?:anon )?(?P<what>[^)]*)\)",
        "The target has a file open of a kind that CRIU cannot save ({what}).",
        _KIND_OF_FILE_ADVICE,
    ),
    _known(
        r"Can't lookup mount=\S+ for fd=\S+ path=(?P<path>\S+)",
        "The target has {path} open, which lies on no filesystem that CRIU sees (secret memory, another namespace).",
        _KIND_OF_FILE_ADVICE,
    ),
    _known(
        r"Can't retrieve FDs from socket",
        "The target has a file open that cannot be passed to another process; io_uring is the usual one.",
        "Use suspend (it needs no CRIU), or start the target with `woodfrog run --no-io-uring`.",
    ),
    # Terminals and sessions
    _known(
        r"tty: Found slave peer index|Found dangling tty|tty: .*(?:inherit|is not supported|Unable to find)",
        "The target has a terminal open whose other end is not part of it.",
        "Start it with `woodfrog run`, or with input and output redirected (setsid … </dev/null >log 2>&1).",
    ),
    _known(
        r"The criu itself is within dumped tree",
        "The node daemon is a child of the target, so the target cannot be saved.",
        "Start the daemon in a session of its own, from outside the target.",
    ),
    _known(
        r"A session leader of (?:zombie process )?(?P<pid>\d+)\(\d+\) is outside of its pid namespace",
        "The session of process {pid} began outside of the target: it was started from a shell.",
        "Start it with `woodfrog run`, or under setsid.",
    ),
    # Sockets
    _known(
        r"Can't get 1:(?:16|34) opt: Operation not supported",
        "The target has a network socket, which this CRIU cannot save on this kernel (6.16 or newer).",
        "Use CRIU 4.2 or newer: scripts/get-criu.sh provides it.",
    ),
    _known(
        r"Can't dump half of stream unix connection|External socket is used",
        "The target is connected by a Unix socket to a process outside of it.",
        "Checkpoint both ends together (their common parent), let the target close it, or use suspend.",
    ),
    _known(
        r"Can't bind inet socket.*Address already in use",
        "A network port that the target was listening on is in use by another process.",
        "End the process that listens there (often the original target, still alive), and restore again. If none does, "
        "a connection to another machine was closed there just now: the kernel keeps its port for a minute.",
    ),
    _known(
        r"Can't bind (?P<what>\S* ?socket).*: (?P<why>\w.*)$",
        "An address that the target was listening on cannot be had here ({why}).",
        "Make the address available (interface, path, port), and restore again.",
    ),
    # Numbers, rights, time
    _known(
        r"Can't fork for (?P<pid>\d+): File exists|Pid (?P<other>\d+) do not match expected",
        "A process or thread number that the target needs ({pid}{other}) is in use.",
        "End the process that has it (often the original target, still alive), or restore once it is gone.",
    ),
    _known(
        r"Unable to interrupt task: (?P<pid>\d+) \(Operation not permitted\)|Can't seize|SEIZE (?P<other>\d+): "
        r"can't .*Operation not permitted",
        "Process {pid}{other} is being traced by another program (a debugger, strace), or this user may not trace it.",
        "Detach the tracer and try again; saving the CPU side needs root or CAP_CHECKPOINT_RESTORE.",
    ),
    _known(
        r"Timeout reached\. Try to interrupt|Unable to interrupt the current operation",
        "The target's threads could not be stopped in time: at least one is stuck in the kernel.",
        "Look for threads in state D (`ps -L`), often a hung network filesystem; then try again.",
        Kind.TIMEOUT,
    ),
    _known(
        r"CPU .*(?:mismatch|do(?:es)? not|incompatible)|cpu: .*(?:feature|xsave)",
        "This machine's CPU lacks features that the target was using.",
        "Restore on a machine with the same or a newer CPU.",
    ),
    _known(
        r"Cannot allocate memory|Out of memory|lazy-pages: register \w+ failed: rc:-12\b",
        "There was not enough host memory.",
        "Free memory, and try again.",
        Kind.NO_SPACE,
    ),
    _known(
        r"uffd: Unable to open an userfaultfd descriptor: (?P<why>\w.*)$|uffd: Failed to get uffd API|"
        r"lazy-pages: register (?P<where>\w+) failed|(?:UFFD|Lazy pages) (?:is|are) not (?:supported|available)",
        "The kernel refused to let woodfrog fill the memory of a process that was being restored (userfaultfd).",
        f"{pages_by.VARIABLE}=criu in the daemon's environment leaves that to CRIU; then restore again.",
    ),
    _known(
        # What keeps pages from being filled otherwise is told by who fills them (criu.py).
        r"Aborting restore due to post-restore script|Can't attach to \d+: No such process",
        "A process of the tree ended while it was being restored.",
        "See the kernel's log for who ended it (`dmesg`), and restore again.",
        Kind.FAILED,
    ),
    _known(
        r"CAP_CHECKPOINT_RESTORE|CAP_SYS_ADMIN|: Operation not permitted",
        "CRIU was not allowed to do something that needs privileges.",
        "Run the daemon as root, or grant it CAP_CHECKPOINT_RESTORE, CAP_SYS_PTRACE and CAP_SYS_ADMIN.",
    ),
)


def errors(log: str) -> list[tuple[str, str]]:
    """(place in CRIU's source, message) of the error lines of a log, in order, harmless ones left out."""
    return _lines(log, "Error")


def reason(log: str) -> Reason:
    """The cause that a log of a failed run names, as one sentence, with the way out."""
    found = [message for _, message in errors(log)]
    # Warnings count only where no error explains it: CRIU warns of much that it then copes with.
    for text in ("\n".join(found), "\n".join(message for _, message in _lines(log, "Warn"))):
        for known in TABLE:
            if match := known.pattern.search(text):
                groups = {name: value or "" for name, value in match.groupdict().items()}
                if "path" in groups:
                    groups["path"] = _absolute(groups["path"])
                return Reason(known.sentence.format(**groups), known.advice, known.kind)
    causes = [message for message in found if not _CONSEQUENCES.match(message)] or found
    if causes:
        return Reason(
            f"CRIU could not do it: {causes[0].rstrip('.')}.",
            "The whole log is kept; docs/troubleshooting.md explains the common messages.",
            Kind.FAILED,
        )
    tail = " / ".join(line.strip() for line in log.splitlines()[-3:] if line.strip())
    said = f"its log ends with: {tail}" if tail else "it wrote nothing to its log"
    return Reason(f"CRIU ended without naming a cause ({said}).", "Try again with a larger --timeout.", Kind.FAILED)


def _lines(log: str, level: str) -> list[tuple[str, str]]:
    matches = (_LINE.match(line) for line in log.splitlines())
    return [(found[2], found[3]) for found in matches if found and found[1] == level and not _HARMLESS.search(found[3])]


def _absolute(path: str) -> str:
    """CRIU opens files relative to the root of the mount namespace and says their paths so."""
    return path if path.startswith("/") else f"/{path}"
