"""What happens between layers while a rank has some of the rows: functions known to need those of others are refused.

Random numbers are drawn for the whole picture, as one rank would, and cut.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .rows import ROWS, Rows


class Unsplittable(Exception):
    """A VAE does what cannot be done, or is not known to be right, with some of the rows; names it."""


def always(*_args: Any, **_options: Any) -> bool:
    return True


def _pads_rows(input: Tensor, pad: tuple[int, ...], *_args: Any, **_options: Any) -> bool:
    return any(pad[2:4])


def _reduces_rows(input: Tensor, dim: Any = None, *_args: Any, **_options: Any) -> bool:
    dims = range(input.ndim) if dim is None else (dim,) if isinstance(dim, int) else dim
    return any(each % input.ndim == input.ndim + ROWS for each in dims)


def _blends(
    input: Tensor, size: Any = None, scale_factor: Any = None, mode: str = "nearest", *_args: Any, **_options: Any
) -> bool:
    asked = scale_factor if size is None else size
    rows = asked if isinstance(asked, int | float) else asked[ROWS]
    factor = rows if size is None else rows / input.shape[ROWS]
    return not mode.startswith("nearest") or factor % 1 != 0  # by part of a row, they are others for each rank


NEEDS_ROWS: dict[Callable[..., Any], Callable[..., bool]] = {
    **dict.fromkeys(
        (
            torch.conv2d, torch.conv3d, torch.conv_transpose2d, torch.conv_transpose3d, F.group_norm, F.instance_norm,
            F.avg_pool2d, F.avg_pool3d, F.max_pool2d, F.adaptive_avg_pool2d, F.scaled_dot_product_attention, torch.bmm,
            torch.baddbmm, torch.matmul, torch.einsum, torch.roll, torch.flip, Tensor.bmm, Tensor.matmul,
            Tensor.__matmul__, Tensor.roll, Tensor.flip,
        ),
        always,
    ),
    **dict.fromkeys(
        (
            torch.mean, torch.sum, torch.var, torch.std, torch.amax, torch.amin, torch.softmax, F.softmax, Tensor.mean,
            Tensor.sum, Tensor.var, Tensor.std, Tensor.amax, Tensor.amin, Tensor.softmax,
        ),
        _reduces_rows,
    ),
    F.pad: _pads_rows,
    F.interpolate: _blends,
}  # fmt: skip
"""Functions that may look at more rows than one, and whether a call does, of a tensor ``[..., rows, columns]``."""


class Watch(TorchFunctionMode):
    """While it is entered. Layers that ``inside`` wraps do as they like."""

    def __init__(self, rows: Rows) -> None:
        super().__init__()
        self.rows, self._inside = rows, 0

    def inside(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A layer's ``forward``, unwatched."""

        def unwatched(*args: Any, **options: Any) -> Any:
            self._inside += 1
            try:
                return forward(*args, **options)
            finally:
                self._inside -= 1

        return unwatched

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if self._inside:
            return func(*args, **options)
        if func is torch.randn_like:
            return self._cut(torch.randn, args[0].shape, {"dtype": args[0].dtype, "device": args[0].device, **options})
        if func is torch.randn:
            return self._cut(func, args[0] if len(args) == 1 else args, options)
        if func in NEEDS_ROWS and NEEDS_ROWS[func](*args, **options):
            raise Unsplittable(f"it calls {func.__name__} between its layers, which may look at other ranks' rows")
        return func(*args, **options)

    def _cut(self, draw: Callable[..., Tensor], shape: Any, options: Mapping[str, Any]) -> Tensor:
        place = self.rows.axis.index
        if len(shape) < 2 or shape[-1] == 1 or shape[ROWS] % self.rows.latent.sizes[place]:
            raise Unsplittable(f"it draws random numbers of shape {list(shape)}, which are not those of rows")
        height = shape[ROWS]
        cut = self.rows.at(height)
        whole = draw((*shape[:ROWS], cut.total, shape[-1]), **options)
        return whole.narrow(ROWS, cut.offsets[place], height)
