"""A linear layer that keeps its compressed weight, and decodes it each time it computes."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..checkpoint.stored_tensor import Compression
from . import native_kernels
from .decoding import decode
from .weight_source import PACKED, WeightSource

_NUMBERS = ("tensor_scale", "input_scale")
"""Scales that every rank holds, whichever rows it has."""


class CompressedLinear(nn.Linear):
    """A layer of ``torch.nn.Linear``'s interface with ``packed``, the weight's rows of bytes, and their scales.

    The rows and their scales are parameters, which weight sharding splits by rows. A scale for the whole weight is a
    buffer.

    Args:
        linear: the layer to stand for, on the meta device.

    Attributes:
        weight_cut: the dim of the weight that is cut, and the parts that this layer has; None if it has all.
        columns: where its columns are among the decoded ones; None if they are the same.
        replacement: returns this layer's part of another weight, which it has for now; None for its own.
    """

    packed: Tensor

    def __init__(self, linear: nn.Linear, compression: Compression) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.compression, self.dtype = compression, linear.weight.dtype
        self.weight_cut: tuple[int, tuple[slice, ...]] | None = None
        self.columns: tuple[slice, ...] | None = None
        self.replacement: Callable[[], Tensor] | None = None
        # First, since diffusers takes the first floating-point parameter's dtype for the layer's.
        self.register_parameter("bias", linear.bias)
        rows, columns = linear.out_features, linear.in_features
        self._hold(PACKED, (rows, columns // compression.block * compression.block_bytes), torch.uint8)
        if compression.row_scale:
            self._hold("row_scale", (rows, 1), torch.float32)
        if compression.block_scale:
            self._hold("block_scale", (rows, columns // compression.block), torch.uint8)
        for name in _NUMBERS:
            if name in compression.scales:
                self.register_buffer(name, torch.ones(()))

    def _hold(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        empty = torch.empty(*shape, dtype=dtype, device="meta")
        setattr(self, name, nn.Parameter(empty, requires_grad=False))

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The decoded weight, ``[rows, columns]``. Each access decodes it."""
        if self.replacement is not None:
            return self.replacement()
        decoded = decode(self.compression, self.packed, self._scales(), self.dtype)
        if self.columns is None:
            return decoded
        return torch.cat([decoded[:, part] for part in self.columns], dim=1)

    @property
    def rows(self) -> int:
        """The number of the weight's rows that this layer has."""
        dim, parts = self.weight_cut or (1, ())
        return self.out_features if dim else sum(part.stop - part.start for part in parts)

    def cut_weight(self, dim: int, parts: tuple[slice, ...]) -> Mapping[nn.Parameter, tuple[int, tuple[slice, ...]]]:
        """Keep a part of the weight, on the meta device: rows, or columns widened to what can be decoded alone.

        Args:
            dim: 0 for rows, 1 for columns.

        Returns:
            The slices to load of each parameter.
        """
        self.weight_cut = dim, parts
        if dim == 0:
            names = [name for name in (PACKED, "row_scale", "block_scale") if hasattr(self, name)]
            return {self._keep(name, 0, parts): (0, parts) for name in names}
        unit, block, size = self.compression.unit, self.compression.block, self.compression.block_bytes
        wide = tuple(slice(part.start // unit * unit, -(-part.stop // unit) * unit) for part in parts)
        self.columns = _inside(parts, wide)
        in_bytes = tuple(slice(part.start // block * size, part.stop // block * size) for part in wide)
        kept = {self._keep(PACKED, 1, in_bytes): (1, in_bytes)}
        if hasattr(self, "block_scale"):
            in_blocks = tuple(slice(part.start // block, part.stop // block) for part in wide)
            kept |= {self._keep("block_scale", 1, in_blocks): (1, in_blocks)}
        return kept

    def _keep(self, name: str, dim: int, parts: tuple[slice, ...]) -> nn.Parameter:
        shape = list(getattr(self, name).shape)
        shape[dim] = sum(part.stop - part.start for part in parts)
        self._hold(name, shape, getattr(self, name).dtype)
        parameter: nn.Parameter = getattr(self, name)
        return parameter

    def forward(self, x: Tensor) -> Tensor:
        """Computes in the weight's format where ComfyUI would."""
        if not x.numel():  # a rank without tokens; kernels cannot take none
            return x.new_empty(*x.shape[:-1], len(self.packed))
        multiply = None
        if self.columns is None and self.replacement is None and x.ndim in (2, 3):
            multiply = native_kernels.product(self.compression, len(self.packed), x.device)
        if multiply is None:
            return functional.linear(x, self.weight, self.bias)
        out = multiply(x.reshape(-1, x.shape[-1]), self.packed, self._scales(), self.bias)
        return out.reshape(*x.shape[:-1], -1)

    def _scales(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in self.compression.scales}


def _inside(parts: tuple[slice, ...], wide: tuple[slice, ...]) -> tuple[slice, ...] | None:
    """Return where parts are inside the concatenation of wider ones; None if they are all of it."""
    if parts == wide:
        return None
    inside, position = [], 0
    for part, around in zip(parts, wide, strict=True):
        start = position + part.start - around.start
        inside.append(slice(start, start + part.stop - part.start))
        position += around.stop - around.start
    return tuple(inside)


def keep_compressed(module: nn.Module, source: WeightSource) -> None:
    """Replace every linear layer of a module on the meta device whose weight is compressed in the files.

    Other compressed weights, such as convolutions', are decoded when they are read.
    """
    linears = [(name, each) for name, each in module.named_modules() if type(each) is nn.Linear]
    for name, linear in linears:
        compression = source.compression(f"{name}.weight")
        if compression is not None:
            module.set_submodule(name, CompressedLinear(linear, compression))
