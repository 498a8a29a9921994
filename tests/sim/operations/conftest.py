"""A private daemon for each test; the targets are compiled once a session."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))

from product import Product, build_targets, new_root


@pytest.fixture(scope="session")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_targets(tmp_path_factory)


@pytest.fixture
def make_product(targets: Path) -> Iterator[Callable[..., Product]]:
    made: list[Product] = []

    def make(**settings: object) -> Product:
        made.append(Product(new_root(), targets, **settings))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for product in made:
        product.close()


@pytest.fixture
def product(make_product: Callable[..., Product]) -> Product:
    return make_product()
