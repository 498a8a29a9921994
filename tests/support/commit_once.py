"""Run by tests/unit/image/test_crash.py: write one image, or remove one, under the fault that the environment names."""

from __future__ import annotations

import sys

import small_images

from woodfrog.image.repository import ImageRepository

store = ImageRepository(sys.argv[2])
if sys.argv[1] == "commit":
    small_images.write(store).close()
else:
    store.remove("small@1")
print("done", flush=True)
