"""The CUDA driver from outside a target: GPUs, the driver's own process checkpoint, and what which driver can do.

Imports without a GPU and without a driver; the first call that needs one raises a DriverError that says so.
"""
