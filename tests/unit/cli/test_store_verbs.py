"""The verbs for whole stores, and between images, on real stores of small images."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import small_images
from finished import Finished
from typer.testing import CliRunner

from woodfrog.cli.app import app
from woodfrog.errors import ExitCode
from woodfrog.image.repository import ImageRepository

CHUNK = small_images.CHUNK_BYTES


Woodfrog = Callable[..., Finished]


@pytest.fixture
def woodfrog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Woodfrog:
    monkeypatch.setenv("WOODFROG_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("WOODFROG_RUNTIME_DIR", str(tmp_path / "run"))

    def run(*arguments: str) -> Finished:
        result = CliRunner().invoke(app, arguments, prog_name="woodfrog")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Finished(result.exit_code, result.stdout, result.stderr)

    return run


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ImageRepository]:
    """small@1, small@2 (the same again) and other@1, of which GPU memory differs."""
    with ImageRepository(tmp_path / "store") as opened:
        for _ in range(2):
            small_images.write(opened).close()
        write_other(opened)
        yield opened


def write_other(repository: ImageRepository, name: str = "other", seed: int = 7) -> None:
    digests = b"".join(
        small_images.digests(small_images.pattern(size, index + seed))
        for index, (_, size) in enumerate(small_images.HANDLES)
    )
    with repository.begin(name) as writer:
        small_images.fill(writer, seed)
        writer.commit(small_images.manifest(digests=digests))


def references(woodfrog: Woodfrog, *options: str) -> list[str]:
    return [image["reference"] for image in woodfrog("images", "--json", *options).json]


def test_prune_frees_what_no_image_needs_and_nothing_else(woodfrog: Woodfrog, store: ImageRepository) -> None:
    assert woodfrog("prune", "--json").json["freed_bytes"] == 0
    assert woodfrog("rm", "other@1").code == 0
    planned = woodfrog("prune", "--dry-run", "--json").json
    assert planned["dry_run"] is True
    assert planned["freed_bytes"] > 6 * CHUNK
    before = sum(path.stat().st_size for path in small_images.packs(store.path or Path()))
    done = woodfrog("prune", "--json").json
    assert done["freed_bytes"] == planned["freed_bytes"]
    after = sum(path.stat().st_size for path in small_images.packs(store.path or Path()))
    assert after < before
    assert woodfrog("verify", "--json").json["verified"] is True
    for reference in ("small@1", "small@2"):
        assert woodfrog("verify", reference).code == 0


def test_prune_dry_run_removes_nothing_and_says_what_would_go(woodfrog: Woodfrog, store: ImageRepository) -> None:
    for seed in (20, 40):
        write_other(store, "other", seed)
    shown = woodfrog("prune", "--keep-last", "1", "--dry-run")
    assert shown.code == 0, shown.err
    assert "would be removed: small@1" in shown.out
    assert "would be removed: other@2" in shown.out
    assert "would be kept: small@2 (among the last 1)" in shown.out
    planned = woodfrog("prune", "--keep-last", "1", "--dry-run", "--json").json
    assert planned["removed"] == ["other@1", "other@2", "small@1"]
    assert planned["images"] == 2
    assert planned["freed_bytes"] > 12 * CHUNK  # what two images of `other` have alone
    assert references(woodfrog) == ["other@1", "other@2", "other@3", "small@1", "small@2"]
    done = woodfrog("prune", "--keep-last", "1", "--json").json
    assert (done["removed"], done["freed_bytes"]) == (planned["removed"], planned["freed_bytes"])
    assert references(woodfrog) == ["other@3", "small@2"]
    assert woodfrog("verify", "--json").json["verified"] is True


def test_prune_rules_can_be_for_one_name_and_by_age(woodfrog: Woodfrog, store: ImageRepository) -> None:
    write_other(store, "other", seed=30)
    assert woodfrog("prune", "other", "--keep-within", "7d", "--json").json["removed"] == []
    assert woodfrog("prune", "other", "--keep-within", "0s", "--json").json["removed"] == ["other@1"]
    assert references(woodfrog) == ["other@2", "small@1", "small@2"]


def test_prune_with_a_grace_leaves_young_packs(woodfrog: Woodfrog, store: ImageRepository) -> None:
    woodfrog("rm", "other@1")
    assert woodfrog("prune", "--grace", "24h", "--json").json["freed_bytes"] == 0
    assert woodfrog("prune", "--grace", "0", "--json").json["freed_bytes"] > 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("prune", "--grace", "soon"),
        ("prune", "--keep-within", "-1d"),
        ("prune", "--keep-last", "0"),
        ("prune", "small"),
        ("verify", "--sample", "200%"),
        ("verify", "small@1", "--sample", "5%"),
        ("verify", "--sample", "x"),
        ("diff", "small@1", "..@2"),
        ("push", "small@1", "ftp://there"),
        ("cp", "small@1", "elsewhere", "--compress", "rar"),
    ],
)
def test_what_makes_no_sense_is_a_usage_error(
    woodfrog: Woodfrog, store: ImageRepository, arguments: tuple[str, ...]
) -> None:
    finished = woodfrog(*arguments)
    assert finished.code == ExitCode.USAGE, finished
    assert finished.out == ""
    assert references(woodfrog) == ["other@1", "small@1", "small@2"]


@pytest.mark.parametrize("verb", ["prune", "repair", "verify", "images"])
def test_a_store_that_is_not_there_is_not_made(woodfrog: Woodfrog, tmp_path: Path, verb: str) -> None:
    missing = tmp_path / "nowhere"
    assert woodfrog(verb, "--store", str(missing)).code == ExitCode.NOT_FOUND
    assert not missing.exists()


def test_verify_of_a_store_finds_damage_and_repair_saves_the_rest(woodfrog: Woodfrog, store: ImageRepository) -> None:
    assert "nothing is wrong" in woodfrog("verify").out
    pack = small_images.packs(store.path or Path())[0]
    data = bytearray(pack.read_bytes())
    data[-1] ^= 0xFF  # padding may end a pack: its last chunk does in this one
    data[len(data) // 2] ^= 0xFF
    pack.chmod(0o600)
    pack.write_bytes(data)
    found = woodfrog("verify", "--json")
    assert found.code == ExitCode.BAD_IMAGE
    assert {problem["kind"] for problem in found.json["problems"]} >= {"pack-damaged", "image-incomplete"}
    repaired = woodfrog("repair", "--json")
    assert repaired.code == ExitCode.BAD_IMAGE
    assert next(iter(repaired.json["salvaged"].values())) > 0
    assert repaired.json["incomplete"]
    shown = woodfrog("repair")
    assert shown.code == ExitCode.BAD_IMAGE
    assert "has lost" in shown.out
    lost = list(repaired.json["incomplete"])
    for reference in lost:
        assert woodfrog("verify", reference).code == ExitCode.BAD_IMAGE
        assert woodfrog("rm", reference).code == 0
    assert woodfrog("verify", "--json").json["verified"] is True


def test_repair_rebuilds_a_lost_index(woodfrog: Woodfrog, store: ImageRepository) -> None:
    for index in (store.path or Path()).glob("index/*"):
        index.unlink()
    assert woodfrog("verify", "small@1").code == ExitCode.BAD_IMAGE
    repaired = woodfrog("repair", "--json").json
    assert repaired["all_well"] is True
    assert repaired["indexed_again"] == repaired["packs"] > 0
    assert woodfrog("verify", "small@1").code == 0


def test_verify_with_a_sample_reads_less_and_finds_a_missing_pack(woodfrog: Woodfrog, store: ImageRepository) -> None:
    assert woodfrog("verify", "--sample", "10%", "--json").json["sample"] == pytest.approx(0.1)
    small_images.packs(store.path or Path())[0].unlink()
    found = woodfrog("verify", "--sample", "0%", "--json")
    assert found.code == ExitCode.BAD_IMAGE
    assert "pack-missing" in {problem["kind"] for problem in found.json["problems"]}


def test_push_and_pull_move_only_what_is_absent(woodfrog: Woodfrog, store: ImageRepository, tmp_path: Path) -> None:
    there = str(tmp_path / "there")
    first = woodfrog("push", "small@1", there, "--json").json
    assert (first["reference"], first["already_there"], first["store"]) == ("small@1", False, there)
    assert first["copied_chunks"] > 0
    again = woodfrog("push", "small@1", there)
    assert again.code == 0
    assert "already" in again.out
    assert woodfrog("push", "small", there, "--json").json["copied_chunks"] == 0  # small@2 is the same bytes
    assert references(woodfrog, "--store", there) == ["small@1", "small@2"]
    assert woodfrog("verify", f"{there}/small@2").code == 0
    pulled = woodfrog("pull", "small@2", there, "--store", str(tmp_path / "third"), "--json").json
    assert pulled["copied_bytes"] == first["copied_bytes"]
    assert woodfrog("verify", "--store", str(tmp_path / "third")).code == 0
    assert woodfrog("push", "nobody@1", there).code == ExitCode.NOT_FOUND
    assert woodfrog("pull", "small", str(tmp_path / "nowhere")).code == ExitCode.NOT_FOUND


def test_push_refuses_to_replace_another_image_of_that_number(
    woodfrog: Woodfrog, store: ImageRepository, tmp_path: Path
) -> None:
    with ImageRepository(tmp_path / "there") as there:
        write_other(there, "small")
    refused = woodfrog("push", "small@1", str(tmp_path / "there"), "--json")
    assert refused.code == ExitCode.REFUSED
    assert "small@1" in refused.json["reason"]
    renamed = woodfrog("cp", "small@1", str(tmp_path / "there"), "--name", "mine", "--json").json
    assert renamed["reference"] == "mine@1"
    assert woodfrog("verify", "mine", "--store", str(tmp_path / "there")).code == 0
    assert woodfrog("inspect", f"{tmp_path}/there/mine@1", "--json").json["reference"] == "mine@1"


def test_cp_names_both_stores_and_makes_a_new_one_with_the_same_chunk_size(woodfrog: Woodfrog, tmp_path: Path) -> None:
    with ImageRepository(tmp_path / "coarse", chunk_bytes=2 * CHUNK) as coarse:
        empty = small_images.manifest(chunk_bytes=2 * CHUNK, handles=[], digests=b"", allocations=type(
            small_images.manifest().allocations)())  # fmt: skip
        with coarse.begin("cpu") as writer:
            small_images.fill_cpu(writer)
            writer.commit(empty)
    assert woodfrog("cp", f"{tmp_path}/coarse/cpu@1", str(tmp_path / "copy")).code == 0
    with ImageRepository(tmp_path / "copy", create=False) as copy:
        assert copy.chunk_bytes == 2 * CHUNK
    ImageRepository(tmp_path / "fine", chunk_bytes=CHUNK).close()
    refused = woodfrog("cp", f"{tmp_path}/coarse/cpu@1", str(tmp_path / "fine"))
    assert refused.code == ExitCode.REFUSED


def test_diff_tells_which_allocation_changed_and_that_equal_images_are_equal(
    woodfrog: Woodfrog, store: ImageRepository
) -> None:
    assert "the same, byte for byte" in woodfrog("diff", "small@1", "small@2").out
    assert woodfrog("diff", "small@1", "small@2", "--json").json["same"] is True
    found = woodfrog("diff", "small@1", "other@1", "--json").json
    assert found["same"] is False
    assert found["allocation_counts"]["changed"] == 3
    last = found["allocations"][-1]
    assert (last["address"], last["changed_bytes"], last["changed_ranges"]) == (
        0x7100_0000_0000, 2 * CHUNK, [[0, 2 * CHUNK]]
    )  # fmt: skip
    assert {process["state"] for process in found["processes"]} == {"same"}
    shown = woodfrog("diff", "small@1", "other@1")
    assert "0x710000000000" in shown.out
    assert "█" in shown.out or "#" in shown.out


def test_inspect_draws_what_is_shared_new_and_zero(woodfrog: Woodfrog, store: ImageRepository) -> None:
    shared = woodfrog("inspect", "small@1", "--json").json["picture"]
    assert shared["gpu"] == {"new_bytes": 0, "shared_bytes": small_images.manifest().gpu_bytes, "zero_bytes": 0}
    alone = woodfrog("inspect", "other@1", "--json").json["picture"]
    assert alone["gpu"]["new_bytes"] == small_images.manifest().gpu_bytes
    assert alone["cpu"]["new_bytes"] == 0
    assert alone["compared_with_images"] == 2
    assert alone["allocations"][-1]["ranges"] == [[0, 2 * CHUNK, "new"]]
    shown = woodfrog("inspect", "other@1")
    assert "only in this image" in shown.out
    assert "█" in shown.out or "#" in shown.out
    assert "only in this image" not in woodfrog("inspect", "other@1", "--no-picture").out
    assert "picture" not in woodfrog("inspect", "other@1", "--no-picture", "--json").json


def test_a_damaged_image_does_not_stop_the_picture_of_another(woodfrog: Woodfrog, store: ImageRepository) -> None:
    damaged = (store.path or Path()) / "images" / "small" / "2"
    damaged.chmod(0o600)
    damaged.write_bytes(b"no")
    assert woodfrog("inspect", "small@1", "--json").json["picture"]["compared_with_images"] == 1


def test_text_out_of_images_cannot_reach_the_terminal_by_diff(woodfrog: Woodfrog, store: ImageRepository) -> None:
    processes = list(small_images.manifest().processes)
    processes[1] = msgspec.structs.replace(processes[1], command_line=["\x1b]0;owned\x07"])
    small_images.write(store, "evil", processes=processes).close()
    shown = woodfrog("diff", "small@1", "evil@1")
    assert shown.code == 0, shown.err
    assert "\x1b" not in shown.out
    assert "\x07" not in shown.out


@pytest.mark.parametrize("verb", ["prune", "repair", "verify", "push", "pull", "cp", "diff", "inspect"])
def test_every_store_verb_has_help_json_and_a_store(woodfrog: Woodfrog, verb: str) -> None:
    shown = woodfrog(verb, "--help")
    assert shown.code == 0
    assert "--json" in shown.out
    assert "--store" in shown.out


def test_images_are_completed_from_the_store_alone(woodfrog: Woodfrog, store: ImageRepository) -> None:
    from woodfrog.cli import completion

    assert completion.images("small") == ["small@1", "small@2"]
    assert completion.images("x") == []
