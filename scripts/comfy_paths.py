"""Where a ComfyUI may lie on this machine."""

import math
import os
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CLONE_URL = "https://github.com/comfyanonymous/ComfyUI"
CLONE_TAG = "v0.3.64"
OLDEST = (0, 3, 64)


def is_comfyui(path: Path) -> bool:
    """Whether a folder is a ComfyUI checkout."""
    return (path / "main.py").is_file() and (path / "comfyui_version.py").is_file()


def version(path: Path) -> str:
    """A checkout's version, such as ``"0.3.64"``."""
    found = re.search(r"""__version__ *= *["']([^"']+)""", (path / "comfyui_version.py").read_text(encoding="utf-8"))
    return found.group(1) if found else "unknown"


def release(path: Path) -> tuple[float, ...]:
    """A checkout's version, to be compared; an unknown one counts as the newest."""
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", version(path))
    return tuple(map(int, numbers.groups())) if numbers else (math.inf,)


def is_new_enough(path: Path) -> bool:
    """Whether a checkout has the node interface that the extension uses."""
    return release(path) >= OLDEST


def cache_folder() -> Path:
    """Where a clone of our own is kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "parallel-dit" / f"ComfyUI-{CLONE_TAG}"


def candidates() -> list[Path]:
    """Every ComfyUI that is there and new enough, in the order of preference, each once."""
    return [path for path in checkouts() if is_new_enough(path)]


def checkouts() -> list[Path]:
    """``candidates``, and those that are too old.

    ``COMFYUI_PATHS`` names several (separated as ``PATH`` is); else ``COMFYUI_PATH`` names one; without either:
    the one that this checkout sits in, ``~/ComfyUI*``, and the clone in the cache folder.

    Raises:
        SystemExit: a folder named by a variable is no ComfyUI; the script ends with this one sentence.
    """
    if several := os.environ.get("COMFYUI_PATHS"):
        return [_named("COMFYUI_PATHS", part) for part in several.split(os.pathsep) if part]
    if one := os.environ.get("COMFYUI_PATH"):
        return [_named("COMFYUI_PATH", one)]
    paths = [ROOT.parent.parent, *sorted(Path.home().glob("ComfyUI*")), cache_folder()]
    return list(dict.fromkeys(path.resolve() for path in paths if is_comfyui(path)))


def are_named() -> bool:
    """Whether a variable says which ones to take, so that no other is to be looked for."""
    return bool(os.environ.get("COMFYUI_PATHS") or os.environ.get("COMFYUI_PATH"))


def _named(variable: str, text: str) -> Path:
    path = Path(text).expanduser().absolute()
    if not is_comfyui(path):
        raise SystemExit(f"{variable} names {path}, which is no ComfyUI: it has no main.py or no comfyui_version.py.")
    return path
