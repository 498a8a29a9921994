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
        PromotionResult,
        ResumeResult,
        StandbyResult,
        SuspendResult,
        Target,
        TargetInfo,
        checkpoint,
        end_standby,
        images,
        inspect,
        migrate,
        open_image,
        promotion,
        ps,
        restore,
        resume,
        rm,
        run,
        standby,
        standby_pool,
        suspend,
        switch,
        verify,
    )
    from woodfrog.image.image import Image
    from woodfrog.image.repository import ImageRepository
    from woodfrog.image.repository import ImageRepository as Store
    from woodfrog.periodic.loop import checkpoint_every
    from woodfrog.restore_news import Restored, on_restore, restored
    from woodfrog.self_checkpoint import checkpoint_self
    from woodfrog.store_api import copy, diff, picture, prune, pull, push, repair, verify_store

__version__ = "0.1.0"

__all__ = [
    "CheckpointResult",
    "Image",
    "ImageInfo",
    "ImageRepository",
    "PromotionResult",
    "Restored",
    "ResumeResult",
    "StandbyResult",
    "Store",
    "SuspendResult",
    "Target",
    "TargetInfo",
    "WoodfrogError",
    "__version__",
    "checkpoint",
    "checkpoint_every",
    "checkpoint_self",
    "copy",
    "diff",
    "end_standby",
    "images",
    "inspect",
    "migrate",
    "on_restore",
    "open_image",
    "picture",
    "promotion",
    "prune",
    "ps",
    "pull",
    "push",
    "repair",
    "restore",
    "restored",
    "resume",
    "rm",
    "run",
    "standby",
    "standby_pool",
    "suspend",
    "switch",
    "verify",
    "verify_store",
]

# Where a name is that is not in woodfrog.api.
_HOMES = {
    "Image": "woodfrog.image.image",
    "ImageRepository": "woodfrog.image.repository",
    "Store": "woodfrog.image.repository",
    "checkpoint_every": "woodfrog.periodic.loop",
    "checkpoint_self": "woodfrog.self_checkpoint",
    **dict.fromkeys(("Restored", "on_restore", "restored"), "woodfrog.restore_news"),
    **dict.fromkeys(
        ("copy", "diff", "picture", "prune", "pull", "push", "repair", "verify_store"), "woodfrog.store_api"
    ),
}
# What it is called there.
_NAMES = {"Store": "ImageRepository"}


def __getattr__(name: str) -> object:
    if name in __all__:
        return getattr(importlib.import_module(_HOMES.get(name, "woodfrog.api")), _NAMES.get(name, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
