"""What only a store on a local disk promises: nobody else's files are read, followed or removed, and a full disk ends
well."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import file_ways
import pytest
import store_images
from store_images import CHUNK_BYTES, pattern, references

from woodfrog.errors import BadImageError, NoSpaceError, NotFoundError, RefusedError, UsageError, WoodfrogError
from woodfrog.store import files, keys, limits, space
from woodfrog.store.open import default_place, open_store
from woodfrog.store.store import Store
from woodfrog.store.tiers.disk import RESERVE_BYTES, DiskTier
from woodfrog.store.tiers.ram import SHARED_MEMORY

DATA = pattern(4 * CHUNK_BYTES, "disk")


def make(path: Path) -> Store:
    return open_store(path, chunk_bytes=CHUNK_BYTES)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_everything_in_a_store_is_its_owners_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with make(tmp_path / "deep" / "store") as store:
            store_images.write(store, DATA)
            store.remove("small@1")
            store_images.write(store, DATA)
            with store.session() as session:
                assert mode(session.work_directory) == 0o700
    finally:
        os.umask(before)
    entries = [tmp_path / "deep" / "store", *(tmp_path / "deep" / "store").rglob("*")]
    assert len(entries) > 10
    for entry in entries:
        assert mode(entry) == (0o700 if entry.is_dir() else 0o600), entry


def test_a_directory_that_was_open_to_others_is_closed_to_them(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir(0o777)
    (tmp_path / "store").chmod(0o777)
    make(tmp_path / "store").close()
    assert mode(tmp_path / "store") == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_store_of_someone_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir(0o700)
    os.chown(tmp_path / "store", 12345, 12345)
    with pytest.raises(RefusedError, match="12345"):
        open_store(tmp_path / "store")
    base = SHARED_MEMORY / f"woodfrog-{os.geteuid()}"
    before = base.stat().st_uid if base.exists() else None
    base.mkdir(0o700, exist_ok=True)
    os.chown(base, 12345, -1)
    try:
        with pytest.raises(RefusedError, match="12345"):
            open_store("ram:mine")
    finally:
        os.chown(base, before if before is not None else os.geteuid(), -1)


def test_a_directory_with_something_else_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir(0o755)
    (tmp_path / "home" / "letter").write_text("dear")
    with pytest.raises(UsageError, match="something else"):
        open_store(tmp_path / "home")
    assert mode(tmp_path / "home") == 0o755
    assert [entry.name for entry in (tmp_path / "home").iterdir()] == ["letter"]


def test_a_link_in_place_of_the_store_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "real").close()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(BadImageError, match="symbolic link"):
        open_store(tmp_path / "link")


@pytest.mark.parametrize("target", ["packs", "index", "images", "locks", "tmp"])
def test_a_link_in_place_of_a_directory_is_not_followed(tmp_path: Path, target: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    make(tmp_path / "store").close()
    for entry in (tmp_path / "store" / target).iterdir():
        entry.unlink()
    (tmp_path / "store" / target).rmdir()
    (tmp_path / "store" / target).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(WoodfrogError):
        open_store(tmp_path / "store")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_planted_links_and_special_files_are_neither_followed_nor_listed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"s" * 5000)
    with make(tmp_path / "store") as store:
        store_images.write(store, DATA)
        root = tmp_path / "store"
        (pack,) = store_images.pack_keys(store)
        (index,) = store_images.index_keys(store)
        planted = [
            keys.pack_key(b"\1" * 32),
            keys.index_key(b"\2" * 32),
            "images/small/7",
            "images/evil/1",
        ]
        for number, key in enumerate(planted):
            (root / key).parent.mkdir(0o700, parents=True, exist_ok=True)
            if number % 2:
                os.mkfifo(root / key)
            else:
                (root / key).symlink_to(secret)
            with pytest.raises(BadImageError):
                store.tier.get(key, 1 << 20)
        (root / "packs" / "zz").mkdir()
        (root / "images" / "linked").symlink_to(tmp_path)
        assert references(store) == ["small@1"]
        assert store_images.pack_keys(store) == [pack]
        assert store_images.index_keys(store) == [index]
        with pytest.raises(BadImageError):
            store.read("small@7")
        assert store_images.read(store, "small@1") == DATA
        store.remove("small@1")
        store.prune(store_images.digests)
        for key in planted:
            assert os.path.lexists(root / key), "only what has a proper key and form is ever deleted"
        (root / pack).parent.mkdir(exist_ok=True)
        (root / pack).symlink_to(secret)
        with pytest.raises(BadImageError):
            store.tier.open_pack(pack, 5000)
    assert secret.read_bytes() == b"s" * 5000


def test_a_file_too_large_to_be_ours_is_not_read(tmp_path: Path) -> None:
    with make(tmp_path / "store") as store:
        store_images.write(store, DATA)
        for key, cap in ((keys.manifest_of("small@1"), keys.MANIFEST_MAX_BYTES), ("index/" + "0" * 64, 256 << 20)):
            (tmp_path / "store" / key).open("wb").truncate(cap + 1)  # sparse
        with pytest.raises(BadImageError, match="at most"):
            store.read("small@1")
        assert {problem.kind for problem in store.verify()} == {"index-damaged"}
    (tmp_path / "store" / "config").open("wb").truncate(1 << 20)
    with pytest.raises(BadImageError, match="at most"):
        open_store(tmp_path / "store")


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b'{"format": 2}',
        b'{"format": 1, "id": "x", "chunk_bytes": 65536}',
        b'{"format": 1, "id": "%s", "chunk_bytes": 65537}' % (b"a" * 32),
        b'{"format": 1, "id": "%s", "chunk_bytes": "65536"}' % (b"a" * 32),
        b'{"format": 1, "id": "%s", "chunk_bytes": 65536, "features": ["encryption"]}' % (b"a" * 32),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(tmp_path: Path, text: bytes) -> None:
    make(tmp_path / "store").close()
    (tmp_path / "store" / "config").write_bytes(text)
    with pytest.raises(BadImageError, match="config"):
        open_store(tmp_path / "store")


def test_a_store_that_lost_its_configuration_is_not_made_anew(tmp_path: Path) -> None:
    with make(tmp_path / "store") as store:
        store_images.write(store, DATA)
    (tmp_path / "store" / "config").unlink()
    with pytest.raises(BadImageError, match="lost its file `config`"):
        open_store(tmp_path / "store")
    # Who knows the chunk size can say it.
    with open_store(tmp_path / "store", chunk_bytes=CHUNK_BYTES) as store:
        assert store_images.read(store, "small") == DATA


def test_what_dead_writers_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    with make(tmp_path / "store") as store:
        tmp = tmp_path / "store" / "tmp"
        outside = tmp_path / "outside"
        outside.mkdir()
        (outside / "precious").write_text("x")
        abandoned = tmp / f"{'0' * 32}.dir"
        (abandoned / "deep").mkdir(parents=True)
        (abandoned / "deep" / "link").symlink_to(outside)
        (tmp / f"{'1' * 32}.file").write_bytes(b"x" * 1000)
        (tmp / f"{'2' * 32}.dir").symlink_to(outside)
        (tmp / "notes").mkdir()
        (tmp_path / "store" / "locks" / ("3" * 32)).write_bytes(b"{}")
        with store.session() as session:
            living = session.work_directory
            file = store.tier.new_file()
            make(tmp_path / "store").close()
            assert sorted(entry.name for entry in tmp.iterdir()) == sorted(
                [f"{'2' * 32}.dir", "notes", living.name, Path(f"/proc/self/fd/{file.fd}").readlink().name]
            )
            file.close()
    assert (outside / "precious").read_text() == "x"
    assert not (tmp_path / "store" / "locks" / ("3" * 32)).exists()


def test_the_reference_of_a_file_system_without_the_rename_flag_is_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_rename_no_replace", lambda *_: False)
    with make(tmp_path / "store") as store:
        assert [store_images.write(store, DATA) for _ in range(2)] == ["small@1", "small@2"]
        assert not store.tier.put_if_absent("images/small/2", b"other")
        assert store_images.read(store, "small@2") == DATA
        assert list((tmp_path / "store" / "tmp").iterdir()) == []


def test_a_store_that_cannot_be_written_can_be_read(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system read-only")
    with make(tmp_path / "store") as store:
        store_images.write(store, DATA)
    (tmp_path / "view").mkdir()
    subprocess.run(["mount", "--bind", tmp_path / "store", tmp_path / "view"], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", tmp_path / "view"], check=True)
        with open_store(tmp_path / "view") as store:
            assert store_images.read(store, "small") == DATA
            assert store.verify(store_images.digests) == []
            with pytest.raises((WoodfrogError, OSError)):
                store_images.write(store, DATA + b"more")
    finally:
        subprocess.run(["umount", tmp_path / "view"], check=True)


def test_a_lock_ends_with_its_process_and_its_object_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "store"
    script = (
        "import os, sys; from woodfrog.store.open import open_store; s = open_store(sys.argv[1]).session();"
        " print('locked', flush=True); sys.stdin.read(); os._exit(0)"
    )
    with make(path) as store:
        holder = subprocess.Popen([sys.executable, "-c", script, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert holder.stdin is not None
        assert holder.stdout is not None
        try:
            assert holder.stdout.readline() == b"locked\n"
            with pytest.raises(RefusedError, match=f"process {holder.pid} on .*write an image"):
                store.prune(store_images.digests, wait_s=0)
        finally:
            holder.kill()
            holder.wait()
            holder.stdin.close()
            holder.stdout.close()
        store.prune(store_images.digests, wait_s=0)
        assert [entry.name for entry in (path / "locks").iterdir()] == ["flock"], "its object went with prune's tidying"


def test_a_lock_object_that_cannot_be_written_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make(tmp_path / "store") as store, make(tmp_path / "store") as other:
        real = files.create_file

        def full(name: str, *, dir_fd: int) -> int:
            if keys.is_key(keys.lock_key(name)):
                raise OSError(28, "No space left on device")
            return real(name, dir_fd=dir_fd)

        monkeypatch.setattr(files, "create_file", full)
        with (
            store.session(),
            pytest.raises(RefusedError, match="could not say who it is"),
        ):
            other.prune(store_images.digests, wait_s=0)
        other.prune(store_images.digests, wait_s=0)


def test_room_is_asked_for_before_anything_is_written(tmp_path: Path) -> None:
    free = space.free_bytes(tmp_path / "not" / "there" / "yet")
    assert free > 0
    with make(tmp_path / "store") as store:
        store.require(1, "the image")
        with pytest.raises(NoSpaceError, match="the image needs") as raised:
            store.require(free * 2, "the image")
        with pytest.raises(NoSpaceError) as beside:
            store.require(free, "the image", work_bytes=free)
    assert raised.value.details["needed_bytes"] == beside.value.details["needed_bytes"] == free * 2


def test_the_environment_chooses_the_default_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WOODFROG_STORE", str(tmp_path / "mine"))
    assert default_place() == str(tmp_path / "mine")
    monkeypatch.delenv("WOODFROG_STORE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_place() == str(tmp_path / ".local" / "share" / "woodfrog" / "store")


def test_places_that_make_no_sense_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for place in (
        "gs://bucket/x",
        "http://host/x",
        "ram:",
        "ram:../x",
        "ram:a/b",
        "s3://",
        "s3://B",
        "s3://bkt/a/../b",
    ):
        with pytest.raises(UsageError):
            open_store(place)
    with pytest.raises(NotFoundError):
        open_store(tmp_path / "nothing", create=False)
    with pytest.raises(UsageError, match="no chunk size"):
        open_store(tmp_path / "odd", chunk_bytes=65537)
    make(tmp_path / "store").close()
    with pytest.raises(UsageError, match="has chunks of 16384 bytes"):
        open_store(tmp_path / "store", chunk_bytes=2 * CHUNK_BYTES)
    with open_store(f"file://{tmp_path}/store") as store:
        assert store.path == tmp_path / "store"
        (tmp_path / "store").rename(tmp_path / "moved")
        assert not store.is_current()


def test_an_image_in_more_packs_than_files_may_be_open_is_refused_with_the_way_out() -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits.allow_open_files(1)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        limits.allow_open_files(2000)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 2000
        if hard != resource.RLIM_INFINITY:
            with pytest.raises(RefusedError, match=f"only {hard} files"):
                limits.allow_open_files(hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def mount_small(path: Path, size: str, kind: str = "tmpfs") -> None:
    path.mkdir()
    if kind == "tmpfs":
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], check=True)
        return
    image = path.with_suffix(".image")
    subprocess.run(["truncate", "-s", size, image], check=True)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, path], check=True)


def fill(disk: Path) -> None:
    """Somebody else's file takes all that is left."""
    with (disk / "other").open("wb") as other:
        while (free := space.free_bytes(disk)) > 0:
            try:
                os.posix_fallocate(other.fileno(), other.seek(0, 2), free)
            except OSError:  # the file's own extents need a block of it
                other.seek(0, 2)
                try:
                    other.write(bytes(1024))
                    other.flush()
                    os.fsync(other.fileno())
                except OSError:
                    break


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small file system")
@pytest.mark.parametrize(("kind", "way"), [("tmpfs", "threads"), ("ext4", "threads"), ("ext4", "uring")])
def test_a_store_full_to_the_last_byte_recovers_after_prune(tmp_path: Path, kind: str, way: str) -> None:
    disk = tmp_path / "disk"
    mount_small(disk, "8m", kind)
    try:
        with file_ways.chosen(way), make(disk / "store") as store:
            store_images.write(store, pattern(64 * CHUNK_BYTES, "old"), "old")
            store_images.write(store, pattern(32 * CHUNK_BYTES, "keep"), "keep")
            with pytest.raises(NoSpaceError), store.session() as session:
                store_images.store_data(session, pattern(512 * CHUNK_BYTES, "too much"))
            assert references(store) == ["keep@1", "old@1"]
            assert list((disk / "store" / "tmp").iterdir()) == []
            fill(disk)
            assert space.free_bytes(disk) < 4096
            with pytest.raises(NoSpaceError):
                store_images.write(store, DATA, "new")
            store.remove("old@1")
            done = store.prune(store_images.digests)
            assert done.executed
            assert done.freed_bytes >= 64 * CHUNK_BYTES
            assert store_images.read(store, "keep") == pattern(32 * CHUNK_BYTES, "keep")
            assert store.verify(store_images.digests) == []
            assert store_images.write(store, DATA, "new") == "new@1"
            assert store_images.read(store, "new") == DATA
            assert store.next_number("old") == 2
            assert (disk / "store" / "reserve").stat().st_size == RESERVE_BYTES, "for the next time"
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small file system")
def test_packs_that_cannot_be_rewritten_for_want_of_room_stay_as_they_are(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    mount_small(disk, "8m")
    try:
        with make(disk / "store") as store:
            data = pattern(128 * CHUNK_BYTES, "both")
            store_images.write(store, data, "whole")
            store_images.write(store, data[: 90 * CHUNK_BYTES], "part")
            store.remove("whole@1")
            with (disk / "other").open("wb") as other:
                os.posix_fallocate(other.fileno(), 0, space.free_bytes(disk))
            done = store.prune(store_images.digests)
            assert done.freed_bytes == 0
            assert any("no room" in note for note in done.notes)
            assert store_images.read(store, "part") == data[: 90 * CHUNK_BYTES]
            (disk / "other").unlink()
            assert store.prune(store_images.digests).freed_bytes > 0
            assert store_images.read(store, "part") == data[: 90 * CHUNK_BYTES]
    finally:
        subprocess.run(["umount", disk], check=True)


def test_an_error_after_the_manifest_is_there_says_so_and_leaves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make(tmp_path / "store") as store:
        with store.session() as session:
            store_images.store_data(session, DATA)
            session.flush()
            monkeypatch.setenv("WOODFROG_FAULTS", "store.put.named:enospc")
            with pytest.raises(WoodfrogError, match="complete, but its name may not survive"):
                session.publish("small", lambda number: store_images.manifest(DATA, number))
        monkeypatch.delenv("WOODFROG_FAULTS")
        assert references(store) == ["small@1"]
        assert store_images.read(store, "small") == DATA


def test_a_reader_in_the_middle_of_a_prune_keeps_everything_it_found(tmp_path: Path) -> None:
    """The lock is held for as long as the reader: prune comes only after it."""
    with make(tmp_path / "store") as store, make(tmp_path / "store") as other:
        store_images.write(store, DATA)
        reader = store.reader()
        located = reader.locate(store_images.digests_of(DATA))
        done = threading.Event()

        def prune() -> None:
            other.prune(store_images.digests, wait_s=120)
            done.set()

        thread = threading.Thread(target=prune)
        thread.start()
        assert not done.is_set()
        for descriptor in located.packs.values():
            assert os.fstat(descriptor).st_nlink == 1
        reader.close()
        thread.join()
        assert done.is_set()


def test_a_held_flock_of_another_kind_is_waited_for_only_so_long(tmp_path: Path) -> None:
    make(tmp_path / "store").close()
    tier = DiskTier(tmp_path / "store")
    descriptor = os.open(tmp_path / "store" / "locks" / "flock", os.O_RDONLY | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(RefusedError, match="in use"):
            tier.acquire(exclusive=False, purpose="read an image", wait_s=0.05)
    finally:
        os.close(descriptor)
        tier.close()


def test_many_files_get_their_keys_once_each_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Synced side by side, each once, all before the first has its name; then the directories, the deepest first."""
    steps: list[str] = []
    sync, rename = files.sync, os.rename

    def noted_sync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        sync(descriptor)
        steps.append(f"sync {path.relative_to(tmp_path / 'store')}")

    def noted_rename(source: str, target: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        rename(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        steps.append("rename")

    tier = DiskTier(tmp_path / "store")
    monkeypatch.setattr(files, "sync", noted_sync)
    monkeypatch.setattr(os, "rename", noted_rename)
    made = [(keys.pack_key(bytes([number]) * 32), tier.new_file()) for number in range(20)]
    for _, file in made:
        os.write(file.fd, b"a pack")
    made[3][1].sync()
    tier.put_files(made)
    names = [step for step in steps if step.startswith("sync tmp/")]
    assert len(names) == len(set(names)) == 20
    assert steps[20:40] == ["rename"] * 20
    assert sorted(steps[40:60]) == sorted(f"sync packs/{bytes([number]).hex()}" for number in range(20))
    assert steps[60:] == ["sync packs", "sync ."]
    for _, file in made:
        file.close()
    tier.close()


def test_a_file_that_cannot_be_synced_gets_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = DiskTier(tmp_path / "store")
    made = [(keys.pack_key(bytes([number]) * 32), tier.new_file()) for number in range(5)]
    sync = files.sync

    def failing(descriptor: int) -> None:
        if descriptor == made[2][1].fd:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(descriptor)

    monkeypatch.setattr(files, "sync", failing)
    with pytest.raises(OSError, match="Input/output"):
        tier.put_files(made)
    assert list(tier.list("packs/")) == []
    for _, file in made:
        file.close()
    tier.close()
