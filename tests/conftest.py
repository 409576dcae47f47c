"""What all tests share: the checkout's root is a package for ComfyUI alone, and nothing of ours may run on."""

import os
import signal
import sys
from pathlib import Path

import pytest

from scripts import comfy_paths

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
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # devices "0,1,2" are CPU ranks on every machine
    config.pluginmanager.register(RootIsNoPackage())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that fixtures end the processes they started


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run what asks for ``comfyui_path`` with every version, or the newest; without any skip it and say why."""
    if "comfyui_path" not in metafunc.fixturenames:
        return
    reason = "no ComfyUI found: set COMFYUI_PATHS, or put one into ~/ComfyUI"
    missing = pytest.param(None, marks=pytest.mark.skip(reason=reason), id="none")
    versions = VERSIONS[-1:] if metafunc.definition.get_closest_marker("newest") else VERSIONS
    found = [pytest.param(path, id=comfy_paths.version(path)) for path in versions]
    metafunc.parametrize("comfyui_path", found or [missing], scope="session", indirect=True)


@pytest.fixture(scope="session")
def comfyui_path(request: pytest.FixtureRequest) -> Path:
    """A ComfyUI checkout; the test runs once for every version that is found."""
    path: Path = request.param
    return path
