"""Which layers a VAE may be made of, and what replaces each of them on a rank with some of the rows.

A layer computes each row from itself (``ROW_BY_ROW``), reads a window of a few rows (``ROW_WINDOWS``, see ``windows``),
or reads all rows (``norms``, ``plane``). Any module made of such layers can be split, whatever its class. A layer that
is in none of the lists is refused.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from ...attention.kernels import Kernel
from ...attention.routing import Routed, set_until_exit
from .norms import MergedNorm
from .plane import FrameCausalAttention, PlaneAttention
from .rows import RowSplit
from .watch import RowGuard, Unsplittable
from .windows import HaloForward, RowWindow

Forward = Callable[..., Any]

ROW_BY_ROW = frozenset({
    "AlphaBlender", "AvgDown3D", "BatchNorm2d", "Dropout", "DupUp3D", "FourierFeatures", "GELU", "Identity",
    "LayerNorm", "Linear", "LpNorm", "Mish", "QwenImageRMS_norm", "QwenImageUpsample", "RMSNorm", "ReLU", "SiLU",
    "Timesteps", "Upsample", "WanRMS_norm", "WanUpsample",
})  # fmt: skip
"""Classes of layers without sublayers whose output rows depend on no row of another rank."""

SPATIAL_ATTENTION = ("WanAttentionBlock", "QwenImageAttentionBlock")
"""Classes of layers with attention over the pixels of a frame, besides diffusers' ``Attention``."""


def _conv_window(layer: Any, padding: int | None = None) -> RowWindow:
    """Return the row window of one of torch's convolutions.

    Args:
        padding: rows that are padded above the image, if another layer pads instead of the convolution.

    Raises:
        Unsplittable: the convolution pads in a way that no supported VAE does.
    """
    if isinstance(layer.padding, str) or layer.padding_mode == "circular":
        raise Unsplittable(f"a {type(layer).__name__} pads in a way that has no known split by rows")
    height = layer.weight.ndim - 4  # index of the height among the kernel's dims: after time, if there is time
    kernel, stride, dilation = (sizes[height] for sizes in (layer.kernel_size, layer.stride, layer.dilation))
    above = layer.padding[height] if padding is None else padding
    return RowWindow(kernel=dilation * (kernel - 1) + 1, stride=stride, padding=above)


ROW_WINDOWS: Mapping[str, Callable[[Any], RowWindow]] = {
    "Conv2d": _conv_window,
    "Conv3d": _conv_window,
    "CogVideoXSafeConv3d": _conv_window,
    "CogVideoXCausalConv3d": lambda layer: _conv_window(layer.conv, layer.height_pad),
    "CogVideoXDownsample3D": lambda layer: _conv_window(layer.conv),
    "Downsample2D": lambda x: _conv_window(x.conv) if x.use_conv else RowWindow(kernel=2, stride=2, padding=0),
    "HunyuanVideoCausalConv3d": lambda x: _conv_window(x.conv, x.time_causal_padding[2] + x.conv.padding[1]),
    "LTXVideoCausalConv3d": lambda layer: _conv_window(layer.conv),
    "QwenImageCausalConv3d": lambda layer: _conv_window(layer, layer._padding[2]),
    "WanCausalConv3d": lambda layer: _conv_window(layer, layer._padding[2]),
}
"""The row window of a layer, by the name of its class. Such a layer is run as one, with the padding that it does."""


def row_window(layer: nn.Module) -> RowWindow | None:
    """Return the window of rows that a layer reads; None if the layer is not of that kind.

    A ``ZeroPad2d`` followed by a convolution in a ``Sequential`` counts as one layer.

    Raises:
        Unsplittable: it is a convolution that pads in an unknown way.
    """
    kind = type(layer).__name__
    if kind in ROW_WINDOWS:
        return ROW_WINDOWS[kind](layer)
    if isinstance(layer, nn.Sequential) and len(layer) == 2 and isinstance(layer[0], nn.ZeroPad2d):
        return _conv_window(layer[1], layer[0].padding[2] + _conv_window(layer[1]).padding)
    return None


def layers_to_replace(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield name and layer of each layer that is not row by row, whether it needs other ranks' rows or not.

    A windowed layer is not searched for sublayers; an attention layer is, for the norms in it.

    Raises:
        Unsplittable: a layer is in none of the lists.
    """
    kind, children = type(module).__name__, list(module.named_children())
    if row_window(module) is not None or isinstance(module, nn.GroupNorm):
        yield name, module
    elif kind not in ROW_BY_ROW:
        if kind in (*SPATIAL_ATTENTION, "Attention", "HunyuanVideoMidBlock3D"):
            yield name, module
        elif not children and not isinstance(module, (nn.ModuleList, nn.Sequential)):
            raise Unsplittable(f"{name} is a {kind}, which has no known split by rows")
        for child, layer in children:
            yield from layers_to_replace(layer, f"{name}.{child}" if name else child)


@contextmanager
def split(module: nn.Module, rows: RowSplit, kernel: Kernel) -> Iterator[None]:
    """Make a VAE compute on this rank's rows while it is entered.

    Args:
        module: diffusers' module, whose layers get their own ``forward`` back on exit.

    Raises:
        Unsplittable: a layer is in none of the lists, or a function between layers may combine rows.
    """
    guard = RowGuard(rows)
    with ExitStack() as stack:
        for _, layer in list(layers_to_replace(module)):
            for attribute, replacement in _replacements(layer, rows, kernel).items():
                set_until_exit(stack, layer, attribute, guard.exempt(replacement))
        stack.enter_context(guard)
        yield


def _replacements(layer: Any, rows: RowSplit, kernel: Kernel) -> dict[str, Forward]:
    """Return what to set on a layer instead of its own functions, by attribute.

    A layer that needs no other rows keeps its ``forward``, and is only exempted from the guard.
    """
    window = row_window(layer)
    if window is not None:
        return {"forward": HaloForward(layer, window, rows) if window.needs_halo else layer.forward}
    if isinstance(layer, nn.GroupNorm):
        return {"forward": MergedNorm(layer, rows)}
    if type(layer).__name__ == "HunyuanVideoMidBlock3D":
        return {"frame_causal_attention": FrameCausalAttention(rows, kernel)}
    if type(layer).__name__ == "Attention" and is_temporal(layer):
        return {"forward": layer.forward}
    return {"forward": Routed(layer, PlaneAttention(rows, kernel), each_sample=False)}


def is_temporal(attention: Any) -> bool:
    """Return whether an ``Attention`` is along time, separately for each pixel.

    Raises:
        Unsplittable: its processor is unknown.
    """
    kind = type(attention.processor).__name__
    if kind not in ("AttnProcessor2_0", "MochiVaeAttnProcessor2_0"):
        raise Unsplittable(f"its attention has a {kind}, which has no known split by rows")
    return kind == "MochiVaeAttnProcessor2_0"
