"""The refusal of a LoRA of whose names ComfyUI knows none for the model, by the first of them."""

from collections.abc import Iterable
from pathlib import Path

import folder_paths

from ...parallel_backend.checkpoint.weight_headers import read_file
from ...parallel_backend.errors import InvalidRequest


def unknown_lora(lora: str, model: str, names: Iterable[str] = ()) -> InvalidRequest:
    """Return the refusal.

    Args:
        lora: its name, which is that of a file in ``models/loras`` where a loader node runs.
        model: the model's name.
        names: those in the LoRA, if they are known already.
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
