"""One image being written: what makes a store's directory an image, and its manifest complete.

The writer of the store beneath it decides the order of a commit and what a crash leaves; this only says what must be
in the directory. It must never write a manifest that contradicts the files.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import msgspec

from woodfrog.errors import BadImageError, UsageError
from woodfrog.image import codec, digest, layout
from woodfrog.image.image import Image, OnProgress
from woodfrog.image.manifest import FileRecord, Manifest
from woodfrog.store import files
from woodfrog.store.protocol import Writer


class ImageWriter:
    """Made by `ImageRepository.begin`. Until `commit` returns nothing of it can be seen; used in a `with` it aborts at
    the end unless it was committed. Owns the store's writer."""

    def __init__(self, writer: Writer, open_image: Callable[[str], Image]) -> None:
        self._writer = writer
        self._open_image = open_image

    @property
    def reference(self) -> str:
        """The name it will have: NAME@NUMBER."""
        return self._writer.reference

    @property
    def number(self) -> int:
        return self._writer.number

    @property
    def directory(self) -> Path:
        """A local directory of its own. CRIU writes into `directory / "cpu"`, which is there already."""
        return self._writer.directory

    def open_data(self, filename: str) -> int:
        """A new, empty data file (`gpu-<k>.data`), opened for reading and writing. The writer owns the descriptor and
        closes it at commit or abort."""
        if not layout.DATA_FILE.fullmatch(filename):
            raise UsageError(f"{filename!r} is no name of a data file")
        return self._writer.create_file(filename)

    def commit(self, manifest: Manifest, progress: OnProgress | None = None) -> Image:
        """Make the image complete, durable and visible, in this order; `name`, `number` and `cpu.files` of the manifest
        are filled in. NoSpaceError when the disk is full, BadImageError when the manifest contradicts the files: then
        the writer has been aborted. The caller closes the image."""
        self._writer.publish(lambda: codec.encode(self._complete(manifest, progress)))
        return self._open_image(self.reference)

    def abort(self) -> None:
        """Remove everything written. Does nothing after commit or a first abort."""
        self._writer.abort()

    def __enter__(self) -> ImageWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def _complete(self, manifest: Manifest, progress: OnProgress | None) -> Manifest:
        """The manifest with name, number and CPU files filled in, checked against what is in the directory."""
        manifest = msgspec.structs.replace(manifest, name=self._writer.name, number=self._writer.number)
        paths = files.list_files(self._writer.dir_fd)
        in_cpu = [path.removeprefix(f"{layout.CPU}/") for path in paths if path.startswith(f"{layout.CPU}/")]
        if manifest.cpu is not None:
            records = self._hash_cpu_files(in_cpu, manifest.chunk_bytes, progress)
            manifest = msgspec.structs.replace(manifest, cpu=msgspec.structs.replace(manifest.cpu, files=records))
        else:
            self._remove_empty_cpu(in_cpu)
        expected = {file.name for file in manifest.data_files}
        found = {path for path in paths if not path.startswith(f"{layout.CPU}/")}
        if expected != found:
            different = ", ".join(sorted(expected ^ found))
            raise BadImageError(f"the image's data files are not those of its manifest: {different}")
        for file in manifest.data_files:
            size_bytes = os.stat(file.name, dir_fd=self._writer.dir_fd, follow_symlinks=False).st_size
            if size_bytes != file.size_bytes:
                raise BadImageError(f"{file.name} has {size_bytes} bytes where its manifest says {file.size_bytes}")
        return manifest

    def _hash_cpu_files(self, paths: list[str], chunk_bytes: int, progress: OnProgress | None) -> list[FileRecord]:
        records = []
        opened = [(path, *layout.open_file(f"{layout.CPU}/{path}", dir_fd=self._writer.dir_fd)) for path in paths]
        total = sum(status.st_size for _, _, status in opened)
        done = 0

        def count(step: int) -> None:
            nonlocal done
            done += step
            if progress is not None:
                progress(done, total)

        try:
            for path, descriptor, status in opened:
                digests = digest.hash_range(descriptor, 0, status.st_size, chunk_bytes=chunk_bytes, on_bytes=count)
                records.append(FileRecord(path=path, size_bytes=status.st_size, digests=digests))
        finally:
            for _, descriptor, _ in opened:
                os.close(descriptor)
        return records

    def _remove_empty_cpu(self, in_cpu: list[str]) -> None:
        if in_cpu:
            raise BadImageError(f"there are files in cpu/ ({in_cpu[0]}, …) and the manifest has no CPU side")
        files.remove_tree(layout.CPU, dir_fd=self._writer.dir_fd)
