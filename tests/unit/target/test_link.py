"""The link to a target's agent: every command, every way for the other side to misbehave, no leaked descriptor."""

from __future__ import annotations

import os
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from woodfrog.errors import NoSpaceError, RefusedError, TimeoutExceededError, WoodfrogError
from woodfrog.target import wire
from woodfrog.target.channel import listen
from woodfrog.target.link import AgentLink
from woodfrog.target.memory import Handle
from woodfrog.target.wire import Message, WireError

from .fake_agent import FakeAgent

STATUS = {"timeout": 1, "wrong_state": 2, "driver_error": 3, "no_memory": 4, "bad_message": 5, "unsupported": 6}

Make = Callable[..., FakeAgent]


def open_descriptors() -> set[str]:
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.add(f"{entry.name} {entry.readlink()}")
        except FileNotFoundError:
            continue  # the listing's own
    return found


@pytest.fixture
def agent() -> Iterator[Make]:
    """agent(**options) makes a fake agent; afterwards this process holds no descriptor more than before."""
    before = open_descriptors()
    made: list[FakeAgent] = []

    def make(**options: object) -> FakeAgent:
        made.append(FakeAgent(**options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.close()
    assert open_descriptors() <= before


def test_hello_says_who_it_is_and_the_kernel_says_which_process(agent: Make) -> None:
    with AgentLink(agent().start().daemon_end) as link:
        assert link.hello.name == "llama"
        assert link.hello.owned_count == 3
        assert link.pid == os.getpid()
        assert link.identity.is_alive()
        assert link.state == "running"


def test_a_whole_checkpoint_and_return(agent: Make) -> None:
    fake = agent(handles=5)
    inodes = [os.fstat(fd).st_ino for fd in fake.fds]
    with AgentLink(fake.start().daemon_end) as link:
        assert link.quiesce(operation=7, timeout_s=5) == pytest.approx(0.0015)
        assert link.state == "quiesced"
        with link.export_memory() as exported:
            assert link.state == "exported"
            assert [os.fstat(fd).st_ino for fd in exported.fds] == inodes
            assert exported.size_bytes == 10 << 20
            assert [mapping.handle for mapping in exported.mappings] == [1, 2, 3, 4, 5]
            link.release_memory()
            assert link.state == "released"
            link.return_memory(exported.handles, list(exported.fds))
            assert link.state == "returned"
        link.resume()
        assert link.ping() < 5
    assert fake.returned == list(zip([1, 2, 3, 4, 5], inodes, strict=True))
    assert fake.commands == [
        "quiesce",
        "export_memory",
        "release_memory",
        "return_batch",
        "resume",
        "ping",
    ]


def test_thousands_of_handles_travel_in_batches_in_order(agent: Make) -> None:
    count = 2 * wire.tables().max_entries + 17
    fake = agent(handles=count)
    with AgentLink(fake.start().daemon_end) as link, link.export_memory() as exported:
        assert [handle.handle for handle in exported.handles] == list(range(1, count + 1))
        link.return_memory(exported.handles, list(exported.fds))
        assert [handle for handle, _ in fake.returned] == list(range(1, count + 1))
    assert fake.commands.count("return_batch") == 3


def test_a_target_without_memory_is_returned_its_nothing(agent: Make) -> None:
    fake = agent()
    with AgentLink(fake.start().daemon_end) as link, link.export_memory() as exported:
        assert len(exported.fds) == 0
        link.return_memory([], [])
        assert link.state == "returned"


def test_survey_counts_and_names_obstacles(agent: Make) -> None:
    with AgentLink(agent().start().daemon_end) as link:
        found = link.survey()
        assert found.owned_bytes == 6 << 20
        assert found.obstacles == ("managed_memory",)
        assert found.devices[0].uuid == b"u" * 16


def test_detach_returns_when_the_agent_has_closed_its_end(agent: Make) -> None:
    fake = agent()
    link = AgentLink(fake.start().daemon_end)
    link.detach()
    assert link.closed
    fake.join()
    with pytest.raises(WoodfrogError, match="connection is closed"):
        link.ping()


def test_detach_does_not_end_before_the_agent_has_closed_its_end(agent: Make) -> None:
    fake = agent()
    fake.answers["detach"] = lambda self, command: self.reply(command)  # says so, and keeps it open
    with AgentLink(fake.start().daemon_end) as link, pytest.raises(TimeoutExceededError, match="detach"):
        link.detach(timeout_s=0.3)


@pytest.mark.parametrize(
    ("status", "error", "part"),
    [
        ("timeout", TimeoutExceededError, "did not finish in time"),
        ("no_memory", NoSpaceError, "out of memory"),
        ("unsupported", RefusedError, "cannot be handed over: imported memory"),
        ("driver_error", WoodfrogError, "driver call failed"),
        ("wrong_state", WoodfrogError, r"refused quiesce \(wrong_state\)"),
        ("bad_message", WoodfrogError, "bad_message"),
    ],
)
def test_a_refusal_becomes_an_error_with_the_state_of_the_target(
    agent: Make, status: str, error: type[WoodfrogError], part: str
) -> None:
    fake = agent()
    fake.answers["quiesce"] = lambda self, command: self.reply(
        command, STATUS[status], b"imported memory", driver_result=700
    )
    with AgentLink(fake.start().daemon_end) as link:
        with pytest.raises(error, match=part) as caught:
            link.quiesce(1, 1)
        assert caught.value.pid == os.getpid()
        assert caught.value.target_state == "running"
        assert caught.value.details["driver_result"] == 700
        link.ping()  # a refusal does not break the connection


def test_an_agent_that_does_not_answer_is_given_up_in_time(agent: Make) -> None:
    fake = agent()
    fake.answers["resume"] = lambda self, command: None
    with AgentLink(fake.start().daemon_end) as link:
        begin = time.monotonic()
        with pytest.raises(TimeoutExceededError, match=r"did not answer resume within 0\.3 s"):
            link.resume(timeout_s=0.3)
        assert time.monotonic() - begin < 5
        assert link.closed  # a late answer would be taken for the next command's


def test_a_target_that_ends_during_a_command_is_said_to_have_broken_off(agent: Make) -> None:
    fake = agent()
    fake.answers["resume"] = lambda self, command: self.socket.shutdown(socket.SHUT_RDWR)
    with AgentLink(fake.start().daemon_end) as link, pytest.raises(WoodfrogError, match="broke during resume"):
        link.resume()


def test_the_state_stays_frozen_in_errors_after_release(agent: Make) -> None:
    fake = agent(handles=1)
    fake.answers["return_batch"] = lambda self, command: self.socket.shutdown(socket.SHUT_RDWR)
    with AgentLink(fake.start().daemon_end) as link, link.export_memory() as exported:
        link.release_memory()
        with pytest.raises(WoodfrogError) as caught:
            link.return_memory(exported.handles, list(exported.fds))
        assert caught.value.target_state == "frozen"


def _reply_bytes(command: Message) -> bytes:
    return wire.pack(Message("reply", command.sequence))


MISBEHAVIOURS: dict[str, Callable[[FakeAgent, Message], None]] = {
    "short packet": lambda self, command: self.send_raw(b"WFRG"),
    "wrong magic": lambda self, command: self.send_raw(b"\0" * 4 + _reply_bytes(command)[4:]),
    "other version": lambda self, command: self.send_raw(
        _reply_bytes(command)[:4] + struct.pack("<H", 99) + _reply_bytes(command)[6:]
    ),
    "unknown type": lambda self, command: self.send_raw(
        _reply_bytes(command)[:6] + struct.pack("<H", 999) + _reply_bytes(command)[8:]
    ),
    "a command instead of an answer": lambda self, command: self.send(Message("resume", command.sequence)),
    "another sequence": lambda self, command: self.send(Message("reply", command.sequence + 1)),
    "trailing bytes": lambda self, command: self.send_raw(_reply_bytes(command) + b"\0"),
    "a cut body": lambda self, command: self.send_raw(_reply_bytes(command)[:-1]),
    "an oversized packet": lambda self, command: self.send_raw(b"\0" * (wire.tables().max_message + 1)),
    "too many entries": lambda self, command: self.send_raw(
        _reply_bytes(command)[:16] + struct.pack("<I", 0xFFFFFFFF) + _reply_bytes(command)[20:]
    ),
    "descriptors that are not announced": lambda self, command: self.send_raw(_reply_bytes(command), [self.fds[0]]),
    "descriptors that do not come": lambda self, command: self.send_raw(
        _reply_bytes(command)[:20] + struct.pack("<I", 1) + _reply_bytes(command)[24:]
    ),
    "a reply with descriptors": lambda self, command: self.send(Message("reply", command.sequence, fds=[self.fds[0]])),
    "a state that does not exist": lambda self, command: self.send(
        Message("reply", command.sequence, body={"state": 77})
    ),
    "a result nobody asked for": lambda self, command: self.send(Message("survey_result", command.sequence)),
}


@pytest.mark.parametrize("name", sorted(MISBEHAVIOURS))
@pytest.mark.parametrize("command", ["ping", "export_memory"])
def test_a_misbehaving_agent_is_refused_and_the_connection_closed(agent: Make, name: str, command: str) -> None:
    fake = agent(handles=1)
    fake.answers[command] = MISBEHAVIOURS[name]
    with AgentLink(fake.start().daemon_end) as link:
        with pytest.raises(WireError, match="cannot be understood"):
            link.ping() if command == "ping" else link.export_memory()
        assert link.closed


BAD_EXPORTS: dict[str, Callable[[FakeAgent], None]] = {
    "a handle twice": lambda fake: fake.handles[1].update(handle=1),
    "a size of nothing": lambda fake: fake.handles[0].update(size=0),
    "an enormous size": lambda fake: fake.handles[0].update(size=1 << 60),
    "a device that cannot be": lambda fake: fake.handles[0].update(device=100_000),
    "a kind that does not exist": lambda fake: fake.handles[0].update(kind=9),
}
BAD_MAPPINGS: dict[str, Callable[[FakeAgent], None]] = {
    "in no handle": lambda fake: fake.mappings[0].update(handle=99),
    "past its handle": lambda fake: fake.mappings[0].update(offset=2 << 20),
    "on another device": lambda fake: fake.mappings[0].update(device=1),
    "of nothing": lambda fake: fake.mappings[0].update(size=0),
    "of a kind that does not exist": lambda fake: fake.mappings[0].update(kind=9),
}


@pytest.mark.parametrize("name", sorted(BAD_EXPORTS))
def test_an_export_that_contradicts_itself_is_refused_without_a_leak(agent: Make, name: str) -> None:
    fake = agent(handles=3)
    BAD_EXPORTS[name](fake)
    with AgentLink(fake.start().daemon_end) as link:
        with pytest.raises(WireError):
            link.export_memory()
        assert link.closed


@pytest.mark.parametrize("name", sorted(BAD_MAPPINGS))
def test_mappings_that_cannot_be_are_refused_when_they_are_looked_at(agent: Make, name: str) -> None:
    fake = agent(handles=3)
    BAD_MAPPINGS[name](fake)
    with AgentLink(fake.start().daemon_end) as link, link.export_memory() as exported:
        with pytest.raises(WireError):
            _ = exported.mappings
        with pytest.raises(WireError):  # not believed the second time either
            _ = exported.mappings


def test_what_an_agent_spent_is_told_by_command(agent: Make) -> None:
    def tell(self: FakeAgent, command: Message) -> None:
        entries = [
            {"ns": 3_000_000, "count": 1, "command": 35, "spending": 0},
            {"ns": 2_000_000, "count": 7, "command": 35, "spending": 7},
            {"ns": 1_000_000, "count": 1, "command": 37, "spending": 0},
        ]
        self.send(Message("spent_batch", command.sequence, entries=entries, last=True))
        self.reply(command)

    fake = agent(handles=1)
    fake.answers["spent"] = tell
    with AgentLink(fake.start().daemon_end) as link:
        assert link.spent() == {
            "release_memory": {"all": (0.003, 1), "unmap_call": (0.002, 7)},
            "return_batch": {"all": (0.001, 1)},
        }


@pytest.mark.parametrize("entry", [{"command": 9999}, {"command": 35, "spending": 99}])
def test_time_spent_on_nothing_that_there_is_is_refused(agent: Make, entry: dict[str, int]) -> None:
    def tell(self: FakeAgent, command: Message) -> None:
        self.send(Message("spent_batch", command.sequence, entries=[entry], last=True))
        self.reply(command)

    fake = agent()
    fake.answers["spent"] = tell
    with AgentLink(fake.start().daemon_end) as link:
        with pytest.raises(WireError):
            link.spent()
        assert link.closed


def test_an_interposer_that_does_not_know_the_question_spent_nothing_that_is_known(agent: Make) -> None:
    fake = agent()
    fake.answers["spent"] = lambda self, command: self.reply(command, STATUS["bad_message"], b"an unknown command")
    with AgentLink(fake.start().daemon_end) as link:
        assert link.spent() == {}
        assert not link.closed


@pytest.mark.parametrize("same", [False, True])
def test_a_return_says_whether_it_is_the_memory_that_was_released(agent: Make, same: bool) -> None:
    said: list[bool] = []

    def take(self: FakeAgent, command: Message) -> None:
        said.append(command.same)
        if command.last:
            self.state = "returned"
            self.reply(command)

    fake = agent(handles=2)
    fake.answers["return_batch"] = take
    with AgentLink(fake.start().daemon_end) as link, link.export_memory() as exported:
        link.return_memory(exported.handles, list(exported.fds), same=same)
    assert said == [same]


def test_a_refused_export_gives_its_descriptors_back(agent: Make) -> None:
    def export_then_fail(self: FakeAgent, command: Message) -> None:
        self.send(Message("export_batch", command.sequence, entries=self.handles, fds=self.fds))
        self.reply(command, STATUS["driver_error"], b"cuMemExportToShareableHandle", 1)

    fake = agent(handles=3)
    fake.answers["export_memory"] = export_then_fail
    with AgentLink(fake.start().daemon_end) as link, pytest.raises(WoodfrogError, match="cuMemExport"):
        link.export_memory()


@pytest.mark.parametrize(
    "hello",
    [
        Message("reply", 0),
        Message("hello", 0, body={"state": 55}),
    ],
)
def test_a_first_packet_that_is_no_hello_is_refused(agent: Make, hello: Message) -> None:
    fake = agent(hello=hello)
    with pytest.raises(WireError):
        AgentLink(fake.start().daemon_end)


def test_a_silent_connection_is_given_up(agent: Make) -> None:
    fake = agent()
    with pytest.raises(TimeoutExceededError, match="did not answer hello"):
        AgentLink(fake.daemon_end, hello_timeout_s=0.2)


def test_a_connection_that_closes_before_hello_is_an_error(agent: Make) -> None:
    fake = agent()
    fake.socket.close()
    with pytest.raises(WoodfrogError, match="broke during hello"):
        AgentLink(fake.daemon_end)


def test_names_cannot_disturb_a_terminal(agent: Make) -> None:
    fake = agent(hello=Message("hello", 0, body={"name": b"\x1b[31mred\n\xff"}))
    with AgentLink(fake.start().daemon_end) as link:
        assert link.hello.name.isprintable()


def test_handles_and_descriptors_must_go_together(agent: Make) -> None:
    with AgentLink(agent().start().daemon_end) as link, pytest.raises(ValueError, match="1 handles and 0"):
        link.return_memory([Handle(1, 4096, 0, "allocation")], [])


def test_the_agents_socket_admits_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    with listen(str(path)) as first:
        assert path.stat().st_mode & 0o777 == 0o600
        with listen(str(path)):  # a name left by a dead daemon is replaced
            assert first.fileno() >= 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_process_of_another_user_is_not_taken_for_an_agent() -> None:
    # Not under tmp_path: another user has to reach it.
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        path = f"{directory}/agent.sock"
        with listen(path) as listener:
            Path(path).chmod(0o666)
            child = os.fork()
            if child == 0:
                os.setgid(65534)
                os.setuid(65534)
                stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                stranger.connect(path)
                stranger.recv(1)
                os._exit(0)
            connection, _ = listener.accept()
            try:
                with pytest.raises(RefusedError, match="user 65534"):
                    AgentLink(connection)
                assert connection.fileno() < 0
            finally:
                connection.close()
                os.waitpid(child, 0)
