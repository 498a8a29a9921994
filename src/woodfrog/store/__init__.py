"""Stores: directories kept under a name and a number, each made visible in one atomic step. Import the submodules.

A store knows nothing of what is in them: that is woodfrog.image's, which is built on this (docs/format.md describes
both). In the sentences that a person reads, what a store keeps is called an image, because nothing else is kept in one.
"""
