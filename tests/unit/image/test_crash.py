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
    "store.session.begin",
    "store.pack.written",
    "store.commit.begin",
    "store.packs.synced",
    "store.packs.durable",
    "store.index.durable",
    "store.commit.flushed",
    "store.commit.manifest_made",
]
AFTER_THE_NAME = ["store.commit.published"]


def run(action: str, store: Path, fault: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SUPPORT / "commit_once.py"), action, str(store)],
        env={**os.environ, "WOODFROG_FAULTS": fault, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def leftovers(path: Path) -> list[Path]:
    """What is in the store's folder for things in the making."""
    return [entry for entry in (path / "tmp").iterdir() if entry.is_dir() or entry.stat().st_size]


def assert_usable(path: Path, expected: list[str]) -> None:
    """The images are these, all verify, nothing abandoned is left, and the next image can be written."""
    with ImageRepository(path) as store:
        assert [entry.reference for entry in store.list()] == expected
        for reference in expected:
            with store.open(reference) as image:
                assert image.verify() == []
        small_images.write(store, "next").close()
        assert store.verify() == []
        assert leftovers(path) == []


def test_a_commit_passes_all_of_these_points_in_this_order(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    assert run("commit", tmp_path / "store", WOODFROG_FAULTS_TRACE=str(trace)).returncode == 0
    passed = [point for point in trace.read_text().split() if point in BEFORE_THE_NAME + AFTER_THE_NAME]
    assert list(dict.fromkeys(passed)) == BEFORE_THE_NAME + AFTER_THE_NAME


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
def test_a_failure_before_the_name_is_there_leaves_no_image_and_nothing_unfinished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, action: str
) -> None:
    with ImageRepository(tmp_path / "store") as store:
        monkeypatch.setenv("WOODFROG_FAULTS", f"{point}:{action}")
        with pytest.raises(NoSpaceError if action == "enospc" else WoodfrogError) as raised:
            small_images.write(store)
        assert raised.value.reason
        assert leftovers(tmp_path / "store") == []
        monkeypatch.delenv("WOODFROG_FAULTS")
    assert_usable(tmp_path / "store", [])


@pytest.mark.parametrize("action", ["error", "enospc"])
@pytest.mark.parametrize("point", AFTER_THE_NAME)
def test_a_failure_after_the_name_is_there_is_told_and_the_image_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, action: str
) -> None:
    with ImageRepository(tmp_path / "store") as store:
        monkeypatch.setenv("WOODFROG_FAULTS", f"{point}:{action}")
        with pytest.raises(WoodfrogError):
            small_images.write(store)
        monkeypatch.delenv("WOODFROG_FAULTS")
    assert_usable(tmp_path / "store", ["small@1"])


@pytest.mark.parametrize(("point", "left"), [("store.remove.marked", ["small@1"]), ("store.remove.deleted", [])])
def test_a_removal_that_was_killed_has_removed_the_image_or_not_begun(
    tmp_path: Path, point: str, left: list[str]
) -> None:
    path = tmp_path / "store"
    assert run("commit", path).returncode == 0
    assert run("remove", path, f"{point}:kill").returncode == -signal.SIGKILL
    assert_usable(path, left)
    with ImageRepository(path) as store:
        assert store.next_number("small") == 2


def test_a_number_of_a_dead_writer_is_given_out_again(tmp_path: Path) -> None:
    path = tmp_path / "store"
    run("commit", path, "store.commit.manifest_made:kill")
    assert run("commit", path).returncode == 0
    assert_usable(path, ["small@1"])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small file system")
def test_a_really_full_disk_is_reported_as_such_and_leaves_no_image(tmp_path: Path) -> None:
    path = tmp_path / "small-disk"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", path], check=True)
    try:
        with ImageRepository(path / "store") as store:
            with store.begin("small") as writer:
                folder = writer.directory / "cpu"
                folder.mkdir()
                # Files that fit, once: there is no room for their chunks.
                (folder / "pages-1.img").write_bytes(small_images.pattern(4 << 20, 5))
                manifest = small_images.manifest(handles=[], digests=b"", allocations=Allocations())
                with pytest.raises(NoSpaceError):
                    writer.commit(manifest)
            assert [entry.reference for entry in store.list()] == []
            assert leftovers(path / "store") == []
            store.prune(grace_s=0)
            small_images.write(store).close()
        assert_usable(path / "store", ["small@1"])
    finally:
        subprocess.run(["umount", path], check=True)
