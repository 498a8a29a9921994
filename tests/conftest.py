"""Compiled modules are kept, whatever the machine's settings: thousands of Python processes start in these tests, and
each would compile the whole product, and each worker all tests."""

from __future__ import annotations

import os
import sys

sys.dont_write_bytecode = False
os.environ["PYTHONDONTWRITEBYTECODE"] = ""
