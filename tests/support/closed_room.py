"""Processes that cannot import what only several machines need, ``parallel_backend.machines``."""

import os
from pathlib import Path

from scripts.comfy_paths import ROOT
from scripts.comfy_server import CPU_SHIM

SENTENCE = "the room of other machines is closed"
"""What the error says where a process tries."""

_CLOSED = f"""
import os, runpy, sys
from pathlib import Path

class Closed:
    '''Lets nobody import the room, whatever the folder of the extension is called.'''

    def find_spec(self, name, path=None, target=None):
        if name.endswith("parallel_backend.machines"):
            raise ImportError("{SENTENCE}")

Path(__file__).with_name(f"{{os.getpid()}}.seen").write_text(" ".join(sys.orig_argv))
sys.meta_path.insert(0, Closed())
runpy.run_path({str(CPU_SHIM / "sitecustomize.py")!r}, run_name="sitecustomize")
"""


def python_path(folder: Path, *more: Path) -> str:
    """Return the ``PYTHONPATH`` of processes that cannot import the room, and note each in ``folder``."""
    (folder / "sitecustomize.py").write_text(_CLOSED)
    return os.pathsep.join(map(str, (folder, *more, ROOT)))


def watched(folder: Path) -> dict[int, str]:
    """Return the command lines of the processes that started with ``python_path(folder)``, by their ids."""
    return {int(file.stem): file.read_text() for file in folder.glob("*.seen")}
