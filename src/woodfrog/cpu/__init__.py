"""The CPU side of a target: CRIU's options, its run as a child with a time-out, and its log turned into a reason.

Nothing here knows of GPUs: the driver's part is done before a dump and after a restore, by woodfrog.operations.
"""
