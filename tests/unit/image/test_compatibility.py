"""What refuses a restore here, what only warns, and that nothing is refused that fits."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import small_images

from woodfrog.errors import RefusedError
from woodfrog.image import compatibility
from woodfrog.image.compatibility import Gpu, Machine, Severity
from woodfrog.image.manifest import Environment

MANIFEST = small_images.manifest()
GPUS = tuple(Gpu(i, small_images.UUIDS[i], "GPU", 1 << 31, 9, 0) for i in (0, 1))
HERE = Machine(
    architecture="x86_64",
    kernel="6.18.0",
    cuda_version=13000,
    driver_release="580.159.04",
    gpus=GPUS,
    criu_version="4.1.1",
    woodfrog_version="0.1.0",
    uid=MANIFEST.environment.uid,
)


def judge(gpu_map: dict[str, str] | None = None, **changes: Any) -> list[tuple[str, str]]:
    findings = compatibility.judge(MANIFEST, dataclasses.replace(HERE, **changes), gpu_map)
    return [(finding.severity.value, finding.field) for finding in findings]


def gpu(index: int, **changes: Any) -> Gpu:
    return dataclasses.replace(GPUS[index], **changes)


def test_the_machine_that_wrote_it_is_told_nothing() -> None:
    assert judge() == []


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"architecture": "aarch64"}, "host.architecture"),
        ({"cuda_version": 12090}, "driver.cuda_version"),
        ({"driver_release": "575.57.08"}, "driver.release"),
        ({"simulated": True}, "driver.simulated"),
        ({"gpus": ()}, "devices"),
        ({"gpus": GPUS[:1]}, "devices"),
        ({"gpus": (GPUS[0], gpu(1, name="Other"))}, "devices.name"),
        ({"gpus": (GPUS[0], gpu(1, compute_minor=1))}, "devices.name"),
        ({"gpus": (GPUS[0], gpu(1, total_bytes=4096))}, "devices.total_bytes"),
        ({"criu_version": None}, "cpu.version"),
        ({"criu_version": "4.0"}, "cpu.version"),
        ({"uid": MANIFEST.environment.uid + 1}, "environment.uid"),
        ({"gpus": (GPUS[0], gpu(1, uuid="33" * 16)), "driver_release": "575.1", "remap_from": 580}, "devices.uuid"),
    ],
)
def test_a_machine_that_cannot_is_refused(changes: dict[str, Any], field: str) -> None:
    assert (Severity.REFUSED.value, field) in judge(**changes)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"kernel": "6.1.0"}, "host.kernel"),
        ({"driver_release": "581.1"}, "driver.release"),
        ({"cuda_version": None}, "driver"),
        ({"gpus": None}, "devices"),
        ({"gpus": (GPUS[0], gpu(1, total_bytes=1 << 30))}, "devices.total_bytes"),
        ({"gpus": (GPUS[0], gpu(1, uuid="33" * 16))}, "devices.uuid"),
        ({"woodfrog_version": "0.0.9"}, "woodfrog_version"),
    ],
)
def test_a_machine_that_differs_harmlessly_is_only_warned(changes: dict[str, Any], field: str) -> None:
    found = judge(**changes)
    assert ("warning", field) in found
    assert all(severity == "warning" for severity, _ in found)


def test_one_release_written_two_ways_is_one_release() -> None:
    assert judge(driver_release="580.159.4") == []


def test_root_may_restore_everybodys_and_newer_criu_everything() -> None:
    assert judge(uid=0, criu_version="4.10") == []


def test_what_is_gone_from_the_file_system_is_a_warning() -> None:
    environment = Environment(uid=HERE.uid, gid=0, working_directory="/nowhere", log_path="/nowhere/log")
    findings = compatibility.judge(small_images.manifest(environment=environment), HERE)
    assert [f.field for f in findings] == ["environment.working_directory", "environment.log_path"]


def test_a_gpu_map_is_followed_and_its_mistakes_are_refused() -> None:
    swap = {small_images.UUIDS[0]: small_images.UUIDS[1], small_images.UUIDS[1]: small_images.UUIDS[0]}
    assert judge(swap) == [("warning", "devices.uuid")] * 2
    assert judge({"44" * 16: small_images.UUIDS[0]}) == [("refused", "devices")]
    assert judge({small_images.UUIDS[0]: "44" * 16})[0] == ("refused", "devices")
    assert judge(dict.fromkeys(small_images.UUIDS, small_images.UUIDS[0])) == [("refused", "devices")]


def test_an_image_without_a_cpu_side_is_not_restored() -> None:
    findings = compatibility.judge(small_images.manifest(cpu=None), HERE)
    assert [(f.severity, f.field) for f in findings] == [(Severity.REFUSED, "cpu")]


def test_a_refusal_lists_every_reason() -> None:
    findings = compatibility.judge(MANIFEST, dataclasses.replace(HERE, architecture="aarch64", criu_version=None))
    with pytest.raises(RefusedError, match=r"aarch64.*CRIU") as raised:
        compatibility.require(findings, "small@1")
    assert len(raised.value.details["findings"]) == 2
    compatibility.require([], "small@1")
