"""What all tests share: the checkout's root is a package for ComfyUI alone, and nothing of ours may run on."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


class RootIsNoPackage:
    """Keep pytest from importing the root's ``__init__.py``.

    Only ComfyUI imports it, under the name of whatever folder the user chose. As a plugin object, since
    pytest asks a ``conftest.py`` only about what lies beside or below it.
    """

    @pytest.hookimpl(tryfirst=True)
    def pytest_collect_directory(self, path: Path, parent: pytest.Collector) -> pytest.Collector | None:
        return pytest.Dir.from_parent(parent, path=path) if path == ROOT else None


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(RootIsNoPackage())
