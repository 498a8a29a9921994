"""A private daemon for each test, and the command line as a person runs it; the target is compiled once a session."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))

import interruptible  # noqa: F401
from finished import Finished
from product import Product, build_targets, new_root
from typer.testing import CliRunner

from woodfrog.cli.app import app


@pytest.fixture(scope="session")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_targets(tmp_path_factory)


@pytest.fixture
def product(targets: Path) -> Iterator[Product]:
    made = Product(new_root(), targets)
    yield made
    made.close()


@pytest.fixture
def environment(product: Product, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Makes this process, too, one of the private daemon's: what is called in it and what it starts."""
    for name, value in product.environment.items():
        monkeypatch.setenv(name, value)
    return {**os.environ, **product.environment}


@pytest.fixture
def woodfrog(environment: dict[str, str]) -> Callable[..., Finished]:
    """Runs the command line to its end: `run` as a process, so that its program has no parent among the tests, and
    `doctor`, so that it finds the simulated driver; the others in this process, which saves a second each."""

    def run(*arguments: str) -> Finished:
        if arguments[0] not in ("run", "doctor"):
            result = CliRunner().invoke(app, arguments, prog_name="woodfrog")
            if result.exception is not None and not isinstance(result.exception, SystemExit):
                raise result.exception
            return Finished(result.exit_code, result.stdout, result.stderr)
        finished = subprocess.run(
            [sys.executable, "-m", "woodfrog", *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return Finished(finished.returncode, finished.stdout, finished.stderr)

    return run
