"""What all tests share: ComfyUI versions, hidden GPUs, and an orderly end on SIGTERM."""

import gc
import os
import re
import signal
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from scripts import comfy_paths
from tests.support import daily, gpus

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = sorted(comfy_paths.candidates(), key=comfy_paths.release)


class RootIsNoPackage:
    """Keep pytest from importing the root's ``__init__.py``.

    Only ComfyUI imports it, under whatever name the user gave the folder. This is a plugin object, because pytest asks
    a ``conftest.py`` only about paths beside or below it.
    """

    @pytest.hookimpl(tryfirst=True)
    def pytest_collect_directory(self, path: Path, parent: pytest.Collector) -> pytest.Collector | None:
        return pytest.Dir.from_parent(parent, path=path) if path == ROOT else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cases", type=int, help="run at most so many cases of each test that is not marked every_case")


def pytest_configure(config: pytest.Config) -> None:
    gpus.hide()
    os.environ["PARALLEL_DIT_SETTINGS"] = os.devnull  # what somebody has chosen in the page of this machine
    os.environ["PARALLEL_DIT_SPARES"] = "0"  # they take memory and time: only the tests of spare ranks start some
    config.pluginmanager.register(RootIsNoPackage())
    # The run ends in order, so that fixtures end the processes that they started.
    signal.signal(signal.SIGTERM, lambda *_: pytest.exit("SIGTERM", returncode=143))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that uses ``comfyui_path`` with the oldest and the newest ComfyUI, or with each if it is marked so.

    Without any ComfyUI, skip it with the reason.
    """
    if "comfyui_path" not in metafunc.fixturenames:
        return
    reason = "no ComfyUI found: set COMFYUI_PATHS, or put one into ~/ComfyUI"
    skipped = pytest.param(None, marks=pytest.mark.skip(reason=reason), id="none")
    every = any(metafunc.definition.get_closest_marker(name) for name in ("grid", "each_version"))
    paths = VERSIONS if every else comfy_paths.ends(VERSIONS)
    versions = [pytest.param(path, id=comfy_paths.version(path)) for path in paths]
    metafunc.parametrize("comfyui_path", versions or [skipped], scope="session", indirect=True)


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests marked ``newest`` for all versions but the newest, and ``grid`` or ``long`` unless ``-m`` does."""
    older = "not newest" in config.option.markexpr  # what does not run there takes no case's place
    some = [item for item in items if not (older and item.get_closest_marker("newest"))]
    daily.mark_long(some, version_of=_path_of, at_most=config.option.cases)
    unwanted = [item for item in items if item.get_closest_marker("newest") and _path_of(item) in VERSIONS[:-1]]
    for name in {"grid", "long"} - set(config.option.markexpr.split()):
        unwanted += [item for item in items if item.get_closest_marker(name)]
    config.hook.pytest_deselected(items=unwanted)
    items[:] = [item for item in items if item not in unwanted]


def pytest_collection_finish() -> None:
    gc.freeze()  # what has been imported is never garbage, and looking at it takes a third of a second each time


_TOO_OLD = re.compile(r"\w+ needs diffusers [\d.]+, and [\w.]+ is installed")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, None, None]:
    """With the lowest versions, skip what needs a newer diffusers than the one that is installed."""
    with _skipped_where_too_old():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, None, None]:
    """See ``pytest_runtest_setup``."""
    with _skipped_where_too_old():
        return (yield)


@contextmanager
def _skipped_where_too_old() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if found := _TOO_OLD.search(str(error)):
            pytest.skip(found.group())
        raise


def _path_of(item: pytest.Item) -> Path | None:
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("comfyui_path") if callspec else None


@pytest.fixture(scope="session")
def comfyui_path(request: pytest.FixtureRequest) -> Path:
    """A ComfyUI checkout. The test runs once for each version that is found."""
    path: Path = request.param
    return path
