"""Whatever moment a writer dies at, the store afterwards holds either nothing of it or a complete, verifying image."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import small_images

from woodfrog.errors import NoSpaceError, WoodfrogError
from woodfrog.image.manifest import Allocations
from woodfrog.image.repository import ImageRepository

SUPPORT = Path(__file__).resolve().parents[2] / "support"
BEFORE_THE_NAME = [
    "store.begin",
    "store.commit.begin",
    "store.commit.files_durable",
    "store.commit.manifest_written",
    "store.commit.manifest_durable",
]
AFTER_THE_NAME = ["store.commit.renamed", "store.commit.durable"]


def run(action: str, store: Path, fault: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SUPPORT / "commit_once.py"), action, str(store)],
        env={**os.environ, "WOODFROG_FAULTS": fault, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def assert_usable(path: Path, expected: list[str]) -> None:
    """The images are these, all verify, nothing abandoned is left, and the next image can be written."""
    store = ImageRepository(path)
    assert [entry.reference for entry in store.list()] == expected
    for reference in expected:
        with store.open(reference) as image:
            assert image.verify() == []
    assert list((path / ".tmp").iterdir()) == []
    small_images.write(store, "next").close()
    store.close()


def test_these_are_all_points_that_a_commit_passes(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    assert run("commit", tmp_path / "store", WOODFROG_FAULTS_TRACE=str(trace)).returncode == 0
    assert trace.read_text().split() == BEFORE_THE_NAME + AFTER_THE_NAME


@pytest.mark.parametrize("point", BEFORE_THE_NAME)
def test_a_writer_killed_before_the_name_is_there_leaves_no_image(tmp_path: Path, point: str) -> None:
    died = run("commit", tmp_path / "store", f"{point}:kill")
    assert died.returncode == -signal.SIGKILL
    assert_usable(tmp_path / "store", [])


@pytest.mark.parametrize("point", AFTER_THE_NAME)
def test_a_writer_killed_once_the_name_is_there_leaves_a_complete_image(tmp_path: Path, point: str) -> None:
    died = run("commit", tmp_path / "store", f"{point}:kill")
    assert died.returncode == -signal.SIGKILL
    assert_usable(tmp_path / "store", ["small@1"])


@pytest.mark.parametrize("action", ["error", "enospc", "timeout"])
@pytest.mark.parametrize("point", BEFORE_THE_NAME)
def test_a_failure_before_the_name_is_there_removes_everything_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, action: str
) -> None:
    store = ImageRepository(tmp_path / "store")
    monkeypatch.setenv("WOODFROG_FAULTS", f"{point}:{action}")
    with pytest.raises(NoSpaceError if action == "enospc" else WoodfrogError) as raised:
        small_images.write(store)
    assert raised.value.reason
    assert list((tmp_path / "store" / ".tmp").iterdir()) == []
    monkeypatch.delenv("WOODFROG_FAULTS")
    assert_usable(tmp_path / "store", [])


@pytest.mark.parametrize("action", ["error", "enospc"])
@pytest.mark.parametrize("point", AFTER_THE_NAME)
def test_a_failure_after_the_name_is_there_is_told_and_the_image_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, action: str
) -> None:
    store = ImageRepository(tmp_path / "store")
    monkeypatch.setenv("WOODFROG_FAULTS", f"{point}:{action}")
    with pytest.raises(WoodfrogError):
        small_images.write(store)
    monkeypatch.delenv("WOODFROG_FAULTS")
    assert_usable(tmp_path / "store", ["small@1"])


def test_a_removal_that_was_killed_half_way_has_removed_the_image(tmp_path: Path) -> None:
    path = tmp_path / "store"
    assert run("commit", path).returncode == 0
    assert run("remove", path, "store.remove.renamed:kill").returncode == -signal.SIGKILL
    assert_usable(path, [])
    store = ImageRepository(path)
    assert store.next_number("small") == 2
    store.close()


def test_a_number_reserved_by_a_dead_writer_is_given_out_again(tmp_path: Path) -> None:
    path = tmp_path / "store"
    run("commit", path, "store.commit.manifest_durable:kill")
    assert run("commit", path).returncode == 0
    assert_usable(path, ["small@1"])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small file system")
def test_a_really_full_disk_is_reported_as_such_and_leaves_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "small-disk"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", path], check=True)
    try:
        store = ImageRepository(path / "store")
        with pytest.raises(OSError, match="No space"), store.begin("small") as writer:
            small_images.fill(writer)
        # CPU files that fit, and fill the disk to its last page: the commit is what fails.
        with store.begin("small") as writer:
            with (writer.directory / "cpu" / "pages-1.img").open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, store.free_bytes())
            with pytest.raises(NoSpaceError, match="full"):
                writer.commit(small_images.manifest(data_files=[], handles=[], allocations=Allocations()))
        assert [entry.reference for entry in store.list()] == []
        assert list((path / "store" / ".tmp").iterdir()) == []
        store.close()
    finally:
        subprocess.run(["umount", path], check=True)
