"""Where a store's files are: a disk, memory (a disk tier on tmpfs), or S3. Import the submodules."""
