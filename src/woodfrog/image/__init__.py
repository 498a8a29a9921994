"""Images: the manifest, its bytes, and a complete image on disk (docs/format.md). Import the submodules."""
