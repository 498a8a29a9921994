"""Catalogues of images: a kernel is listed only where the driver is known to run what was analysed."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from woodfrog.kernels import image_catalogue, templates, triton_cache
from woodfrog.kernels.reader import CodeObject

PTX = """
.version 8.0
.target {target}
.address_size 64
.visible .entry {name}(.param .u64 to, .param .u32 value)
{{
    .reg .b64 %rd<3>;
    .reg .b32 %r<3>;
    ld.param.u64 %rd1, [to];
    ld.param.u32 %r1, [value];
    cvta.to.global.u64 %rd2, %rd1;
    {body}
    ret;
}}
"""
BOUNDED = "st.global.u32 [%rd2], %r1;"
ANYWHERE = "ld.global.u64 %rd1, [%rd2]; st.global.u32 [%rd1], %r1;"


def text(target: str = "sm_90", name: str = "one", body: str = BOUNDED) -> bytes:
    return PTX.format(target=target, name=name, body=body).encode()


def ptx(target: str) -> CodeObject:
    data = text(target)
    return CodeObject("ptx", target, "none", len(data), data, target)


def cubin(architecture: str, said: bytes = b"") -> CodeObject:
    return CodeObject("cubin", architecture, "none", 10, b"\x7fELF" + said, architecture)


def test_an_image_becomes_a_list_and_a_library_and_is_taken_away(tmp_path: Path) -> None:
    (tmp_path / "k.image").write_bytes(text())
    assert image_catalogue.build(tmp_path, "k") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["k.kernels", "k.so"]
    assert (tmp_path / "k.kernels").read_text().splitlines() == [
        "woodfrog-kernels 1", "kernel 0 0 1 12 one", "parameter 0 8", "parameter 8 4", "end",
    ]  # fmt: skip
    assert stat.S_IMODE((tmp_path / "k.so").stat().st_mode) == 0o700


@pytest.mark.parametrize("data", [b"", b"no code", b"\x7fELF\0\0\0\0", b".version 8.0\n.target sm_90\nnonsense"])
def test_what_cannot_be_analysed_becomes_an_empty_list(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "k.image").write_bytes(data)
    assert image_catalogue.build(tmp_path, "k") == 0
    assert (tmp_path / "k.kernels").read_text() == "woodfrog-kernels 1\nend\n"
    assert not (tmp_path / "k.image").exists()


@pytest.fixture
def cached(tmp_path: Path) -> Path:
    """A cache of Triton's with one kernel."""
    entry = tmp_path / "cache" / "hash"
    entry.mkdir(parents=True)
    (entry / "one.cubin").write_bytes(b"\x7fELFcode")
    (entry / "one.ptx").write_bytes(text())
    for path in (entry, *entry.iterdir()):
        path.chmod(0o700)
    return entry.parent


def test_the_machine_code_of_tritons_cache_has_the_ptx_beside_it(cached: Path) -> None:
    assert list(image_catalogue._usable([cubin("sm_90", b"code")], [cached])) == [(text(), 0)]
    assert list(image_catalogue._usable([cubin("sm_90", b"edoc")], [cached])) == []


@pytest.mark.parametrize("name", ["hash", "hash/one.cubin", "hash/one.ptx"])
def test_a_cache_that_others_may_write_to_is_not_believed(name: str, cached: Path) -> None:
    (cached / name).chmod(0o722)
    assert list(image_catalogue._usable([cubin("sm_90", b"code")], [cached])) == []


def test_tritons_cache_is_where_the_environment_says(tmp_path: Path) -> None:
    inductor = tmp_path / "torchinductor_frog" / "triton" / "0"
    inductor.mkdir(parents=True)
    home = {"HOME": "/pond", "TMPDIR": str(tmp_path), "USER": "frog"}
    assert triton_cache.folders(home) == [Path("/pond/.triton/cache"), inductor]
    moved = {**home, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "torchinductor_frog"), "USER": "toad"}
    assert triton_cache.folders(moved) == [Path("/pond/.triton/cache"), inductor]
    assert triton_cache.folders({**home, "TRITON_CACHE_DIR": "/a", triton_cache.FOLDERS: "/b:/c"}) == [
        Path("/b"), Path("/c"), Path("/a"),
    ]  # fmt: skip


def test_machine_code_from_a_file_has_the_ptx_beside_that_file(cached: Path, tmp_path: Path) -> None:
    (tmp_path / "k.origin").write_text(str(cached / "hash" / "one.cubin"))
    assert image_catalogue._cache_of(tmp_path / "k.origin") == [cached]
    assert image_catalogue._cache_of(tmp_path / "l.origin") == []
    (tmp_path / "k.image").write_bytes(text())
    assert image_catalogue.build(tmp_path, "k") == 1
    assert not (tmp_path / "k.origin").exists()


@pytest.mark.parametrize(
    ("codes", "versions"),
    [
        ([ptx("sm_90")], [0]),
        ([ptx("sm_90a")], [0]),
        ([ptx("sm_80"), ptx("sm_90")], [80, 90]),
        ([cubin("sm_80"), cubin("sm_90"), ptx("sm_90")], [90]),
        ([cubin("sm_90", b"-arch sm_90a "), ptx("sm_90")], []),
        ([cubin("sm_90", b"-arch sm_90a "), ptx("sm_90a")], [90]),
        ([cubin("sm_90"), ptx("sm_90a")], []),
        ([cubin("sm_100", b"sm_100f"), ptx("sm_100"), ptx("sm_90")], [90]),
        ([ptx("sm_90"), ptx("sm_90a")], []),
        ([cubin("sm_90"), cubin("sm_80")], []),
    ],
)
def test_ptx_is_used_for_what_the_driver_makes_of_it_only(codes: list[CodeObject], versions: list[int]) -> None:
    assert [version for _, version in image_catalogue._usable(codes)] == versions


def test_a_kernel_that_could_not_be_analysed_is_not_bounded() -> None:
    (one,) = templates(text())
    assert image_catalogue.is_bounded(one)
    (called,) = templates(text(body="bra.uni nowhere;"))
    assert not image_catalogue.is_bounded(called)
