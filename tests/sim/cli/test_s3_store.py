"""A store in S3 (a real server on this machine) used like any other: checkpoints into it, a restore out of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.store import S3Store
from product import DEADLINE_S, Product, Stepper, new_root
from s3_server import S3Server
from typer.testing import CliRunner

from woodfrog.cli.app import app

STORE = "s3://bucket/prefix"


@pytest.fixture
def remote(targets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Product]:
    """A daemon that knows the server and its credentials."""
    server = S3Server(tmp_path)
    try:
        made = Product(new_root(), targets, environment=server.environment())
        try:
            for name, value in made.environment.items():
                monkeypatch.setenv(name, value)
            obstore.put(S3Store("bucket", client_options={"allow_http": True}), "made", b"")
            yield made
        finally:
            made.close()
    finally:
        server.close()


def woodfrog(*arguments: str) -> Any:
    result = CliRunner().invoke(app, [*arguments, "--json"], prog_name="woodfrog")
    assert result.exit_code == 0, (arguments, result.stdout, result.stderr)
    return json.loads(result.stdout)


def test_a_target_is_checkpointed_into_s3_in_increments_and_restored_from_there(remote: Product) -> None:
    stepper = remote.run("--idle-kib", "2048", name="walker")
    first = woodfrog("checkpoint", "walker", "--store", STORE)
    stepper.wait_steps(2)
    second = woodfrog("checkpoint", "walker", "--store", STORE, "--stop")
    assert 0 < second["gpu_new_bytes"] < first["gpu_new_bytes"]
    assert [image["reference"] for image in woodfrog("images", "--store", STORE)] == ["walker@1", "walker@2"]
    assert woodfrog("diff", f"{STORE}/walker@1", f"{STORE}/walker@2")["gpu_new_bytes"] == second["gpu_new_bytes"]
    assert stepper.process is not None
    stepper.process.wait(DEADLINE_S)
    back = woodfrog("restore", f"{STORE}/walker@2", "--verify")
    restored = Stepper(back["pid"], Path(back["log"]))
    remote._targets.append(restored)
    restored.check_runs_right()
    assert woodfrog("prune", "--store", STORE, "--keep-last", "1")["removed"] == ["walker@1"]
    assert woodfrog("verify", "--store", STORE)["verified"] is True
