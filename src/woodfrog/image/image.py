"""One complete image on disk, opened for reading: its manifest, its CPU side's directory, its data files.

An open image holds one directory descriptor and reads everything through it, so that a rename or a removal underneath
cannot switch it for another. It must never write.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from woodfrog.errors import BadImageError, NotFoundError, RefusedError
from woodfrog.image import codec, digest, layout
from woodfrog.image.manifest import DIGEST_BYTES, Manifest
from woodfrog.store import files
from woodfrog.store.names import MANIFEST

# (bytes done, bytes in all)
OnProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class Problem:
    """Something wrong with an image: which file, which chunk of it (None: the file as such), and what."""

    path: str
    what: str
    chunk: int | None = None

    def __str__(self) -> str:
        return f"{self.path}: {self.what}"


class Image:
    """Made by `Image.open` or an ImageRepository; close it, or use it in a `with`."""

    def __init__(self, path: Path, dir_fd: int, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self._dir_fd = dir_fd

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Image:
        """The image in this directory: manifest decoded, every listed file there with its size; it cannot be removed
        from a store until it is closed.

        NotFoundError without a directory, RefusedError for an image that others may have written, BadImageError for
        anything else.
        """
        descriptor = files.open_directory(path)
        if not files.try_lock_shared(descriptor):
            os.close(descriptor)
            raise NotFoundError(f"{os.fspath(path)} is being removed")
        return cls.in_directory(Path(path), descriptor)

    @classmethod
    def in_directory(cls, path: Path, dir_fd: int) -> Image:
        """The same for a directory that is open already. Takes `dir_fd` over, also when it raises; `path` is what
        messages and CRIU are told."""
        try:
            _check_owner(path, dir_fd)
            image = cls(path, dir_fd, _read_manifest(path, dir_fd))
            image._check_sizes()
        except BaseException:
            os.close(dir_fd)
            raise
        return image

    @property
    def reference(self) -> str:
        return self.manifest.reference

    @property
    def cpu_directory(self) -> Path:
        """Where CRIU's files are. BadImageError for an image without a CPU side."""
        if self.manifest.cpu is None:
            raise BadImageError(
                f"{self.reference} has no CPU side: it holds GPU memory only", advice="checkpoint without cpu=False"
            )
        return self.path / layout.CPU

    def open_data(self, filename: str) -> int:
        """A descriptor of a data file, for reading. The caller owns it."""
        if not layout.DATA_FILE.fullmatch(filename):
            raise BadImageError(f"{filename!r} is no name of a data file")
        return layout.open_file(filename, dir_fd=self._dir_fd)[0]

    def open_cpu(self, path: str) -> int:
        """A descriptor of one of CRIU's files (its path inside cpu/), for reading. The caller owns it."""
        return layout.open_file(f"{layout.CPU}/{path}", dir_fd=self._dir_fd)[0]

    @property
    def size_bytes(self) -> int:
        """Of all files but the manifest."""
        return sum(size for _, size in self._listed())

    def verify(self, progress: OnProgress | None = None) -> list[Problem]:
        """Hash every chunk of every file and compare; look for files that are not listed. Empty: all is well."""
        problems = []
        done = 0
        total = self.size_bytes

        def count(step: int) -> None:
            nonlocal done
            done += step
            if progress is not None:
                progress(done, total)

        count(0)
        listed = {MANIFEST}
        for index, file in enumerate(self.manifest.data_files):
            listed.add(file.name)
            runs = list(digest.handle_runs(self.manifest, index))
            problems += self._verify_file(file.name, file.digests, runs, count)
        if self.manifest.cpu is not None:
            for record in self.manifest.cpu.files:
                path = f"{layout.CPU}/{record.path}"
                listed.add(path)
                runs = [(0, record.size_bytes, 0)] if record.size_bytes else []
                problems += self._verify_file(path, record.digests, runs, count)
        for path in files.list_files(self._dir_fd):
            if path not in listed:
                problems.append(Problem(path, "the manifest does not list this file"))
        return problems

    def close(self) -> None:
        """Give the directory up; calling it again does nothing."""
        if self._dir_fd >= 0:
            os.close(self._dir_fd)
            self._dir_fd = -1

    def __enter__(self) -> Image:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Image {self.reference} at {self.path}>"

    def _listed(self) -> list[tuple[str, int]]:
        listed = [(file.name, file.size_bytes) for file in self.manifest.data_files]
        if self.manifest.cpu is not None:
            listed += [(f"{layout.CPU}/{record.path}", record.size_bytes) for record in self.manifest.cpu.files]
        return listed

    def _check_sizes(self) -> None:
        for path, size_bytes in self._listed():
            descriptor, status = layout.open_file(path, dir_fd=self._dir_fd)
            os.close(descriptor)
            if status.st_size != size_bytes:
                raise BadImageError(
                    f"{self.path}: {path} has {status.st_size} bytes where the manifest says {size_bytes}",
                    advice="the file was cut or changed after the image was written: use another image",
                )

    def _verify_file(
        self, path: str, expected: bytes, runs: list[tuple[int, int, int]], count: Callable[[int], None]
    ) -> list[Problem]:
        chunk_bytes = self.manifest.chunk_bytes
        try:
            descriptor, _ = layout.open_file(path, dir_fd=self._dir_fd)
        except BadImageError as error:
            return [Problem(path, error.reason)]
        try:
            for offset, size_bytes, first in runs:
                found = digest.hash_range(descriptor, offset, size_bytes, chunk_bytes=chunk_bytes, on_bytes=count)
                wanted = expected[first * DIGEST_BYTES : first * DIGEST_BYTES + len(found)]
                if (chunk := digest.first_difference(found, wanted)) is not None:
                    at = offset + chunk * chunk_bytes
                    return [Problem(path, f"the chunk at byte {at} does not have its digest", first + chunk)]
        except digest.ShortFileError:
            return [Problem(path, "the file is shorter than the manifest says")]
        except OSError as error:
            return [Problem(path, f"cannot be read: {error.strerror or error}")]
        finally:
            os.close(descriptor)
        return []


def _check_owner(path: str | os.PathLike[str], descriptor: int) -> None:
    status = os.fstat(descriptor)
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
        raise RefusedError(
            f"{os.fspath(path)} belongs to user {status.st_uid} with mode {status.st_mode & 0o777:o}: "
            "restoring it would run whatever others put into it",
            advice="if you trust it: chown it to yourself and chmod -R go-rwx",
        )


def _read_manifest(path: str | os.PathLike[str], descriptor: int) -> Manifest:
    where = f"{os.fspath(path)}/{MANIFEST}"
    manifest_fd, status = layout.open_file(MANIFEST, dir_fd=descriptor)
    with os.fdopen(manifest_fd, "rb") as file:
        if status.st_size > codec.MAX_FILE_BYTES:
            raise BadImageError(
                f"{where} has {status.st_size} bytes, more than a manifest can have", advice="use another image"
            )
        data = file.read(status.st_size + 1)
    return codec.decode(data, where)
