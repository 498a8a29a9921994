"""A store's files as objects in S3, or in a server that speaks its language and keeps `If-None-Match` (FACTS §7).

Requests that met a conflict, a throttle or a failing server are repeated, with growing random pauses, up to a limit.
Packs are written to a local file first and fetched into one, range by range; no byte of them is copied in Python.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import mmap
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import S3Store

from woodfrog._native.transfer import CancelledError, Progress
from woodfrog.errors import BadImageError, NotFoundError, RefusedError, UsageError, WoodfrogError
from woodfrog.faults import fault_point
from woodfrog.store import keys, space
from woodfrog.store.entries import Hold
from woodfrog.store.scratch import Scratch, ScratchFile, default_scratch
from woodfrog.store.tiers import object_lock
from woodfrog.store.tiers.protocol import Listed, TemporaryFile

PACK_BYTES = 128 << 20  # a pack whose writer is gone is sent anew: what was sent of it is lost
PART_BYTES = 16 << 20  # of uploads and downloads: S3 asks for 5 MiB and more, and a link is filled by a few of these
PARTS_IN_FLIGHT = 8  # of one upload; two packs are sent at a time
RANGES_IN_FLIGHT = 16  # of all downloads
_GAP_BYTES = 1 << 20  # ranges closer than that are fetched as one: a request costs about as much as this
RETRY_S = 120.0  # how long a request is repeated before the failure is told
_PAUSE_S = 0.1  # the first pause before repeating; each further one may be twice as long
_LONGEST_PAUSE_S = 10.0
_URL = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/([A-Za-z0-9._/-]*))?")
_STATUS = re.compile(r"status code: (\d{3})")
_METADATA_SERVICE = "169.254.169.254"  # where clients look when the environment has no credentials
_T = TypeVar("_T")


class S3Tier:
    """See Tier. Region, endpoint and credentials come from the environment, as every S3 client takes them (AWS_…)."""

    local = False
    path = None
    pack_bytes = PACK_BYTES

    def __init__(self, url: str) -> None:
        """Asks the server for nothing yet. UsageError for an address that cannot be one."""
        match = _URL.fullmatch(url)
        parts = (match[2] or "").strip("/").split("/") if match else []
        if match is None or any(part in (".", "..") or (part == "" and len(parts) > 1) for part in parts):
            raise UsageError(f"{url!r} is no address of a store", advice="write s3://BUCKET/PREFIX")
        self._url = url.rstrip("/")
        # Whoever repeats a conditional put has to know that it did: so this one repeats nothing by itself.
        self._once = _client(match[1], "/".join(parts), repeat=False)
        self._repeating = _client(match[1], "/".join(parts), repeat=True)
        self._scratch: Scratch = default_scratch()
        self._pool = ThreadPoolExecutor(RANGES_IN_FLIGHT, thread_name_prefix="woodfrog-s3")
        self._skew_s = 0.0

    @property
    def url(self) -> str:
        return self._url

    @property
    def spool(self) -> Path:
        return self._scratch.path

    def get(self, key: str, max_bytes: int) -> bytes | None:
        def request() -> bytes:
            result = obstore.get(self._once, key)
            if result.meta["size"] > max_bytes:
                raise BadImageError(
                    f"{self._url}/{key} has {result.meta['size']} bytes, and at most {max_bytes} are possible",
                    advice="it was not written by woodfrog: look at it before you use the store",
                )
            return bytes(result.bytes())

        try:
            return self._request(request)
        except FileNotFoundError:
            return None

    def put_if_absent(self, key: str, data: bytes) -> bool:
        fault_point("store.put.written")
        repeated = False

        def request() -> bool:
            nonlocal repeated
            again, repeated = repeated, True
            try:
                obstore.put(self._once, key, data, mode="create", use_multipart=False)
            except AlreadyExistsError as error:
                there = self.get(key, max(len(data), 1))
                if there is None:
                    raise _TryAgain(str(error)) from error  # 409: another writer's attempt was under way, and failed
                # An attempt whose answer was lost may have succeeded.
                return again and there == data
            except FileNotFoundError:
                raise self._no_bucket() from None
            return True

        put = self._request(request)
        if put:
            fault_point("store.put.named")
        return put

    def replace(self, key: str, data: bytes) -> None:
        self._put(key, lambda: obstore.put(self._once, key, data, use_multipart=False))

    def new_file(self) -> ScratchFile:
        with space.telling_full(self.spool):
            return self._scratch.new_file()

    def put_files(self, files: Sequence[tuple[str, TemporaryFile]]) -> None:
        for key, file in files:
            # One that is there should have the same bytes, but may be damaged.
            self._put(key, partial(self._upload, key, file.fd, os.fstat(file.fd).st_size))
            fault_point("store.put.uploaded")

    def open_pack(self, key: str, size_bytes: int) -> S3Pack:
        size = self._size(key)
        if size is None:
            raise NotFoundError(f"there is no {key} in {self._url}", advice="see `woodfrog verify`")
        if size != size_bytes:
            raise BadImageError(
                f"{self._url}/{key} has {size} bytes instead of {size_bytes}",
                advice="`woodfrog repair` saves what can be saved",
            )
        return S3Pack(self, key, size_bytes)

    def list(self, prefix: str) -> Iterator[Listed]:
        # A listing that fails half way is begun anew, so it is taken whole.
        def request() -> builtins.list[Listed]:
            return [
                Listed(meta["path"], meta["size"], meta["last_modified"].timestamp())
                for page in obstore.list(self._once, prefix.rstrip("/"))
                for meta in page
                if keys.is_key(meta["path"])
            ]

        yield from self._request(request)

    def delete(self, keys_: Sequence[str]) -> None:
        if keys_:
            self._request(lambda: obstore.delete(self._once, builtins.list(keys_)))

    def remove(self, key: str) -> None:
        """One object of ours; for locks."""
        with contextlib.suppress(FileNotFoundError):
            self._request(lambda: obstore.delete(self._once, key))

    def acquire(self, *, exclusive: bool, purpose: str, wait_s: float) -> Hold:
        lock = object_lock.acquire(self, exclusive=exclusive, purpose=purpose, wait_s=wait_s)
        self._skew_s = lock.skew_s
        return lock

    def free_bytes(self) -> int | None:
        return None

    def clock_s(self) -> float:
        """The server's, as far as a lock that was taken has shown it; this machine's before."""
        return time.time() + self._skew_s

    def make_directory(self) -> Path:
        with space.telling_full(self.spool):
            return self._scratch.make_directory()

    def remove_directory(self, path: Path) -> None:
        self._scratch.remove_directory(path)

    def clean(self) -> builtins.list[str]:
        return self._scratch.clean()

    def release_reserve(self) -> bool:
        return False

    def restore_reserve(self) -> None:
        """There is none: a bucket is never full."""

    def is_current(self) -> bool:
        return True

    def close(self) -> None:
        self._pool.shutdown()
        self._scratch.close()

    def fetch(self, key: str, fd: int, ranges: Iterable[tuple[int, int]], progress: Progress | None) -> None:
        """These (offset, size) of an object into the same places of a file; for S3Pack."""
        parts = [part for merged in _merge(ranges) for part in _split(*merged)]
        space.require(self.spool, sum(size for _, size in parts), f"a local copy of parts of {key}")
        failed = threading.Event()

        def fetch(part: tuple[int, int]) -> None:
            if failed.is_set():
                return
            try:
                if progress is not None and progress.cancelled:
                    error = CancelledError("cancelled")
                    error.code, error.call = -errno.ECANCELED, "fetch"
                    raise error
                self._fetch(key, fd, *part)
            except BaseException:
                failed.set()
                raise

        with space.telling_full(self.spool):
            futures = [self._pool.submit(fetch, part) for part in parts]
            wait(futures)  # all of them, also after a failure: they write into a file that its owner will close
            for future in futures:
                future.result()

    def _fetch(self, key: str, fd: int, offset: int, size: int) -> None:
        try:
            data = self._request(lambda: obstore.get_range(self._repeating, key, start=offset, length=size))
        except FileNotFoundError:
            raise NotFoundError(f"there is no {key} in {self._url}", advice="see `woodfrog verify`") from None
        view = memoryview(data)
        if len(view) != size:
            raise BadImageError(
                f"{self._url}/{key} ends at {offset + len(view)} bytes",
                advice="`woodfrog repair` saves what can be saved",
            )
        while view:
            written = os.pwrite(fd, view, offset)
            view, offset = view[written:], offset + written

    def _upload(self, key: str, fd: int, size: int) -> None:
        if size == 0:
            obstore.put(self._repeating, key, b"", use_multipart=False)
            return
        whole = mmap.mmap(fd, size, prot=mmap.PROT_READ)
        view = memoryview(whole)
        try:
            if size <= PART_BYTES:
                obstore.put(self._repeating, key, view, use_multipart=False)
                return
            # Views of the mapping: the parts go from the page cache to the socket. Nothing is visible before the last.
            parts = (view[at : at + PART_BYTES] for at in range(0, size, PART_BYTES))
            obstore.put(self._repeating, key, parts, chunk_size=PART_BYTES, max_concurrency=PARTS_IN_FLIGHT)
        finally:
            with contextlib.suppress(BufferError):  # a part that failed may hold its view; the mapping goes with it
                view.release()
                whole.close()

    def _put(self, key: str, request: Callable[[], object]) -> None:
        try:
            self._request(request)
        except FileNotFoundError:
            raise self._no_bucket() from None

    def _size(self, key: str) -> int | None:
        try:
            return self._request(lambda: obstore.head(self._once, key)["size"])
        except FileNotFoundError:
            return None

    def _request(self, request: Callable[[], _T]) -> _T:
        """Repeats what may succeed the next time. FileNotFoundError passes; all else becomes an error of ours."""
        began_s = time.monotonic()
        pause_s = _PAUSE_S
        while True:
            try:
                return request()
            except (PermissionDeniedError, UnauthenticatedError) as error:
                raise RefusedError(
                    f"the server does not let this user into {self._url} ({_first_line(error)})",
                    advice="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY of one who may read and write there",
                ) from error
            except (BaseError, _TryAgain) as error:
                if _METADATA_SERVICE in str(error):
                    raise RefusedError(
                        f"there are no credentials for {self._url}",
                        advice="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
                    ) from error
                if time.monotonic() >= began_s + _patience_s(error):
                    raise WoodfrogError(
                        f"the store {self._url} cannot be reached or answers with errors: {_first_line(error)}",
                        advice="see to the server and to AWS_ENDPOINT_URL, then try again",
                    ) from error
            threading.Event().wait(random.uniform(0, pause_s))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _no_bucket(self) -> RefusedError:
        return RefusedError(
            f"there is no bucket for {self._url}", advice="make the bucket first, or write its right name"
        )


class S3Pack:
    """See OpenPack. Owns a local file as long as the pack, with holes where nothing was fetched."""

    def __init__(self, tier: S3Tier, key: str, size_bytes: int) -> None:
        self._tier = tier
        self._key = key
        self._file = tier.new_file()
        self._fetched: set[tuple[int, int]] = set()
        self._lock = threading.Lock()  # several threads may fetch: what two want at once comes twice
        os.ftruncate(self._file.fd, size_bytes)

    @property
    def fd(self) -> int:
        return self._file.fd

    def fetch(self, ranges: Iterable[tuple[int, int]], progress: Progress | None = None) -> None:
        with self._lock:
            wanted = set(ranges) - self._fetched
        self._tier.fetch(self._key, self._file.fd, wanted, progress)
        with self._lock:
            self._fetched |= wanted

    def close(self) -> None:
        self._file.close()


class _TryAgain(Exception):
    """The request met another one and lost, with nothing to show for it."""


def _client(bucket: str, prefix: str, *, repeat: bool) -> S3Store:
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    try:
        return S3Store(
            bucket,
            prefix=prefix or None,
            client_options={
                "allow_http": endpoint.startswith("http://"),
                "connect_timeout": timedelta(seconds=10),
                "timeout": timedelta(minutes=5),  # of one request: a part over a slow link
            },
            retry_config={"max_retries": 10 if repeat else 0, "retry_timeout": timedelta(seconds=RETRY_S)},
        )
    except BaseError as error:
        raise UsageError(f"the settings for s3://{bucket} make no sense: {_first_line(error)}") from error


def _patience_s(error: Exception) -> float:
    """How long to repeat what failed like this: a conflict, a throttle, a failing server pass; a refusal does not."""
    if isinstance(error, _TryAgain):
        return RETRY_S
    statuses = _STATUS.findall(str(error))  # obstore says it in its message only
    if not statuses:
        return RETRY_S / 4  # nobody answers at all: no need to wait as long
    may_pass = any(status in ("408", "409", "429") or (status >= "500" and status != "501") for status in statuses)
    return RETRY_S if may_pass else 0.0


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _merge(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    begin = end = -1
    for offset, size in sorted(ranges):
        if begin >= 0 and offset <= end + _GAP_BYTES:
            end = max(end, offset + size)
            continue
        if begin >= 0:
            yield begin, end - begin
        begin, end = offset, offset + size
    if begin >= 0:
        yield begin, end - begin


def _split(offset: int, size: int) -> Iterator[tuple[int, int]]:
    for at in range(offset, offset + size, PART_BYTES):
        yield at, min(PART_BYTES, offset + size - at)
