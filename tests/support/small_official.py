"""A server on which official templates run without a GPU: small random files under the official names.

ComfyUI builds some text encoders and VAEs at their published sizes whatever a file holds. ``shrink_core`` adds an
extension that lets it build small ones.
"""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from scripts import install
from scripts.comfy_paths import ROOT

INSIDE = ROOT / "tests" / "inside_comfyui"
DEADLINE = 900.0
EXTENSION = """import sys

sys.path.append({inside!r})
import pytest
from helpers import shrunk_core

shrunk_core.shrink(pytest.MonkeyPatch())
NODE_CLASS_MAPPINGS = {{}}
"""
WRITE = """import pathlib
import sys

sys.path.insert(0, {inside!r})
import conftest
import pytest
from helpers import official_files, shrunk_core

shrunk_core.shrink(pytest.MonkeyPatch())
for name in sys.argv[1:]:
    official_files.write(pathlib.Path(name))
"""


def shrink_core(base: Path) -> None:
    """Let the ComfyUI with this base folder build small text encoders and VAEs."""
    folder = base / "custom_nodes" / "small_core"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "__init__.py").write_text(EXTENSION.format(inside=str(INSIDE)), encoding="utf-8")


def write(comfyui: Path, files: Iterable[Path]) -> None:
    """Write small model files. What is in one follows from its name.

    Raises:
        subprocess.CalledProcessError: nothing is known of a name; its output has ComfyUI's words.
    """
    path = [install.packages_folder(comfyui), comfyui, ROOT]
    environment = os.environ | {
        "PARALLEL_DIT_INSIDE_COMFYUI": "1",
        "PYTHONPATH": os.pathsep.join([*map(str, path), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-P", "-W", "ignore", "-c", WRITE.format(inside=str(INSIDE)), *map(str, files)]
    subprocess.run(command, cwd=comfyui, env=environment, check=True, timeout=DEADLINE)
