"""A content-addressed store for images: chunks in packs, an index that finds them, numbered manifests.

`open.open_store` makes one of a path or address; docs/format.md describes what is in it. Import the submodules. It
knows nothing of what is in a manifest: that is woodfrog.image's, which is built on this. In the sentences that a person
reads, what a store keeps is called an image, because nothing else is kept in one.
"""
