"""What all tests share: the checkout's root is a package for ComfyUI alone, and nothing of ours may run on."""

import signal
from pathlib import Path

import pytest

from scripts import comfy_paths
from tests.support import gpus

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = sorted(comfy_paths.candidates(), key=comfy_paths.release)


class RootIsNoPackage:
    """Keep pytest from importing the root's ``__init__.py``.

    Only ComfyUI imports it, under the name of whatever folder the user chose. As a plugin object, since
    pytest asks a ``conftest.py`` only about what lies beside or below it.
    """

    @pytest.hookimpl(tryfirst=True)
    def pytest_collect_directory(self, path: Path, parent: pytest.Collector) -> pytest.Collector | None:
        return pytest.Dir.from_parent(parent, path=path) if path == ROOT else None


def pytest_configure(config: pytest.Config) -> None:
    gpus.hide()
    config.pluginmanager.register(RootIsNoPackage())
    # So that the run ends, and fixtures end the processes they started.
    signal.signal(signal.SIGTERM, lambda *_: pytest.exit("SIGTERM", returncode=143))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run what asks for ``comfyui_path`` with every version; without any skip it and say why."""
    if "comfyui_path" not in metafunc.fixturenames:
        return
    reason = "no ComfyUI found: set COMFYUI_PATHS, or put one into ~/ComfyUI"
    missing = pytest.param(None, marks=pytest.mark.skip(reason=reason), id="none")
    found = [pytest.param(path, id=comfy_paths.version(path)) for path in VERSIONS]
    metafunc.parametrize("comfyui_path", found or [missing], scope="session", indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave ``newest`` tests out with older versions."""
    older = [item for item in items if item.get_closest_marker("newest") and _path_of(item) in VERSIONS[:-1]]
    config.hook.pytest_deselected(items=older)
    items[:] = [item for item in items if item not in older]


def _path_of(item: pytest.Item) -> Path | None:
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("comfyui_path") if callspec else None


@pytest.fixture(scope="session")
def comfyui_path(request: pytest.FixtureRequest) -> Path:
    """A ComfyUI checkout; the test runs once for every version that is found."""
    path: Path = request.param
    return path
