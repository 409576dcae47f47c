"""The bridges, by the rows of the backend's registry of families."""

from importlib import import_module

from ...parallel_backend.checkpoint.checkpoint import Checkpoint
from ...parallel_backend.errors import InvalidRequest
from ...parallel_backend.families.registry import FAMILIES
from ..bridges.bridge import Bridge


def bridge_class(class_name: str) -> type[Bridge]:
    """Return the bridge of a diffusers transformer class that the registry lists."""
    row = FAMILIES[class_name]
    bridge: type[Bridge] = getattr(import_module(f".{row.folder}", __package__), row.name)
    return bridge


def bridge_for(checkpoint: Checkpoint) -> Bridge:
    """Return the bridge of a checkpoint's family, after its checks.

    Raises:
        InvalidRequest: the class is not listed (the message has the list), or the variant is not supported.
    """
    checkpoint.check_known("transformer")
    name = checkpoint.components.get("transformer")
    if name is None:
        raise InvalidRequest(
            f"{checkpoint.name} holds no diffusion model (its parts: {', '.join(checkpoint.components)}): choose "
            "a file with one, and load this one with Parallel VAE"
        )
    if name not in FAMILIES:
        supported = ", ".join(FAMILIES)
        raise InvalidRequest(f"{checkpoint.name}: transformer {name} is not supported; supported: {supported}")
    bridge = bridge_class(name).of(checkpoint)
    bridge.check()
    return bridge
