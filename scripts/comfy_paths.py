"""Find the ComfyUI checkouts on this machine, and which of them can be used."""

import math
import os
import re
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST = (0, 8, 0)
"""The oldest release that the extension supports."""
NEWEST_TESTED = (0, 33, 0)
"""The newest release that the tests have run with. Newer ones are used too."""
CLONE_URL = "https://github.com/Comfy-Org/ComfyUI"
CLONE_TAG = "v" + ".".join(map(str, NEWEST_TESTED))


def is_comfyui(path: Path) -> bool:
    """Whether a folder is a ComfyUI checkout."""
    return (path / "main.py").is_file() and (path / "comfyui_version.py").is_file()


def version(path: Path) -> str:
    """The version of a checkout, such as ``"0.27.0"``; ``"unknown"`` if its file does not say."""
    text = (path / "comfyui_version.py").read_text(encoding="utf-8")
    match = re.search(r"""__version__ *= *["']([^"']+)""", text)
    return match.group(1) if match else "unknown"


def release(path: Path) -> tuple[float, ...]:
    """The version of a checkout as numbers that can be compared. An unknown version counts as the newest."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", version(path))
    return tuple(map(int, match.groups())) if match else (math.inf,)


def is_new_enough(path: Path) -> bool:
    """Whether the extension supports a checkout's version."""
    return release(path) >= OLDEST


def cache_folder() -> Path:
    """Where the clone that the scripts make of ComfyUI is kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "parallel-dit" / f"ComfyUI-{CLONE_TAG}"


def candidates() -> list[Path]:
    """The checkouts that are new enough, each once, in order of preference."""
    return [path for path in checkouts() if is_new_enough(path)]


def oldest() -> list[Path]:
    """The oldest checkout that is new enough; none if there is none."""
    return sorted(candidates(), key=release)[:1]


def ends(paths: Sequence[Path]) -> list[Path]:
    """The first and the last, each once, as of checkouts that are sorted by release."""
    return list(dict.fromkeys([*paths[:1], *paths[-1:]]))


def checkouts() -> list[Path]:
    """All checkouts, each once, in order of preference, including those that are too old.

    ``COMFYUI_PATHS`` names several, separated as in ``PATH``. Otherwise ``COMFYUI_PATH`` names one. With neither set
    they are the one that contains this repository, ``~/ComfyUI*`` with the newest first, and the clone in the cache.

    Raises:
        SystemExit: a variable names a folder that is not a ComfyUI checkout.
    """
    if several := os.environ.get("COMFYUI_PATHS"):
        return [_named("COMFYUI_PATHS", part) for part in several.split(os.pathsep) if part]
    if one := os.environ.get("COMFYUI_PATH"):
        return [_named("COMFYUI_PATH", one)]
    at_home = sorted(filter(is_comfyui, sorted(Path.home().glob("ComfyUI*"))), key=release, reverse=True)
    paths = [ROOT.parent.parent, *at_home, cache_folder()]
    return list(dict.fromkeys(path.resolve() for path in paths if is_comfyui(path)))


def are_named() -> bool:
    """Whether a variable names the checkouts to use, so that the scripts neither search for others nor clone one."""
    return bool(os.environ.get("COMFYUI_PATHS") or os.environ.get("COMFYUI_PATH"))


def _named(variable: str, text: str) -> Path:
    path = Path(text).expanduser().absolute()
    if not is_comfyui(path):
        raise SystemExit(
            f"{variable} names {path}, which is not a ComfyUI checkout: it needs a main.py and a comfyui_version.py."
        )
    return path
