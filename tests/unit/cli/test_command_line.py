"""The command line on a real store: what it prints, and the code it ends with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import small_images
from damage import damage_chunk
from typer.testing import CliRunner

from woodfrog.cli.app import app
from woodfrog.errors import ExitCode
from woodfrog.image.repository import ImageRepository

VERBS = ["run", "ps", "checkpoint", "restore", "suspend", "resume", "images", "inspect", "verify", "rm", "doctor",
         "demo", "bench", "daemon"]  # fmt: skip
Woodfrog = Callable[..., "Finished"]


@dataclass
class Finished:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store and a runtime directory of the test's own."""
    monkeypatch.setenv("WOODFROG_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("WOODFROG_RUNTIME_DIR", str(tmp_path / "run"))


@pytest.fixture
def woodfrog(environment: None) -> Woodfrog:
    """Runs the command line in this process; anything but an orderly exit fails the test."""

    def run(*arguments: str) -> Finished:
        result = CliRunner().invoke(app, arguments, prog_name="woodfrog")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Finished(result.exit_code, result.stdout, result.stderr)

    return run


@pytest.fixture
def process(environment: None) -> Woodfrog:
    """Runs the command line as a process of its own."""

    def run(*arguments: str, **environment: str) -> Finished:
        finished = subprocess.run(
            [sys.executable, "-m", "woodfrog", *arguments],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return Finished(finished.returncode, finished.stdout, finished.stderr)

    return run


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ImageRepository]:
    opened = ImageRepository(tmp_path / "store")
    for _ in range(2):
        small_images.write(opened).close()
    yield opened
    opened.close()


def document(finished: Finished) -> Any:
    """The one JSON document that is all of stdout; stderr is empty."""
    assert finished.stderr == ""
    assert finished.stdout.count("\n") == 1
    return json.loads(finished.stdout)


def test_help_names_every_verb(woodfrog: Woodfrog) -> None:
    shown = woodfrog("--help")
    assert shown.returncode == 0
    for verb in VERBS:
        assert f"\n  {verb} " in shown.stdout


@pytest.mark.parametrize("verb", [*VERBS[:-1], "daemon start", "daemon stop", "daemon status"])
def test_every_verb_has_help_and_json(woodfrog: Woodfrog, verb: str) -> None:
    shown = woodfrog(*verb.split(), "--help")
    assert shown.returncode == 0
    assert "--json" in shown.stdout


def test_the_version_is_told(woodfrog: Woodfrog) -> None:
    import woodfrog as package

    assert woodfrog("--version").stdout == f"woodfrog {package.__version__}\n"


def test_help_does_not_wait_for_imports_that_only_verbs_need() -> None:
    late = ("msgspec", "rich", "cuda", "blake3", "numpy", "woodfrog.api")
    code = f"import sys; import woodfrog.cli.app; print([m for m in {late} if m in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert loaded.stdout.strip() == "[]"


def test_images_lists_references_and_sizes(woodfrog: Woodfrog, store: ImageRepository) -> None:
    shown = woodfrog("images")
    assert shown.returncode == 0
    assert "small@1" in shown.stdout
    assert "small@2" in shown.stdout
    rows = document(woodfrog("images", "--json"))
    assert [row["reference"] for row in rows] == ["small@1", "small@2"]
    assert rows[0]["gpu_bytes"] == small_images.manifest().gpu_bytes
    assert document(woodfrog("images", "other", "--json")) == []


def test_a_damaged_image_is_listed_as_damaged(woodfrog: Woodfrog, store: ImageRepository) -> None:
    (store.path / "images" / "small" / "1").write_bytes(b"no")
    shown = woodfrog("images")
    assert shown.returncode == 0
    assert "damaged" in shown.stdout
    assert "small@2" in shown.stdout


def test_verify_says_ok_or_names_the_damage(woodfrog: Woodfrog, store: ImageRepository) -> None:
    good = document(woodfrog("verify", "small", "--json"))
    assert good["verified"] is True
    assert good["image"] == "small@2"
    damage_chunk(store, store.manifest("small").digests[:32])
    shown = woodfrog("verify", "small")
    assert shown.returncode == ExitCode.BAD_IMAGE
    assert shown.stdout == ""
    assert "handle 0x1000" in shown.stderr
    error = woodfrog("verify", "small", "--json")
    assert error.returncode == ExitCode.BAD_IMAGE
    assert document(error)["error"] == "BadImageError"
    assert document(error)["details"]["problems"][0]["chunk"] == 0


def test_inspect_shows_the_image_and_whether_it_fits_here(woodfrog: Woodfrog, store: ImageRepository) -> None:
    shown = woodfrog("inspect", "small@1")
    assert shown.returncode == 0, shown.stderr
    assert "small@1" in shown.stdout
    found = document(woodfrog("inspect", "small@1", "--json"))
    assert found["handles"] == 3
    assert found["chunks"] == 7
    assert {finding["severity"] for finding in found["compatibility"]} <= {"refused", "warning"}


def test_text_out_of_an_image_cannot_reach_the_terminal(woodfrog: Woodfrog, store: ImageRepository) -> None:
    processes = [
        small_images.Process(pid=100, command_line=["\x1b]0;owned\x07\x1b[2J"]),
        small_images.Process(pid=101, parent_pid=100),
    ]
    small_images.write(store, "evil", processes=processes, target_name="\x1b[31mred\n").close()
    for verb in (["inspect", "evil"], ["images"]):
        shown = woodfrog(*verb)
        assert shown.returncode == 0
        assert "\x1b" not in shown.stdout + shown.stderr
        assert "\x07" not in shown.stdout + shown.stderr


def test_rm_removes_and_says_what(woodfrog: Woodfrog, store: ImageRepository) -> None:
    several = woodfrog("rm", "small")
    assert several.returncode == ExitCode.USAGE
    assert "several" in several.stderr
    assert document(woodfrog("rm", "small@1", "small@2", "--json")) == {"removed": ["small@1", "small@2"]}
    gone = woodfrog("rm", "small@1")
    assert gone.returncode == ExitCode.NOT_FOUND


def test_rm_tells_when_links_of_an_image_could_not_be_found_and_removes_it(
    woodfrog: Woodfrog, store: ImageRepository
) -> None:
    with store.begin("small") as writer:
        small_images.fill(writer)
        (writer.directory / "cpu" / "remap-fpath.img").write_bytes(b"damaged")
        writer.commit(small_images.manifest())
    (store.path / "images" / "small" / "1").write_bytes(b"no")
    for image in ("small@3", "small@1"):
        finished = woodfrog("rm", image, "--json")
        assert finished.returncode == ExitCode.FAILED
        assert "the image is removed" in finished.stdout + finished.stderr
    assert [entry.reference for entry in store.list()] == ["small@2"]


@pytest.mark.parametrize("reference", ["..@1", "a@b", "small@0", ".."])
def test_a_reference_that_makes_no_sense_is_a_usage_error(
    woodfrog: Woodfrog, store: ImageRepository, reference: str
) -> None:
    for verb in ("inspect", "verify"):
        finished = woodfrog(verb, reference)
        assert finished.returncode == ExitCode.USAGE
        assert finished.stdout == ""


def test_a_store_that_is_not_there_is_not_made_by_looking(woodfrog: Woodfrog, tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"
    finished = woodfrog("images", "--store", str(missing))
    assert finished.returncode == ExitCode.NOT_FOUND
    assert not missing.exists()


def test_without_a_daemon_its_status_is_an_error_with_its_code(woodfrog: Woodfrog) -> None:
    finished = woodfrog("daemon", "status", "--json")
    assert finished.returncode == ExitCode.NO_DAEMON
    assert document(finished)["exit_code"] == ExitCode.NO_DAEMON
    assert woodfrog("daemon", "stop").returncode == ExitCode.NO_DAEMON


def test_doctor_gives_each_check_a_verdict_and_each_failure_a_fix(woodfrog: Woodfrog, store: ImageRepository) -> None:
    finished = woodfrog("doctor", "--json")
    found = document(finished)
    assert finished.returncode == (ExitCode.OK if found["ok"] else ExitCode.REFUSED)
    names = {check["name"] for check in found["checks"]}
    assert {"driver", "kernel", "CRIU", "privileges", "open files", "store", "daemon"} <= names
    for check in found["checks"]:
        assert check["verdict"] in ("ok", "warning", "fail", "n/a")
        assert check["finding"]
        assert check["verdict"] != "fail" or check["fix"]


def test_bench_lists_the_scripts_of_the_checkout_and_measures_without_a_gpu(
    woodfrog: Woodfrog, store: ImageRepository
) -> None:
    before = sorted(store.path.rglob("*"))
    assert "builtin" in document(woodfrog("bench", "--json"))["benches"]
    measured = document(woodfrog("bench", "builtin", "--json"))
    assert all(value > 0 for value in measured["summary"].values())
    assert sorted(store.path.rglob("*")) == before
    assert woodfrog("bench", "nonsense").returncode == ExitCode.NOT_FOUND


def test_the_shell_is_offered_images_that_are_there(process: Woodfrog, store: ImageRepository) -> None:
    offered = process("", _WOODFROG_COMPLETE="complete_bash", COMP_WORDS="woodfrog verify sm", COMP_CWORD="2")
    assert offered.stdout.split() == ["small@1", "small@2"]
    verbs = process("", _WOODFROG_COMPLETE="complete_bash", COMP_WORDS="woodfrog re", COMP_CWORD="1")
    assert {"restore", "resume"} <= set(verbs.stdout.split())


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_can_be_had_for_each_shell(process: Woodfrog, shell: str) -> None:
    shown = process("", _WOODFROG_COMPLETE=f"source_{shell}")
    assert "woodfrog" in shown.stdout


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_output_that_nobody_reads_any_more_is_no_traceback(
    environment: None, store: ImageRepository, options: list[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        finished = subprocess.run(
            [sys.executable, "-m", "woodfrog", "images", *options],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
    finally:
        os.close(writer)
    assert (finished.returncode, finished.stderr) == (141, "")


def test_the_package_and_its_project_file_have_one_version() -> None:
    import woodfrog as package

    text = (Path(__file__).resolve().parents[3] / "pyproject.toml").read_text()
    assert f'\nversion = "{package.__version__}"\n' in text
