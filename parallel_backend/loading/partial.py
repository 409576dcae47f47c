"""Reads part of a component's weights from its safetensors files directly to a device.

Used if a rank holds only a part of the weights: what it does not hold is never read.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ..errors import InvalidRequest
from ..interfaces.tensor_cuts import Slices


class WeightFiles:
    """The tensors of several safetensors files, by name.

    A file is open only while a tensor is read, so that its pages do not stay in the process's memory.
    """

    def __init__(self, files: list[Path]) -> None:
        self._files: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path in files:
            with _opened(path) as file:
                for name in file.keys():  # noqa: SIM118
                    self._files[name], self._shapes[name] = path, tuple(file.get_slice(name).get_shape())

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check the files against the shapes of all tensors of the whole model.

        All ranks then refuse the same files, even if only one of them would read the tensor in question.

        Raises:
            InvalidRequest: a tensor is missing or has another shape.
        """
        for name, shape in shapes.items():
            if name not in self._files:
                raise InvalidRequest(f"the weight files lack {name}: download the model again")
            if self._shapes[name] != shape:
                raise InvalidRequest(
                    f"{name} has shape {list(self._shapes[name])} in the weight files, but {list(shape)} in the config:"
                    " download the model again"
                )

    def copy(self, name: str, dim: int, parts: tuple[slice, ...] | None, rows: slice | None, into: Tensor) -> None:
        """Read part of a tensor.

        Args:
            name: name of the tensor.
            dim: the dim that ``parts`` slices.
            parts: slices along ``dim``, which are concatenated in this order; None for the whole dim.
            rows: rows of the result to keep; None for all.
            into: the tensor to fill.
        """
        with _opened(self._files[name]) as file:
            stored = file.get_slice(name)
            if parts is None:
                into.copy_(stored[:] if rows is None else stored[rows])
                return
            cut = torch.cat([stored[(slice(None),) * dim + (part,)] for part in parts], dim=dim)
            into.copy_(cut if rows is None else cut[rows])


def _opened(path: Path) -> Any:
    return safe_open(str(path), framework="pt", device="cpu")


def empty(model_class: Any, config: Mapping[str, Any], dtype: torch.dtype) -> nn.Module:
    """Create a diffusers model with parameters on the meta device, in the dtypes in which it would be loaded."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        module: nn.Module = model_class.from_config(config)
    keep = model_class._keep_in_fp32_modules or []
    floats = [(name, value) for name, value in module.state_dict(keep_vars=True).items() if value.is_floating_point()]
    for name, value in floats:
        kept = any(part in name.split(".") for part in keep)
        value.data = value.data.to(torch.float32 if kept else dtype)
    return module


def fill(module: nn.Module, files: WeightFiles, slices: Slices, device: torch.device) -> None:
    """Load the weights that a module holds.

    Args:
        module: the module, on the meta device.
        files: the weight files.
        slices: the slices of parameters that were cut; of the result, FSDP keeps this rank's shard.
        device: where the weights go.
    """
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    module.to_empty(device=device)
    saved = module.state_dict(keep_vars=True)
    for name, buffer in module.named_buffers():
        buffer.copy_(buffers[name])
    for name, target in saved.items():
        dim, parts = slices.get(name, (0, None))
        local, rows = _local_rows(target)
        if parts == ():
            local.zero_()
        elif local.numel():
            files.copy(name, dim, parts, rows, into=local)


def _local_rows(target: Tensor) -> tuple[Tensor, slice | None]:
    """Return this rank's shard of a tensor, and which rows of the tensor it is; None for all."""
    if not isinstance(target, DTensor):
        return target.detach(), None
    shape, offset = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
    return target.to_local().detach(), slice(offset[0], offset[0] + shape[0])
