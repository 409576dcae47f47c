"""A copy of ComfyUI's Python files, in which differences are planted."""

import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def copy_of_core(comfyui_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a ComfyUI that the contract is about; a test that changes one has to change it back."""
    copy = tmp_path_factory.mktemp("core") / "ComfyUI"
    for folder in ("comfy", "comfy_api", "comfy_extras", "comfy_execution"):
        shutil.copytree(comfyui_path / folder, copy / folder, ignore=_all_but_python)
    for file in comfyui_path.glob("*.py"):
        shutil.copy(file, copy)
    return copy


def _all_but_python(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if not name.endswith(".py") and not (Path(folder) / name).is_dir()]
