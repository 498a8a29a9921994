"""What only a store in S3 promises: failures on the way to the server are borne, told apart, or said in a sentence."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import store_images
from failing_proxy import FailingProxy, Times
from s3_server import S3Server
from store_images import CHUNK_BYTES, pattern, references
from store_places import Place

from woodfrog._native.transfer import CancelledError, Progress
from woodfrog.errors import BadImageError, NoSpaceError, NotFoundError, RefusedError, WoodfrogError
from woodfrog.store import keys, space
from woodfrog.store import reader as reading
from woodfrog.store.open import open_store
from woodfrog.store.packing import PACKS_ON_THE_WAY
from woodfrog.store.store import Store
from woodfrog.store.tiers import object_lock, s3

DATA = pattern(4 * CHUNK_BYTES, "s3")
MANIFEST = "/images/small/1"


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[FailingProxy]:
    proxy = FailingProxy(s3_server.endpoint)
    yield proxy
    proxy.close()


@pytest.fixture
def behind(
    make_place: Callable[[str], Place], proxy: FailingProxy, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], Store]:
    """Opens a store that is reached through the proxy."""
    place = make_place("s3")
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    return place.open


@pytest.mark.parametrize("statuses", [(409, 429), (500, 503)])
def test_a_request_that_may_succeed_later_is_repeated(
    behind: Callable[[], Store], proxy: FailingProxy, statuses: tuple[int, int]
) -> None:
    store = behind()
    for method, part in (
        ("PUT", MANIFEST),
        ("PUT", "/packs/"),
        ("PUT", "/index/"),
        ("PUT", "/locks/"),
        ("GET", "/images/small"),
        ("GET", "prefix="),
    ):
        judge = Times(method, part, [*statuses])
        proxy.judge = judge
        reference = store_images.write(store, DATA + part.encode())
        assert store_images.read(store, reference) == DATA + part.encode()
        assert judge.left == 0
    assert len(references(store)) == 6


def test_a_put_whose_answer_was_lost_counts_as_done_if_it_was(behind: Callable[[], Store], proxy: FailingProxy) -> None:
    store = behind()
    judge = Times("PUT", MANIFEST, ["lost"])
    proxy.judge = judge
    assert store_images.write(store, DATA) == "small@1"
    assert judge.left == 0
    assert references(store) == ["small@1"]


def test_a_put_whose_answer_was_lost_does_not_take_anothers_file_for_its_own(
    behind: Callable[[], Store], proxy: FailingProxy
) -> None:
    store = behind()
    key = keys.manifest_key("small", 1)

    def judge(method: str, path: str) -> int | None:
        """The first attempt never arrives, and another writer is faster than the second."""
        if method == "PUT" and MANIFEST in path and store.tier.get(key, 100) is None:
            proxy.judge = lambda method, path: None
            assert store.tier.put_if_absent(key, b"theirs")
            return 503
        return None

    proxy.judge = judge
    assert not store.tier.put_if_absent(key, b"mine..")
    assert store.tier.get(key, 100) == b"theirs"


def test_an_upload_that_fails_for_good_is_never_visible(
    behind: Callable[[], Store], proxy: FailingProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "RETRY_S", 1.0)
    monkeypatch.setattr(s3, "PART_BYTES", 5 << 20)
    store = behind()
    data = pattern(12 << 20, "large")

    def judge(method: str, path: str) -> int | None:
        return 500 if method == "PUT" and "partNumber=2" in path else None

    proxy.judge = judge
    with pytest.raises(WoodfrogError, match="answers with errors"):
        store_images.write(store, data)
    assert any("partNumber=1" in path for _, path in proxy.seen), "it is uploaded in parts"
    assert store_images.pack_keys(store) == []
    assert references(store) == []
    proxy.judge = lambda method, path: None
    assert store_images.write(store, data) == "small@1"
    assert store_images.read(store, "small") == data


def test_a_part_that_fails_is_sent_again_and_not_the_others(
    behind: Callable[[], Store], proxy: FailingProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "PART_BYTES", 5 << 20)
    store = behind()
    data = pattern(16 << 20, "parts")
    judge = Times("PUT", "partNumber=2", [503, 503])
    proxy.judge = judge
    store_images.write(store, data)
    assert judge.left == 0
    sent = [path.partition("partNumber=")[2].split("&")[0] for method, path in proxy.seen if "partNumber=" in path]
    assert sorted(sent) == ["1", "2", "2", "2", "3", "4"]
    assert store_images.read(store, "small") == data


def test_only_the_ranges_that_are_needed_are_fetched(
    behind: Callable[[], Store], proxy: FailingProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = behind()
    data = pattern(8 << 20, "ranges")
    store_images.write(store, data)
    some = data[: 2 * CHUNK_BYTES] + data[-CHUNK_BYTES:]
    with store.reader() as reader:
        located = reader.locate(store_images.digests_of(some))
        (descriptor,) = located.packs.values()
        assert os.fstat(descriptor).st_size > len(data)
        assert os.fstat(descriptor).st_blocks * 512 < 4 << 20, "the rest is holes"
        proxy.seen.clear()
        reader.locate(store_images.digests_of(some))
        assert [path for method, path in proxy.seen if method == "GET"] == [], "what was fetched is not fetched again"
    assert list(store.tier.spool.iterdir()) == []


def test_a_download_that_ends_early_is_repeated_or_told(behind: Callable[[], Store], proxy: FailingProxy) -> None:
    store = behind()
    store_images.write(store, DATA)
    judge = Times("GET", "/packs/", [503, "lost"])
    proxy.judge = judge
    assert store_images.read(store, "small") == DATA
    assert judge.left == 0


def test_a_batch_that_does_not_arrive_is_told_by_whoever_waits_for_it(
    behind: Callable[[], Store], proxy: FailingProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "BATCH_BYTES", CHUNK_BYTES)
    store = behind()
    store_images.write(store, DATA)
    with store.reader() as reader:
        judge = Times("GET", "/packs/", [404])
        proxy.judge = judge
        arriving = reader.locate_ahead(store_images.digests_of(DATA))
        failures = []
        for batch in range(len(arriving.batches)):
            try:
                arriving.wait(batch)
            except NotFoundError as error:
                failures.append(error)
        assert (len(failures), judge.left) == (1, 0)
    assert list(store.tier.spool.iterdir()) == []


def test_who_waits_for_what_hangs_can_be_cancelled_and_the_reader_closed(
    behind: Callable[[], Store], proxy: FailingProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = behind()
    store_images.write(store, DATA)
    goes_on = threading.Event()
    monkeypatch.setattr(type(store.tier), "_fetch", lambda *_: goes_on.wait(60))
    progress = Progress()
    with store.reader() as reader:
        arriving = reader.locate_ahead(store_images.digests_of(DATA))
        progress.cancel()
        with pytest.raises(CancelledError):
            arriving.wait(0, progress)
        goes_on.set()
    assert list(store.tier.spool.iterdir()) == []


def test_a_server_that_is_not_there_is_said_to_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(s3, "RETRY_S", 0.5)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")  # tcpmux: nobody listens
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(WoodfrogError, match="cannot be reached"):
        open_store("s3://stores/x")


def test_no_credentials_at_all_are_said_to_be_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(s3, "RETRY_S", 0.5)
    with pytest.raises(RefusedError, match="no credentials"):
        open_store("s3://stores/x")


def test_wrong_credentials_are_said_to_be_wrong(
    make_place: Callable[[str], Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = make_place("s3")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(RefusedError, match="does not let this user"):
        place.open()


def test_a_writer_whose_lock_was_lost_publishes_nothing(
    make_place: Callable[[str], Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_place("s3").open()
    session = store.session()
    store_images.store_data(session, DATA)
    # As after a night of suspension.
    now = object_lock._clock_s()
    with monkeypatch.context() as later:
        later.setattr(object_lock, "_clock_s", lambda: now + 12 * 3600)
        with pytest.raises(RefusedError, match="could not be renewed for"):
            session.publish("small", lambda number: store_images.manifest(DATA, number))
    assert references(store) == []


def test_a_writer_that_was_killed_is_passed_over_at_once_on_its_own_machine(make_place: Callable[[str], Place]) -> None:
    place = make_place("s3")
    store = place.open()
    script = (
        "import os, sys, signal; from woodfrog.store.open import open_store; s = open_store(sys.argv[1]).session();"
        " os.kill(os.getpid(), signal.SIGKILL)"
    )
    died = subprocess.run([sys.executable, "-c", script, place.url], timeout=300, check=False)
    assert died.returncode == -signal.SIGKILL
    assert len(list(store.tier.list(keys.LOCKS))) == 1
    store.prune(store_images.digests, wait_s=0)
    assert list(store.tier.list(keys.LOCKS)) == []


def test_an_object_in_place_of_a_lock_that_nobody_can_read_is_respected(make_place: Callable[[str], Place]) -> None:
    store = make_place("s3").open()
    key = keys.lock_key(secrets.token_hex(16))
    store.tier.replace(key, b"?")
    with pytest.raises(RefusedError, match=key):
        store.prune(store_images.digests, wait_s=0)
    store.tier.delete([key])
    store.prune(store_images.digests, wait_s=0)


def test_a_range_beyond_the_end_is_damage(make_place: Callable[[str], Place]) -> None:
    store = make_place("s3").open()
    name = bytes(32)
    file = store.tier.new_file()
    os.write(file.fd, b"x" * 1000)
    store.tier.put_files([(keys.pack_key(name), file)])
    file.close()
    pack = store.tier.open_pack(keys.pack_key(name), 1000)
    with pytest.raises(BadImageError, match="ends at 1000"):
        pack.fetch([(900, 200)])
    pack.close()


def test_room_on_the_local_disk_is_asked_for_packs_on_their_way_and_files_beside_them(
    make_place: Callable[[str], Place],
) -> None:
    store = make_place("s3").open()
    free = space.free_bytes(store.tier.spool)
    store.require(1000 * free, "the image")  # goes out pack by pack
    with pytest.raises(NoSpaceError, match="the image needs") as raised:
        store.require(1000 * free, "the image", work_bytes=free)
    assert raised.value.details["needed_bytes"] == free + PACKS_ON_THE_WAY * s3.PACK_BYTES
