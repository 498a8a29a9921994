"""Imports run one way (DESIGN: cli → daemon → operations → target, driver, cpu, image → store), in every function too.

What is imported only for a type checker counts as well: a type that a layer has to know is a dependency of it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src" / "woodfrog"

# Lowest first. A part may import what is in a line above its own, never what is in its own line or below.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "__version__", "_native", "logtail"),
    ("faults", "results", "sizes"),
    ("store",),
    ("image", "target", "driver", "cpu"),
    ("operations",),
    ("daemon",),
    ("launch", "image_api"),
    ("api", "doctor", "trace"),
    ("store_api",),
    ("periodic",),
    ("self_checkpoint", "restore_news", "demo"),
    ("cli",),
    ("__main__",),
)
RANK = {part: rank for rank, layer in enumerate(LAYERS) for part in layer}
# Reads programs, not processes: it works without the rest, and the rest takes it or leaves it.
ALONE = "kernels"
ALONE_MAY = {"errors", "_native"}

Import = tuple[str, str]  # (the module that imports, the module or name of woodfrog that it imports)


def module_of(path: Path) -> str:
    parts = ("woodfrog", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path, text: str) -> Iterator[Import]:
    """Every import of woodfrog in the file, relative ones resolved, wherever in it they stand."""
    module = module_of(path)
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(text)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            base = ".".join(filter(None, (base, node.module)))
            names = [f"{base}.{alias.name}" for alias in node.names]
        yield from ((module, name) for name in names if name.split(".")[0] == "woodfrog")


def part_of(name: str) -> str | None:
    """The part of woodfrog that a module belongs to; None for the package itself."""
    return name.split(".")[1] if "." in name else None


def all_imports() -> list[Import]:
    return [found for path in sorted(SOURCE.rglob("*.py")) for found in imports_of(path, path.read_text())]


def fault_of(importer: str, imported: str) -> str | None:
    """What is wrong with this import, if anything."""
    source, target = part_of(importer), part_of(imported)
    if source is None or source == target:
        return None  # the package itself offers names of all of its parts, when they are asked for
    if target is None:
        return f"{importer} imports the whole of woodfrog"
    if source == ALONE:
        return None if target in ALONE_MAY else f"{importer} imports {imported}, and {ALONE} stands alone"
    if source not in RANK or (target not in RANK and target != ALONE):
        return f"{importer} imports {imported}: {source if source not in RANK else target} is in no layer of this test"
    if target == ALONE or RANK[target] < RANK[source]:
        return None
    return f"{importer} imports {imported}, which is not below it"


def circles(edges: dict[str, set[str]]) -> set[frozenset[str]]:
    """Sets of two and more that each reach each other."""
    reached: dict[str, set[str]] = {}
    for start in edges:
        seen: set[str] = set()
        waiting = list(edges[start])
        while waiting:
            if (part := waiting.pop()) not in seen:
                seen.add(part)
                waiting.extend(edges.get(part, ()))
        reached[start] = seen
    found = {frozenset(other for other in reached[part] if part in reached.get(other, ())) for part in edges}
    return {circle for circle in found if len(circle) > 1}


def test_imports_run_one_way() -> None:
    faults = [fault for importer, imported in all_imports() if (fault := fault_of(importer, imported))]
    assert faults == []


def test_there_is_no_circle_between_the_parts() -> None:
    edges: dict[str, set[str]] = {}
    for importer, imported in all_imports():
        source, target = part_of(importer), part_of(imported)
        if source is not None and target is not None and source != target:
            edges.setdefault(source, set()).add(target)
    assert circles(edges) == set()


def test_every_part_of_the_package_has_its_layer() -> None:
    parts = {part_of(module_of(path)) for path in SOURCE.rglob("*.py")} - {None, ALONE}
    assert parts == set(RANK) - {"__version__"}


def test_an_import_against_the_direction_would_be_found() -> None:
    """The walker itself: function-local, relative, for types only, and of a whole package."""
    path = SOURCE / "store" / "example.py"
    wrong = (
        "def f():\n    from woodfrog.image import layout",
        "from ..image import layout",
        "from .. import image",
        "if TYPE_CHECKING:\n    import woodfrog.image.layout",
        "import woodfrog",
        "from woodfrog import api",
    )
    for text in wrong:
        assert [fault_of(*found) for found in imports_of(path, text)] != [None], text
    for text in ("from woodfrog.errors import UsageError", "from . import files", "from woodfrog.store import files"):
        assert [fault_of(*found) for found in imports_of(path, text)] == [None], text
    assert fault_of("woodfrog.cpu.x", "woodfrog.image.manifest") is not None
    assert fault_of("woodfrog.kernels.x", "woodfrog.store.names") is not None
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == {frozenset({"b", "c"})}
