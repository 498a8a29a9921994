"""Names inside an image, and opening its files without following a symbolic link.

The names are those of docs/format.md, "Layout of an image". It must never create, change or remove anything.
"""

from __future__ import annotations

import errno
import os
import re
import stat

from woodfrog.errors import BadImageError
from woodfrog.store import files

CPU = "cpu"
DATA_FILE = re.compile(r"gpu-[0-9]{1,4}[.]data")


def open_file(path: str, *, dir_fd: int) -> tuple[int, os.stat_result]:
    """A regular file of the image whose directory `dir_fd` is. The caller owns the descriptor; BadImageError."""
    try:
        descriptor = files.open_below(path, dir_fd=dir_fd)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO):
            raise BadImageError(
                f"{path} is missing from the image, or is a symbolic link", advice="use another image"
            ) from error
        raise
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise BadImageError(f"{path} in the image is not a regular file", advice="use another image")
    return descriptor, status
