"""`woodfrog demo`: a program that trains a small network (train.py), and what is done to it (scenario.py)."""
