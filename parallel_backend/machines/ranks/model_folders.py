"""Finds models on this host. Requests have paths of ComfyUI's machine.

A model has the same content, and the same path or the same name in a folder of ``PARALLEL_DIT_MODELS``.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from ... import env
from ...checkpoint.opening import open_checkpoint
from ...errors import InvalidRequest
from ...protocol.model_spec import ModelSpec

_COMFYUI = Path(__file__).resolve().parents[4]


def this_host() -> str:
    """This host's name in messages."""
    name = env.HOST.get()
    return f"host {name}" if name else "the first host"


def find(model: ModelSpec) -> Path:
    """Return where this host has a model.

    Raises:
        InvalidRequest: it has no model of this name, or only with other content.
    """
    path = Path(model.path)
    candidates = [path, *_named(path.name)]
    found = next((each for each in candidates if each.exists() and _is(model, each)), None)
    if found:
        return found
    candidates = [each for each in candidates if each.exists()]
    if candidates:
        raise InvalidRequest(
            f"{this_host()} has another {path.name} ({candidates[0]}) than ComfyUI: copy the file there again"
        )
    named = ", ".join(map(str, folders())) or "which is not set"
    raise InvalidRequest(
        f"{this_host()} has no {path.name}: copy it there, to {path} or into a folder of {env.MODELS} ({named})"
    )


def _is(model: ModelSpec, path: Path) -> bool:
    """Whether this is the model. Any other file may be broken."""
    try:
        return open_checkpoint(path).content() == model.content
    except InvalidRequest:
        return False


def _named(name: str) -> Iterator[Path]:
    """Follow links to folders, as ComfyUI does, but search no folder twice."""
    seen: set[tuple[int, int]] = set()
    for folder in folders():
        for root, subfolders, files in os.walk(folder, followlinks=True):
            here = os.stat(root)
            if (here.st_dev, here.st_ino) in seen:
                subfolders.clear()
                continue
            seen.add((here.st_dev, here.st_ino))
            subfolders[:] = sorted(subfolders)
            if name in subfolders or name in files:
                yield Path(root, name)


def folders() -> Sequence[Path]:
    """The folders to search for models: the named ones, or those of the ComfyUI around this folder."""
    if named := env.MODELS.get():
        return named
    around = _COMFYUI.parent if _COMFYUI.name == "custom_nodes" else None
    return [around / "models"] if around else []
