"""What woodfrog-enter leaves in processes for ever has another version when it is another thing.

The next woodfrog finds it there, and uses it if it says that it is its own (native/enter/blob/layout.hpp). So the
sources are held against native/enter/blob/versions.txt: not the bytes, which every compiler makes differently.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from dataclasses import dataclass
from pathlib import Path

import copier
import pytest

ENTER = Path(__file__).resolve().parents[3] / "native" / "enter"
SOURCES = ("layout.hpp", "copy.cpp", "flat.ld")
APART = 1 << 20  # from one version's place to the next one's: more than all of it takes, stacks too
TOKEN = re.compile(r'R"\((?:.|\n)*?\)"|"(?:\\.|[^"\\\n])*"|\w+|\S')
COMMENT = re.compile(r'(R"\((?:.|\n)*?\)"|"(?:\\.|[^"\\\n])*")|//[^\n]*|/\*(?:.|\n)*?\*/')


@dataclass(frozen=True)
class Version:
    """One line of versions.txt."""

    magic: str
    place: int
    digest: str

    def __str__(self) -> str:
        return f"{self.magic} {self.place:#x} {self.digest}"


def tokens(text: str) -> str:
    """C++ or a linker script without comments, and one space between any two words or signs."""
    bare = COMMENT.sub(lambda match: match[1] or " ", text)
    return " ".join(TOKEN.findall(bare))


def build_rules(text: str) -> str:
    """Of CMakeLists.txt: how the code is compiled and linked, but for what warns only."""
    rules = text[text.index("set(blob_options") : text.index('OUTPUT "${made}/code.cpp"')]
    bare = re.sub(r"#[^\n]*", " ", rules)
    return " ".join(word for word in bare.split() if not word.startswith("-W") or word.startswith("-Wl,"))


def digest(folder: Path) -> str:
    """Of all that makes the code and says what lies where."""
    parts = [tokens((folder / "blob" / name).read_text()) for name in SOURCES]
    parts.append(build_rules((folder / "CMakeLists.txt").read_text()))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def constant(layout: str, name: str) -> int:
    """A number of layout.hpp."""
    found = re.search(rf"constexpr std::uint64_t {name} = (0x[0-9a-f']+);", layout)
    assert found is not None, name
    return int(found[1].replace("'", ""), 16)


def current(folder: Path) -> Version:
    layout = (folder / "blob" / "layout.hpp").read_text()
    magic = constant(layout, "magic").to_bytes(8, "little").decode("ascii")
    return Version(magic, constant(layout, "place"), digest(folder))


def versions(folder: Path) -> list[Version]:
    lines = (folder / "blob" / "versions.txt").read_text().splitlines()
    words = [line.split() for line in lines if line and not line.startswith("#")]
    return [Version(magic, int(place, 16), found) for magic, place, found in words]


def complaint(folder: Path) -> str:
    """What is wrong with the version, and what to do; empty if nothing is."""
    now, known = current(folder), versions(folder)
    if known and known[-1] == now:
        return ""
    if any((one.magic, one.place) == (now.magic, now.place) for one in known):
        return (
            f"The code or layout of native/enter/blob is another one, and its version is still {now.magic}. Processes "
            "have the former one for ever: give layout.hpp another `magic` (the header in copy.cpp too) and another "
            "`place`, run this test again, and add the line that it shows to native/enter/blob/versions.txt."
        )
    if any(one.magic == now.magic or one.place == now.place for one in known):
        return "Of `magic` and `place` in native/enter/blob/layout.hpp only one is another: both must be."
    return f"This version is not in native/enter/blob/versions.txt. Add: {now}"


def test_code_or_layout_that_changed_has_another_version() -> None:
    assert complaint(ENTER) == ""


def test_versions_never_meet() -> None:
    known = versions(ENTER)
    numbers = [int(one.magic.removeprefix("WFCOPY")) for one in known]
    assert numbers == list(range(numbers[0], numbers[0] + len(known)))
    assert all(one.magic == f"WFCOPY{number:02}" for one, number in zip(known, numbers, strict=True))
    places = sorted(one.place for one in known)
    assert all(second - first >= APART for first, second in itertools.pairwise(places))


def test_the_tests_look_where_the_code_is() -> None:
    assert current(ENTER).place == copier.PLACE


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    (tmp_path / "blob").mkdir()
    for name in ("CMakeLists.txt", "blob/versions.txt", *[f"blob/{name}" for name in SOURCES]):
        (tmp_path / name).write_bytes((ENTER / name).read_bytes())
    return tmp_path


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def test_comments_and_white_space_are_no_change(copied: Path) -> None:
    for name in ("copy.cpp", "layout.hpp"):
        edit(copied / "blob" / name, "\n}", '   // another remark, "with marks"\n  /* and\none */ }\n')
    edit(
        copied / "CMakeLists.txt",
        "  list(APPEND blob_options -Werror)",
        "  # a remark\n list(APPEND blob_options -Werror)",
    )
    assert complaint(copied) == ""


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("blob/layout.hpp", "most_ranges = 8", "most_ranges = 9"),
        (
            "blob/layout.hpp",
            "std::uint32_t done;\n    std::uint32_t busy;",
            "std::uint32_t busy;\n    std::uint32_t done;",
        ),
        ("blob/copy.cpp", "patience_us = 100", "patience_us = 101"),
        ("blob/copy.cpp", "andq $-16, %rsp", "andq $-32, %rsp"),
        ("blob/copy.cpp", "rep movsb", "rep movsq"),
        ("blob/flat.ld", "*(.text.header) *(.text", "*(.text"),
        ("CMakeLists.txt", "-mgeneral-regs-only ", ""),
    ],
)
def test_what_changes_the_code_or_layout_is_noticed(copied: Path, name: str, old: str, new: str) -> None:
    edit(copied / name, old, new)
    assert "its version is still WFCOPY" in complaint(copied)


def test_a_new_version_needs_magic_and_place_and_a_line(copied: Path) -> None:
    last, layout = versions(copied)[-1], copied / "blob" / "layout.hpp"
    number = int(last.magic[6:]) + 1
    text = layout.read_text().replace("most_ranges = 8", "most_ranges = 9")
    magic = f"0x{int.from_bytes(f'WFCOPY{number:02}'.encode(), 'little'):x}"
    layout.write_text(re.sub(r"(uint64_t magic = )[0-9a-fx']+", rf"\g<1>{magic}", text))
    assert "only one is another" in complaint(copied)
    layout.write_text(re.sub(r"(uint64_t place = )[0-9a-fx']+", rf"\g<1>{last.place + APART:#x}", layout.read_text()))
    wanted = complaint(copied)
    assert wanted.startswith("This version is not in")
    with (copied / "blob" / "versions.txt").open("a") as file:
        file.write(wanted.partition("Add: ")[2] + "\n")
    assert complaint(copied) == ""
