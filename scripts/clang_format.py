"""Runs clang-format (the one from the virtual environment) over the C++ sources; `--check` only reports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUFFIXES = {".cpp", ".hpp", ".h", ".c", ".cu"}


def main() -> int:
    files = [
        str(path)
        for folder in ("native", "tests", "bench")
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in SUFFIXES and path.is_file()
    ]
    if not files:
        return 0
    program = str(Path(sys.executable).parent / "clang-format")
    mode = ["--dry-run", "-Werror"] if "--check" in sys.argv[1:] else ["-i"]
    return subprocess.run([program, *mode, *files], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
