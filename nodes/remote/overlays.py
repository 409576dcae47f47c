"""Weights that nodes change in other ways than by low-rank factors, computed by ComfyUI's own functions.

The backend reads each weight from the model's files, ComfyUI's ``calculate_weight`` changes it, and the result goes to
a file in memory that the ranks read instead.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import comfy.model_management
import comfy.utils
import torch
from torch import Tensor

from ...parallel_backend.checkpoint import overlay_file
from ...parallel_backend.errors import InvalidRequest
from ...parallel_backend.protocol.messages import ReadWeights
from ...parallel_backend.protocol.model_spec import Overlay
from ..backend.connection import Handle
from ..backend.executing import executing_lora
from ..backend.session import current
from .digests import described
from .recent_files import RecentFiles
from .sealed_file import SealedFile, Slot
from .weight_fit import changed_weight, check_enlarged, said_by_comfyui
from .weight_patches import Patch

_BATCH_BYTES, _BATCH_WEIGHTS = 1 << 28, 64
"""The most that one request reads."""


def overlay_for(
    handle: Handle,
    components: Sequence[str],
    merged: Mapping[str, Sequence[Patch]],
    shapes: Mapping[str, Sequence[int]],
) -> tuple[Overlay, SealedFile] | None:
    """Return changed weights, and the file with them for the ranks; None if there are none.

    Args:
        components: diffusers' names of the components that have these weights.
        merged: all changes of each weight, by its name.
        shapes: shape of every weight of the model.

    Raises:
        InvalidRequest: a change does not fit its weight. ComfyUI logs this and leaves the weight as it is.
        InterruptProcessingException: the user interrupted.
    """
    if not merged:
        return None
    file_id = _id(handle, components, merged)
    file = current().part(RecentFiles).get(file_id, lambda: _new(file_id, handle, components, merged, shapes))
    return Overlay(path=str(file.path), id=file_id), file


def _new(
    file_id: str,
    handle: Handle,
    components: Sequence[str],
    merged: Mapping[str, Sequence[Patch]],
    shapes: Mapping[str, Sequence[int]],
) -> tuple[SealedFile, Iterable[Tensor]]:
    dtype = _read(handle, components[0], (), shapes)["dtype"].dtype
    slots = {
        f"{component}.{name}": Slot(dtype=dtype, shape=tuple(shapes[name]))
        for component in components
        for name in merged
    }
    file = SealedFile(slots, overlay_file.metadata(shapes, file_id))
    progress = comfy.utils.ProgressBar(len(slots))
    return file, (
        _counted(_changed(name, weight, merged[name]).to(dtype), progress)
        for component in components
        for name, weight in stored_weights(handle, component, list(merged), shapes)
    )


def _counted(weight: Tensor, progress: Any) -> Tensor:
    comfy.model_management.throw_exception_if_processing_interrupted()
    progress.update(1)
    return weight


def stored_weights(
    handle: Handle, component: str, names: Sequence[str], shapes: Mapping[str, Sequence[int]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield weights as the model's files hold them, a batch for each request."""
    batch: list[str] = []
    size = 0
    for i, name in enumerate(names):
        batch.append(name)
        size += 4 * torch.Size(shapes[name]).numel()
        if size > _BATCH_BYTES or len(batch) == _BATCH_WEIGHTS or i == len(names) - 1:
            answer = _read(handle, component, tuple(batch), shapes)
            for number, each in enumerate(batch):
                yield each, answer.pop(str(number))
            batch, size = [], 0


def _read(
    handle: Handle, component: str, names: tuple[str, ...], shapes: Mapping[str, Sequence[int]]
) -> dict[str, Tensor]:
    listed = json.dumps({name: list(shape) for name, shape in shapes.items()}).encode()
    message = ReadWeights(model=handle.spec, component=component, names=names)
    return handle.call(message, {"shapes": torch.frombuffer(bytearray(listed), dtype=torch.uint8)})


def _changed(name: str, weight: Tensor, changes: Sequence[Patch]) -> Tensor:
    with said_by_comfyui() as messages:
        changed = changed_weight(name, weight.to(torch.float32, copy=True), changes)
    if messages:
        lora = executing_lora()
        raise InvalidRequest(
            f"ComfyUI cannot change {name} with {lora} ({messages[0].strip()}): it is for another model"
        )
    check_enlarged(name, weight.shape, changed.shape)
    return changed


def _id(handle: Handle, components: Sequence[str], merged: Mapping[str, Sequence[Patch]]) -> str:
    lines = [handle.spec.path, handle.spec.stamp, handle.spec.dtype, *components]
    lines += [f"{name} {[described(part) for part in changes]}" for name, changes in sorted(merged.items())]
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()
