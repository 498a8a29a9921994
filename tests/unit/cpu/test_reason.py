"""A failed run of CRIU is told in one sentence with its cause; the excerpts under logs/ are of real runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from woodfrog.cpu.reason import TABLE, Kind, errors, reason

LOGS = Path(__file__).parent / "logs"

EXPECTED = {
    "cwd_gone": (Kind.REFUSED, "/data/q, which the target had open, does not exist here"),
    "deleted_large": (Kind.REFUSED, "deleted file of 3145728 bytes open (/data/a)"),
    "deleted_with_link": (Kind.REFUSED, "/data/a was deleted while the target has it open"),
    "disk_full": (Kind.NO_SPACE, "disk filled up"),
    "file_mode": (Kind.REFUSED, "/data/data has other permissions"),
    "io_uring": (Kind.REFUSED, "io_uring"),
    "link_used_up": (Kind.REFUSED, "/data/a, which the target had open, is gone for good"),
    "network_socket": (Kind.REFUSED, "network socket, which this CRIU cannot save on this kernel"),
    "pages_missing": (Kind.BAD_IMAGE, "damaged or incomplete"),
    "port_used": (Kind.REFUSED, "network port"),
    "record_cut": (Kind.BAD_IMAGE, "damaged or incomplete"),
    "secret_memory": (Kind.REFUSED, "/secretmem open"),
    "traced": (Kind.REFUSED, "Process 22957 is being traced"),
    "tty": (Kind.REFUSED, "terminal open"),
    "unix_peer_outside": (Kind.REFUSED, "Unix socket to a process outside"),
    "unknown_anonymous": (Kind.REFUSED, "anon_inode:[userfaultfd]"),
}


def test_every_log_excerpt_has_its_expectation() -> None:
    assert {path.stem for path in LOGS.glob("*.log")} == EXPECTED.keys()


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_the_cause_in_a_real_log_becomes_one_sentence_with_a_way_out(name: str) -> None:
    kind, part = EXPECTED[name]
    found = reason((LOGS / f"{name}.log").read_text())
    assert part in found.sentence
    assert found.kind is kind
    assert found.advice
    assert found.sentence.endswith(".")
    assert "\n" not in found.sentence


def test_a_harmless_error_line_is_never_the_reason() -> None:
    log = (
        "(00.000049) Error (criu/util.c:1534): rlimit: Can't setup RLIMIT_NOFILE for self: Operation not permitted\n"
        "(00.100000) Error (criu/new.c:1): Something that nobody has met yet\n"
        "(00.200000) Error (criu/cr-dump.c:2111): Dumping FAILED.\n"
    )
    found = reason(log)
    assert "Something that nobody has met yet" in found.sentence
    assert found.kind is Kind.FAILED


def test_an_unknown_cause_is_shown_and_not_its_consequences() -> None:
    log = (
        "(00.1)   12: Error (criu/x.c:1): The first cause\n"
        "(00.1)   12: Error (criu/files.c:1221): Unable to open fd=3 id=0xa\n"
        "(00.2) Error (criu/cr-restore.c:1258): 12 exited, status=1\n"
        "(00.2) Error (criu/cr-restore.c:2320): Restoring FAILED.\n"
    )
    assert "The first cause" in reason(log).sentence


@pytest.mark.parametrize("log", ["", "\n\n", "(00.1) Dumping processes\n(00.2) last words\n"])
def test_a_log_without_errors_is_said_to_have_none(log: str) -> None:
    assert "without naming a cause" in reason(log).sentence


def test_warnings_do_not_hide_an_error() -> None:
    log = (
        "(00.1) Warn  (compel/src/lib/infect.c:132): Unable to interrupt task: 5 (Operation not permitted)\n"
        "(00.2) Error (criu/bfd.c:131): bfd: Error flushing image: No space left on device\n"
    )
    assert reason(log).kind is Kind.NO_SPACE


def test_lines_of_the_restorer_and_of_the_parasite_are_read() -> None:
    log = (
        "(00.1) pie: 7: Error (criu/pie/restorer.c:1835): Can't read pages data (-9)\n"
        "pie: 8: Error (criu/pie/parasite.c:588): send_fds failed (-22)\n"
    )
    assert [message for _, message in errors(log)] == ["Can't read pages data (-9)", "send_fds failed (-22)"]


def test_every_sentence_of_the_table_can_be_filled_in() -> None:
    for known in TABLE:
        known.sentence.format(**dict.fromkeys(known.pattern.groupindex, ""))
