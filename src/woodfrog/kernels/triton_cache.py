"""PTX of machine code that Triton compiled: its cache holds both, side by side.

Where the cache is follows from a program's environment, by the rules of Triton (3.x, triton/knobs.py) and of PyTorch's
torch.compile (2.x, torch/_inductor/runtime/cache_dir_utils.py), which sets Triton's folder to one of its own.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

FOLDERS = "WOODFROG_TRITON_CACHES"  # more of them, for the process that makes catalogues


def folders(environment: Mapping[str, str]) -> list[Path]:
    """The folders that a program with this environment may have Triton's cache in."""
    found = [Path(one) for one in environment.get(FOLDERS, "").split(os.pathsep) if one]
    if chosen := environment.get("TRITON_CACHE_DIR"):
        return [*found, Path(chosen)]
    home = environment.get("TRITON_HOME") or environment.get("HOME") or str(Path.home())
    found.append(Path(home) / ".triton" / "cache")
    inductor = environment.get("TORCHINDUCTOR_CACHE_DIR")
    if not inductor:
        user = _user(environment)
        inductor = f"{environment.get('TMPDIR') or '/tmp'}/torchinductor_{user}" if user else ""
    return [*found, *sorted((Path(inductor) / "triton").glob("*"))] if inductor else found


def _user(environment: Mapping[str, str]) -> str:
    """As Python's getpass.getuser says it."""
    named = (environment.get(name) for name in ("LOGNAME", "USER", "LNAME", "USERNAME"))
    found = next((name for name in named if name), "")
    with contextlib.suppress(KeyError):  # a user without a name
        return found or pwd.getpwuid(os.getuid()).pw_name
    return ""


def ptx_of(cubin: bytes, caches: Iterable[Path]) -> bytes | None:
    """The PTX beside the very same machine code. A folder or file that others may write to is passed over."""
    for cache in caches:
        for path in cache.glob("*/*.cubin"):
            ptx = path.with_suffix(".ptx")
            try:
                is_same = path.stat().st_size == len(cubin) and path.read_bytes() == cubin
                if is_same and all(map(_is_ours, (path.parent, path, ptx))):
                    return ptx.read_bytes()
            except OSError:
                continue  # being written, or without its PTX: as if it were not there
    return None


def _is_ours(path: Path) -> bool:
    status = path.stat()
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
