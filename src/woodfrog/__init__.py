"""woodfrog: checkpoint and restore GPU processes whole. The public API: see `woodfrog.api` for each function.

Names are looked up when they are first used, because importing one part must never cost the time of another.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from woodfrog.errors import WoodfrogError

if TYPE_CHECKING:
    from woodfrog.api import (
        CheckpointResult,
        ImageInfo,
        ResumeResult,
        SuspendResult,
        Target,
        TargetInfo,
        checkpoint,
        images,
        inspect,
        open_image,
        ps,
        restore,
        resume,
        rm,
        run,
        suspend,
        verify,
    )
    from woodfrog.image.image import Image
    from woodfrog.image.repository import ImageRepository
    from woodfrog.self_checkpoint import checkpoint_self

__version__ = "0.1.0"

__all__ = [
    "CheckpointResult",
    "Image",
    "ImageInfo",
    "ImageRepository",
    "ResumeResult",
    "SuspendResult",
    "Target",
    "TargetInfo",
    "WoodfrogError",
    "__version__",
    "checkpoint",
    "checkpoint_self",
    "images",
    "inspect",
    "open_image",
    "ps",
    "restore",
    "resume",
    "rm",
    "run",
    "suspend",
    "verify",
]

# Where a name is that is not in woodfrog.api.
_HOMES = {
    "Image": "woodfrog.image.image",
    "ImageRepository": "woodfrog.image.repository",
    "checkpoint_self": "woodfrog.self_checkpoint",
}


def __getattr__(name: str) -> object:
    if name in __all__:
        return getattr(importlib.import_module(_HOMES.get(name, "woodfrog.api")), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
