"""Ranks to run on, and tiny checkpoints, both made once a session."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from parallel_backend.verify import examples
from tests.ranks import driver
from tests.support import families, tiny
from tests.support.pool import Pool

Checkpoints = Callable[..., Path]
Pools = Callable[[int], Pool]


@pytest.fixture(scope="session")
def _started() -> Iterator[dict[int, Pool]]:
    pools: dict[int, Pool] = {}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="session")
def pools(_started: dict[int, Pool]) -> Pools:
    """``pools(n)`` is a pool of ``n`` ranks."""
    return lambda size: _started.setdefault(size, Pool(size))


@pytest.fixture(scope="module", autouse=True)
def _without_models_of_other_modules(_started: dict[int, Pool]) -> Iterator[None]:
    """Let no rank keep models after a module: those of all modules do not fit into memory."""
    yield
    for pool in _started.values():
        pool.run(driver.forget)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """``checkpoints(heads=3)`` is the folder of a tiny pipeline of that kind."""
    written: dict[tuple[tuple[str, Any], ...], Path] = {}

    def checkpoint(**sizes: Any) -> Path:
        key = tuple(sorted(sizes.items()))
        if key not in written:
            folder = tmp_path_factory.mktemp("tiny") / "model"
            written[key] = tiny.write(folder, tiny.Tiny(**sizes))
        return written[key]

    return checkpoint


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """``folders(class_name, variant)`` is the folder of a family's small model."""
    written: dict[tuple[str, str], Path] = {}

    def folder(name: str, kind: str) -> Path:
        if (name, kind) not in written:
            written[name, kind] = examples.write_checkpoint(
                tmp_path_factory.mktemp("family"), families.module(name, kind)
            )
        return written[name, kind]

    return folder


@pytest.fixture
def streaming(pools: Pools) -> Iterator[Callable[[int], None]]:
    """``streaming(n)`` lets all blocks stream on the pool of ``n`` ranks."""
    on: list[int] = []

    def stream(ranks: int) -> None:
        on.append(ranks)
        pools(ranks).run(driver.stream_all, True)

    yield stream
    for ranks in on:
        pools(ranks).run(driver.stream_all, False)


@pytest.fixture
def compiled_eagerly(pools: Pools) -> Iterator[Callable[[int], None]]:
    """``compiled_eagerly(n)`` lets the pool of ``n`` ranks compile without inductor, which takes a minute."""
    on: list[int] = []

    def without(ranks: int) -> None:
        on.append(ranks)
        pools(ranks).run(driver.compile_with, "eager")

    yield without
    for ranks in on:
        pools(ranks).run(driver.compile_with, "inductor")
