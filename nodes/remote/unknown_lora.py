"""Refuses a LoRA if ComfyUI knows none of its names for the model."""

from collections.abc import Iterable
from pathlib import Path

import folder_paths

from ...parallel_backend.checkpoint.weight_headers import read_file
from ...parallel_backend.errors import InvalidRequest


def unknown_lora(lora: str, model: str, names: Iterable[str] = ()) -> InvalidRequest:
    """Return the refusal.

    Args:
        lora: its name; while a loader node runs, a file's in ``models/loras``.
        model: the model's name.
        names: the LoRA's names of weights, if they are known already.
    """
    first = next(iter(names), None) or _first_name(lora)
    such = f", such as {first}" if first else ""
    return InvalidRequest(
        f"{lora} fits no weight of {model}: ComfyUI knows none of its names for this model{such}, and would ignore the "
        "file. It is for another model, or has to be converted to names that ComfyUI knows"
    )


def _first_name(lora: str) -> str | None:
    path = folder_paths.get_full_path("loras", lora)
    try:
        return next(iter(read_file(Path(path)).tensors), None) if path else None
    except InvalidRequest:  # ComfyUI reads other formats, too
        return None
