"""The weights of a MODEL or VAE that ComfyUI holds, as a file in memory that the ranks read."""

import json
import zlib
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import comfy.float
import comfy.lora
import comfy.model_management
import comfy.model_patcher
import comfy.utils
import torch
from comfy.quant_ops import QuantizedTensor
from torch import Tensor

from ...parallel_backend.checkpoint.dtypes import PACKED_NAMES, STORED_NAMES
from ...parallel_backend.errors import InvalidRequest
from .sealed_file import SealedFile, Slot

_SPARE = 1 << 30
"""Bytes of memory that must stay free."""

_DESCRIPTION = ".comfy_quant"
"""End of the names by which ComfyUI describes compressed layers."""

_READ_THE_FILE = "load the model with Load Diffusion Model or Parallel Loader, so that the ranks read its file"


class MemoryFile:
    """A file in memory with the weights of a MODEL or VAE. It lives as long as this object.

    At first it has a header only, and takes no memory: enough to check what it will hold. ``fill`` copies the weights.

    Args:
        prefixes: the beginning of the names of the weights to copy, and what they begin with in the file instead.
        config: what the file's metadata says that the weights do not show.
        merged: names of the weights that are copied with their patches. The others are copied without.

    Attributes:
        path: where other processes open it.

    Raises:
        InvalidRequest: it does not fit into memory, or a weight is compressed in a way that ComfyUI does not describe.
    """

    def __init__(
        self,
        patcher: Any,
        prefixes: tuple[str, str],
        config: Mapping[str, Any],
        merged: Container[str] = frozenset(),
    ) -> None:
        self._patcher, self._prefixes, self._merged = patcher, prefixes, merged
        weights, said = _weights(patcher, *prefixes, merged)
        slots = {
            name: Slot(dtype=_dtype(name, weight), shape=tuple(weight.tensor.shape)) for name, weight in weights.items()
        }
        _check_memory(sum(slot.nbytes for slot in slots.values()))
        metadata = {"config": json.dumps(config)}
        if said:
            metadata["_quantization_metadata"] = json.dumps({"layers": said})
        self._file = SealedFile(slots, metadata)
        self.path = self._file.path

    def fill(self) -> None:
        """Copy the weights, unless they are copied, and forbid changes from then on. ComfyUI's are not used any more.

        Shows progress on the node that is running, and ends when the user interrupts.

        Raises:
            InvalidRequest: the system refuses the memory.
        """
        if self._patcher is None:
            return
        weights, _ = _weights(self._patcher, *self._prefixes, self._merged)
        self._patcher = None
        self._file.fill(_patched(weights.values()), "a copy of the model's weights", f": {_READ_THE_FILE}")


@dataclass(frozen=True, kw_only=True)
class _Weight:
    """A tensor of the file.

    Attributes:
        key: ComfyUI's name of it.
        tensor: as ComfyUI holds it.
        convert: decodes it, if it is compressed and has patches.
        patches: what nodes add to it.
        packed: whether it is bytes of a compressed weight, or a scale.
    """

    key: str
    tensor: Tensor
    convert: Callable[..., Tensor] = lambda weight, **_: weight
    patches: Sequence[Any] = ()
    packed: bool = False


def _weights(patcher: Any, old: str, new: str, merged: Container[str]) -> tuple[dict[str, _Weight], dict[str, Any]]:
    """Return the tensors to copy by their names in the file, and ComfyUI's descriptions of the compressed ones.

    Compressed weights are copied as they are, or decoded if they have patches, as ComfyUI decodes them to add patches.
    """
    state = patcher.model_state_dict(old)
    weights: dict[str, _Weight] = {}
    said: dict[str, Any] = {}
    parts: set[str] = set()
    for key in [key for key in state if key.endswith(_DESCRIPTION)]:
        layer = key.removesuffix(_DESCRIPTION)
        weight = _weight(patcher, f"{layer}.weight", merged)
        stored = weight.tensor.state_dict(weight.key) if isinstance(weight.tensor, QuantizedTensor) else {}
        parts |= {key, f"{layer}.input_scale", *stored} - ({weight.key} if weight.patches or not stored else set())
        if stored and not weight.patches:
            tensors = stored | {name: state[name] for name in (f"{layer}.input_scale",) if name in state}
            weights |= {name: _Weight(key=name, tensor=tensor, packed=True) for name, tensor in tensors.items()}
            said[new + layer.removeprefix(old)] = json.loads(bytes(state[key].tolist()))
    weights |= {key: _weight(patcher, key, merged) for key in state if key not in parts}
    return {new + key.removeprefix(old): weight for key, weight in weights.items()}, said


def _weight(patcher: Any, key: str, merged: Container[str]) -> _Weight:
    """Return a weight as it is without patches, and the patches to merge.

    ``ModelPatcher.get_key_patches`` does so for all weights at once, with all patches.
    """
    tensor, _, convert = comfy.model_patcher.get_key_weight(patcher.model, key)
    if key in patcher.backup:
        tensor = patcher.backup[key].weight
    if key in patcher.hook_backup:
        tensor = patcher.hook_backup[key][0]
    plain = _Weight(key=key, tensor=tensor, patches=patcher.patches.get(key, ()) if key in merged else ())
    return plain if convert is None else replace(plain, convert=convert)


def _dtype(name: str, weight: _Weight) -> torch.dtype:
    """Return the dtype that a weight has in the file."""
    tensor, names = weight.tensor, STORED_NAMES | (PACKED_NAMES if weight.packed else {})
    decoded = isinstance(tensor, QuantizedTensor) and len(weight.patches) > 0
    if (not decoded and type(tensor) not in (Tensor, torch.nn.Parameter)) or tensor.dtype not in names:
        kind = f"{type(tensor).__name__} of {tensor.dtype}"
        raise InvalidRequest(
            f"the model's {name} is a {kind}, which is not supported: put Parallel Model behind a loader that reads "
            "the file itself, or load the model in bf16, fp16 or fp32"
        )
    return tensor.dtype


def _patched(weights: Collection[_Weight]) -> Iterator[Tensor]:
    """Yield each weight with its patches, computed one at a time by ComfyUI's own functions. Show progress."""
    progress = comfy.utils.ProgressBar(len(weights))
    for weight in weights:
        comfy.model_management.throw_exception_if_processing_interrupted()
        tensor = weight.tensor
        if weight.patches:
            value = weight.convert(tensor.to(torch.float32, copy=True), inplace=True)
            merged = comfy.lora.calculate_weight(weight.patches, value, weight.key)
            tensor = comfy.float.stochastic_rounding(merged, tensor.dtype, seed=zlib.crc32(weight.key.encode()))
        yield tensor
        progress.update(1)


def _check_memory(size: int) -> None:
    available = comfy.model_management.get_free_memory(torch.device("cpu"))
    if size + _SPARE > available:
        raise InvalidRequest(
            f"one more copy of the model's weights takes {size / 1e9:.1f} GB, and {available / 1e9:.1f} GB of memory "
            f"are free: {_READ_THE_FILE}"
        )
