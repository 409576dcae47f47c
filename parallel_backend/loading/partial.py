"""Fills a module with the weights that a rank holds, directly on its device. What it does not hold is never read."""

from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from ..interfaces.tensor_cuts import Slices
from .weight_source import WeightSource


def empty(model_class: Any, config: Mapping[str, Any], dtype: torch.dtype) -> nn.Module:
    """Create a diffusers model with parameters on the meta device, in the dtypes in which it would be loaded."""
    with _parameters_on_meta():
        module: nn.Module = model_class.from_config(config)
    keep = model_class._keep_in_fp32_modules or []
    floats = [(name, value) for name, value in module.state_dict(keep_vars=True).items() if value.is_floating_point()]
    for name, value in floats:
        kept = any(part in name.split(".") for part in keep)
        value.data = value.data.to(torch.float32 if kept else dtype)
    return module


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Have every parameter that a module gets while the context lasts on the meta device. Buffers keep their values."""

    def without_memory(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    hook = register_module_parameter_registration_hook(without_memory)  # type: ignore[arg-type]
    try:
        yield
    finally:
        hook.remove()


def fill(module: nn.Module, source: WeightSource, device: torch.device) -> None:
    """Load all weights of a module that is on the meta device."""
    allocate(module, device)
    read_parameters(module, source, {})


def allocate(module: nn.Module, device: torch.device) -> None:
    """Give memory to a module's parameters that are on the meta device, and move its buffers to the device."""
    module._apply(lambda t: torch.empty_like(t, device=device) if t.device.type == "meta" else t.to(device))


def read_parameters(
    module: nn.Module,
    source: WeightSource,
    slices: Slices,
    only: Container[str] | None = None,
    homes: Mapping[str, Tensor] | None = None,
) -> None:
    """Read the weights that a module holds into it.

    Args:
        slices: the slices of parameters that were cut; of the result, FSDP keeps this rank's shard.
        only: names of those to read; None for all.
        homes: where to read weights of blocks that stream, by name.
    """
    for name, target in module.state_dict(keep_vars=True).items():
        if only is not None and name not in only:
            continue
        dim, parts = slices.get(name, (0, None))
        local, rows = _local_rows((homes or {}).get(name, target))
        if parts == ():
            local.zero_()
        elif local.numel():
            source.read(name, dim, parts, rows, into=local)


def local_bytes(module: nn.Module) -> int:
    """Return the bytes that this rank's part of a module takes on its device."""
    locals_ = [_local_rows(tensor)[0] for tensor in (*module.parameters(), *module.buffers())]
    return sum(local.numel() * local.element_size() for local in locals_)


def _local_rows(target: Tensor) -> tuple[Tensor, slice | None]:
    """Return this rank's shard of a tensor, and which rows of the tensor it is; None for all."""
    if not isinstance(target, DTensor):
        return target.detach(), None
    local, mesh = target.to_local().detach(), target.device_mesh
    start = min(mesh.get_local_rank() * -(-len(target) // mesh.size()), len(target))  # FSDP cuts as torch.chunk does
    return local, slice(start, start + len(local))
