"""Where a ComfyUI may lie on this machine."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CLONE_URL = "https://github.com/comfyanonymous/ComfyUI"
CLONE_TAG = "v0.3.64"


def is_comfyui(path: Path) -> bool:
    """Whether a folder is a ComfyUI checkout."""
    return (path / "main.py").is_file() and (path / "comfyui_version.py").is_file()


def version(path: Path) -> str:
    """A checkout's version, such as ``"0.3.64"``."""
    namespace: dict[str, str] = {}
    exec((path / "comfyui_version.py").read_text(encoding="utf-8"), namespace)
    return namespace["__version__"]


def cache_folder() -> Path:
    """Where a clone of our own is kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "parallel-dit" / f"ComfyUI-{CLONE_TAG}"


def candidates() -> list[Path]:
    """Every ComfyUI that is there, in the order of preference, each once.

    ``COMFYUI_PATHS`` (separated as ``PATH`` is) or ``COMFYUI_PATH`` name them; without either: the one that this
    checkout sits in, ``~/ComfyUI*``, and the clone in the cache folder.

    Raises:
        FileNotFoundError: a folder named by a variable is no ComfyUI.
    """
    named = os.environ.get("COMFYUI_PATHS") or os.environ.get("COMFYUI_PATH")
    if named:
        paths = [Path(part).expanduser() for part in named.split(os.pathsep) if part]
        wrong = [str(path) for path in paths if not is_comfyui(path)]
        if wrong:
            raise FileNotFoundError(f"COMFYUI_PATH names {', '.join(wrong)}, which is no ComfyUI checkout")
        return paths
    paths = [ROOT.parent.parent, *sorted(Path.home().glob("ComfyUI*")), cache_folder()]
    return list(dict.fromkeys(path.resolve() for path in paths if is_comfyui(path)))
