"""The changes of weights that are in force for a call of a parallel MODEL's transformer."""

from collections.abc import Mapping, Sequence
from typing import Any

from ...parallel_backend.errors import InvalidRequest
from ...parallel_backend.protocol.messages import Adapter
from .lora_files import adapters_for
from .transformer import RemoteTransformer
from .weight_patches import Patch, sort_patches

PREFIX = "diffusion_model."
"""The beginning of the transformer's names in a MODEL."""


def check_patches(remote: RemoteTransformer, patches: Mapping[str, Sequence[Patch]]) -> None:
    """Refuse changes that the ranks cannot apply.

    Args:
        remote: the transformer.
        patches: as ComfyUI keeps them, by the name of the weight in the MODEL.

    Raises:
        InvalidRequest: the message names the weight.
    """
    _sort(remote, patches)


def adapters_of(remote: RemoteTransformer, patches: Mapping[str, Sequence[Patch]]) -> tuple[Adapter, ...]:
    """Return the LoRAs that make up some changes, with files for the ranks. The arguments are ``check_patches``'."""
    shapes = {name: tuple(tensor.shape) for name, tensor in remote.weights.tensors.items()}
    return adapters_for(_sort(remote, patches).low_rank, shapes)


def _sort(remote: RemoteTransformer, patches: Mapping[str, Sequence[Patch]]) -> Any:
    own = {name.removeprefix(PREFIX): changes for name, changes in patches.items() if name.startswith(PREFIX)}
    shapes = {name: tuple(tensor.shape) for name, tensor in remote.weights.tensors.items()}
    found = sort_patches(own, shapes, remote.weights.linear)
    if found.merged:
        raise InvalidRequest(f"changes of {next(iter(found.merged))} other than a LoRA's factors are not supported yet")
    return found
