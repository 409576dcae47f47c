"""Guards what a VAE computes between its layers while each rank holds only some of the rows.

The layers themselves are replaced (``layers``). The code between them runs as it is on a rank's block, which is right
as long as each row is computed from itself. So while a split is active:

- Functions that are known to combine rows, called in that way, raise ``Unsplittable``.
- Random numbers are drawn for the whole image, as on one rank, and each rank keeps its rows'. A VAE that draws
  any seeds the generators alike on all ranks (``vaes.ltx``).
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .rows import ROW_DIM, RowSplit


class Unsplittable(Exception):
    """A VAE cannot be split by rows, or is not known to give the right result when split. The message says why."""


def always(*_args: Any, **_options: Any) -> bool:
    """Return that a call may combine rows, whatever its arguments."""
    return True


def _pads_rows(input: Tensor, pad: tuple[int, ...], *_args: Any, **_options: Any) -> bool:
    return any(pad[2:4])


def _reduces_rows(input: Tensor, dim: Any = None, *_args: Any, **_options: Any) -> bool:
    dims = range(input.ndim) if dim is None else (dim,) if isinstance(dim, int) else dim
    return any(each % input.ndim == input.ndim + ROW_DIM for each in dims)


def _mixes_rows(
    input: Tensor, size: Any = None, scale_factor: Any = None, mode: str = "nearest", *_args: Any, **_options: Any
) -> bool:
    requested = scale_factor if size is None else size
    rows = requested if isinstance(requested, int | float) else requested[ROW_DIM]
    factor = rows if size is None else rows / input.shape[ROW_DIM]
    # With a fractional factor, which input row an output row copies depends on the position in the whole image.
    return not mode.startswith("nearest") or factor % 1 != 0


CROSS_ROW_FUNCTIONS: dict[Callable[..., Any], Callable[..., bool]] = {
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
    F.interpolate: _mixes_rows,
}  # fmt: skip
"""Functions that may combine rows of a tensor ``[..., rows, columns]``, each with a test whether a call may."""


class RowGuard(TorchFunctionMode):
    """Refuses functions that may combine rows, and cuts random numbers by rows, while it is entered.

    It does not look inside forwards that ``exempt`` wraps.
    """

    def __init__(self, rows: RowSplit) -> None:
        super().__init__()
        self.rows, self._exempt_depth = rows, 0

    def exempt(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a layer's ``forward`` so that the functions that it calls are not checked."""

        def unchecked(*args: Any, **options: Any) -> Any:
            self._exempt_depth += 1
            try:
                return forward(*args, **options)
            finally:
                self._exempt_depth -= 1

        return unchecked

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if self._exempt_depth:
            return func(*args, **options)
        if func is torch.randn_like:
            like = {"dtype": args[0].dtype, "device": args[0].device, **options}
            return self._draw_local_rows(torch.randn, args[0].shape, like)
        if func is torch.randn:
            return self._draw_local_rows(func, args[0] if len(args) == 1 else args, options)
        if func in CROSS_ROW_FUNCTIONS and CROSS_ROW_FUNCTIONS[func](*args, **options):
            raise Unsplittable(f"it calls {func.__name__} between its layers, which may read other ranks' rows")
        return func(*args, **options)

    def _draw_local_rows(self, draw: Callable[..., Tensor], shape: Any, options: Mapping[str, Any]) -> Tensor:
        """Draw for the whole image, given the ``shape`` of this rank's rows, and return this rank's rows."""
        place = self.rows.axis.index
        if len(shape) < 2 or shape[-1] == 1 or shape[ROW_DIM] % self.rows.latent.sizes[place]:
            raise Unsplittable(f"it draws random numbers of shape {list(shape)}, which cannot be cut by rows")
        height = shape[ROW_DIM]
        partition = self.rows.from_local(height)
        whole = draw((*shape[:ROW_DIM], partition.total, shape[-1]), **options)
        return whole.narrow(ROW_DIM, partition.offsets[place], height)
