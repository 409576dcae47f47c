"""What mypy says of nodes/ with a checkout's source beside it, which it reads and does not run."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from scripts import comfy_paths

CONFIG = Path(__file__).with_name("mypy.ini")
CACHES = comfy_paths.ROOT / ".mypy_cache" / "core"
DEADLINE = 900.0
_OURS = re.compile(r'is overriding a method in class "(?!comfy)')
"""Only methods of ComfyUI have to be marked as overridden."""


def messages(comfyui: Path, *targets: str) -> list[str]:
    """Return each error as ``nodes/file.py:line: error: text``. There is none if all that mypy sees is as we use it.

    Args:
        comfyui: the checkout.
        targets: what to check, in mypy's arguments; by default ``nodes/``.

    Raises:
        RuntimeError: mypy is not installed, or it fails.
    """
    command = [sys.executable, "-m", "mypy", "--config-file", str(CONFIG), "--no-error-summary"]
    command += ["--cache-dir", str(_cache(comfy_paths.version(comfyui)))]
    # nodes/ imports the backend relatively. In any other folder it would also hide ComfyUI's module of its name.
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "parallel_dit").symlink_to(comfy_paths.ROOT)
        done = subprocess.run(
            [*command, *(targets or ("-p", "parallel_dit.nodes"))],
            cwd=folder,
            env={**os.environ, "MYPYPATH": str(comfyui)},
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=False,
        )
    if done.returncode not in (0, 1) or done.stderr:
        raise RuntimeError(f"mypy cannot check nodes/ with {comfyui}: {done.stderr}{done.stdout}")
    lines = [line.removeprefix("parallel_dit/") for line in done.stdout.splitlines() if ": error: " in line]
    return [line for line in lines if not _OURS.search(line)]


def _cache(version: str) -> Path:
    """Return mypy's cache of a checkout. A new one begins as a copy of another's, most of which is torch."""
    cache, others = CACHES / version, [each for each in CACHES.glob("*") if each.is_dir()]
    if others and not cache.exists():
        shutil.copytree(others[0], cache)
    return cache
