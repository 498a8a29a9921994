"""What an agent tells of memory on the host, and how it may lie about it: nothing is believed, no descriptor stays."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from woodfrog.errors import WoodfrogError
from woodfrog.target import wire
from woodfrog.target.link import AgentLink
from woodfrog.target.wire import Message, WireError

from .fake_agent import FakeAgent
from .test_link import open_descriptors

Tell = Callable[[FakeAgent, Message], None]


@pytest.fixture
def agent() -> Iterator[FakeAgent]:
    before = open_descriptors()
    fake = FakeAgent(handles=3)
    yield fake
    fake.close()
    assert open_descriptors() <= before


def telling(kind: str, numbers: list[int], *, fds: bool) -> Tell:
    """An answer with these handles in one batch, the agent's own descriptors with them."""

    def answer(fake: FakeAgent, command: Message) -> None:
        if command.type == "replace_batch":
            fake.returned += [
                (one["handle"], os.fstat(fd).st_ino) for one, fd in zip(command.entries, command.fds, strict=True)
            ]
            if not command.last:
                fake.send(Message(kind, command.sequence))
                return
        entries = [{"handle": number, "size": 2 << 20, "device": 0, "kind": 0} for number in numbers]
        fake.send(Message(kind, command.sequence, entries=entries, last=True, fds=fake.fds if fds else []))
        fake.reply(command)

    return answer


def test_handles_come_with_descriptors_and_go_back_as_others(agent: FakeAgent) -> None:
    agent.answers["hosted"] = telling("hosted_batch", [1, 2, 3], fds=True)
    agent.answers["replace_batch"] = telling("replaced_batch", [3, 1], fds=False)
    with AgentLink(agent.start().daemon_end) as link, link.hosted() as hosted:
        assert hosted.size_bytes == 6 << 20
        inodes = [os.fstat(fd).st_ino for fd in hosted.fds]
        assert inodes == [os.fstat(fd).st_ino for fd in agent.fds]
        assert link.replace_memory(hosted.handles, list(hosted.fds)) == [3, 1]
        assert agent.returned == list(zip([1, 2, 3], inodes, strict=True))


def test_many_are_replaced_in_batches(agent: FakeAgent) -> None:
    agent.answers["hosted"] = telling("hosted_batch", [1, 2, 3], fds=True)
    agent.answers["replace_batch"] = telling("replaced_batch", [], fds=False)
    with AgentLink(agent.start().daemon_end) as link, link.hosted() as hosted:
        count = wire.tables().max_entries + 5
        link.replace_memory(hosted.handles[:1] * count, list(hosted.fds)[:1] * count)
        assert len(agent.returned) == count


@pytest.mark.parametrize(
    ("answer", "part"),
    [
        (telling("hosted_batch", [1, 2], fds=True), "2 handles came with 3 descriptors"),
        (telling("hosted_batch", [1, 2, 3], fds=False), "3 handles came with 0 descriptors"),
        (telling("hosted_batch", [1, 2, 2], fds=True), "twice"),
        (telling("export_batch", [1, 2, 3], fds=True), "in answer to hosted"),
    ],
    ids=["too many descriptors", "none", "a handle twice", "another batch"],
)
def test_an_agent_that_lies_is_not_believed(agent: FakeAgent, answer: Tell, part: str) -> None:
    agent.answers["hosted"] = answer
    with AgentLink(agent.start().daemon_end) as link, pytest.raises(WireError, match=part):
        link.hosted()


def test_names_come_without_descriptors(agent: FakeAgent) -> None:
    agent.answers["accessed"] = telling("accessed_batch", [3, 1], fds=False)
    with AgentLink(agent.start().daemon_end) as link:
        assert link.accessed() == [3, 1]
    assert agent.commands == ["accessed"]


@pytest.mark.parametrize(
    "answer", [telling("accessed_batch", [1, 2, 3], fds=True), telling("replaced_batch", [1], fds=False)]
)
def test_names_that_are_none_are_refused(agent: FakeAgent, answer: Tell) -> None:
    agent.answers["accessed"] = answer
    with AgentLink(agent.start().daemon_end) as link, pytest.raises(WireError):
        link.accessed()


def test_an_agent_that_does_not_know_of_it_says_so(agent: FakeAgent) -> None:
    agent.answers["hosted"] = lambda fake, command: fake.reply(command, 5, b"an unknown command")
    with AgentLink(agent.start().daemon_end) as link:
        with pytest.raises(WoodfrogError, match="unknown command") as raised:
            link.hosted()
        assert raised.value.details["status"] == "bad_message"
        assert link.ping() < 5  # the connection is as good as before
