"""The command line. `main` is the entry point; one file per verb, output and errors in `output.py`."""

from __future__ import annotations


def main() -> None:
    """Run the command line and exit."""
    from woodfrog.cli.app import main as run

    run()
