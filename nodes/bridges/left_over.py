"""What a file holds besides its model. ComfyUI leaves it aside or, if it knows the names, loads another model."""

from collections.abc import Set
from typing import Any

import comfy.model_detection
import torch

from ...parallel_backend.checkpoint.architectures import architecture_of
from ...parallel_backend.checkpoint.single_file import SingleFile, is_in_memory
from ...parallel_backend.errors import InvalidRequest
from .bridge import Bridge


def left_over(bridge: Bridge) -> list[str]:
    """Return the names of weights in a checkpoint's file that its transformer has no use for.

    Raises:
        InvalidRequest: ComfyUI takes the file for another model because of one of them.
    """
    checkpoint = bridge.checkpoint
    if not isinstance(checkpoint, SingleFile) or is_in_memory(checkpoint.path):
        return []
    without_use = _without_use(bridge, checkpoint)
    names = [name for name in checkpoint.weights("transformer") if name in without_use]
    if names:
        _check_meaning(checkpoint, names)
    return names


def _without_use(bridge: Bridge, checkpoint: SingleFile) -> frozenset[str]:
    architecture = architecture_of(checkpoint.components["transformer"])
    known = checkpoint.left_over("transformer")
    if architecture.native and not checkpoint.stored("transformer").native:
        return known
    module = bridge.module(bridge.core_config().unet_config)
    if module is None:  # ComfyUI does not have the family
        return known
    used = {architecture.published(name) for name in module.state_dict()}
    names = checkpoint.weights("transformer").keys() - architecture.unused
    return known | {name for name in names if architecture.published(name) not in used}


def _check_meaning(checkpoint: SingleFile, names: list[str]) -> None:
    plain = checkpoint.weights("transformer").keys() - set(names)
    detected = _detected(checkpoint, plain)
    if _detected(checkpoint, plain | set(names)) == detected:
        return
    telling = next((name for name in names if _detected(checkpoint, plain | {name}) != detected), names[0])
    raise InvalidRequest(
        f"{checkpoint.name}: the file has {telling}, by which ComfyUI takes it for another model than "
        f"{checkpoint.components['transformer']}: choose another file, or load this one with ComfyUI's own loader"
    )


def _detected(checkpoint: SingleFile, names: Set[str]) -> Any:
    """Return the config that ComfyUI finds in weights of these names, or the error that it ends in."""
    weights = checkpoint.weights("transformer")
    shaped = {name: torch.zeros(()).expand(weights[name].shape) for name in weights if name in names}
    try:
        return comfy.model_detection.detect_unet_config(shaped, "")
    except Exception as error:  # it looks for other weights of the model that a name belongs to
        return repr(error)
