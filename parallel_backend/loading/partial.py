"""Reading part of a component's weights straight from its safetensors files to a device.

Used where a rank holds a part of the weights only: what it does not hold is never read.
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
    """The tensors of several safetensors files by name.

    A file is open only while a tensor is read, so that the pages that were read do not stay with the process.
    """

    def __init__(self, files: list[Path]) -> None:
        self._files: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path in files:
            with _opened(path) as file:
                for name in file.keys():  # noqa: SIM118
                    self._files[name], self._shapes[name] = path, tuple(file.get_slice(name).get_shape())

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Hold the files to all tensors of a whole model, so that every rank refuses alike what one of them would miss.

        Raises:
            InvalidRequest: one is missing, or has another shape.
        """
        for name, shape in shapes.items():
            if name not in self._files:
                raise InvalidRequest(f"the weight files lack {name}: download the model again")
            found = self._shapes[name]
            if found != shape:
                raise InvalidRequest(
                    f"the weight files have {name} of shape {list(found)}, and the config says {list(shape)}: "
                    "download the model again"
                )

    def copy(self, name: str, dim: int, parts: tuple[slice, ...] | None, rows: slice | None, into: Tensor) -> None:
        """Fill ``into`` with what ``parts`` are of a tensor along a dim, in that order; ``rows`` of that.

        ``None`` stands for all.
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
    """A diffusers model whose parameters are on the meta device, in the dtypes that it would be loaded in."""
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
    """Load what a module holds: of each parameter what ``slices`` say, and of that FSDP's own shard."""
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    module.to_empty(device=device)
    saved = module.state_dict(keep_vars=True)
    for name, buffer in module.named_buffers():
        buffer.copy_(buffers[name])
    for name, target in saved.items():
        dim, parts = slices.get(name, (0, None))
        local, rows = _own_rows(target)
        if parts == ():
            local.zero_()
        elif local.numel():
            files.copy(name, dim, parts, rows, into=local)


def _own_rows(target: Tensor) -> tuple[Tensor, slice | None]:
    """The part of a tensor that lies here, and which rows it is of; None for all."""
    if not isinstance(target, DTensor):
        return target.detach(), None
    shape, offset = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
    return target.to_local().detach(), slice(offset[0], offset[0] + shape[0])
