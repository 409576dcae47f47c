"""Which files hold a component's weights: safetensors only, as diffusers and transformers choose them."""

import json
from pathlib import Path

from ..errors import InvalidRequest
from .checkpoint import Checkpoint

_WHOLE = ("diffusion_pytorch_model.safetensors", "model.safetensors")


def weight_files(checkpoint: Checkpoint, component: str) -> list[Path]:
    """Those that the component's index lists, else the one of the usual name; other variants' files are left alone.

    Raises:
        InvalidRequest: the weights are quantised, there are none in safetensors, one is missing, or the index names
            another format or folder.
    """
    folder = checkpoint.path / component
    if "quantization_config" in checkpoint.config(component):
        raise InvalidRequest(f"{folder} is quantised, which is not supported yet; use plain weights")
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise InvalidRequest(
            f"{folder} has no .safetensors file; weights in .bin or .pt files are not loaded, since opening one can "
            "run code: save the checkpoint again with safe_serialization=True"
        )
    for name in _WHOLE:
        index = folder / f"{name}.index.json"
        if index.is_file():
            return [_beside(index, each) for each in _listed(index)]
    for name in _WHOLE:
        if (folder / name).is_file():
            return [folder / name]
    raise InvalidRequest(
        f"{folder} has {files[0].name}, and is read by the names {' or '.join(_WHOLE)}: rename the file"
    )


def _listed(index: Path) -> list[str]:
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise InvalidRequest(f"{index} is no index of weight files: download it again") from error


def _beside(index: Path, name: str) -> Path:
    if not name.endswith(".safetensors") or Path(name).name != name:
        raise InvalidRequest(f"{index} lists {name!r}, which is no .safetensors file beside it")
    if not (index.parent / name).is_file():
        raise InvalidRequest(f"{index.parent} lacks {name}, which {index.name} lists: download it again")
    return index.parent / name
