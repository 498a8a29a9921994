"""Checkpoints of a running target again and again: when the next one is due (policy.py), and doing it (loop.py)."""
