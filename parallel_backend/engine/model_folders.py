"""Where this host has models, which requests call by paths of ComfyUI's machine.

A model is at the same path, or has the same name in a folder of ``PARALLEL_DIT_MODELS``, and the same content.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..checkpoint.opening import open_checkpoint
from ..errors import InvalidRequest
from ..protocol.model_spec import FIRST, HOST, ModelSpec

FOLDERS = "PARALLEL_DIT_MODELS"
PART = ".part"
"""How the name of a folder ends in which a model is that has not arrived completely."""

_COMFYUI = Path(__file__).resolve().parents[3]


def this_host() -> str:
    """What messages call this host."""
    name = os.environ.get(HOST, FIRST)
    return f"host {name}" if name else "the first host"


def find(model: ModelSpec) -> Path:
    """Return where this host has a model.

    Raises:
        InvalidRequest: it has none of this name, or only others.
    """
    path = Path(model.path)
    candidates = [each for each in (path, *_named(path.name)) if each.exists()]
    for candidate in candidates:
        if _is(model, candidate):
            return candidate
    if candidates:
        raise InvalidRequest(
            f"{this_host()} has another {path.name} ({candidates[0]}) than ComfyUI: copy the file there again"
        )
    named = ", ".join(map(str, folders())) or "which is not set"
    raise InvalidRequest(
        f"{this_host()} has no {path.name}: copy it there, to {path} or into a folder of {FOLDERS} ({named})"
    )


def _is(model: ModelSpec, path: Path) -> bool:
    """Whether this is the model. Another one may be broken."""
    try:
        return open_checkpoint(path).content() == model.content
    except InvalidRequest:
        return False


def _named(name: str) -> Iterator[Path]:
    for folder in folders():
        found = (each for each in folder.rglob(name) if not any(part.endswith(PART) for part in each.parts))
        yield from sorted(found)


def folders() -> Sequence[Path]:
    """The folders in which models are looked for: those that are named, or those of the ComfyUI around this folder."""
    named = os.environ.get(FOLDERS)
    if named:
        return [Path(each) for each in named.split(os.pathsep) if each]
    around = _COMFYUI.parent if _COMFYUI.name == "custom_nodes" else None
    return [around / "models"] if around else []
