"""Watches a process go through its driver's checkpoint and back: what it has, what the driver does, what it saves.

Works from outside, on processes that woodfrog did not start as well; what could not be seen is said.
"""
