"""The wheel holds the whole backend: every module imports from an installed copy alone."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from parallel_backend.version import version

ROOT = Path(__file__).parents[2]
BUILT_FROM = ("pyproject.toml", "README.md", "LICENSE", "requirements.txt")
IMPORT_ALL = """
import importlib, pkgutil, sys
import parallel_backend
names = ["parallel_backend", *(m.name for m in pkgutil.walk_packages(parallel_backend.__path__, "parallel_backend."))]
for name in names:
    importlib.import_module(name)
assert parallel_backend.__file__.startswith(sys.argv[1])
print(len(names))
"""


def python(*arguments: str, cwd: Path, **variables: str) -> str:
    """Run this Python outside of the checkout; returns what it prints."""
    environment = {**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(
        [sys.executable, "-P", *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the sources, since setuptools writes beside them."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(
        ROOT / "parallel_backend", source / "parallel_backend", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in BUILT_FROM:
        shutil.copy(ROOT / name, source)
    pip = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    python(*pip, "--wheel-dir", str(folder), ".", cwd=source)
    (built,) = folder.glob("*.whl")
    return built


def modules() -> list[str]:
    """The backend's files, relative to the checkout."""
    return sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "parallel_backend").rglob("*.py"))


def test_wheel_has_every_file_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert sorted(name for name in names if ".dist-info/" not in name) == modules()


@pytest.fixture(scope="module")
def target(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh folder with the wheel alone; what it requires is this Python's."""
    folder = tmp_path_factory.mktemp("installed")
    pip = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile", "--target", str(folder)]
    python(*pip, str(wheel), cwd=folder)
    return folder


def test_every_module_imports_from_the_installed_wheel(target, tmp_path):
    path = os.pathsep.join([str(target), os.environ.get("PYTHONPATH", "")])
    assert int(python("-c", IMPORT_ALL, str(target), cwd=tmp_path, PYTHONPATH=path)) == len(modules())


def test_the_installed_backend_answers(target, tmp_path):
    said = python("-m", "parallel_backend", "--help", cwd=tmp_path, PYTHONPATH=str(target))
    assert "usage: python -m parallel_backend" in said
    assert all(f"  {command} " in said for command in ("serve", "host", "status", "stop", "doctor"))
    assert python("-m", "parallel_backend", "--version", cwd=tmp_path, PYTHONPATH=str(target)) == said_version()


def said_version() -> str:
    return f"parallel-dit {version()}\n"


def test_the_wheels_command_answers(target, tmp_path):
    """``parallel-dit``, which pip makes of the wheel's entry point."""
    command = [sys.executable, "-P", str(target / "bin" / "parallel-dit"), "--version"]
    environment = {**os.environ, "PYTHONPATH": str(target)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, said_version()), done.stderr
