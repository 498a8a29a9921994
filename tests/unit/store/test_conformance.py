"""What every store promises (woodfrog.store.protocol), run over each implementation: add a new one to STORES."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from woodfrog.errors import BadImageError, NotFoundError, RefusedError, UsageError
from woodfrog.store.disk import DiskStore
from woodfrog.store.protocol import Store, Writer

STORES: dict[str, Callable[[Path], Store]] = {"disk": DiskStore}
CONTENTS = {"one": b"1" * 5000, "sub/two": b"2", "sub/empty": b""}


@pytest.fixture(params=STORES)
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Store]:
    """Opens the same store anew at each call."""
    return lambda: STORES[request.param](tmp_path / "store")


@pytest.fixture
def store(open_store: Callable[[], Store]) -> Iterator[Store]:
    opened = open_store()
    yield opened
    opened.close()


def fill(writer: Writer) -> None:
    """One file as the transfer engine would write it, two as a program that was told a path would."""
    os.write(writer.create_file("one"), CONTENTS["one"])
    for path in ("sub/two", "sub/empty"):
        (writer.directory / path).write_bytes(CONTENTS[path])


def write(store: Store, name: str = "small") -> str:
    with store.begin(name, ["sub"]) as writer:
        fill(writer)
        writer.publish(lambda: b"what it is")
        return writer.reference


def read(store: Store, reference: str) -> dict[str, bytes]:
    """Everything in a published directory."""
    opened = store.open(reference)
    try:
        root = Path(f"/proc/self/fd/{opened.dir_fd}").readlink()
        return {str(file.relative_to(root)): file.read_bytes() for file in root.rglob("*") if file.is_file()}
    finally:
        os.close(opened.dir_fd)


def references(store: Store) -> list[str]:
    return [entry.reference for entry in store.list()]


def test_it_is_a_store_and_gives_out_writers(store: Store) -> None:
    assert isinstance(store, Store)
    with store.begin("a") as writer:
        assert isinstance(writer, Writer)
        assert (writer.reference, writer.name, writer.number) == ("a@1", "a", 1)
        assert os.path.samestat(os.fstat(writer.dir_fd), writer.directory.stat())


def test_what_is_published_is_there_for_everybody_and_whole(store: Store, open_store: Callable[[], Store]) -> None:
    assert write(store) == "small@1"
    for other in (store, open_store()):
        assert read(other, "small@1") == {**CONTENTS, "manifest": b"what it is"}
        (entry,) = other.list()
        assert (entry.name, entry.number, entry.path) == ("small", 1, other.path / "small@1")


def test_nothing_can_be_seen_before_it_is_published(store: Store) -> None:
    with store.begin("small", ["sub"]) as writer:
        fill(writer)
        assert references(store) == []
        with pytest.raises(NotFoundError):
            store.open("small")


def test_an_aborted_directory_leaves_nothing(store: Store) -> None:
    with store.begin("small", ["sub"]) as writer:
        fill(writer)
        directory = writer.directory
    assert not directory.exists()
    assert references(store) == []
    writer.abort()


def test_a_writer_that_has_ended_writes_no_more(store: Store) -> None:
    with store.begin("small") as writer:
        writer.publish(lambda: b"m")
        with pytest.raises(UsageError):
            writer.create_file("late")
        with pytest.raises(UsageError):
            writer.publish(lambda: b"again")
        writer.abort()
    assert references(store) == ["small@1"]


def test_files_may_change_until_the_manifest_was_asked_for(store: Store) -> None:
    with store.begin("small", ["sub"]) as writer:
        fill(writer)

        def manifest() -> bytes:
            (writer.directory / "sub" / "empty").unlink()
            return b"what it is"

        writer.publish(manifest)
    assert set(read(store, "small")) == {"one", "sub/two", "manifest"}


def test_a_manifest_that_cannot_be_made_leaves_nothing(store: Store) -> None:
    def manifest() -> bytes:
        raise BadImageError("contradicts itself")

    with store.begin("small", ["sub"]) as writer:
        fill(writer)
        with pytest.raises(BadImageError, match="contradicts"):
            writer.publish(manifest)
        assert not writer.directory.exists()
    assert references(store) == []


def test_a_link_among_the_files_is_refused_and_leaves_nothing(store: Store, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(b"x")
    for make in (lambda path: path.symlink_to(tmp_path / "elsewhere"), os.mkfifo):
        with store.begin("small", ["sub"]) as writer:
            make(writer.directory / "sub" / "planted")
            with pytest.raises(BadImageError, match="sub/planted"):
                writer.publish(lambda: b"m")
    assert references(store) == []
    assert (tmp_path / "elsewhere").read_bytes() == b"x"


def test_numbers_rise_and_a_bare_name_is_the_newest(store: Store) -> None:
    assert [write(store) for _ in range(3)] == ["small@1", "small@2", "small@3"]
    assert write(store, "other") == "other@1"
    opened = store.open("small")
    os.close(opened.dir_fd)
    assert opened.reference == "small@3"
    assert store.next_number("small") == 4
    assert references(store) == ["other@1", "small@1", "small@2", "small@3"]
    assert [entry.reference for entry in store.list("other")] == ["other@1"]


def test_a_number_is_never_used_again(store: Store) -> None:
    for _ in range(2):
        write(store)
    assert store.remove("small@2") == "small@2"
    assert write(store) == "small@3"
    store.remove("small@3")
    store.remove("small@1")
    assert references(store) == []
    assert write(store) == "small@4"


def test_two_writers_of_one_name_get_two_numbers(store: Store, open_store: Callable[[], Store]) -> None:
    with store.begin("small") as first, open_store().begin("small") as second:
        assert {first.reference, second.reference} == {"small@1", "small@2"}
        for writer in (second, first):
            writer.publish(lambda: b"m")
    assert references(store) == ["small@1", "small@2"]


def test_many_writers_at_once_each_get_a_number(open_store: Callable[[], Store]) -> None:
    written: list[str] = []
    start = threading.Barrier(8)

    def work() -> None:
        store = open_store()
        start.wait()
        written.append(write(store))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(written) == [f"small@{number}" for number in range(1, 9)]
    assert references(open_store()) == sorted(written)


def test_a_living_writer_is_left_alone_by_others(store: Store, open_store: Callable[[], Store]) -> None:
    with store.begin("small", ["sub"]) as writer:
        fill(writer)
        write(open_store(), "other")
        writer.publish(lambda: b"what it is")
    assert read(store, "small@1") == {**CONTENTS, "manifest": b"what it is"}


def test_what_somebody_holds_is_not_removed(store: Store) -> None:
    write(store)
    held = store.open("small")
    touched: list[Path] = []
    with pytest.raises(RefusedError, match="in use"):
        store.remove("small@1", touched.append)
    os.close(held.dir_fd)
    assert touched == []
    looked_at = store.open("small", hold=False)
    store.remove("small@1")
    os.close(looked_at.dir_fd)
    for action in (store.open, store.remove):
        with pytest.raises(NotFoundError):
            action("small@1")


def test_what_belongs_to_it_elsewhere_can_go_with_it(store: Store) -> None:
    write(store)
    seen: list[bytes] = []

    def look(directory: Path) -> None:
        assert references(store) == []
        with pytest.raises(NotFoundError):
            store.open("small@1")
        seen.append((directory / "sub" / "two").read_bytes())

    assert store.remove("small", look) == "small@1"
    assert seen == [CONTENTS["sub/two"]]


def test_a_failure_about_what_belongs_to_it_is_told_and_does_not_bring_it_back(store: Store) -> None:
    write(store)
    directories: list[Path] = []

    def fail(directory: Path) -> None:
        directories.append(directory)
        raise FileNotFoundError("elsewhere")

    with pytest.raises(FileNotFoundError, match="elsewhere"):
        store.remove("small@1", fail)
    assert references(store) == []
    assert not directories[0].exists()
    assert store.next_number("small") == 2


def test_a_bare_name_removes_only_the_single_one(store: Store) -> None:
    write(store)
    write(store)
    with pytest.raises(UsageError, match="several"):
        store.remove("small")
    store.remove("small@1")
    assert store.remove("small") == "small@2"


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "-a", "a@1", "a b", "x" * 64, "ä", "a\0", "a\n"])
def test_a_name_that_could_leave_the_store_is_refused(store: Store, name: str) -> None:
    with pytest.raises(UsageError):
        store.begin(name)
    with pytest.raises(UsageError):
        store.next_number(name)


@pytest.mark.parametrize("reference", ["", "..", "a/b", "small@", "small@0", "small@01", "small@-1", "@1", "small@1@1"])
def test_a_malformed_reference_is_refused(store: Store, reference: str) -> None:
    for action in (store.open, store.remove):
        with pytest.raises(UsageError):
            action(reference)


def test_a_store_knows_whether_its_path_still_leads_to_it(store: Store) -> None:
    assert store.is_current()
    store.path.rename(store.path.with_name("aside"))
    assert not store.is_current()
    store.path.mkdir()
    assert not store.is_current()


def test_free_space_is_told(store: Store) -> None:
    assert store.free_bytes() > 0
